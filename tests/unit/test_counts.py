"""Counts of the calls, frames and device waits of a step. Times are measured in the benchmarks."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader

FEW, MANY = 20, 70


class Counter:
    """Count the Python calls of this thread between two batches, without start and end of the run."""

    def __init__(self) -> None:
        self.calls = 0

    def at(self, batch_idx: int) -> None:
        if batch_idx == FEW:
            gc.collect()
            gc.disable()  # otherwise finalizers of garbage would be counted at random moments
            sys.setprofile(self._count)
        elif batch_idx == MANY:
            sys.setprofile(None)
            gc.enable()

    def _count(self, frame: Any, event: str, arg: Any) -> None:
        self.calls += event == "call"


class Model(TinyModule):
    def __init__(self, logs: int = 0, counter: Counter | None = None) -> None:
        super().__init__()
        self.logs, self.counter = logs, counter
        self.frames: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.counter is not None:
            self.counter.at(batch_idx)
        if batch_idx == 3 and not self.frames:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "trained":
                self.frames.append(frame.f_code.co_name)
                frame = frame.f_back
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        for number in range(self.logs):
            self.log(f"loss{number}", loss)
        return loss


def trained(batches: int, logs: int, root: Path, counter: Counter | None = None) -> Model:
    module = Model(logs, counter)
    fx.Trainer(max_epochs=1, limit_train_batches=batches, default_root_dir=root, **QUIET).fit(module, loader())
    return module


def plain(batches: int, logs: int, root: Path, counter: Counter) -> None:
    module = Model(counter=counter)
    optimizer = module.configure_optimizers()
    for number, (inputs, targets) in zip(range(batches), loader(), strict=False):
        loss = module.training_step((inputs, targets), number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loader() -> Any:
    return tiny_loader(4 * (MANY + 10), 4, shuffle=True)


def calls_per_batch(run: Any, logs: int, root: Path) -> float:
    counter = Counter()
    try:
        run(MANY + 1, logs, root, counter)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counter.calls / (MANY - FEW)


def test_a_batch_adds_few_python_calls_to_a_plain_loop(tmp_path: Path) -> None:
    bare = calls_per_batch(plain, 0, tmp_path)
    empty = calls_per_batch(trained, 0, tmp_path)
    assert empty - bare <= 50  # 150 would be allowed
    assert calls_per_batch(trained, 3, tmp_path) - empty <= 3 * 3  # three for each value


def test_few_frames_are_between_fit_and_the_training_step(tmp_path: Path) -> None:
    frames = trained(5, 0, tmp_path).frames
    assert frames[-1] == "fit"
    assert frames.index("fit") <= 4, frames  # frames of the loop, below the frames of the set-up
    assert len(frames) - 1 <= 8, frames


def test_a_step_that_logs_nothing_never_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            waits.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)

    def waited(batches: int) -> list[str]:
        waits.clear()
        module = Model(logs=1)
        options = {**QUIET, "log_every_n_steps": 1000}
        batch = [(torch.ones(4, 4), torch.ones(4, 1))]
        fx.Trainer(max_epochs=1, default_root_dir=tmp_path, **options).fit(module, batch * batches)
        return list(waits)

    assert waited(MANY) == waited(FEW)
