"""A step of a mesh against plain torch on the same ranks, its bytes, and the cost of the trial run at set-up."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from table import Row, interleaved, show
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.model_parallel.scaling.traffic import tensor_exchange
from fabricx.strategies import Mesh
from fabricx.testing import QUIET, run_ranks

WORDS, WIDTH, HEADS, LENGTH, LAYERS, ROWS, WARM = 256, 256, 4, 64, 4, 8, 3


class Enter(torch.autograd.Function):
    """The input of divided layers: its gradient is summed over the ranks (f of Megatron-LM)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Leave(torch.autograd.Function):
    """The output of divided layers: the sum over the ranks (g of Megatron-LM)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Block(nn.Module):
    """A block; with a group, the part of a rank, divided by hand."""

    def __init__(self, ranks: int = 1, group: Any = None) -> None:
        super().__init__()
        self.heads, self.divided, self.group = HEADS // ranks, ranks > 1, group
        self.norm1, self.norm2, part = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), WIDTH // ranks
        self.qkv, self.out = nn.Linear(WIDTH, 3 * part, bias=False), nn.Linear(part, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * part, bias=False), nn.Linear(4 * part, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, positions, _ = x.shape
        qkv = self.qkv(self._enter(self.norm1(x))).chunk(3, dim=-1)
        q, k, v = (part.view(b, positions, self.heads, -1).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self._leave(self.out(y))
        return x + self._leave(self.down(F.gelu(self.up(self._enter(self.norm2(x))))))

    def _enter(self, x: Tensor) -> Any:
        return Enter.apply(x, self.group) if self.divided else x

    def _leave(self, x: Tensor) -> Any:
        return Leave.apply(x, self.group) if self.divided else x


class Net(nn.Module):
    def __init__(self, ranks: int = 1, group: Any = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(ranks, group) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Timed(fx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.times = Net(), []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(steps: int) -> TensorDataset:
    return TensorDataset(torch.randint(WORDS, (steps * ROWS, LENGTH), generator=torch.Generator().manual_seed(0)))


def ours(strategy: Any, steps: int) -> tuple[float, float]:
    """Return milliseconds of a step, and of the set-up."""
    torch.set_num_threads(1)
    devices = dist.get_world_size() if dist.is_initialized() else 1
    module, began = Timed(), time.perf_counter()
    shares = devices // getattr(strategy, "tensor", 1) // getattr(strategy, "pipeline", 1)
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{**QUIET, "max_epochs": 1})  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(data(steps * shares), ROWS))
    times = module.times
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM) * 1e3, (times[0] - began) * 1e3


def plain(tensor: int, steps: int) -> tuple[float, float]:
    """Return the milliseconds of a step of a manually divided loop, and of its set-up."""
    torch.set_num_threads(1)
    began, ranks = time.perf_counter(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + tensor))) for first in range(0, ranks, tensor)]
    across = [dist.new_group(list(range(column, ranks, tensor))) for column in range(tensor)]
    model: nn.Module = Net(tensor, groups[dist.get_rank() // tensor])
    if ranks > tensor:
        model = nn.parallel.DistributedDataParallel(model, process_group=across[dist.get_rank() % tensor])
    optimizer, times = torch.optim.SGD(model.parameters(), lr=0.01), []
    for [ids] in DataLoader(data(steps), ROWS):
        times.append(time.perf_counter())
        loss = model(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM) * 1e3, (times[0] - began) * 1e3


def compare(title: str, measures: dict[str, Callable[[], tuple[float, float]]], most: float, rounds: int) -> None:
    """Print steps and set-ups, the first row being the plain way."""
    setups: dict[str, list[float]] = {name: [] for name in measures}

    def step(name: str) -> float:
        rates, setup = measures[name]()
        setups[name].append(setup)
        return rates

    values = interleaved({name: lambda name=name: step(name) for name in measures}, rounds)  # type: ignore[misc]
    for kind, rates in (("a step", values), ("set-up, with the trial run", setups)):
        wanted = [None] + [most if kind == "a step" else None] * (len(rates) - 1)
        show(f"{title}: {kind}", [
            Row(name, times, "ms", limit) for (name, times), limit in zip(rates.items(), wanted, strict=True)
        ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    n, rounds = args.steps, args.rounds

    single = {"single": lambda: ours("single", n), "mesh, all axes 1": lambda: ours(Mesh(), n)}
    compare("one process", single, 1.0, rounds)
    for title, ranks in (("tensor=2", 2), ("ddp x tensor=2", 4)):
        ways = {
            "plain torch, divided by hand": lambda ranks=ranks: run_ranks(plain, ranks, 2, n)[0],
            f"fabricx, {title}": lambda ranks=ranks: run_ranks(ours, ranks, Mesh(tensor=2), n)[0],
        }
        compare(title, ways, 1.05, rounds)
    sent = tensor_exchange(LAYERS, ROWS * LENGTH * WIDTH).total.in_bytes(4, 4).sent(2)
    print(f"\na rank sends {sent / 2**20:.1f} MiB in a step along tensor=2, by formula")


if __name__ == "__main__":
    main()
