"""A small language model for tests of meshes, and functions that train it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader
from torchmetrics import Metric

import fabricx as fx
from fabricx.callbacks import EMA, FaultRecovery
from fabricx.strategies import Mesh
from fabricx.testing import QUIET
from tests.soak import SOAK

WORDS, WIDTH, HEADS, LENGTH = 19, 16, 4, 8
SAMPLES = 27 if SOAK else 19  # 7 or 5 batches of 4, of which the last has 3
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AdamW": ({}, {}),
    "SGD, accumulation": ({"accumulate_grad_batches": 2}, {"sgd": True}),
    "AdamW, dropout": ({}, {"dropout": 0.3}),
}
EPOCHS = 2 if SOAK else 1


class Block(nn.Module):
    """A transformer block with a fused projection, as in nanoGPT."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, length, c = x.size()
        q, k, v = (
            part.view(b, length, HEADS, c // HEADS).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(c, dim=2)
        )  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, length, c))
        return x + self.down(self.drop(F.gelu(self.up(self.norms[1](x)))))


class Counts(Metric):
    """Number of samples over all ranks."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, samples: int) -> None:
        self.total += samples

    def compute(self) -> Tensor:
        return self.total


class GPT(fx.Module):
    """A language model; its head shares the weight of the embedding."""

    def __init__(self, dropout: float = 0.0, sgd: bool = False) -> None:
        super().__init__()
        self.sgd = sgd
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.correct = Counts()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.norms: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x=x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).reshape(-1, WORDS), batch[:, 1:].reshape(-1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch))
        self.correct.update(len(batch))
        self.log("samples", self.correct)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, Mesh):
            self.norms.append(float(self.trainer.strategy.gradient_norm([optimizer])))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        if self.sgd:
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Plain(GPT):
    """Computes the norm of whole gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))


class SavesAtTheEnd(fx.Callback):
    """Saves a checkpoint at the last batch, before the run ends."""

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(f"{self.folder}/end")


class ChangesOnce(fx.Callback):
    """Freeze a part of the module after a step; or freeze it before training and unfreeze it after the step.

    Args:
        part: name of the part.
        step: the step.
        trains: unfreeze.
    """

    def __init__(self, part: str, step: int, *, trains: bool) -> None:
        self.part, self.step, self.trains = part, step, trains

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self.trains:
            module.get_submodule(self.part).requires_grad_(False)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            module.get_submodule(self.part).requires_grad_(self.trains)


def sentences(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (LENGTH + 1,), generator=generator) for _ in range(count)]


def train(
    strategy: Any, batch: int, options: dict[str, Any], module: dict[str, Any], folder: str = "",
    ckpt_path: str | None = None, ema: bool = False, samples: int = SAMPLES,
    kind: type[GPT] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train in the present ranks; return weights, metrics and gradient norms."""
    fx.seed_everything(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = (kind or (Plain if strategy == "single" else GPT))(**module)
        trainer = fx.Trainer(
            devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            strategy=strategy, default_root_dir=folder or None,
            callbacks=[EMA(0.8)] * ema + ([SavesAtTheEnd(folder, options["max_steps"])] if folder else []),
            **{**QUIET, "max_epochs": 2, "gradient_clip_val": 0.5, **options},
        )  # fmt: skip
        data = DataLoader(sentences(samples), batch, shuffle=True)  # type: ignore[arg-type]
        trainer.fit(model, data, DataLoader(sentences(5), 2), ckpt_path=ckpt_path)  # type: ignore[arg-type]
        whole = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in model.named_parameters()}
        return {
            "weights": whole, "metrics": {n: float(v) for n, v in trainer.callback_metrics.items()},
            "norms": model.norms,
        }  # fmt: skip
    finally:
        torch.set_default_dtype(before)


def recovered(strategy: Any, devices: int, faults: list[Any], dropout: float = 0.0) -> Any:
    """Train in workers of this process; return weights, metrics and recovered failures."""
    fx.seed_everything(3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = GPT(dropout)
        trainer = fx.Trainer(
            devices=devices, strategy=strategy, callbacks=[FaultRecovery(), *faults],
            **{**QUIET, "max_epochs": EPOCHS, "gradient_clip_val": 0.5},
        )  # fmt: skip
        batch = 4 // strategy.data_ranks_of(devices)
        data = DataLoader(sentences(SAMPLES), batch, shuffle=True)  # type: ignore[arg-type]
        trainer.fit(model, data, DataLoader(sentences(5), 2))  # type: ignore[arg-type]
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return weights, {n: float(v) for n, v in trainer.callback_metrics.items()}, list(trainer.failures)
    finally:
        torch.set_default_dtype(before)
