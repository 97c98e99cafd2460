"""Workers with servers: the cost of a slow worker, an exchange against gloo's, and an idle server."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from table import Row, interleaved, show
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.parameter_server.server.process import serve
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.lockstep import WorkerStep
from fabricx.parameter_server.worker.shared_memory_weights import SharedWeights
from fabricx.strategies import DDP, AsyncSGD, ParameterServer, Single
from fabricx.testing import QUIET, run_ranks

STEP_S, SLOWER = 0.02, 4
WORKERS = 4
MIB = 25


class Sleeps(fx.Module):
    """A step has a fixed duration, several times as long on rank 0."""

    def __init__(self, slow: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.slow = slow
        self.seconds = 0.0

    def on_train_epoch_start(self) -> None:
        self.trainer.world.barrier()
        self.begun = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        self.seconds = time.perf_counter() - self.begun

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(STEP_S * (SLOWER if self.slow and self.global_rank == 0 else 1))
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def ms_a_batch(strategy: Any, batches: int, *, devices: int = WORKERS, slow: bool = True) -> float:
    module = Sleeps(slow)
    trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=1, log_every_n_steps=0, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(batches, 4)), 1))
    return module.seconds / batches * 1e3


def all_speeds_together(batches: int) -> float:
    """Return the time of a batch if no worker ever waited: from the separate speeds of a fast and a slow worker."""
    slow, fast = (ms_a_batch(Single(), batches, devices=1, slow=slow) for slow in (True, False))
    return 1 / (1 / slow + (WORKERS - 1) / fast)


class Wide(fx.Module):
    """25 MiB of weights in 10 layers; the gradient of a step is nearly free. Times each step."""

    def __init__(self) -> None:
        super().__init__()
        side = int((MIB * 2**20 / 4 / 10) ** 0.5)
        self.weights = nn.ParameterList(torch.zeros(side, side) for _ in range(10))
        self.times: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return _Ones.apply(*self.weights)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Ones(torch.autograd.Function):
    """A loss with a precomputed gradient."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.gradients = tuple(torch.ones_like(weight) for weight in weights)
        return torch.zeros((), requires_grad=True) + 0.0

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return ctx.gradients


def step_ms(strategy: Any, steps: int) -> float:
    """Return the time of a whole step: batch, gradient, exchange, update."""
    module = _trained(Wide(), strategy, steps)
    return _median([b - a for a, b in zip(module.times, module.times[1:], strict=False)])


def exchange_ms(strategy: Any, steps: int) -> float:
    """Return the time of the exchange and the update after all gradients are ready, as with gloo."""
    module = _trained(Exchanges(), strategy, steps)
    return _median(module.exchanges)


def _trained(module: Any, strategy: Any, steps: int) -> Any:
    trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=1, log_every_n_steps=0, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(2 * steps, 1)), 1))
    return module


def _median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2] * 1e3


class Exchanges(Wide):
    """Times each exchange, from the moment at which the last gradient has been computed."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[float] = []

    def on_fit_start(self) -> None:
        for pace in (WorkerStep, SharedWeights):  # in this process, which ends with the run
            pace.complete = self._timed(pace.complete)  # type: ignore[method-assign]

    def _timed(self, complete: Any) -> Any:
        def timed(pace: Any) -> bool:
            self.begun = time.perf_counter()
            return complete(pace)

        return timed

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.begun = 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.exchanges.append(time.perf_counter() - self.begun)


def plain_gloo_ms(steps: int) -> float:
    return max(run_ranks(_plain_gloo, 2, steps))


def _plain_gloo(steps: int) -> float:
    flat = torch.zeros(MIB * 2**20 // 4, requires_grad=True)
    optimizer = torch.optim.SGD([flat], lr=0.01)
    times = []
    for _ in range(steps):
        flat.grad = torch.ones_like(flat)
        begun = time.perf_counter()
        dist.all_reduce(flat.grad)
        optimizer.step()
        times.append(time.perf_counter() - begun)
    return sorted(times)[steps // 2] * 1e3


def _serve(port: int) -> None:
    serve(dist.TCPStore("127.0.0.1", port, is_master=False), "idle", bytes(32), 0, 1, network=False)


def idle_part_of_a_core(seconds: float = 4.0) -> float:
    """Return the share of a core that an idle server uses."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(store.port,))
    server.start()
    weights = [nn.Parameter(torch.zeros(1000))]
    client = Client(store, "idle", bytes(32), 0, weights, 1)
    client.begin(Settings(1), [torch.optim.SGD(weights)], 0)
    client.weights.pull(weights)
    begun = _cpu_seconds(server.pid)
    time.sleep(seconds)
    used = _cpu_seconds(server.pid) - begun
    client.close()
    server.join()
    return used / seconds


def _cpu_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    rows: dict[str, Any] = {
        "all speeds together": lambda: all_speeds_together(args.steps),
        "async_sgd": lambda: ms_a_batch(AsyncSGD(), 20 * args.steps),
        "ddp, as fast as the slowest": lambda: ms_a_batch(DDP(), 2 * args.steps),
    }
    times = interleaved(rows, args.rounds)
    wanted = dict(zip(rows, (None, 1 / 0.90, None), strict=True))
    show(
        f"{WORKERS} workers, one {SLOWER} times slower", [Row(n, v, "ms a batch", wanted[n]) for n, v in times.items()]
    )
    rows = {
        "gloo's all_reduce and SGD": lambda: plain_gloo_ms(args.steps),
        "servers=0, optimizer=server": lambda: exchange_ms(ParameterServer(servers=0, optimizer="server"), args.steps),
        "servers=0": lambda: exchange_ms(ParameterServer(servers=0), args.steps),
        "parameter_server, servers=1": lambda: exchange_ms(ParameterServer(), args.steps),
        "parameter_server, link=gloo": lambda: exchange_ms(ParameterServer(link="gloo"), args.steps),
    }
    times = interleaved(rows, args.rounds)
    wanted = dict(zip(rows, (None, 0.25, None, None, None), strict=True))
    show(
        f"{MIB} MiB of gradients exchanged by 2 workers, and a step",
        [Row(n, v, "ms", wanted[n]) for n, v in times.items()],
    )
    rows = {
        "ddp": lambda: step_ms(DDP(), args.steps),
        "parameter_server, servers=0": lambda: step_ms(ParameterServer(servers=0), args.steps),
        "parameter_server, servers=1": lambda: step_ms(ParameterServer(), args.steps),
        "parameter_server, optimizer=server": lambda: step_ms(ParameterServer(optimizer="server"), args.steps),
        "async_sgd": lambda: step_ms(AsyncSGD(), args.steps),
    }
    times = interleaved(rows, args.rounds)
    show(f"a whole step with {MIB} MiB of weights, 2 workers", [Row(n, v, "ms", None) for n, v in times.items()])
    times = interleaved({"a core": lambda: 1.0, "a server that nobody asks": idle_part_of_a_core}, args.rounds)
    wanted = dict(zip(times, (None, 0.02), strict=True))
    show("doing nothing", [Row(n, v, "cores", wanted[n]) for n, v in times.items()])


if __name__ == "__main__":
    main()
