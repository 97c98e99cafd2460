"""The records of a trainer's newest run, which remain after it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fabricx.core.state import RunState
from fabricx.data.run_data import BatchCounts
from fabricx.metrics.run_metrics import Published
from fabricx.session.status import StopStatus


@dataclass
class RunRecords:
    """The records of a trainer's newest run, which remain after it.

    Attributes:
        state: position of the run, which checkpoints save.
        stop: requested and agreed stops.
        batches: numbers of batches of the loaders.
        published: newest values of everything that was logged.
        run_dir: folder of the run; None before the first run.
        next_run_dir: folder that the first run will have, once `log_dir` is read before it.
        ckpt_path: checkpoint that the run has loaded; None without.
    """

    state: RunState = field(default_factory=RunState)
    stop: StopStatus = field(default_factory=StopStatus)
    batches: BatchCounts = field(default_factory=BatchCounts)
    published: Published = field(default_factory=Published)
    run_dir: Path | None = None
    next_run_dir: Path | None = None
    ckpt_path: str | Path | None = None

    def begin(self, *, fits: bool) -> None:
        """Reset the records of the previous run.

        Args:
            fits: the run trains the module.
        """
        self.stop.interrupted = self.stop.terminated = False
        self.published.clear()
        if fits:
            self.stop.requested = self.stop.agreed = False
            self.stop.boundary = 0
            self.state.run = secrets.token_hex(8)  # a checkpoint records the run that saved it
        # The seed is reproducible if the caller has seeded torch.
        self.state.seed = self.state.seed or torch.initial_seed() % 2**62

    def adopt(self, other: RunRecords) -> None:
        """Adopt the records of a run of worker processes.

        Args:
            other: records of the main rank.
        """
        vars(self).update(vars(other))
