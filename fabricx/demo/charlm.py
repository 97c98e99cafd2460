"""A language model of characters on the documentation that every Python carries."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module

SYMBOLS = 128  # ASCII; anything else becomes a question mark


def text() -> str:
    """Return `pydoc_data.topics`, 465 thousand characters in the order of its topics."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


class Passages(Dataset[Any]):
    """Passages of a text, each with the same one character on.

    Args:
        codes: the characters as numbers, shape [characters].
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
    """A GRU that reads a character at a time and guesses the next one.

    Args:
        width: of the embedding and of the state.
        lr: highest learning rate of the one-cycle schedule.
    """

    def __init__(self, width: int = 192, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(SYMBOLS, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, SYMBOLS)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits, shape [batch, length, 128], of the characters that follow."""
        states, _ = self.gru(self.embedding(characters))
        logits: Tensor = self.out(states)
        return logits

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen, following = batch
        return nn.functional.cross_entropy(self(seen).flatten(0, 1), following.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross entropy; log it in bits a character."""
        loss = self._loss(batch)
        self.log("bits", loss / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the cross entropy in bits a character."""
        self.log("val_bits", self._loss(batch) / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW under a one-cycle schedule over the whole run."""
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        steps = max(2, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps + 1, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CharData(DataModule):
    """The first nine tenths of the text to train on, the last to validate.

    Args:
        batch_size: passages of a batch on each rank.
        length: characters of a passage.
    """

    def __init__(self, batch_size: int = 32, length: int = 128) -> None:
        self.batch_size = batch_size
        self.length = length
        self.codes = torch.empty(0, dtype=torch.long)

    def setup(self, stage: str) -> None:
        """Read the text."""
        self.codes = torch.tensor(list(text().encode("ascii", "replace")))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training passages."""
        return DataLoader(Passages(self.codes[: self._cut()], self.length), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the validation passages."""
        return DataLoader(Passages(self.codes[self._cut() :], self.length), self.batch_size)

    def _cut(self) -> int:
        return len(self.codes) * 9 // 10
