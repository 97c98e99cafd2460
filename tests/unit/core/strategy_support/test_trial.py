"""A trial of the step."""

from __future__ import annotations

import contextlib

from fabricx.core.strategy_support.trial import Trial


def test_a_trial_runs_in_its_context() -> None:
    events = []

    @contextlib.contextmanager
    def undisturbed():  # type: ignore[no-untyped-def]
        events.append("begins")
        yield
        events.append("ends")

    def step(batch: int, index: int) -> int:
        events.append("steps")
        return batch + index

    assert Trial(step, 3, undisturbed).run() == 3
    assert events == ["begins", "steps", "ends"]
