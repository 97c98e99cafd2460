"""Strategies between two islands that a slow link connects: `python -m tests.bench.slow_network`, as root.

Each island is a network namespace with a rank, or two. A step sleeps for `STEP_S`, as if a GPU computed it. Steps and
the link are `DILATION` times slower, and times are divided by it: they depend less on the speed of this machine.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.demo.charlm import SYMBOLS, CharData
from fabricx.strategies import DDP, LocalSGD, Mesh
from fabricx.testing import QUIET
from tests.bench.slow_link import ADDRESSES, connected

STEP_S: Final = 0.1
DILATION: Final = 3
DELAY_S, RATE = 0.05, 100e6 / 8  # 50 ms one way, 100 Mbit/s
MARKS: Final = (10, 20, 40)  # seconds after the first step at which the loss is printed
ALONE_S: Final = 10  # of the run without delay
EVERY: Final = 20
_STREAMED: Final[dict[str, Any]] = {"every": EVERY, "outer": "nesterov", "fragments": 4, "overlap_steps": 10}
# name: strategy, ranks of an island
RUNS: Final[dict[str, tuple[Any, int]]] = {
    "ddp": (DDP, 1),
    "ddp, compression=bf16": (lambda: DDP(compression="bf16"), 1),
    "local_sgd, averaging": (lambda: LocalSGD(every=EVERY), 1),
    "DiLoCo": (lambda: LocalSGD(every=EVERY, outer="nesterov"), 1),
    "DiLoCo, int8": (lambda: LocalSGD(every=EVERY, outer="nesterov", compression="int8"), 1),
    "DiLoCo, int4": (lambda: LocalSGD(every=EVERY, outer="nesterov", compression="int4"), 1),
    "DiLoCo, 4 fragments, overlap": (lambda: LocalSGD(**_STREAMED), 1),
    "the same, int8": (lambda: LocalSGD(**_STREAMED, compression="int8"), 1),
    "the same, int4": (lambda: LocalSGD(**_STREAMED, compression="int4"), 1),
    "the same, int4, islands of 2 (fsdp)": (lambda: Mesh(data=LocalSGD(**_STREAMED, compression="int4"), shard=2), 2),
}


class Grams(fx.Module):
    """Predicts a character from embeddings of the 1 to 4 characters before it: many weights, little computation."""

    def __init__(self, rows: int = 8192, width: int = 32) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(4))
        self.net = nn.Sequential(nn.Linear(4 * width, 128), nn.ReLU(), nn.Linear(128, SYMBOLS))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(STEP_S * DILATION)
        seen, following = batch
        key, parts = torch.zeros_like(seen), []
        for distance, table in enumerate(self.tables):
            key = key * 131 + torch.roll(seen, distance, 1) + 1
            parts.append(table(key % self.rows))
        return nn.functional.cross_entropy(self.net(torch.cat(parts, -1)).flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class Times(fx.Callback):
    """Stops the run after a time, and writes the time and the loss of each step."""

    def __init__(self, seconds: float, path: Path) -> None:
        self.seconds, self.path = seconds, path
        self.rows: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append((time.monotonic(), float(outputs["loss"])))
        if self.rows[-1][0] - self.rows[0][0] > self.seconds:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.rows))


def train(name: str, seconds: float, path: Path) -> None:
    """Train on this rank."""
    strategy, per = RUNS[name]
    fx.seed_everything(0)
    module = Grams()
    trainer = fx.Trainer(
        strategy=strategy(), devices=per, num_nodes=2, max_epochs=1000, **QUIET,
        limit_val_batches=0, callbacks=[Times(seconds, path)], default_root_dir=path.parent, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, datamodule=CharData(batch_size=16, length=64))


def measure(name: str, delay_s: float, rate: float, seconds: float) -> list[tuple[float, float]]:
    """Return the seconds and the loss of each step since the first."""
    per = RUNS[name][1]
    with connected(delay_s * DILATION, rate / DILATION) as islands, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times"
        ranks = []
        for rank in range(2 * per):
            island = islands[rank // per]
            variables = {
                "RANK": rank, "WORLD_SIZE": 2 * per, "LOCAL_RANK": rank % per, "LOCAL_WORLD_SIZE": per,
                "GROUP_RANK": rank // per, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29417,
                "GLOO_SOCKET_IFNAME": f"{island}0", "OMP_NUM_THREADS": 1, "FABRICX_KEY": KEY,
            }  # fmt: skip
            command = [sys.executable, "-m", "tests.bench.slow_network", name, str(seconds * DILATION), str(path)]
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", island, *command],
                    env={**os.environ, **{key: str(value) for key, value in variables.items()}},
                )
            )
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.1)
        for rank in ranks:
            rank.kill()  # after a failure of another
            rank.wait()
        if any(codes):
            raise RuntimeError(f"{name}: ranks have ended with {codes}")
        rows = json.loads(path.read_text())
        return [((at - rows[0][0]) / DILATION, loss) for at, loss in rows]


def report(name: str) -> None:
    """Print the row of a strategy."""
    rows = measure(name, DELAY_S, RATE, MARKS[-1])
    alone = measure(name, 0.0, 1e10, ALONE_S)
    slow_s, fast_s = (_step_s(each) for each in (rows, alone))
    marks = [statistics.mean([loss for at, loss in rows if at <= mark][-EVERY:]) / 0.6931 for mark in MARKS]
    print(
        f"| {name} | {1000 * slow_s:.0f} ms | {1000 * fast_s:.0f} ms | {slow_s / fast_s:.2f} | "
        f"{' | '.join(f'{mark:.2f}' for mark in marks)} |", flush=True,
    )  # fmt: skip


def _step_s(rows: list[tuple[float, float]]) -> float:
    """Return the mean time of a step, over whole rounds."""
    whole = (len(rows) - 1) // EVERY * EVERY
    return (rows[whole][0] - rows[0][0]) / whole if whole else rows[-1][0] / (len(rows) - 1)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
    else:
        KEY = secrets.token_hex(32)
        print("| strategy | a step | without delay | ratio | " + " | ".join(f"{mark} s" for mark in MARKS) + " |")
        for each in sys.argv[1:] or RUNS:
            report(each)
