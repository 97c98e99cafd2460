"""Character-level language model on the documentation in Python's standard library."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module

SYMBOLS = 128  # ASCII; other characters are replaced by question marks


def text() -> str:
    """Return the texts of `pydoc_data.topics`, 465 thousand characters, sorted by topic."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


class Passages(Dataset[Any]):
    """Pairs of passages of a text: inputs, and targets that are shifted by a character.

    Args:
        codes: codes of the characters, shape [characters].
        length: characters of a passage.
    """

    def __init__(self, codes: Tensor, length: int) -> None:
        self.codes = codes
        self.length = length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        passage = self.codes[index * self.length : (index + 1) * self.length + 1]
        return passage[:-1], passage[1:]


class CharGRU(Module):
    """A GRU that predicts the next character.

    Args:
        width: size of the embedding and of the hidden state.
        lr: highest learning rate of the one-cycle schedule.
    """

    def __init__(self, width: int = 192, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(SYMBOLS, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, SYMBOLS)

    def forward(self, characters: Tensor) -> Tensor:
        """Predict the next character at each position.

        Args:
            characters: codes, shape [batch, length].

        Returns:
            logits, shape [batch, length, 128].
        """
        states, _ = self.gru(self.embedding(characters))
        logits: Tensor = self.out(states)
        return logits

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen, following = batch
        return nn.functional.cross_entropy(self(seen).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy; log it in bits per character.

        Args:
            batch: inputs and targets, each of shape [batch, length].
            batch_idx: number of the batch.
        """
        loss = self._loss(batch)
        self.log("bits", loss / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the cross entropy in bits per character.

        Args:
            batch: inputs and targets, each of shape [batch, length].
            batch_idx: number of the batch.
        """
        self.log("val_bits", self._loss(batch) / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a one-cycle schedule over the whole run."""
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        steps = max(2, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps + 1, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CharData(DataModule):
    """The text: nine tenths for training, the last tenth for validation.

    Args:
        batch_size: passages per batch on each rank.
        length: characters of a passage.
    """

    def __init__(self, batch_size: int = 32, length: int = 128) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: set a whole number, 1 or more")
        self.batch_size = batch_size
        self.length = length
        self.codes = torch.empty(0, dtype=torch.long)

    def setup(self, stage: str) -> None:
        """Read the text.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """
        self.codes = torch.tensor(list(text().encode("ascii", "replace")))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training passages."""
        return DataLoader(Passages(self.codes[: self._cut()], self.length), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation passages."""
        return DataLoader(Passages(self.codes[self._cut() :], self.length), self.batch_size)

    def _cut(self) -> int:
        return len(self.codes) * 9 // 10
