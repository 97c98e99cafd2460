"""How often a snapshot is written, under a clock that only counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fabricx.callbacks import FaultRecovery, fault_recovery
from fabricx.comm.world import World
from fabricx.strategies import DDP, LocalSGD


class Trainer:
    """A run of steps that take a quarter of a second each; a snapshot is written meanwhile, and takes its time."""

    def __init__(self, root: Path, writing_s: float) -> None:
        self.now, self.global_step, self.saved = 1000.0, 0, []
        self.world, self.failures, self.failed_at = World(), [], 0.0
        self.fast_dev_run, self.run_dir, self.default_root_dir = False, root, root
        self.writing_s = writing_s
        self.ends: list[tuple[float, Callable[[], None]]] = []
        self.strategy: Any = DDP()

    @property
    def writer(self) -> Any:
        return SimpleNamespace(busy=lambda: bool(self.ends))

    def save_checkpoint(self, path: Path, *, wait: bool, after: Callable[[], None]) -> None:
        self.saved.append(self.global_step)
        self.ends.append((self.now + self.writing_s, after))

    def step(self, recovery: FaultRecovery) -> None:
        self.now += 0.25
        self.global_step += 1
        while self.ends and self.ends[0][0] <= self.now:
            self.ends.pop(0)[1]()
        recovery.on_train_batch_end(self, None, None, None, 0)


def snapshots(
    root: Path, writing_s: float, steps: int, monkeypatch: pytest.MonkeyPatch, strategy: Any = None, **options: Any
) -> list[int]:
    trainer, recovery = Trainer(root, writing_s), FaultRecovery(**options)
    trainer.strategy = strategy or trainer.strategy
    monkeypatch.setattr(fault_recovery.time, "monotonic", lambda: trainer.now)
    recovery.on_train_start(trainer, None)
    for _ in range(steps):
        trainer.step(recovery)
    return trainer.saved


def test_a_snapshot_comes_each_minute_if_it_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = snapshots(tmp_path, 0.5, 1600, monkeypatch)
    assert [after - before for before, after in itertools.pairwise(saved)] == [60 * 4] * (len(saved) - 1)
    assert len(saved) >= 6


def test_one_that_takes_long_comes_so_rarely_that_it_is_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = snapshots(tmp_path, 5.0, 12_000, monkeypatch)
    assert [after - before for before, after in itertools.pairwise(saved[1:])] == [500 * 4] * (len(saved) - 2)
    assert len(saved) * 5.0 <= 0.01 * 3000 + 2 * 5.0  # and the first two, before that was known


def test_steps_that_were_asked_for_are_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshots(tmp_path, 2.0, 40, monkeypatch, every_n_train_steps=10) == [10, 20, 30, 40]


def test_one_that_would_have_to_wait_is_left_out_unless_numbers_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"writing_s": 3.0, "steps": 40, "monkeypatch": monkeypatch, "every_n_train_steps": 5}
    assert snapshots(tmp_path, **options) == [5, 20, 35]  # each takes 12 steps
    assert snapshots(tmp_path, strategy=LocalSGD(), **options) == [5, 10, 15, 20, 25, 30, 35, 40]
