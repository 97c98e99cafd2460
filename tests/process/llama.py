"""A small model of the Llama family, with the dimensions of the cost model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import fabricx as fx
from fabricx.model_parallel.scaling.dimensions import Transformer

MODEL = Transformer(layers=3, hidden=32, heads=4, kv_heads=2, ffn=64, vocabulary=64, sequence=16)


class Block(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        width, keys, ffn = model.hidden, model.keys, model.ffn
        self.features = width // model.heads  # of a head
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.features)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(fx.Module):
    def __init__(self, recompute: bool = False, model: Transformer = MODEL) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(model.vocabulary, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm, self.head = nn.RMSNorm(model.hidden), nn.Linear(model.hidden, model.vocabulary, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())
