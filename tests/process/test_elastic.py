"""Dead workers are replaced in place, workers join and leave on request, and no resources of dead processes remain."""

from __future__ import annotations

import functools
import os
import re
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


class RecordsSizes(Ledger):
    """Records on the main rank the number of workers at each step, and all numbers of workers."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.sizes: dict[int, int] = {}
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes[self.trainer.global_step] = self.trainer.world.size
        self.seen.append(self.trainer.world.size)
        return super().training_step(batch, batch_idx)


class RequestsWorkers(fx.Callback):
    """Requests numbers of workers at given steps, each after the previous request is fulfilled.

    Requests are noted in files: attributes of callbacks go back with the run.
    """

    def __init__(self, **workers: int) -> None:
        self.workers = {int(step.removeprefix("at_")): number for step, number in workers.items()}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        asked = [int(file.name) for file in trainer.run_dir.glob("asked/*")]
        due = [step for step in sorted(self.workers) if step <= trainer.global_step and step not in asked]
        if not trainer.is_global_zero or not due:
            return
        if asked and trainer.world.size != self.workers[max(asked)]:
            return
        step = due[0]  # updates of other workers may have passed several of the steps since the previous batch
        (trainer.run_dir / "asked").mkdir(exist_ok=True)
        (trainer.run_dir / "asked" / str(step)).touch()
        request_workers(trainer.run_dir, self.workers[step])
        deadline = time.monotonic() + 60
        # The next generation is announced: this batch is the last of the current generation.
        while not trainer.session.fault_tolerance.outdated:
            assert time.monotonic() < deadline
            time.sleep(0.01)


ELASTIC: list[Any] = [
    DDP(), LocalSGD(every=2), AsyncSGD(damp=False), ParameterServer(optimizer="server"),
]  # fmt: skip
ELASTIC_SOAK: list[Any] = [
    FSDP(), ParameterServer(servers=2), ParameterServer(mode="bounded"), ParameterServer(servers=0, optimizer="server"),
    silent(DDP()), silent(FSDP()),
]  # fmt: skip
RECONNECTED: dict[str, Any] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "local_sgd": lambda: LocalSGD(every=4, fragments=2, overlap_steps=1, keep_local=0.3),
    "parameter_server": ParameterServer,
    "optimizer on servers": lambda: ParameterServer(optimizer="server", overlap="forward", link="gloo"),
    "shared memory": lambda: ParameterServer(servers=0),
}


@pytest.mark.parametrize("strategy", params(ELASTIC, ELASTIC_SOAK))
def test_workers_join_and_leave_during_a_run(strategy: Any, tmp_path: Path) -> None:
    requests: Any = RequestsWorkers(at_2=3, at_5=1, at_9=2)
    module, trainer = train(
        strategy, [requests], tmp_path, module=RecordsSizes(), recovery=FaultRecovery(), enable_checkpointing=True
    )
    assert not trainer.failures
    assert {1, 2, 3} <= set(module.seen) | {trainer.world.size}  # several sizes may occur within the same step
    assert module.sizes[min(module.sizes)] == 2  # the main rank may begin after the first update of the other rank
    assert trainer.current_epoch == EPOCHS
    alone = not strategy.traits.lockstep and not strategy._settings.aggregate
    assert exact(module, EPOCHS * (2.0 if alone else 1.0))  # the global batch is unchanged
    if strategy.traits.lockstep:
        assert trainer.global_step == STEPS


class RequestsWorkersWithoutCheckpoint(RequestsWorkers):
    """Requests workers after the deletion of the checkpoint that the run has resumed, as newer checkpoints cause it.

    Args:
        path: the checkpoint.
        workers: see `RequestsWorkers`.
    """

    def __init__(self, path: Path, **workers: int) -> None:
        super().__init__(**workers)
        self.path = path
        self.sizes: set[int] = set()  # world sizes

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.add(trainer.world.size)
        if trainer.is_global_zero:  # an update of all ranks is done: each rank has read the checkpoint
            shutil.rmtree(self.path, ignore_errors=True)


class DelaysAnnouncement(fx.Callback):
    """Delays the message that announces the next generation on rank 1."""

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


def test_a_rank_without_samples_does_not_wait_for_ranks_that_have_joined_the_next_generation(tmp_path: Path) -> None:
    callbacks = [RequestsWorkers(at_2=3), DelaysAnnouncement(), FaultRecovery()]
    options = {**QUIET, "enable_checkpointing": True, "callbacks": callbacks}
    trainer = fx.Trainer(devices=2, strategy=DDP(), max_epochs=4, default_root_dir=tmp_path, **options)
    # Every second batch has no sample for rank 1: it follows rank 0's hooks.
    trainer.fit(TinyModule(), tiny_loader(3, 1))
    assert trainer.global_step == 8


def test_values_of_a_batch_that_is_interrupted_by_a_join_are_logged_once(tmp_path: Path) -> None:
    requests: Any = RequestsWorkers(at_10=3)
    late: Any = DelaysAnnouncement()  # rank 1 has begun the next batch, and repeats it with the new worker
    options: dict[str, Any] = {"recovery": FaultRecovery(), "enable_checkpointing": True}
    torch.manual_seed(3)
    _, alone = train("single", [], tmp_path / "a", module=RecordsSizes(), devices=1, **options)
    torch.manual_seed(3)
    module, trainer = train(DDP(), [requests, late], tmp_path / "b", module=RecordsSizes(), **options)
    assert module.seen[-1] == 3
    assert exact(module)
    for name in ("loss", "val"):
        torch.testing.assert_close(trainer.callback_metrics[name], alone.callback_metrics[name], atol=1e-5, rtol=1e-4)


def test_a_worker_joins_a_resumed_run_after_the_deletion_of_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    options: dict[str, Any] = {
        **QUIET,
        "enable_checkpointing": True,
        "devices": 2,
        "strategy": DDP(),
        "default_root_dir": tmp_path,
    }
    fx.Trainer(max_epochs=1, callbacks=[SavesAtEnd(path)], **options).fit(TinyModule(), tiny_loader(64, 2))
    requests = RequestsWorkersWithoutCheckpoint(path, at_20=3)
    resumed = fx.Trainer(max_epochs=4, **{**options, "callbacks": [requests, FaultRecovery()]})
    resumed.fit(TinyModule(), tiny_loader(64, 2), ckpt_path=path)
    assert not path.exists()
    assert (resumed.failures, requests.sizes, resumed.current_epoch) == ([], {2, 3}, 4)


class MissesSection(fx.Callback):
    """Delays rank 1 in a section until rank 0 has trained it and a third worker has joined; compares steps at meetings.

    Attributes:
        missed: whether rank 0 has trained without rank 1; set on rank 0.
    """

    watches_metrics = True  # called at meetings of all ranks

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
def test_a_worker_that_has_missed_a_section_has_the_weights_of_all_workers_at_the_next_meeting(
    strategy: Any, tmp_path: Path
) -> None:
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
def test_survivors_continue_without_waiting_for_a_replacement(way: Any, tmp_path: Path) -> None:
    expected, reference = train(way(), [], tmp_path / "a", devices=3)
    faults = [kill(rank=1).during("backward", step=3), kill(rank=0).during("validation", step=4, attempt=1)]
    recovery = FaultRecovery(patience=0.0)
    module, trainer = train(way(), faults, tmp_path / "b", devices=3, recovery=recovery)
    assert len(trainer.failures) == 2
    assert exact(module)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    for name in ("loss", "val"):  # also values that the lost rank had logged
        torch.testing.assert_close(
            trainer.callback_metrics[name], reference.callback_metrics[name], atol=1e-5, rtol=1e-4
        )


def test_local_updates_between_averages_are_kept_after_the_death_of_a_worker(tmp_path: Path) -> None:
    faults = [kill(rank=1).during("backward", step=3), kill(rank=0).during("validation", step=4, attempt=1)]
    module, trainer = train(LocalSGD(every=2), faults, tmp_path, devices=3, recovery=FaultRecovery(patience=0.0))
    assert len(trainer.failures) == 2
    assert exact(module)


@pytest.mark.parametrize(
    "way",
    params(
        ["fsdp", "optimizer on servers"], [way for way in RECONNECTED if way not in ("fsdp", "optimizer on servers")]
    ),
)
def test_cut_connections_are_replaced_and_no_worker_is_ended(way: Any, tmp_path: Path) -> None:
    expected, _ = train(RECONNECTED[way](), [], tmp_path / "a")
    module, trainer = train(RECONNECTED[way](), [cut(rank=1).during("forward", step=4)], tmp_path / "b")
    [failure] = trainer.failures
    assert re.search(r"lost its links: \w+: .+", failure)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


class KillsServer(fx.Callback):
    """Kills the first server in step 5."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 4 and not trainer.failures:
            os.kill(int(trainer.world.store.get("server 0")), signal.SIGKILL)


