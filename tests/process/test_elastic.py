"""Workers that die are replaced in place, come and go on request, and leave nothing behind."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.distributed import world as worlds
from fabricx.distributed.membership.generations import membership
from fabricx.launch.resize import request_workers
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer
from fabricx.testing import QUIET, Ledger, SavesAtEnd, TinyModule, cut, kill, run_ranks, tiny_loader
from fabricx.trainer import process
from tests import warm
from tests.soak import params

from .aborted import silent
from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact, train
from .served import serve_and_publish_pid


class Noted(Ledger):
    """Notes, on the main rank, how many workers there were: at each step last, and ever."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.sizes: dict[int, int] = {}
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes[self.trainer.global_step] = self.trainer.world.size
        self.seen.append(self.trainer.world.size)
        return super().training_step(batch, batch_idx)


class Asks(fx.Callback):
    """Asks for a number of workers after some steps, once those that were asked for before are there."""

    def __init__(self, **workers: int) -> None:
        self.workers = {int(step.removeprefix("at_")): number for step, number in workers.items()}
        self.asked: set[int] = set()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        due = [step for step in sorted(self.workers) if step <= trainer.global_step and step not in self.asked]
        if not trainer.is_global_zero or not due:
            return
        if self.asked and trainer.world.size != self.workers[max(self.asked)]:
            return
        step = due[0]  # updates of other workers may have passed several of the steps since the last batch
        self.asked.add(step)
        request_workers(trainer.run_dir, self.workers[step])
        deadline = time.monotonic() + 60
        while (
            not trainer.session.fault_tolerance.outdated
        ):  # the next generation is named: this batch is the last of this one
            assert time.monotonic() < deadline
            time.sleep(0.01)


COMING: list[Any] = [
    DDP(), LocalSGD(every=2), AsyncSGD(damp=False), ParameterServer(optimizer="server"),
]  # fmt: skip
COMING_TOO: list[Any] = [
    FSDP(), ParameterServer(servers=2), ParameterServer(mode="bounded"), ParameterServer(servers=0, optimizer="server"),
    silent(DDP()), silent(FSDP()),
]  # fmt: skip
TORN: dict[str, Any] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "local_sgd": lambda: LocalSGD(every=4, fragments=2, overlap_steps=1, keep_local=0.3),
    "parameter_server": ParameterServer,
    "servers step": lambda: ParameterServer(optimizer="server", overlap="forward", link="gloo"),
    "no server": lambda: ParameterServer(servers=0),
}


@pytest.mark.parametrize("strategy", params(COMING, COMING_TOO))
def test_workers_come_and_go_while_a_run_goes_on(strategy: Any, tmp_path: Path) -> None:
    asks: Any = Asks(at_2=3, at_5=1, at_9=2)
    module, trainer = train(
        strategy, [asks], tmp_path, module=Noted(), recovery=FaultRecovery(), enable_checkpointing=True
    )
    assert not trainer.failures
    assert {1, 2, 3} <= set(module.seen) | {trainer.world.size}  # several sizes may have been at one step
    assert module.sizes[min(module.sizes)] == 2  # the main rank may begin after the other's first update
    assert trainer.current_epoch == EPOCHS
    alone = not strategy.traits.lockstep and not strategy._settings.aggregate
    assert exact(module, EPOCHS * (2.0 if alone else 1.0))  # the global batch stays what it was
    if strategy.traits.lockstep:
        assert trainer.global_step == STEPS


class AsksWithoutCheckpoint(Asks):
    """Asks once the checkpoint from which the run has gone on is deleted, as newer checkpoints do it.

    Args:
        path: the checkpoint.
        workers: see `Asks`.
    """

    def __init__(self, path: Path, **workers: int) -> None:
        super().__init__(**workers)
        self.path = path
        self.sizes: set[int] = set()  # of the world

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.add(trainer.world.size)
        if trainer.is_global_zero:  # an update of all ranks is done: each rank has read the checkpoint
            shutil.rmtree(self.path, ignore_errors=True)


