from __future__ import annotations

import pytest

from fabricx.model_parallel.pipeline.schedule import SCHEDULES, Action, check_schedule, replay, schedule, simulate

CASES = [
    (kind, stages, virtual, microbatches)
    for kind in SCHEDULES
    for virtual in ((1,) if kind == "zero_bubble" else (1, 2, 3))
    for stages in range(1, 9)
    for microbatches in range(1, 17)
]


def test_no_schedule_is_a_deadlock_and_each_computes_all_microbatches_of_all_chunks():
    for kind, stages, virtual, microbatches in CASES:
        simulate(kind, stages, virtual, microbatches)  # raises for a deadlock
        for rank in range(stages):
            actions = schedule(kind, rank, stages, virtual, microbatches)
            assert len(set(actions)) == len(actions)
            pairs = {(chunk, number) for chunk in range(virtual) for number in range(microbatches)}
            kinds = ("input_gradient", "weight_gradient") if kind == "zero_bubble" else ("backward",)
            for part in ("forward", *kinds):
                assert {action[1:] for action in actions if action.kind == part} == pairs


def test_messages_between_two_ranks_arrive_in_the_order_of_their_use():
    """The order of (chunk, microbatch) is the same on all ranks, so that a channel needs no tags."""
    for kind, stages, virtual, microbatches in CASES:
        for part in ("forward", "backward", "input_gradient"):
            orders = [
                [action[1:] for action in schedule(kind, rank, stages, virtual, microbatches) if action.kind == part]
                for rank in range(stages)
            ]
            assert orders == [orders[0]] * stages


def test_idle_time_matches_the_literature():
    for kind, stages, virtual, microbatches in CASES:
        if virtual > 1 and microbatches % stages:
            continue
        result = simulate(kind, stages, virtual, microbatches, forward=1.0, input_gradient=1.0, weight_gradient=1.0)
        if kind != "zero_bubble":
            expected = (stages - 1) / (virtual * microbatches + stages - 1)
        elif microbatches < stages:
            continue
        else:  # (p - 1)(F + B - W), Qi et al. 2023, table 2
            expected = (stages - 1) / (3 * microbatches + stages - 1)
        assert result.idle == pytest.approx(expected, abs=1e-9), (kind, stages, virtual, microbatches)


def test_ranks_hold_as_many_microbatches_as_the_literature_says():
    for stages in range(1, 9):
        assert simulate("1f1b", stages, 1, 16).held == tuple(range(stages, 0, -1))
        assert simulate("gpipe", stages, 1, 16).held == (16,) * stages
        assert max(simulate("zero_bubble", stages, 1, 16).held) == stages
        interleaved = simulate("1f1b", stages, 2, 2 * stages).held
        assert interleaved == tuple(min(2 * (stages - rank - 1) + stages + 1, 4 * stages) for rank in range(stages))


def test_zero_bubble_is_1f1b_with_later_gradients_of_weights():
    assert schedule("zero_bubble", 1, 2, 1, 2) == [
        Action("forward", 0, 0),
        Action("input_gradient", 0, 0),
        Action("forward", 0, 1),
        Action("input_gradient", 0, 1),
        Action("weight_gradient", 0, 0),
        Action("weight_gradient", 0, 1),
    ]


def test_a_slow_chunk_and_slow_transfers_make_the_batch_longer():
    even = simulate("1f1b", 2, 1, 4)
    assert even.time == pytest.approx(3.0 * 5)
    assert simulate("1f1b", 2, 1, 4, costs=[1, 3]).time > even.time
    assert simulate("1f1b", 2, 1, 4, transfer=0.5).time > even.time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 2, 2, 5), "set microbatches=6, or virtual=1"),
        (("zero_bubble", 2, 2, 4), "use schedule=1f1b, or virtual=1"),
        (("1f1b", 2, 0, 4), "virtual=0: must be 1 or more"),
        (("1f1b", 2, 1, 0), "microbatches=0: must be 1 or more"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(*arguments)


def test_an_unknown_schedule_is_an_error_with_the_valid_names():
    with pytest.raises((ValueError, LookupError), match="1f1b"):
        check_schedule("1f1", 2, 1, 4)


def test_actions_that_a_run_has_recorded_are_simulated_like_a_schedule():
    lists = [schedule("1f1b", rank, 4, 1, 8) for rank in range(4)]
    assert replay(lists, 1) == simulate("1f1b", 4, 1, 8)
    with pytest.raises(RuntimeError, match="deadlock"):
        replay([lists[0], lists[1][::-1], *lists[2:]], 1)
