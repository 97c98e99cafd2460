"""Helpers for tests of strategies, callbacks and modules: ranks on demand, small modules, small data."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fabricx.core.callback import Callback
from fabricx.core.module import Module
from fabricx.distributed.world import World
from fabricx.launch.supervisor import run_workers

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` on so many ranks that have joined a world on gloo; returns the results by rank.

    The world is `fabricx.distributed.world.current()`. Processes come from the fork server, which stays warm between
    calls.
    """
    return run_workers(_joined, (function, arguments), size=ranks)


def _joined(world: World, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    replace(world, device=torch.device("cpu")).join()
    return function(*arguments)


def tiny_data(samples: int = 16) -> TensorDataset:
    """Return pairs of inputs, shape [4], and targets, shape [1]; the same at each call."""
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def tiny_loader(samples: int = 16, batch: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader of `tiny_data`."""
    return DataLoader(tiny_data(samples), batch_size=batch, **options)


class TinyModule(Module):
    """One linear layer, 4 to 1, trained with plain gradient descent; always begins with the same weights."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.fill_(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions, shape [batch, 1]."""
        output: Tensor = self.layer(inputs)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error."""
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error."""
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Layer(nn.Module):
    """A residual layer of width 6, with 9 rows inside: an uneven shard for every number of ranks up to 8 but 3."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of the inputs' shape, [batch, 6]."""
        output: Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return output


class LayeredModule(Module):
    """Three repeated layers and a head in two parameter groups; a manual loop trains `body` and `head` apart."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(*[Layer() for _ in range(3)])
        self.head = nn.Linear(6, 1)
        self.automatic_optimization = not manual

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions, shape [batch, 1]."""
        output: Tensor = self.head(self.body(inputs))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean squared error, or train both parts on it."""
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.automatic_optimization:
            return loss
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1] * (1 + number)))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error."""
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        """Return AdamW, one for each part in a manual loop."""
        if self.automatic_optimization:
            groups: Any = [{"params": self.body.parameters(), "weight_decay": 0.1}, {"params": self.head.parameters()}]
            return torch.optim.AdamW(groups, lr=0.02)
        return [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (self.body, self.head)]


def layered_data(samples: int) -> TensorDataset:
    """Return pairs for a `LayeredModule`: inputs, shape [6], and their sums, shape [1]; the same at each call."""
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class SavesAtEnd(Callback):
    """Writes a checkpoint when training ends.

    Args:
        path: where to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write it."""
        trainer.save_checkpoint(self.path)


def assert_same_state(one: Any, other: Any) -> None:
    """Raise an AssertionError unless two states, of tensors and plain data, are equal to the bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same_state(a, b)
    else:
        assert one == other


class Ledger(Module):
    """Counts in its own weights how often each sample was trained: a lost or repeated one shows.

    With a global batch of `batch` samples that divides `samples`, each entry is minus the number of epochs.

    Args:
        samples: of the data; a batch is (inputs of shape [6], targets, numbers of the samples).
        batch: samples of a global batch.
    """

    def __init__(self, samples: int, batch: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch = batch
        self.layer = nn.Linear(6, 1)
        self.entries = nn.Parameter(torch.zeros(samples))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss, and one more for each sample that is there."""
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss + self.batch * self.entries[batch[2]].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error."""
        self.log("val", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent with momentum for the layer alone."""
        groups: Any = [{"params": self.layer.parameters(), "momentum": 0.9, "lr": 0.01}, {"params": [self.entries]}]
        return torch.optim.SGD(groups, lr=1.0)


class Fault(Callback):
    """What happens to one rank at one moment of a run; see `kill`, `freeze`, `hang`, `cut` and `fail`."""

    def __init__(self, rank: int, kind: Literal["kill", "freeze", "hang", "cut", "fail"], error: str = "") -> None:
        self.rank, self.kind, self.error = rank, kind, error
        self.moment, self.step, self.attempt = "", 0, 0

    def during(self, moment: str, step: int = 0, attempt: int | None = 0) -> Fault:
        """Let it happen once, at the first such moment after so many steps.

        Args:
            moment: "start", "forward", "backward", "optimizer", "batch end", "validation" or "checkpoint".
            step: weight updates before.
            attempt: in which start of the run, from 0; None for each.
        """
        self.moment, self.step, self.attempt = moment, step, -1 if attempt is None else attempt
        return self

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

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Be the moment "start"."""
        self._now(trainer, "start")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Be the moment "forward"."""
        self._now(trainer, "forward")

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        """Be the moment "backward"."""
        self._now(trainer, "backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Be the moment "optimizer"."""
        self._now(trainer, "optimizer")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Be the moment "batch end"."""
        self._now(trainer, "batch end")

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Be the moment "validation"."""
        if not trainer.sanity_checking:
            self._now(trainer, "validation")

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Be the moment "checkpoint"."""
        self._now(trainer, "checkpoint")


def kill(rank: int) -> Fault:
    """Return a `kill -9` of one rank: `kill(rank=1).during("backward", step=7)`."""
    return Fault(rank, "kill")


def freeze(rank: int) -> Fault:
    """Return a SIGSTOP of one rank: its process is there, and does nothing."""
    return Fault(rank, "freeze")


def hang(rank: int) -> Fault:
    """Return an endless loop on one rank: `hang(rank=1).during("forward", step=7)`."""
    return Fault(rank, "hang")


def cut(rank: int) -> Fault:
    """Return the loss of all network links of one rank, whose process stays."""
    return Fault(rank, "cut")


def cut_links() -> None:
    """Shut down all network connections of this process."""
    for name in os.listdir("/proc/self/fd"):
        # An error: no socket, or one that isn't connected.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername():
                link.shutdown(socket.SHUT_RDWR)


def fail(rank: int, error: str) -> Fault:
    """Return an exception on one rank: `fail(rank=1, error="no memory").during("forward", step=7)`."""
    return Fault(rank, "fail", error)
