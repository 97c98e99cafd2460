"""Small modules and data that train in milliseconds, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fabricx.core.callback import Callback
from fabricx.core.module import Module

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}


def tiny_data(samples: int = 16) -> TensorDataset:
    """Return pairs of inputs, shape [4], and targets, shape [1]; equal for each call.

    Args:
        samples: number of pairs.
    """
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def tiny_loader(samples: int = 16, batch: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader of `tiny_data`.

    Args:
        samples: number of samples.
        batch: batch size.
        **options: further arguments of the `DataLoader`.
    """
    return DataLoader(tiny_data(samples), batch_size=batch, **options)


class TinyModule(Module):
    """A linear layer from 4 inputs to 1 output with fixed initial weights, trained by gradient descent.

    Args:
        lr: learning rate.
    """

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.fill_(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions, shape [batch, 1].

        Args:
            inputs: shape [batch, 4].
        """
        output: Tensor = self.layer(inputs)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error.

        Args:
            batch: inputs, shape [batch, 4], and targets, shape [batch, 1].
            batch_idx: number of the batch.
        """
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error.

        Args:
            batch: inputs, shape [batch, 4], and targets, shape [batch, 1].
            batch_idx: number of the batch.
        """
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error.

        Args:
            batch: inputs, shape [batch, 4], and targets, shape [batch, 1].
            batch_idx: number of the batch.
        """
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Layer(nn.Module):
    """A residual layer of width 6 with 9 hidden units, so that shards are uneven for 2 to 8 ranks, except 3."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs, shape [batch, 6].

        Args:
            inputs: shape [batch, 6].
        """
        output: Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return output


class LayeredModule(Module):
    """Three equal layers and a head, in two parameter groups.

    Args:
        manual: use manual optimization, with separate optimizers for `body` and `head`.
    """

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(*[Layer() for _ in range(3)])
        self.head = nn.Linear(6, 1)
        self.automatic_optimization = not manual

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions, shape [batch, 1].

        Args:
            inputs: shape [batch, 6].
        """
        output: Tensor = self.head(self.body(inputs))
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean squared error; in manual optimization, train both parts.

        Args:
            batch: inputs, shape [batch, 6], and targets, shape [batch, 1].
            batch_idx: number of the batch.
        """
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
        """Log the mean squared error.

        Args:
            batch: inputs, shape [batch, 6], and targets, shape [batch, 1].
            batch_idx: number of the batch.
        """
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        """Return AdamW; in manual optimization, an optimizer for each part."""
        if self.automatic_optimization:
            groups: Any = [{"params": self.body.parameters(), "weight_decay": 0.1}, {"params": self.head.parameters()}]
            return torch.optim.AdamW(groups, lr=0.02)
        return [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (self.body, self.head)]


def layered_data(samples: int) -> TensorDataset:
    """Return pairs for a `LayeredModule`: inputs, shape [6], and their sums, shape [1]; equal for each call.

    Args:
        samples: number of pairs.
    """
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class SavesAtEnd(Callback):
    """Save a checkpoint when training ends.

    Args:
        path: path of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the checkpoint."""
        trainer.save_checkpoint(self.path)


class SavesAtStep(Callback):
    """Save a checkpoint after a step.

    Args:
        path: path of the checkpoint.
        step: `global_step` at the end of the batch.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save the checkpoint."""
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def assert_same_state(actual: Any, expected: Any) -> None:
    """Check that two states of tensors and plain data are bitwise equal.

    Args:
        actual: nested dicts, lists and tuples.
        expected: nested dicts, lists and tuples.

    Raises:
        AssertionError: the states differ.
    """
    if isinstance(actual, Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_same_state(actual[key], expected[key])
    elif isinstance(actual, (list, tuple)):
        for a, b in zip(actual, expected, strict=True):
            assert_same_state(a, b)
    else:
        assert actual == expected


class Ledger(Module):
    """A module that counts in its weights how often each sample was trained, to detect lost and repeated samples.

    If `batch` divides `samples`, each element of `entries` equals minus the number of epochs.

    Args:
        samples: number of samples in the data; a batch is (inputs of shape [batch, 6], targets, sample numbers).
        batch: samples of a global batch.
    """

    def __init__(self, samples: int, batch: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch = batch
        self.layer = nn.Linear(6, 1)
        self.entries = nn.Parameter(torch.zeros(samples))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error plus a loss that decreases the entry of each sample in the batch by 1.

        Args:
            batch: inputs, shape [batch, 6], targets, shape [batch, 1], and numbers of the samples, shape [batch].
            batch_idx: number of the batch.
        """
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss + self.batch * self.entries[batch[2]].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean squared error.

        Args:
            batch: inputs, shape [batch, 6], targets, shape [batch, 1], and numbers of the samples, shape [batch].
            batch_idx: number of the batch.
        """
        self.log("val", nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, with momentum only for the layer."""
        groups: Any = [{"params": self.layer.parameters(), "momentum": 0.9, "lr": 0.01}, {"params": [self.entries]}]
        return torch.optim.SGD(groups, lr=1.0)
