"""Character-level language model, trained on the documentation in Python's standard library (`pydoc_data.topics`)."""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx

TEXT = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
ALPHABET = sorted(set(TEXT))


def passages(text: str, length: int = 128) -> TensorDataset:
    """Return passages of a text, and the same passages shifted by a character as targets."""
    codes = torch.tensor([ALPHABET.index(character) for character in text])
    whole = (len(codes) - 1) // length * length
    return TensorDataset(codes[:whole].view(-1, length), codes[1 : whole + 1].view(-1, length))


class CharLM(fx.Module):
    """A GRU that predicts the next character."""

    def __init__(self, width: int = 192, lr: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, len(ALPHABET))

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden, _ = self.gru(self.embedding(batch[0]))
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), batch[1].flatten())

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
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--part", type=float, default=1.0, help="fraction of the batches of an epoch")
    args = parser.parse_args()

    fx.seed_everything(0)
    cut = len(TEXT) * 9 // 10  # the last tenth is held out
    train = DataLoader(passages(TEXT[:cut]), 32 // args.devices, shuffle=True)
    val = DataLoader(passages(TEXT[cut:]), 64)
    options = {"gradient_clip_val": 1.0, "limit_train_batches": args.part, "limit_val_batches": args.part}
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices, **options)
    trainer.fit(CharLM(), train, val)


if __name__ == "__main__":
    main()
