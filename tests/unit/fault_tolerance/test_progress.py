"""Progress increases with each event of a run: recovery compares it to find the most advanced rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.fault_tolerance.progress import progress
from fabricx.testing import TinyModule, tiny_loader


class Follows(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[Any, ...]]] = []


def _follow(name: str) -> Any:
    def hook(self: Follows, trainer: Any, *_: Any) -> None:
        self.seen.append((name, progress(trainer.session)))

    return hook


MOMENTS = (
    "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end",
)  # fmt: skip
for _name in MOMENTS:
    setattr(Follows, _name, _follow(_name))


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}, {"accumulate_grad_batches": 3}], ids=str)
def test_progress_is_monotonic_and_increases_with_each_batch(options: dict[str, Any], quiet: dict[str, Any]) -> None:
    follows = Follows()
    trainer = fx.Trainer(max_epochs=2, num_sanity_val_steps=0, callbacks=[follows], **options, **quiet)
    trainer.fit(TinyModule(), tiny_loader(20, 4), tiny_loader())
    for (_, before), (name, after) in itertools.pairwise(follows.seen):
        assert before <= after, name
    updates = [point for name, point in follows.seen if name == "on_before_optimizer_step"]
    assert all(before < after for before, after in itertools.pairwise(updates))
    assert len(updates) == trainer.global_step