@pytest.mark.parametrize("options", params([{"servers": 2}], [({"optimizer": "server"},)]))
def test_weights_after_the_death_of_a_server_equal_those_of_an_undisturbed_run(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    expected, _ = train(ParameterServer(**options), [], tmp_path / "a")
    kills: Any = KillsServer()
    module, trainer = train(ParameterServer(**options), [kills], tmp_path / "b")
    assert len(trainer.failures) == 1
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


class WritesPids(Numbered):
    """Write a file per loader process: the file name is its PID, the content is the shared memory that it uses."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        maps = Path("/proc/self/maps").read_text().splitlines()
        # joblib's semaphores belong to the fork server, which has imported joblib
        inodes = {line.split()[4] for line in maps if "/dev/shm/" in line and "loky" not in line}
        passing = self.folder.with_name(f"{os.getpid()}")
        passing.write_text(" ".join(inodes))
        passing.rename(self.folder / passing.name)
        return super().__getitem__(index)

    def wait_for_ends(self) -> None:
        """Wait until the loader processes have ended and none of their files remains in /dev/shm.

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


def test_loader_processes_end_after_the_kill_of_their_worker(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    data = WritesPids(tmp_path / "pids")
    _, trainer = train(DDP(), [kill(rank=1).during("forward", step=5)], tmp_path, data=data, num_workers=1)
    assert len(trainer.failures) == 1
    data.wait_for_ends()


KILLED = """
import sys
from pathlib import Path
from tests.process.test_elastic import WritesPids
from tests.process.ledgers import train
from fabricx.strategies import DDP
from fabricx.testing import hang

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train(DDP(), [hang(rank=0).during("forward", step=3)], folder, data=WritesPids(folder / "pids"), num_workers=1)
"""


def test_loader_processes_end_after_the_kill_of_the_supervisor(tmp_path: Path) -> None:
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
    WritesPids(tmp_path / "pids").wait_for_ends()


@pytest.mark.parametrize("strategy", params([FSDP(), LocalSGD(every=2)], [ParameterServer(optimizer="server")]))
def test_in_memory_checkpoints_survive_the_death_of_all_workers(strategy: Any, tmp_path: Path, capsys: Any) -> None:
    faults = [kill(rank).during("batch end", step=5) for rank in range(2)]
    recovery = FaultRecovery(copy_every_n_steps=1)
    module, trainer = train(strategy, faults, tmp_path, recovery=recovery)
    assert len(trainer.failures) == 2
    assert exact(module)
    assert "start again" not in capsys.readouterr().err


class Manual(Ledger):
    """A ledger with manual optimization."""

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


class WrapsErrors(Manual):
    """Converts every error in its step into its own error."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except Exception as error:
            raise ValueError("the step has failed") from error


def test_a_dead_rank_is_recognized_as_the_cause_of_a_modules_own_error(tmp_path: Path) -> None:
    fault = kill(rank=1).during("backward", step=3)
    module, trainer = train(DDP(), [fault], tmp_path, module=WrapsErrors())
    assert len(trainer.failures) == 1
    assert exact(module)


def test_recovery_with_manual_optimization_loses_no_sample(tmp_path: Path) -> None:
    expected, _ = train(DDP(), [], tmp_path / "a", module=Manual())
    faults = [kill(rank=1).during("optimizer", step=3), kill(rank=0).during("backward", step=7, attempt=1)]
    module, trainer = train(DDP(), faults, tmp_path / "b", module=Manual())
    assert len(trainer.failures) == 2
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_dead_workers_leave_no_files_threads_or_processes(tmp_path: Path) -> None:
    train(DDP(), [], tmp_path / "a")  # resources that a process keeps after it has started workers for the first time
    before = open_resources()
    faults = [kill(rank=number % 2).during("forward", step=number, attempt=number) for number in range(STEPS)]
    module, trainer = train(DDP(), faults, tmp_path / "b")
    assert len(trainer.failures) == STEPS
    assert exact(module)
    deadline = time.monotonic() + 60
    while grown(before) and time.monotonic() < deadline:
        time.sleep(0.05)  # a store thread ends when the system reports the closed connection of its worker
    assert not grown(before)


def open_resources() -> tuple[int, int, int]:
    """Return the numbers of open files, threads and child processes of this process."""
    process = psutil.Process()
    return process.num_fds(), threading.active_count(), len(process.children(recursive=True))


def grown(before: tuple[int, int, int]) -> list[str]:
    """Return the resources that have increased; earlier tests' garbage may be collected, so they may also decrease."""
    kinds = zip(("files", "threads", "processes"), open_resources(), before, strict=True)
    return [f"{now} {kind}, {earlier} before" for kind, now, earlier in kinds if now > earlier]


def _die_during_set_up(strategy: FSDP) -> Any:
    """Die as a replacement, during the construction of the groups of the first new generation."""
    if membership().worker == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return FSDP._mesh(strategy)


def test_a_death_during_the_construction_of_groups_is_recovered_soon(tmp_path: Path) -> None:
    strategy = FSDP(replicas=2)
    vars(strategy)["_mesh"] = functools.partial(_die_during_set_up, strategy)
    module, trainer = train(strategy, [kill(rank=1).during("backward", step=3)], tmp_path, devices=4)
    assert len(trainer.failures) == 2  # torch's own limit is half an hour, this test's limit is two minutes
    assert not any("in place failed" in failure for failure in trainer.failures)
    assert exact(module)


def _leave_groups_during_an_operation() -> bool:
    world = worlds.current()
    assert world is not None
    assert world.store is not None
    reducing = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    if not world.main_rank:
        world.store.wait(["the other rank continues"], timedelta(seconds=60))
        dist.all_reduce(torch.ones(1))
        return True
    dist.all_reduce(torch.ones(1), async_op=True)
    left_groups = threading.Event()

    def continue_other() -> None:
        left_groups.wait()
        time.sleep(0.2)
        world.store.set("the other rank continues", "")  # type: ignore[union-attr]

    thread = threading.Thread(target=continue_other)
    thread.start()
    world.leave_groups()
    worlds._CURRENT.clear()
    left_groups.set()
    del reducing  # its destructor would destroy the group, and wait
    world.release_left_groups()
    thread.join()
    return True


def test_leaving_a_group_with_a_pending_operation_does_not_block_other_threads() -> None:
    assert all(run_ranks(_leave_groups_during_an_operation, 2))
