"""A GPT on the characters of Python's documentation, trained on a mesh: data x pipeline x tensor parallelism."""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.strategies import Mesh

TEXT = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
ALPHABET, LENGTH = sorted(set(TEXT)), 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(fx.Module):
    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.position = nn.Embedding(len(ALPHABET), width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET), bias=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x = self.embed(batch[0]) + self.position(torch.arange(batch[0].shape[1], device=batch[0].device))
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[1].flatten())
        self.log("bits", loss / math.log(2), prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("devices", "tensor", "pipeline", "epochs"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--part", type=float, default=1.0, help="fraction of the batches of an epoch")
    args = parser.parse_args()

    fx.seed_everything(0)
    codes = torch.tensor([ALPHABET.index(character) for character in TEXT])
    rows = (len(codes) - 1) // LENGTH * LENGTH
    data = TensorDataset(codes[:rows].view(-1, LENGTH), codes[1 : rows + 1].view(-1, LENGTH))
    mesh, data_ranks = Mesh(tensor=args.tensor, pipeline=args.pipeline), args.devices // args.tensor // args.pipeline
    options = {"limit_train_batches": args.part, "gradient_clip_val": 1.0}
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices, strategy=mesh, **options)
    trainer.fit(GPT(), DataLoader(data, 32 // data_ranks, shuffle=True))
    print(f"bits per character: {trainer.callback_metrics['bits_epoch']:.6f}")


if __name__ == "__main__":
    main()
