"""Share of a run spent on fault tolerance: two ranks, 20 million parameters.

In-memory copies of the strategies that need them, and snapshots on disk, at the default intervals.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from checkpoints import Large
from table import Row, show
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.callbacks import FaultRecovery

WARM, STEPS, EACH = 20, 200, 60


class Timed(Large):
    """Records the duration of training after a warm-up, and the part of it spent on copies."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.copying, self.begun = 0.0, 0.0, (0.0, 0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        memory_checkpointer = self.trainer.session.fault_tolerance.memory
        now = (time.monotonic(), 0.0 if memory_checkpointer is None else memory_checkpointer.seconds)
        if self.trainer.global_step == WARM:
            self.begun = now
        self.seconds, self.copying = now[0] - self.begun[0], now[1] - self.begun[1]


def measure(strategy: str, snapshots_each: int = 10**6) -> tuple[float, float, float]:
    """Return the seconds of a run with a snapshot every n steps, the seconds spent on copies, and the default interval
    between two snapshots in seconds."""
    module = Timed()
    recovery = FaultRecovery(every_n_train_steps=snapshots_each)
    inputs = torch.randn(64 * 64, 64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.int64)), 32, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = fx.Trainer(
            max_steps=STEPS, devices=2, strategy=strategy, accelerator="cpu", default_root_dir=folder, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[recovery],
        )  # fmt: skip
        trainer.fit(module, data)
    return module.seconds, module.copying, recovery.interval_s


def main() -> None:
    for strategy in ("fsdp", "local_sgd"):
        seconds, copying, _ = measure(strategy)
        show(f"two ranks, 20 million parameters, {strategy}", [
            Row(f"steps {WARM} to {STEPS}", [seconds], "s"),
            Row("copies in memory", [copying], "s", 0.01),
        ])  # fmt: skip
    pairs = [(measure("ddp"), measure("ddp", EACH)) for _ in range(2)]
    count = STEPS // EACH
    show(f"two ranks, 20 million parameters, ddp, a snapshot each {EACH} steps", [
        Row("between two of them, by default", [some[2] for _, some in pairs], "s"),
        Row("what a snapshot takes of it", [(some[0] - none[0]) / count for none, some in pairs], "s", 0.01),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
