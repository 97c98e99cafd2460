"""Faults of ranks at chosen moments of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Any, Final, Literal

from torch import Tensor

from fabricx.core.callback import Callback
from fabricx.errors import check_choice

MOMENTS: Final = ("start", "forward", "backward", "optimizer", "batch end", "validation", "checkpoint")  # of faults


class Fault(Callback):
    """Fault injection on a rank at a chosen moment; created by `kill`, `freeze`, `hang`, `cut` and `fail`.

    Args:
        rank: the rank.
        kind: kind of fault.
        error: message of the exception, for "fail".
    """

    def __init__(self, rank: int, kind: Literal["kill", "freeze", "hang", "cut", "fail"], error: str = "") -> None:
        self.rank, self.kind, self.error = rank, kind, error
        self.moment, self.step, self.attempt = "", 0, 0

    def during(self, moment: str, step: int = 0, attempt: int | None = 0) -> Fault:
        """Set the moment of the fault: the first such moment after `step` weight updates.

        Args:
            moment: "start", "forward", "backward", "optimizer", "batch end", "validation" or "checkpoint".
            step: weight updates before the fault.
            attempt: number of the run's start, from 0, in which the fault occurs; None for every start.

        Returns:
            this callback.

        Raises:
            ValueError: the moment is unknown.
        """
        check_choice(self.kind, "moment", moment, MOMENTS)
        self.moment, self.step, self.attempt = moment, step, -1 if attempt is None else attempt
        return self

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a fault without a moment, which would never occur."""
        if not self.moment:
            raise ValueError(
                f"{self.kind}(rank={self.rank}) has no moment, so it would never occur: add one, for example "
                f'{self.kind}(rank={self.rank}).during("forward", step=3)'
            )

    def _now(self, trainer: Any, moment: str) -> None:
        due = moment == self.moment and trainer.world.rank == self.rank and trainer.global_step >= self.step
        if not due or self.attempt not in (-1, len(trainer.failures)):
            return
        if self.kind == "fail":
            raise RuntimeError(self.error)
        if self.kind == "cut":
            cut_links()
        elif self.kind != "hang":
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        while self.kind == "hang":
            time.sleep(1.0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Trigger a fault at "start"."""
        self._now(trainer, "start")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Trigger a fault at "forward"."""
        self._now(trainer, "forward")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Trigger a fault at "backward"."""
        self._now(trainer, "backward")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Trigger a fault at "optimizer"."""
        self._now(trainer, "optimizer")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Trigger a fault at "batch end"."""
        self._now(trainer, "batch end")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Trigger a fault at "validation"."""
        if not trainer.sanity_checking:
            self._now(trainer, "validation")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Trigger a fault at "checkpoint"."""
        self._now(trainer, "checkpoint")


def kill(rank: int) -> Fault:
    """Return a fault that kills a rank by SIGKILL: `kill(rank=1).during("backward", step=7)`.

    Args:
        rank: the rank.
    """
    return Fault(rank, "kill")


def freeze(rank: int) -> Fault:
    """Return a fault that stops the process of a rank by SIGSTOP.

    Args:
        rank: the rank.
    """
    return Fault(rank, "freeze")


def hang(rank: int) -> Fault:
    """Return a fault that puts a rank into an endless loop: `hang(rank=1).during("forward", step=7)`.

    Args:
        rank: the rank.
    """
    return Fault(rank, "hang")


def cut(rank: int) -> Fault:
    """Return a fault that shuts down all network connections of a rank; its process continues.

    Args:
        rank: the rank.
    """
    return Fault(rank, "cut")


def cut_links() -> None:
    """Shut down all network connections of this process."""
    for name in os.listdir("/proc/self/fd"):
        # OSError: not a socket, or not connected.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername():
                link.shutdown(socket.SHUT_RDWR)


def fail(rank: int, error: str) -> Fault:
    """Return a fault that raises an exception on a rank: `fail(rank=1, error="no memory").during("forward", step=7)`.

    Args:
        rank: the rank.
        error: message of the `RuntimeError`.
    """
    return Fault(rank, "fail", error)