class HearsLate(fx.Callback):
    """Delays on rank 1 the message that announces the next generation."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank != 1:
            return
        member = membership()
        receive = member.on_message

        def late(kind: str, content: Any) -> None:
            if kind == "generation":
                time.sleep(1.0)
            receive(kind, content)

        member.on_message = late  # type: ignore[method-assign]


def test_a_rank_without_samples_does_not_wait_for_ranks_that_have_left_to_let_a_worker_join(tmp_path: Path) -> None:
    callbacks = [Asks(at_2=3), HearsLate(), FaultRecovery()]
    options = {**QUIET, "enable_checkpointing": True, "callbacks": callbacks}
    trainer = fx.Trainer(devices=2, strategy=DDP(), max_epochs=4, default_root_dir=tmp_path, **options)
    trainer.fit(TinyModule(), tiny_loader(3, 1))  # rank 1 has no sample of each second batch: it follows rank 0's hooks
    assert trainer.global_step == 8


def test_values_of_a_batch_that_a_join_has_interrupted_are_not_logged_twice(tmp_path: Path) -> None:
    asks: Any = Asks(at_10=3)
    late: Any = HearsLate()  # rank 1 has begun the next batch, and repeats it with the new worker
    options: dict[str, Any] = {"recovery": FaultRecovery(), "enable_checkpointing": True}
    torch.manual_seed(3)
    _, alone = train("single", [], tmp_path / "a", module=Noted(), devices=1, **options)
    torch.manual_seed(3)
    module, trainer = train(DDP(), [asks, late], tmp_path / "b", module=Noted(), **options)
    assert module.seen[-1] == 3
    assert exact(module)
    for name in ("loss", "val"):
        torch.testing.assert_close(trainer.callback_metrics[name], alone.callback_metrics[name], atol=1e-5, rtol=1e-4)


def test_a_worker_joins_a_resumed_run_whose_checkpoint_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    options: dict[str, Any] = {
        **QUIET,
        "enable_checkpointing": True,
        "devices": 2,
        "strategy": DDP(),
        "default_root_dir": tmp_path,
    }
    fx.Trainer(max_epochs=1, callbacks=[SavesAtEnd(path)], **options).fit(TinyModule(), tiny_loader(64, 2))
    asks = AsksWithoutCheckpoint(path, at_20=3)
    resumed = fx.Trainer(max_epochs=4, **{**options, "callbacks": [asks, FaultRecovery()]})
    resumed.fit(TinyModule(), tiny_loader(64, 2), ckpt_path=path)
    assert not path.exists()
    assert (resumed.failures, asks.sizes, resumed.current_epoch) == ([], {2, 3}, 4)


class MissesSection(fx.Callback):
    """Keeps rank 1 from a section until rank 0 has trained it and a third worker has come; compares steps at meetings.

    Attributes:
        missed: did rank 0 train without rank 1? Known to rank 0.
    """

    watches_metrics = True  # called where all meet

    def __init__(self) -> None:
        self.meetings = 0
        self.missed = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.meetings == 1 and trainer.world.generation == 0:
            trainer.world.store.set("a batch that rank 1 misses", "")
            self.missed = True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.meetings += 1
        world = trainer.world
        steps = world.gather_objects((trainer.global_step, [p.detach() for p in module.parameters()]))
        for step, weights in steps[1:]:
            assert step == steps[0][0], "ranks meet at different steps"
            assert all(map(torch.equal, weights, steps[0][1])), "ranks meet with different weights"
        if self.meetings == 1 and (world.rank, world.generation) == (1, 0):
            world.store.wait(["a batch that rank 1 misses"], timedelta(seconds=60))
            request_workers(trainer.run_dir, 3)
            deadline = time.monotonic() + 60
            while not trainer.session.fault_tolerance.outdated:
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.parametrize("strategy", params([AsyncSGD(damp=False)], [ParameterServer(mode="bounded")]))
def test_a_worker_that_has_missed_a_section_meets_with_the_weights_of_all(strategy: Any, tmp_path: Path) -> None:
    misses: Any = MissesSection()
    recovery = FaultRecovery(every_n_train_steps=2)
    torch.manual_seed(3)
    module = Ledger(SAMPLES, BATCH)
    trainer = fx.Trainer(
        devices=2, strategy=strategy, max_epochs=EPOCHS, default_root_dir=tmp_path, callbacks=[recovery, misses],
        **{**QUIET, "enable_checkpointing": True},
    )  # fmt: skip
    trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
    assert misses.missed
    assert trainer.current_epoch == EPOCHS
    assert exact(module, EPOCHS * (1.0 if strategy._settings.aggregate else 2.0))


@pytest.mark.parametrize(
    "way",
    params(
        [FSDP, ParameterServer],
        [DDP, lambda: ParameterServer(servers=0, optimizer="server"), lambda: silent(DDP())],
    ),
)
def test_those_that_are_left_needn_t_wait(way: Any, tmp_path: Path) -> None:
    wanted, one = train(way(), [], tmp_path / "a", devices=3)
    faults = [kill(rank=1).during("backward", step=3), kill(rank=0).during("validation", step=4, attempt=1)]
    recovery = FaultRecovery(patience=0.0)
    found, trainer = train(way(), faults, tmp_path / "b", devices=3, recovery=recovery)
    assert len(trainer.failures) == 2
    assert exact(found)
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for name in ("loss", "val"):  # also what a lost rank had logged
        torch.testing.assert_close(trainer.callback_metrics[name], one.callback_metrics[name], atol=1e-5, rtol=1e-4)


def test_what_workers_have_moved_by_themselves_is_kept_when_one_is_gone(tmp_path: Path) -> None:
    faults = [kill(rank=1).during("backward", step=3), kill(rank=0).during("validation", step=4, attempt=1)]
    module, trainer = train(LocalSGD(every=2), faults, tmp_path, devices=3, recovery=FaultRecovery(patience=0.0))
    assert len(trainer.failures) == 2
    assert exact(module)


@pytest.mark.parametrize(
    "way", params(["fsdp", "servers step"], [way for way in TORN if way not in ("fsdp", "servers step")])
)
def test_links_that_are_cut_are_made_anew_and_nobody_is_ended(way: Any, tmp_path: Path) -> None:
    wanted, _ = train(TORN[way](), [], tmp_path / "a")
    found, trainer = train(TORN[way](), [cut(rank=1).during("forward", step=4)], tmp_path / "b")
    [failure] = trainer.failures
    assert "lost its links" in failure
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b)


class KillsServer(fx.Callback):
    """Kills the first server in the fifth step."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 4 and not trainer.failures:
            os.kill(int(trainer.world.store.get("server 0")), signal.SIGKILL)


