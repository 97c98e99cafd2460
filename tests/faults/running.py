"""Run a cell of the fault matrix, and compare its trained weights with an undisturbed run."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import FaultRecovery, ModelCheckpoint, fault_recovery
from fabricx.checkpoint import sharded_tensors
from fabricx.checkpoint.writer import Writer
from fabricx.errors import WorkerFailed
from fabricx.testing import QUIET, Ledger, cut_links, layered_data
from tests.faults.cells import AFTER, ASYNCHRONOUS, EARLY, EXCEPTIONS, NOT_HOOKS, STRATEGIES, Cell
from tests.faults.outside import run_outside

SAMPLES, BATCH, EPOCHS, RANKS = 48, 12, 3, 2
STEPS = EPOCHS * SAMPLES // BATCH
MESSAGE = "the fault of this cell"
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM, "int": signal.SIGINT}
DISKS = {"full": errno.ENOSPC, "failing": errno.EIO}
JOINING = {0: "setup", 4: "on_fit_start", 7: "on_train_start"}  # moment of a replacement's death, by a cell's step
DRAWING = ("on_train_epoch_start", "on_train_batch_start", "on_after_backward", "on_before_optimizer_step")


class Samples(Dataset[Any]):
    """Samples with their indices; the process that loads sample 17 has a fault once, if `mark` is set.

    Args:
        mark: a file that records the fault; None for no fault.
        fault: "kill", "exit" or "error".
    """

    def __init__(self, mark: Path | None = None, fault: str = "kill") -> None:
        self.data, self.mark, self.fault = layered_data(SAMPLES), mark, fault

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.mark is not None and index == 17 and not self.mark.exists():
            self.mark.touch()
            if self.fault == "error":
                raise RuntimeError(MESSAGE)
            if self.fault == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return (*self.data[index], index)


def draw() -> float:
    """Draw a number from each generator."""
    return float(torch.rand(1)) + random.random() + np.random.rand()


class Shuffles(Sampler[int]):
    """Shuffles its previous order with its own generator."""

    def __init__(self, samples: int) -> None:
        self.order, self.own_generator = list(range(samples)), np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        self.own_generator.shuffle(self.order)
        return iter(list(self.order))


class Drawing(Ledger):
    """A ledger with dropout and noise, so that other random numbers train other weights.

    Args:
        of_rank: has state that depends on the rank: batch norm, and the module's own generator.
    """

    def __init__(self, of_rank: bool) -> None:
        super().__init__(SAMPLES, BATCH)
        self.norm: nn.Module = nn.BatchNorm1d(6) if of_rank else nn.Identity()
        self.own_generator = torch.Generator().manual_seed(5) if of_rank else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noisy = nn.functional.dropout(self.norm(batch[0]), 0.3) + 0.1 * draw()
        noisy = noisy + 0.1 * torch.rand(1, generator=self.own_generator)
        return super().training_step((noisy, *batch[1:]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        draw()
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [*self.layer.parameters(), *self.norm.parameters()]
        groups: Any = [{"params": trained, "momentum": 0.9, "lr": 0.01}, {"params": [self.entries]}]
        return torch.optim.SGD(groups, lr=1.0)


class DrawsInHooks(fx.Callback):
    """Draws random numbers in hooks."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        draw()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        draw()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        draw()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        draw()


class DiesJoining(fx.Callback):
    """Kills the first replacement of a worker while it joins."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.mark = folder / "happened-joining"
        setattr(self, JOINING[cell.step], self._die)

    def _die(self, trainer: Any, *arguments: Any) -> None:
        if trainer.world.newcomer and _first(self.mark):
            os.kill(os.getpid(), signal.SIGKILL)


class TriggersFault(fx.Callback):
    """Triggers the fault of a cell, once.

    Args:
        cell: the cell.
        folder: folder of the mark that records the fault, and of checkpoints.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        moment = cell.moment
        if cell.process != "loader" and moment not in NOT_HOOKS:
            setattr(self, moment, functools.partial(_at_hook, self))
        elif moment == "committed":
            setattr(self, "on_train_batch_start", functools.partial(_when_committed, self))  # noqa: B010

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Prepare the moments that aren't hooks."""
        if self.cell.moment == "reducing":
            module.layer.register_forward_hook(functools.partial(_when_gradients_are_computed, self, trainer))
        write, finish, waits = sharded_tensors.write, Writer.finish, threading.Event()

        def slow(file: Path, tensors: Any) -> Any:
            if self.cell.disk == "slow":
                waits.wait()
            number = DISKS.get(self.cell.disk)
            if number is not None and trainer.world.rank == 0 and _first(self.folder / "disk"):
                raise OSError(number, os.strerror(number))
            if self.cell.moment == "writing":
                self.now(trainer)
            return write(file, tensors)

        def released(writer: Writer) -> bool:
            waits.set()
            return finish(writer)

        sharded_tensors.write, Writer.finish = slow, released  # type: ignore[method-assign]

    def now(self, trainer: Any) -> None:
        """Trigger the fault, if the rank and the step are due."""
        cell, rank = self.cell, trainer.world.rank
        both = cell.process == "both workers"
        acts = cell.number if cell.process.startswith("worker") else 0
        if (rank != acts and not both) or trainer.world.newcomer:
            return
        if trainer.global_step < cell.step or trainer.sanity_checking:
            return
        if _first(self.folder / (f"happened-{rank}" if both else "happened")):
            _trigger_fault(cell, self.folder)


