"""A language model of characters, on a text that every Python carries: the documentation in `pydoc_data.topics`."""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fabricx as fx

TEXT = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
ALPHABET = sorted(set(TEXT))


class Passages(Dataset):
    """Passages of a text, and the same passages one character on."""

    def __init__(self, text: str, length: int = 128) -> None:
        self.codes = torch.tensor([ALPHABET.index(character) for character in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        passage = self.codes[index * self.length : (index + 1) * self.length + 1]
        return passage[:-1], passage[1:]


class CharLM(fx.Module):
    """A GRU that reads a character at a time and guesses the next one."""

    def __init__(self, width: int = 192, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, len(ALPHABET))

    def loss(self, batch: list[Tensor]) -> Tensor:
        seen, following = batch
        hidden, _ = self.gru(self.embedding(seen))
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), following.flatten())

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.log("bits", loss / math.log(2), prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_bits", self.loss(batch) / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batches", type=float, default=1.0, help="part of the training batches of an epoch")
    args = parser.parse_args()

    fx.seed_everything(0)
    cut = len(TEXT) * 9 // 10
    train = DataLoader(Passages(TEXT[:cut]), 32 // args.devices, shuffle=True)
    val = DataLoader(Passages(TEXT[cut:]), 64)
    limit = {"limit_train_batches": args.batches, "limit_val_batches": args.batches}
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices, gradient_clip_val=1.0, **limit)
    trainer.fit(CharLM(), train, val)


if __name__ == "__main__":
    main()