@pytest.mark.parametrize("options", params([{"servers": 2}], [({"optimizer": "server"},)]))
def test_a_server_that_is_gone_takes_nothing_with_it(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    wanted, _ = train(ParameterServer(**options), [], tmp_path / "a")
    kills: Any = KillsServer()
    found, trainer = train(ParameterServer(**options), [kills], tmp_path / "b")
    assert len(trainer.failures) == 1
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b)


class LeavesPids(Numbered):
    """Writes a file for each process that loads it: the process number, and the shared memory that the process uses."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        maps = Path("/proc/self/maps").read_text().splitlines()
        # joblib's are those of the fork server, which has imported it
        inodes = {line.split()[4] for line in maps if "/dev/shm/" in line and "loky" not in line}
        passing = self.folder.with_name(f"{os.getpid()}")
        passing.write_text(" ".join(inodes))
        passing.rename(self.folder / passing.name)
        return super().__getitem__(index)

    def wait_for_ends(self) -> None:
        """Wait until the processes have ended and nothing in /dev/shm is theirs; other tests' files don't matter.

        Shared memory is compared by its inode: the C library maps a semaphore under another name than its final one.
        """
        files = list(self.folder.iterdir())
        assert len(files) >= 2
        inodes = {int(inode) for file in files for inode in file.read_text().split()}
        assert inodes  # at least the semaphores of queues
        deadline = time.monotonic() + 60
        while any(psutil.pid_exists(int(file.name)) for file in files) or inodes & _shared_memory():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _shared_memory() -> set[int]:
    with os.scandir("/dev/shm") as files:
        return {file.inode() for file in files}


def test_processes_that_load_data_end_with_a_worker_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    data = LeavesPids(tmp_path / "pids")
    _, trainer = train(DDP(), [kill(rank=1).during("forward", step=5)], tmp_path, data=data, num_workers=1)
    assert len(trainer.failures) == 1
    data.wait_for_ends()


KILLED = """
import sys
from pathlib import Path
from tests.process.test_elastic import LeavesPids
from tests.process.ledgers import train
from fabricx.strategies import DDP
from fabricx.testing import hang

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train(DDP(), [hang(rank=0).during("forward", step=3)], folder, data=LeavesPids(folder / "pids"), num_workers=1)
"""


def test_processes_that_load_data_end_with_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    (tmp_path / "killed.py").write_text(KILLED)
    root = Path(__file__).parents[2]
    script = warm.Popen(
        [sys.executable, tmp_path / "killed.py", tmp_path], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "pids").iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    script.kill()
    script.wait()
    LeavesPids(tmp_path / "pids").wait_for_ends()


@pytest.mark.parametrize("strategy", params([FSDP(), LocalSGD(every=2)], [ParameterServer(optimizer="server")]))
def test_what_workers_held_outlives_all_of_them(strategy: Any, tmp_path: Path, capsys: Any) -> None:
    faults = [kill(rank).during("batch end", step=5) for rank in range(2)]
    recovery = FaultRecovery(copy_every_n_steps=1)
    module, trainer = train(strategy, faults, tmp_path, recovery=recovery)
    assert len(trainer.failures) == 2
    assert exact(module)
    assert "start again" not in capsys.readouterr().err


class Manual(Ledger):
    """The same, in a loop of its own."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Wraps(Manual):
    """Raises an error of its own for every error in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except Exception as error:
            raise ValueError("the step has failed") from error


def test_a_lost_rank_is_found_behind_an_error_of_the_module(tmp_path: Path) -> None:
    fault = kill(rank=1).during("backward", step=3)
    module, trainer = train(DDP(), [fault], tmp_path, module=Wraps())
    assert len(trainer.failures) == 1
    assert exact(module)


def test_a_module_that_steps_by_itself_loses_nothing(tmp_path: Path) -> None:
    wanted, _ = train(DDP(), [], tmp_path / "a", module=Manual())
    faults = [kill(rank=1).during("optimizer", step=3), kill(rank=0).during("backward", step=7, attempt=1)]
    found, trainer = train(DDP(), faults, tmp_path / "b", module=Manual())
    assert len(trainer.failures) == 2
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_is_left_of_those_that_died(tmp_path: Path) -> None:
    train(DDP(), [], tmp_path / "a")  # what a process keeps once it has started workers
    before = open_here()
    faults = [kill(rank=number % 2).during("forward", step=number, attempt=number) for number in range(STEPS)]
    module, trainer = train(DDP(), faults, tmp_path / "b")
    assert len(trainer.failures) == STEPS
    assert exact(module)
    deadline = time.monotonic() + 60
    while grown(before) and time.monotonic() < deadline:
        time.sleep(0.05)  # a thread that serves the store ends when the system has told it that its worker is gone
    assert not grown(before)


def open_here() -> tuple[int, int, int]:
    """Return how many files, threads and processes this process has."""
    own = psutil.Process()
    return own.num_fds(), threading.active_count(), len(own.children(recursive=True))


def grown(before: tuple[int, int, int]) -> list[str]:
    """Return what this process has more of; it may have less, as garbage of earlier tests is collected at any time."""
    kinds = zip(("files", "threads", "processes"), open_here(), before, strict=True)
    return [f"{now} {kind}, {earlier} before" for kind, now, earlier in kinds if now > earlier]


def _dies_once(strategy: FSDP) -> Any:
    """Die while the groups of the first change are built, in the place of one that had died."""
    if membership().worker == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return FSDP._mesh(strategy)


def test_who_dies_while_groups_are_built_is_not_waited_for_long(tmp_path: Path) -> None:
    strategy = FSDP(replicas=2)
    vars(strategy)["_mesh"] = functools.partial(_dies_once, strategy)
    module, trainer = train(strategy, [kill(rank=1).during("backward", step=3)], tmp_path, devices=4)
    assert len(trainer.failures) == 2  # torch's own limit is half an hour, this test's two minutes
    assert not any("in place failed" in failure for failure in trainer.failures)
    assert exact(module)


def _leaves_while_an_operation_is_under_way() -> bool:
    own = worlds.current()
    assert own is not None
    assert own.store is not None
    reducing = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    if not own.main_rank:
        own.store.wait(["the other can speak"], timedelta(seconds=60))
        dist.all_reduce(torch.ones(1))
        return True
    dist.all_reduce(torch.ones(1), async_op=True)
    leaving = threading.Event()

    def speak() -> None:
        leaving.wait()
        time.sleep(0.2)
        own.store.set("the other can speak", "")  # type: ignore[union-attr]

    thread = threading.Thread(target=speak)
    thread.start()
    own.leave_groups()
    worlds._CURRENT.clear()
    leaving.set()
    del reducing  # whose end would be that of the group, and wait
    own.release_left_groups()
    thread.join()
    return True


def test_what_waits_for_the_end_of_a_group_lets_others_of_its_process_go_on() -> None:
    assert all(run_ranks(_leaves_while_an_operation_is_under_way, 2))
