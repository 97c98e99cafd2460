"""Random schedules of joins and deaths with delayed messages and slow ranks, and the trained samples of each."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.distributed.membership.generations import membership
from fabricx.launch.resize import request_workers
from fabricx.strategies import DDP, FSDP, AsyncSGD, ParameterServer, Reproducible
from fabricx.testing import QUIET, Ledger, kill
from tests.faults.running import BATCH, EPOCHS, Accounts, Samples, account_of

UNEVEN: Final = 41  # samples: the last of 3 ranks has no sample of the last batch
STRATEGIES: Final[dict[str, Callable[[], Any]]] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "reproducible": Reproducible,
    "ps": ParameterServer,
    "ps2-server": lambda: ParameterServer(servers=2, optimizer="server"),
    "ps0": lambda: ParameterServer(servers=0),
    "ps0-server": lambda: ParameterServer(servers=0, optimizer="server"),
    "bounded": lambda: ParameterServer(mode="bounded", max_staleness=1),
    "async": lambda: AsyncSGD(damp=False),
    "async2": lambda: AsyncSGD(damp=False, servers=2),
    "rounds": lambda: AsyncSGD(every=3, outer="sum"),
    "stale": lambda: AsyncSGD(damp=False, max_staleness=1),
    "clock": lambda: AsyncSGD(damp=False, max_staleness=1, bound="clock"),
    "backup": lambda: ParameterServer(backup_workers=1),
}
PER_RANK: Final = ("async", "async2", "rounds", "stale", "clock")  # each rank's batch is an update of its own
EVEN: Final = (*PER_RANK, "bounded", "backup")  # equal weights of all samples need equal batch sizes
MOMENTS: Final = ("forward", "backward", "optimizer", "batch end", "validation", "checkpoint")


class DelaysMessages(fx.Callback):
    """Delays the supervisor's messages to a rank and its batches at random, so that ranks notice changes separately."""

    def __init__(self, seed: int) -> None:
        self.seed, self.most_s = seed, 0.0
        self.draws = random.Random()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        member = membership()
        self.draws = draws = random.Random(f"{self.seed} {member.worker}")
        most_s, receive = draws.choice([0.0, 0.03, 0.4]), member.on_message
        self.most_s = draws.choice([0.0, 0.03, 0.15])

        def late(kind: str, content: Any) -> None:
            time.sleep(random.random() * most_s)
            receive(kind, content)

        member.on_message = late  # type: ignore[method-assign]

    def on_train_batch_start(self, *arguments: Any) -> None:
        time.sleep(self.draws.random() ** 2 * self.most_s)

    def on_train_batch_end(self, *arguments: Any) -> None:
        time.sleep(self.draws.random() ** 2 * self.most_s)

    def on_validation_batch_start(self, *arguments: Any) -> None:
        time.sleep(self.draws.random() ** 2 * self.most_s)


class Resizes(fx.Callback):
    """Requests numbers of workers after steps.

    Args:
        requests: number of workers by step.
    """

    def __init__(self, requests: dict[int, int]) -> None:
        self.requests = dict(requests)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            for step in [step for step in self.requests if step <= trainer.global_step]:
                request_workers(trainer.run_dir, self.requests.pop(step))


def fit(strategy: Any, devices: int, samples: int, folder: Path, callbacks: list[Any]) -> tuple[Ledger, fx.Trainer]:
    """Train a ledger of samples on ranks."""
    torch.manual_seed(3)
    data: Any = torch.utils.data.Subset(Samples(), range(samples))
    module = Ledger(samples, BATCH)
    trainer = fx.Trainer(
        devices=devices, strategy=strategy, max_epochs=EPOCHS, default_root_dir=folder,
        **{**QUIET, "enable_checkpointing": bool(callbacks), "callbacks": callbacks},
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, BATCH // devices, shuffle=True), DataLoader(data, 16 // devices))
    return module, trainer


def judge(seed: int, folder: Path) -> list[str]:
    """Run the schedule of a seed; return the deviations from the expected samples."""
    draws = random.Random(seed)
    name, devices = draws.choice(list(STRATEGIES)), draws.choice([2, 3])
    requests = {draws.randrange(12): draws.choice([1, 2, 3]) for _ in range(draws.choice([0, 1, 1, 2, 3]))}
    faults = [
        kill(rank=draws.randrange(2)).during(draws.choice(MOMENTS), step=draws.randrange(11), attempt=attempt)
        for attempt in range(draws.choice([0, 1, 2]))
    ]
    recovery = FaultRecovery(
        patience=draws.choice([0.0, 0.0, 1.0, 30.0]), max_restarts=20,
        every_n_train_steps=draws.choice([None, 2]),
    )  # fmt: skip
    samples = UNEVEN + 7 if name in EVEN else UNEVEN
    callbacks = [*faults, DelaysMessages(seed), Resizes(requests), Accounts(folder), recovery]
    with contextlib.chdir(folder):
        module, trainer = fit(STRATEGIES[name](), devices, samples, folder / "run", callbacks)
    entries, wrong = module.entries.detach(), []
    if name in EVEN:
        due = torch.full_like(entries, -EPOCHS * (devices if name in PER_RANK else 1.0))
        if name == "backup":  # an update is the mean of the batches of 1 to all but one ranks
            due = entries.clamp(-EPOCHS * devices, -EPOCHS * devices / (devices - 1))
    else:
        alone, undisturbed = fit("single", 1, samples, folder / "undisturbed", [])
        due, values = alone.entries.detach(), trainer.callback_metrics
        wrong = [
            f"{key}: {values[key]:.5f}, and {value:.5f} in an undisturbed run"
            for key, value in undisturbed.callback_metrics.items()
            if abs(values[key] - value) > 1e-4
        ]
    wrong += [
        f"sample {number}: {a:.3f}, and {b:.3f} in an undisturbed run"
        for number, (a, b) in enumerate(zip(entries, due, strict=True))
        if abs(a - b) > 1e-4
    ]
    wrong += account_of(folder)
    description = f"{name}, {devices} ranks, requests {requests}, {[(f.rank, f.moment, f.step) for f in faults]}"
    return [f"{description}; {trainer.failures}: {'; '.join(wrong)}"] if wrong else []