class Accounts(fx.Callback):
    """Writes the sample account of the last line of a recovered run.

    Args:
        folder: folder of the text file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "account"

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(fault_recovery._account(trainer, module))


def account_of(folder: Path) -> list[str]:
    """Return the account of a run if it reports lost or repeated samples."""
    account = (folder / "account").read_text()
    return [] if account.startswith(", 0 samples lost") else [f"its account says {account!r}"]


def _trigger_fault(cell: Cell, folder: Path) -> None:
    """Trigger the fault of a cell; called in the affected worker, or in worker 0."""
    if cell.fault in EXCEPTIONS:
        raise EXCEPTIONS[cell.fault](MESSAGE)
    if cell.fault == "cut":
        cut_links()
        return
    number = SIGNALS.get(cell.fault, signal.SIGKILL)
    if cell.outside:
        supervisor = psutil.Process(int((folder / "supervisor").read_text()))
        if cell.fault == "freeze":  # its workers wait for it only as long as they need it
            subprocess.Popen(["/bin/sh", "-c", f"sleep 1; kill -CONT {supervisor.pid}"])
        others = supervisor.children(recursive=True) if cell.process == "all" else []
        for process in (*(other for other in others if other.pid != os.getpid()), supervisor):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if cell.process == "all":
            os.kill(os.getpid(), number)
        return
    os.kill(_server(cell.number) if cell.process.startswith("server") else os.getpid(), number)


def _first(mark: Path) -> bool:
    """Create a mark; return whether it didn't exist."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _at_hook(fault: TriggersFault, trainer: Any, *arguments: Any, **options: Any) -> None:
    fault.now(trainer)


def _when_committed(fault: TriggersFault, trainer: Any, *arguments: Any) -> None:
    if checkpoint.list_committed(fault.folder / "saved"):
        fault.now(trainer)


def _when_gradients_are_computed(fault: TriggersFault, trainer: Any, layer: Any, inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: fault.now(trainer))


def _server(number: int) -> int:
    """Wait for a server of this worker's run; return its PID.

    From its first heartbeat on, a process of the run has an open file with its number in the file's name.
    """
    [stacks] = {link for link in _open_files(os.getpid()) if Path(link).name.startswith("stacks-")}
    stacks_of_server = str(Path(stacks).with_name(f"stacks-{RANKS + number}"))
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if stacks_of_server in _open_files(int(pid)):
                return int(pid)
        time.sleep(0.01)


def _open_files(pid: int) -> set[str]:
    paths = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                paths.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return paths


