"""The position of a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fabricx.core.state import Phase, RunningStage, RunState, TrainerFn, TrainerStatus


def test_a_position_is_read_from_plain_data_of_this_and_newer_versions() -> None:
    written = RunState(phase=Phase.VALIDATE, epoch=3, batch=2, drained=True, run="abc")
    data = written.state_dict()
    assert {type(value) for value in data.values()} == {str, int, bool}
    read = RunState()
    read.load_state_dict({**data, "of the future": 1})
    assert read == written
    assert read.phase is Phase.VALIDATE
    older = RunState()
    older.load_state_dict({"phase": "train", "epoch": 1})
    assert older == RunState(phase=Phase.TRAIN, epoch=1)


def test_the_next_epoch_begins_at_its_first_sample() -> None:
    state = RunState(epoch=2, batch=5, samples=40, step=9, drained=True, closing=True)
    state.next_epoch(5)
    assert state == RunState(epoch=3, before=5, step=9)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=20))
def test_each_sample_that_is_not_trained_once_is_counted(windows: list[tuple[int, int]]) -> None:
    state = RunState()
    for number, (start, length) in enumerate(windows, start=1):
        state.advance(number, start, start + length)
        assert (state.batch, state.passed) == (number, number)
    trained = sum(length for _, length in windows)
    assert trained + state.left_out - state.again == state.samples
    assert state.left_out >= 0
    assert state.again >= 0


def test_stages_are_printed_like_lightnings() -> None:
    from lightning.pytorch.trainer import states

    for enumeration in (TrainerFn, TrainerStatus, RunningStage):
        theirs = getattr(states, enumeration.__name__)
        for member in enumeration:
            assert member == member.value
            assert str(member) == str(theirs(member.value))
            assert f"{member}" == f"{theirs(member.value)}"
