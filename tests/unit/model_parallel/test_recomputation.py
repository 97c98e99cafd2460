"""Recomputations of activation checkpointing run in the contexts of their step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import checkpoint

from fabricx.model_parallel.recomputation import recomputing


def test_a_recomputation_runs_in_the_context_of_its_forward() -> None:
    seen: list[str] = []
    phase = ["forward"]

    def part(x: torch.Tensor) -> torch.Tensor:
        seen.append(phase[0])
        return x.sin()

    @contextmanager
    def again(state: str) -> Iterator[None]:
        phase.append(phase.pop().replace("outside", state))
        try:
            yield
        finally:  # torch ends a recomputation early
            phase[0] = "outside"

    original = dict(vars(checkpoint))
    with recomputing(lambda: again(f"again in {phase[0]}")):
        y = checkpoint.checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=False)
        z = checkpoint.checkpoint(part, x=torch.ones(2, requires_grad=True), use_reentrant=False)
    assert vars(checkpoint) == original
    phase[0] = "outside"
    y.sum().backward()
    z.sum().backward()
    assert seen == ["forward", "forward", "again in forward", "again in forward"]
    assert phase == ["outside"]