def fit(
    cell: Cell, folder: Path, *, undisturbed: bool, resume: bool = False
) -> tuple[Drawing, fx.Trainer, ModelCheckpoint]:
    """Train a cell, without its fault if `undisturbed`; `resume` resumes a stopped run's newest checkpoint, if any."""
    folder.mkdir(exist_ok=True)
    (folder / "supervisor").write_text(str(os.getpid()))
    torch.manual_seed(3)
    module = Drawing(of_rank=cell.strategy != "reproducible")  # refused by `reproducible`
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=3, save_last=True)
    faults: list[Any] = [] if undisturbed or resume else [TriggersFault(cell, folder)]
    if faults and cell.fault == "again":
        faults.append(DiesJoining(cell, folder))
    hooks: list[Any] = [DrawsInHooks()] if cell.draws == "hooks" else []
    frozen_after = 2.0 if cell.fault == "freeze" and not undisturbed else 60.0  # a busy machine freezes ranks as well
    recovery = FaultRecovery(every_n_train_steps=2, frozen_after=frozen_after)
    elastic: Any = {"deterministic": "elastic"} if cell.strategy == "reproducible" else {}
    trainer = fx.Trainer(
        devices=RANKS, strategy=STRATEGIES[cell.strategy](), max_epochs=EPOCHS, default_root_dir=folder,
        callbacks=[*hooks, *faults, saver, Accounts(folder), recovery],
        **{**QUIET, "enable_checkpointing": True}, **elastic,
    )  # fmt: skip
    loads = cell.process == "loader"
    data = Samples(folder / "happened" if loads and not undisturbed else None, cell.fault)
    order: Any = {"sampler": Shuffles(len(data))} if cell.draws == "hooks" else {"shuffle": True}
    loader: Any = DataLoader(data, BATCH // RANKS, **order, num_workers=int(loads), persistent_workers=loads)
    newest = "last" if resume and checkpoint.list_committed(folder / "saved") else None
    trainer.fit(module, loader, DataLoader(Samples(), 16), ckpt_path=newest)
    return module, trainer, saver


@functools.lru_cache(maxsize=64)
def undisturbed_weights(strategy: str, draws: str, loads: bool, folder: Path) -> dict[str, Tensor]:
    """Return the weights of an undisturbed run."""
    cell = Cell(strategy=strategy, draws=draws, process="loader" if loads else "worker 0")
    module, _, _ = fit(cell, folder / f"undisturbed-{strategy}-{draws}-{loads}", undisturbed=True)
    return {name: value.clone() for name, value in module.state_dict().items()}


def judge(cell: Cell, folder: Path, undisturbed: Path) -> list[str]:
    """Run a cell; return the deviations from the expected results.

    Args:
        cell: the cell.
        folder: folder of this run.
        undisturbed: folder of undisturbed runs, shared by cells.
    """
    folder.mkdir()
    raised = None
    try:
        if cell.outside:
            if wrong := run_outside(cell, folder):
                return wrong
            module, trainer, saver = fit(cell, folder, undisturbed=False, resume=True)
        else:
            module, trainer, saver = fit(cell, folder, undisturbed=False)
    except WorkerFailed as error:
        raised = error
    except SystemExit:
        if cell.fault != "term":
            return ["it stopped without a request"]
        module, trainer, saver = fit(cell, folder, undisturbed=False, resume=True)
    if raised is not None:
        return [] if _may_fail(cell, folder, raised) else [f"it failed: {raised}"]
    if not list(folder.glob("happened*")) and not (cell.disk == "failing" and (folder / "disk").exists()):
        return ["the fault has not happened"]
    left = [f"a folder remains: {path.name}" for path in (folder / "tmp").glob("*")]  # a new run removes earlier ones
    begun_anew = cell.outside and cell.fault == "kill" and trainer.state.attempt == 0  # no checkpoint existed to resume
    checkpoints = [] if begun_anew else _checkpoints(saver, folder)
    return [*left, *_weights(cell, module, undisturbed), *account_of(folder), *checkpoints, *_counts(cell, trainer)]


def _may_fail(cell: Cell, folder: Path, error: WorkerFailed) -> bool:
    """Return whether a run may end with this error: an error of the user or the disk without a snapshot to restore."""
    lost = cell.disk in DISKS and not any(map(checkpoint.list_committed, folder.glob("runs/*/recovery")))
    if lost and cell.disk == "failing" and "could not be written" in str(error):
        return True
    none = cell.moment in (*EARLY, *AFTER) or cell.step == 0 or lost  # no snapshot exists yet, or any longer
    return cell.fault in EXCEPTIONS and none and MESSAGE in str(error)


def _weights(cell: Cell, module: Drawing, undisturbed: Path) -> list[str]:
    if cell.strategy in ASYNCHRONOUS:
        strategy: Any = STRATEGIES[cell.strategy]()
        per_epoch = 1.0 if strategy._settings.aggregate else float(RANKS)  # else an update is a mean of one rank
        off = (module.entries.detach() + EPOCHS * per_epoch) / per_epoch
        lost = int(off.clamp(min=0).round().sum())
        twice = int((-off).clamp(min=0).round().sum())
        return [f"samples: {lost} lost, {twice} trained twice"] if off.abs().max() > 1e-3 else []
    # A checkpoint averages the ranks, also an additional checkpoint.
    if cell.strategy == "local_sgd" and (cell.fault == "term" or (cell.outside and cell.fault == "int")):
        off = (module.entries.detach() + EPOCHS).abs().max()
        return [f"samples were lost or trained twice: {float(off):g}"] if off > 1e-3 else []
    expected = undisturbed_weights(cell.strategy, cell.draws, cell.process == "loader", undisturbed)
    names = [name for name, value in module.state_dict().items() if not torch.equal(value, expected[name])]
    off = (module.entries.detach() + EPOCHS).abs().max()
    ledger = [f"samples were lost or trained twice: {float(off):g}"] if off > 1e-3 else []
    return [*ledger, *([f"different values in {', '.join(names)}"] if names else [])]


def _checkpoints(saver: ModelCheckpoint, folder: Path) -> list[str]:
    wrong = [f"half a checkpoint: {path.name}" for path in (folder / "saved").glob(".*.partial")]
    try:
        checkpoint.verify(saver.best_model_path)
        checkpoint.verify(saver.last_model_path)
    except checkpoint.CheckpointError as error:
        wrong.append(str(error))
    return wrong


def _counts(cell: Cell, trainer: fx.Trainer) -> list[str]:
    steps = trainer.global_step
    if cell.strategy not in ASYNCHRONOUS and steps != STEPS:
        return [f"{steps} steps, and not {STEPS}"]
    silent = cell.outside or cell.fault in ("term", "int", "cut")  # an unused link isn't missed
    silent = silent or cell.moment in AFTER or cell.process.startswith("server")
    return [] if trainer.failures or silent else ["no failure was noted"]
