"""The per-rank states with which the members of a generation continue."""

from __future__ import annotations

from typing import Any

from fabricx.fault_tolerance.member_states import Contribution, LaterChanges, later_changes, record_at, records_of_all

BATCH_1, BATCH_2, NEXT_GENERATION = (1, 0), (2, 0), (2, 1)  # (batch, generation)


def record(name: str) -> dict[str, Any]:
    return {"sums": name}


def test_the_record_of_the_greatest_progress_has_precedence_over_the_present_state() -> None:
    records = [(BATCH_1, record("before")), (BATCH_2, record("after"))]
    assert record_at(records, BATCH_2, record("now")) == record("after")
    assert record_at(records[:1], BATCH_2, record("now")) == record("now")


def test_a_replacement_continues_with_the_newest_earlier_record_of_its_generation() -> None:
    records = [(BATCH_1, record("first")), (BATCH_2, record("second"))]
    assert record_at(records, (3, 0)) == record("second")
    assert record_at(records, (1, 1)) is None  # sums of an earlier generation are part of the present sums
    assert record_at([], BATCH_1) is None


def test_each_rank_keeps_its_record_if_all_ranks_have_one() -> None:
    survivor = Contribution(BATCH_2, [(BATCH_2, record("0"))], record("now"))
    replacement = Contribution(records=[(BATCH_2, record("1"))])
    assert records_of_all([survivor, replacement], BATCH_2) == ([record("0"), record("1")], True)


def test_the_main_rank_receives_the_sums_of_ranks_that_have_no_worker() -> None:
    vacant = [(1, [(BATCH_2, record("of a dead rank"))])]
    survivor = Contribution(BATCH_2, [(BATCH_2, record("0"))], record("now"), vacant)
    assert records_of_all([survivor], BATCH_2) == ([record("0"), record("of a dead rank")], False)
    # In later generations, the sums of the members include the dead rank's sums.
    assert records_of_all([survivor], NEXT_GENERATION) == ([record("now")], True)


def test_a_replacement_without_a_record_begins_with_empty_sums() -> None:
    survivor = Contribution(BATCH_2, [(BATCH_2, record("0"))], record("now"))
    assert records_of_all([survivor, Contribution()], BATCH_2) == ([record("0")], False)


def state(buffers: dict[str, bytes], **attributes: int) -> dict[str, Any]:
    return {"buffers": buffers, "attributes": [["", name, value] for name, value in attributes.items()]}


def test_a_rank_that_died_in_a_hook_receives_what_the_hook_has_changed_from_another_rank() -> None:
    before_hook, after_hook = (2, 0, 0), (2, 1, 0)  # (batch, stage, generation)
    later = later_changes(
        [
            (after_hook, state({"mean": b"0", "count": b"3"}, calls=4, seen=7)),
            (after_hook, state({"mean": b"0", "count": b"1"})),
            (before_hook, state({"mean": b"0", "count": b"2"}, calls=3, seen=7)),
        ]
    )
    before = [["", "calls", 3], ["", "seen", 7]]
    assert later == {
        after_hook: LaterChanges({"count"}, [], [["", "calls", 4], ["", "seen", 7]]),
        before_hook: LaterChanges({"count"}, before, [["", "calls", 4]]),
    }
    replacement = Contribution(records=[(before_hook, state({"mean": b"1", "count": b"2"}, calls=3, seen=5))])
    assert replacement.complete(later, after_hook) == {"calls": True}
    assert replacement.records == [(before_hook, state({"mean": b"1"}, calls=4, seen=5))]
    own = Contribution(records=[(before_hook, state({}, calls=2, seen=5))])  # a value that differs between ranks
    assert own.complete(later, after_hook) == {"calls": False}
    assert own.records == [(before_hook, state({}, calls=2, seen=5))]
    exact = Contribution(after_hook, records=[(after_hook, state({"count": b"9"}, calls=9))])  # has run the hook
    assert not exact.complete(later, after_hook)
    assert exact.records == [(after_hook, state({"count": b"9"}, calls=9))]
    interrupted = Contribution(records=[(after_hook, state({"count": b"1"}))])  # the other rank waits in a later hook
    assert interrupted.complete(later, after_hook) == {"calls": True, "seen": True}
    assert interrupted.records == [(after_hook, state({}, calls=4, seen=7))]
