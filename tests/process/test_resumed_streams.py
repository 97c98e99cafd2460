"""Runs that resume within a stream: loaders with a state, and streams that are read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx import checkpoint
from fabricx.testing import QUIET, Ledger
from tests.soak import params

from .resuming import MOMENTS, Noisy, assert_same, train

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Reader:
    """A stateful stream of batches with its own order."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)
        self.done, self.read = 0, 0
        self.begun = self.generator.get_state()

    def __iter__(self) -> Any:
        if self.done == 0:
            self.begun = self.generator.get_state()
        self.generator.set_state(self.begun)
        order = torch.randperm(5, generator=self.generator).tolist()
        while self.done < 5:
            number = order[self.done]
            self.done += 1
            self.read += 1
            yield torch.full((3, 4), number / 5.0) + torch.eye(3, 4), torch.full((3, 1), 1.0 - number)
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "begun": self.begun if self.done else self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.begun = state["done"], state["begun"]
        self.generator.set_state(self.begun)


class SizedReader(Reader):
    def __len__(self) -> int:
        return 5


def stateful(kind: str) -> Any:
    return Reader() if kind == "stream" else SizedReader()


@pytest.mark.parametrize(("kind", "strategy", "accumulate"), [
    *params(
        [("stream", "single", 2), ("sized", "ddp", 2)],
        [("stream", "single", 1), ("sized", "single", 1), ("sized", "single", 2), ("stream", "ddp", 2)],
    ),
])  # fmt: skip
def test_a_stateful_loader_is_resumed_by_its_state(tmp_path: Path, kind: str, strategy: str, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "val_check_interval": 1.0}
    rows, end, _ = train(tmp_path / "whole", strategy, data=stateful(kind), saves=tmp_path, **options)
    for moment in MOMENTS:
        path, again = tmp_path / f"{moment}.ckpt", stateful(kind)
        resumed = train(tmp_path / moment, strategy, ckpt=path, data=again, **options)
        assert resumed[0] == rows[len(rows) - len(resumed[0]) :], moment
        assert_same(resumed[1], end, moment)
        if strategy == "single":
            assert again.read <= 10 - checkpoint.read_manifest(path)["step"] * accumulate + 1  # no batch is read twice


def test_rereading_a_stream_without_a_state_is_reported_and_rereading_a_list_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = list(DataLoader(Noisy(), 6))
    for data, reported in ((batches, False), (Stream(batches), True)):
        root = tmp_path / type(data).__name__
        rows, end, _ = train(root / "whole", "single", data=data, val_check_interval=1.0)
        train(root / "stopped", "single", data=data, max_steps=3, val_check_interval=1.0)
        capsys.readouterr()
        path = root / "stopped" / "end.ckpt"
        resumed = train(root / "resumed", "single", data=data, ckpt=path, val_check_interval=1.0)
        assert resumed[0] == [row for row in rows if row["step"] > 3]
        assert_same(resumed[1], end, "resumed")
        assert ("its first 3 batches of this epoch are read" in capsys.readouterr().out) is reported


class ContinuingStream:
    """A stateful stream of samples that continues from epoch to epoch."""

    at = 0

    def __iter__(self) -> Any:
        while True:
            numbers = torch.arange(self.at, self.at + 3)
            self.at += 3
            yield torch.randn(3, 6), torch.zeros(3, 1), numbers

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class SavesAtTheStart(fx.Callback):
    """Saves a checkpoint before the first batch of the second epoch."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "between.ckpt")


@pytest.mark.parametrize("devices", [1, 2])
def test_stream_states_that_are_lost_with_another_number_of_ranks_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], devices: int
) -> None:
    def fit(folder: Path, devices: int, ckpt: Path | None = None) -> list[int]:
        module = Ledger(24, 3)
        options: dict[str, Any] = {**QUIET, "default_root_dir": folder, "max_epochs": 2, "limit_train_batches": 4}
        fx.Trainer(devices=devices, callbacks=[SavesAtTheStart()], **options).fit(
            module, ContinuingStream(), ckpt_path=ckpt
        )
        return [round(-entry) for entry in module.entries.tolist()]

    assert fit(tmp_path, 2) == [1] * 24
    capfd.readouterr()
    counts = fit(tmp_path / "again", devices, tmp_path / "between.ckpt")
    reported = "the states of the loaders of 2 ranks, and the run has 1 now" in capfd.readouterr().out
    assert (counts == [1] * 24, reported) == ((True, False) if devices == 2 else (False, True))


class Stream:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class NoisyStream(IterableDataset[Any]):
    """A stream of noise without a state."""

    def __iter__(self) -> Any:
        for index in range(12):
            yield torch.randn(4) + index, torch.rand(1)


def test_a_stream_in_loader_processes_resumes_the_generator_of_their_seeds(tmp_path: Path) -> None:
    def stream() -> Any:
        return DataLoader(
            NoisyStream(), 6, num_workers=1, multiprocessing_context="fork", generator=torch.Generator().manual_seed(9)
        )

    rows, end, _ = train(tmp_path / "whole", "single", data=stream(), val_check_interval=1.0)
    train(tmp_path / "stopped", "single", data=stream(), max_steps=3, val_check_interval=1.0)  # in the second epoch
    path = tmp_path / "stopped" / "end.ckpt"
    resumed = train(tmp_path / "resumed", "single", data=stream(), ckpt=path, val_check_interval=1.0)
    assert resumed[0] == [row for row in rows if row["step"] > 3]
    assert_same(resumed[1], end, "resumed")
