"""Memory of weights, gradients and optimizer state on each of two ranks: ddp and fsdp, a transformer of 50 million."""

from __future__ import annotations

from typing import Any

import torch
from table import Row, show
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx

VOCABULARY, WIDTH, LAYERS = 8192, 640, 8


class Transformer(fx.Module):
    """50 million parameters in eight layers, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True) for _ in range(LAYERS)
        ])  # fmt: skip
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.held_mib = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.embedding(batch[0])
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[0].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = self.trainer.optimizers[0].state
        held = [
            tensor
            for p in self.parameters()
            for tensor in (p, p.grad, *state.get(p, {}).values())
            if tensor is not None
        ]
        self.held_mib = (
            sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in held) / 2**20
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def held_mib(strategy: str) -> float:
    module = Transformer()
    trainer = fx.Trainer(
        max_steps=2, devices=2, strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(8, 4, dtype=torch.int64)), 2))
    return module.held_mib


def main() -> None:
    millions = sum(parameter.numel() for parameter in Transformer().parameters()) / 1e6
    rows = [Row(name, [held_mib(name)], "MiB", most) for name, most in (("ddp", None), ("fsdp", 0.55))]
    show(f"two ranks, {millions:.0f} million parameters, AdamW: what rank 0 holds", rows)


if __name__ == "__main__":
    main()
