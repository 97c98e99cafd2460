"""Two ranks: a plain DDP script under torchrun against `Trainer(devices=2, strategy="ddp")`.

Measured are the time from the start of the command to the end of the first step on rank 0, and that of later steps,
with 0.3, 1 and 25 MiB of gradients. The plain script without a sum of gradients is the limit for any implementation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from table import Row, show
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fabricx as fx

WARM = 10
WIDTHS = {"0.3": 256, "1": 480, "25": 2500}  # of the network, by MiB of gradients


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def data(batches: int) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * 32 * batches, 64, generator=random)
    return TensorDataset(inputs, torch.randint(10, (len(inputs),), generator=random))


def report(ends: list[float]) -> None:
    """Write the time of the first step, and the mean duration of later steps."""
    step = (ends[-1] - ends[WARM]) / (len(ends) - 1 - WARM)
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps({"first": ends[0], "step": step}))


def plain(batches: int, width: int, *, sums: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = data(batches)
    model = nn.parallel.DistributedDataParallel(net(width)) if sums else net(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ends = []
    for inputs, labels in DataLoader(whole, 32, sampler=DistributedSampler(whole)):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.time())
    if dist.get_rank() == 0:
        report(ends)
    dist.barrier()  # torch may abort a process that ends while another process still sends
    dist.destroy_process_group()


class Timed(fx.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net, self.ends = net(width), []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        self.ends.append(time.time())

    def on_fit_end(self) -> None:
        if self.global_rank == 0:
            report(self.ends)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def ours(batches: int, width: int) -> None:
    trainer = fx.Trainer(
        max_epochs=1,
        devices=2,
        strategy="ddp",
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Timed(width), DataLoader(data(batches), 32, shuffle=True))


def measure(way: str, batches: int, width: int) -> tuple[float, float]:
    """Run a command; return seconds to the end of the first step, and milliseconds of a step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if way != "ours" else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, *launcher, __file__, "--way", way, "--batches", str(batches), "--width", str(width)]
        begun = time.time()
        subprocess.run(
            command, check=True, cwd=folder, env={**os.environ, "BENCH_OUT": str(out), "OMP_NUM_THREADS": "1"}
        )
        result = json.loads(out.read_text())
    return result["first"] - begun, result["step"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["plain", "apart", "ours"])
    parser.add_argument("--batches", type=int, default=800)
    parser.add_argument("--width", type=int, default=WIDTHS["0.3"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.way:
        if args.way == "ours":
            return ours(args.batches, args.width)
        return plain(args.batches, args.width, sums=args.way == "plain")

    names = {
        "plain": "a plain DDP script under torchrun",
        "apart": "the plain script, each rank alone: the limit",
        "ours": "fabricx, one log, TensorBoard, checkpoints",
    }
    wanted = {"0.3": 1.0, "1": 0.8, "25": 0.55}
    for mib, width in WIDTHS.items():
        results: dict[str, list[tuple[float, float]]] = {way: [] for way in names}
        batches = args.batches if width < 1000 else args.batches // 10
        for number in range(args.rounds):
            for way in list(results) if number % 2 == 0 else list(results)[::-1]:
                results[way].append(measure(way, batches, width))
        titles = [(f"two ranks, a step of 2 x 32 samples, {mib} MiB of gradients", "ms", 1, wanted[mib])]
        if width == WIDTHS["0.3"]:
            titles.insert(0, ("two ranks, from the command to the end of the first step", "s", 0, 1.0))
        for title, unit, index, most in titles:
            show(title, [
                Row(names[way], [pair[index] for pair in pairs], unit, most if way == "ours" else None)
                for way, pairs in results.items()
            ])  # fmt: skip
    return None


if __name__ == "__main__":
    main()
