"""A mixture of experts on the characters of Python's documentation; several ranks divide the experts among them."""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx

TEXT = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
ALPHABET, LENGTH = sorted(set(TEXT)), 16


class Experts(nn.Module):
    """Stacked weights: `strategy=expert` divides modules with this attribute, these shapes and these arguments."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, choice = torch.where(index == expert)
            hidden = F.gelu(tokens[row] @ self.up[expert])
            output = output.index_add(0, row, hidden @ self.down[expert] * weights[row, choice, None])
        return output


class Mixture(fx.Module):
    """Predicts a character from the characters before it; each token is computed by two of the experts."""

    def __init__(self, experts: int = 8, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.mix = nn.Embedding(len(ALPHABET), width), nn.Linear(LENGTH * width, width)
        self.gate, self.experts = nn.Linear(width, experts), Experts(experts, width)
        self.head = nn.Linear(width, len(ALPHABET))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        tokens = self.mix(self.embed(batch[0]).flatten(1))
        chances = self.gate(tokens).softmax(-1)
        weights, index = chances.topk(2)
        loss = F.cross_entropy(self.head(tokens + self.experts(tokens, index, weights)), batch[1])
        used = F.one_hot(index, self.hparams.experts).sum(1).to(chances.dtype).mean(0)  # of this rank's tokens
        self.log("bits", loss / math.log(2), prog_bar=True, on_epoch=True)
        return loss + 0.01 * self.hparams.experts * (used * chances.mean(0)).sum()  # balances the experts

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--part", type=float, default=1.0, help="fraction of the batches of an epoch")
    args = parser.parse_args()

    fx.seed_everything(0)
    codes = torch.tensor([ALPHABET.index(character) for character in TEXT])
    data = TensorDataset(codes[:-1].unfold(0, LENGTH, 1)[:-1], codes[LENGTH:-1])
    strategy = "expert" if args.devices > 1 else "auto"
    options = {"limit_train_batches": args.part, "gradient_clip_val": 1.0}
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices, strategy=strategy, **options)
    trainer.fit(Mixture(), DataLoader(data, 256 // args.devices, shuffle=True))
    print(f"bits per character: {trainer.callback_metrics['bits_epoch']:.6f}")


if __name__ == "__main__":
    main()
