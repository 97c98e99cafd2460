"""Faults of a rank while a trainer validates, tests or predicts: a clear error soon, and a correct next call."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from allpairspy import AllPairs
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.testing import QUIET, cut_links
from tests.faults.cells import EXCEPTIONS, STRATEGIES
from tests.faults.running import BATCH, MESSAGE, RANKS, SIGNALS, Drawing, Samples

STAGES = ("validate", "test", "predict")
ERROR_TEXTS = {  # text in the error, by fault
    "kill": "SIGKILL", "freeze": "no heartbeat", "error": MESSAGE, "memory": "MemoryError", "cut": "Connection",
    "loader": "DataLoader worker",
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """A call of the trainer and its fault.

    Attributes:
        strategy: name of the strategy.
        stage: "validate", "test" or "predict".
        fault: a signal, an exception, "cut" for its network links, or "loader" for a killed loader process.
        rank: rank of the affected process.
    """

    strategy: str
    stage: str
    fault: str
    rank: int

    def __str__(self) -> str:
        return f"{self.stage} under {self.strategy}, {self.fault} of rank {self.rank}"


class Evaluates(Drawing):
    """Records samples; the fault happens in the second batch, once."""

    def __init__(self, cell: Evaluation, mark: Path) -> None:
        super().__init__(of_rank=cell.strategy != "reproducible")
        self.cell, self.mark = cell, mark

    def _batch(self, batch: Any, batch_idx: int) -> torch.Tensor:
        cell = self.cell
        due = batch_idx == 1 and self.global_rank == cell.rank and cell.fault != "loader"
        if due and not self.mark.exists():
            self.mark.touch()
            if cell.fault in EXCEPTIONS:
                raise EXCEPTIONS[cell.fault](MESSAGE)
            if cell.fault == "cut":
                cut_links()
            else:
                os.kill(os.getpid(), SIGNALS[cell.fault])
        return batch[2].float()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("numbers", self._batch(batch, batch_idx).sum(), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self._batch(batch, batch_idx)


def pairwise(seed: int) -> Iterator[Evaluation]:
    """Yield cells until each possible pair of values has occurred; deterministic for a seed."""
    rng = random.Random(seed)
    values: list[tuple[Any, ...]] = [tuple(STRATEGIES), STAGES, (*ERROR_TEXTS, "term", "int"), tuple(range(RANKS))]
    for row in AllPairs([rng.sample(options, len(options)) for options in values]):
        yield Evaluation(*row)


def judge(cell: Evaluation, folder: Path) -> list[str]:
    """Run a cell, and the same call again; return the deviations from the expected results."""
    folder.mkdir()
    mark = folder / "happened"
    elastic: Any = {"deterministic": "elastic"} if cell.strategy == "reproducible" else {}
    recovery = FaultRecovery(frozen_after=2.0 if cell.fault == "freeze" else 60.0)
    trainer = fx.Trainer(
        devices=RANKS, strategy=STRATEGIES[cell.strategy](), default_root_dir=folder, callbacks=[recovery],
        **QUIET, **elastic,
    )  # fmt: skip
    loads = cell.fault == "loader"
    loader: Any = DataLoader(Samples(mark if loads else None), BATCH // RANKS, num_workers=int(loads))
    call = getattr(trainer, cell.stage)
    module = Evaluates(cell, mark)
    end = _end_of(lambda: _numbers(call(module, loader)))
    if not mark.exists():
        return ["the fault has not happened"]
    expected = float(sum(range(len(loader.dataset))))
    again = _end_of(lambda: _numbers(call(module, loader)))
    wrong = [] if again == expected else [f"the next call gives {again}, and not {expected}"]
    if cell.fault == "int" or (cell.fault == "cut" and not isinstance(end, str)):  # no rank used its links
        return wrong if end == expected else [f"it gives {end}, and not {expected}", *wrong]
    text = ERROR_TEXTS.get(cell.fault, "stopped with status 143")
    return wrong if text in str(end) else [f"the error doesn't say {text!r}: {end}", *wrong]


def _end_of(call: Any) -> float | str:
    try:
        return float(call())
    except WorkerFailed as error:
        return str(error)
    except SystemExit as error:
        return f"stopped with status {error.code}"


def _numbers(results: Any) -> float:
    """Return the sum of the sample numbers in the results of an evaluation."""
    if results and isinstance(results[0], dict):
        return float(results[0]["numbers"])
    return float(sum(torch.as_tensor(result).sum() for result in results))
