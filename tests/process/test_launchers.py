"""Ranks started by launchers of the tests, on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.fault_tolerance import memory_holder
from fabricx.launch import ranks
from fabricx.launch.launcher import Ended, Launcher, Program, torchrun_variables
from fabricx.launch.machine import Machine
from fabricx.launch.ranks import Ranks
from fabricx.launch.worker import Failure
from fabricx.launchers import Slurm
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, Mesh, ParameterServer
from fabricx.testing import QUIET, Ledger, TinyModule, kill, tiny_loader
from fabricx.trainer.launcher_run import continued
from tests import warm
from tests.ports import reserved_port
from tests.soak import params

from . import meshes
from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact


class OnThisMachine(Launcher):
    """Starts ranks and servers on this machine."""

    starts_servers = True

    def run(self, program: Program) -> Ended:
        assert program.nodes == 1
        with reserved_port() as port:
            return Ranks(program.job, torchrun_variables(program, 0, "127.0.0.1", port)).run()


class KeepsMachine(Launcher):
    """Keeps a process of the machine (this process) between the starts of a run.

    Args:
        during: called with the machine, in a thread, while the ranks of the first start run.
    """

    starts_servers = True

    def __init__(self, during: Callable[[Machine], None] = lambda machine: None) -> None:
        self._during = during

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def run(self, program: Program) -> Ended:
        machine, during = Machine(), self._during
        self._during = lambda machine: None
        with ThreadPoolExecutor(1) as threads:
            during_run = threads.submit(during, machine)
            ended = machine.run(0, program, self.variables(program, machine))
            during_run.result()
        return ended

    def variables(self, program: Program, machine: Machine) -> list[dict[str, str]]:
        return torchrun_variables(program, 0, *machine.address(lambda: "127.0.0.1"))


class Continues(KeepsMachine):
    """Runs as if the calling process had died after the first start."""

    def run(self, program: Program) -> Ended:
        following: Program | None = program
        with mock.patch.dict(os.environ), continued(program) as next_program:
            while following is not None:
                ended = super().run(following)
                following = next_program(ended)
        return ended


@pytest.fixture(autouse=True)
def _clones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.subprocess, "Popen", warm.Popen)  # type: ignore[attr-defined]


class Fails(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 1:
            raise KeyError("no such sample")
        return super().training_step(batch, batch_idx)


def trained(launcher: Any) -> tuple[fx.Trainer, TinyModule]:
    torch.manual_seed(1)
    module = TinyModule()
    trainer = fx.Trainer(launcher=launcher, devices=2, strategy="ddp", precision="64-true", max_epochs=2, **QUIET)
    trainer.fit(module, tiny_loader(24, 6), tiny_loader(8, 4))
    return trainer, module


def test_ranks_of_a_launcher_return_the_results_of_local_workers(own_folder: Path) -> None:
    (launched, module), (worked, same) = trained(OnThisMachine()), trained("auto")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), same.parameters(), strict=True))
    assert launched.callback_metrics == worked.callback_metrics
    assert (launched.global_step, launched.current_epoch) == (worked.global_step, worked.current_epoch)
    assert launched.test(module, tiny_loader(8, 4), verbose=False) == worked.test(
        same, tiny_loader(8, 4), verbose=False
    )


@pytest.mark.parametrize("strategy", [ParameterServer(servers=2), AsyncSGD(every=4, outer="average")])
def test_servers_of_a_launcher_train_the_weights_of_local_servers(strategy: Any, own_folder: Path) -> None:
    modules = []
    for launcher in (OnThisMachine(), "auto"):
        torch.manual_seed(3)
        module = Ledger(SAMPLES, BATCH)
        trainer = fx.Trainer(launcher=launcher, devices=2, strategy=strategy, max_epochs=EPOCHS, **QUIET)
        loader = DataLoader(Numbered(), BATCH // 2, shuffle=True)
        trainer.validate(module, loader)  # servers don't take part in it
        trainer.fit(module, loader)
        assert exact(module)
        modules.append(module)
    if strategy.traits.lockstep:
        torch.testing.assert_close(modules[0].state_dict(), modules[1].state_dict(), rtol=0.0, atol=0.0)


def test_a_killed_rank_of_a_launcher_loses_no_sample(own_folder: Path) -> None:
    torch.manual_seed(3)
    module = Ledger(SAMPLES, BATCH)
    faults = [kill(rank=1).during("backward", step=5), FaultRecovery(every_n_train_steps=2)]
    trainer = fx.Trainer(
        launcher=OnThisMachine(), devices=2, strategy="ddp", max_epochs=EPOCHS, **QUIET, callbacks=faults
    )
    trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
    assert (trainer.global_step, exact(module), len(trainer.failures)) == (STEPS, True, 1)


@pytest.mark.parametrize("launcher", [OnThisMachine, KeepsMachine])
def test_ranks_of_a_launcher_load_data_in_processes(launcher: Callable[[], Launcher], own_folder: Path) -> None:
    """Regression: forked ranks had their own session, whose group a fork server of the outer session can't join."""
    states = []
    for num_workers in (0, 1):
        torch.manual_seed(3)
        module = Ledger(SAMPLES, BATCH)
        trainer = fx.Trainer(launcher=launcher(), devices=2, strategy="ddp", max_epochs=1, **QUIET)
        trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True, num_workers=num_workers))
        states.append(module.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=0.0, atol=0.0)


KILLED = """
import os, time
from pathlib import Path
import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.process.test_launchers import KeepsMachine

class Pids(fx.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        Path(f"rank-{os.getpid()}").touch()
        time.sleep(60)

if __name__ == "__main__":
    trainer = fx.Trainer(launcher=KeepsMachine(), devices=2, strategy="ddp", max_epochs=1, **QUIET, callbacks=[Pids()])
    trainer.fit(TinyModule(), tiny_loader(24, 6, num_workers=1))
"""


def test_ranks_end_after_the_kill_of_the_process_of_their_machine(own_folder: Path) -> None:
    """Regression: forked ranks continued, because a reset connection ended only the thread that watched it."""
    (own_folder / "script.py").write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = warm.Popen([sys.executable, "script.py"], env=environment)
    while len(pids := [int(path.name.split("-")[1]) for path in own_folder.glob("rank-*")]) < 2:
        assert run.poll() is None
        time.sleep(0.02)
    processes = [part for pid in pids for part in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    run.kill()
    run.wait()
    assert psutil.wait_procs(processes, timeout=30)[1] == []


class Begins(fx.Callback):
    """Writes the step at which the main rank begins; synchronizes all in-memory checkpoints before deaths."""

    def __init__(self, *deaths: int) -> None:
        self.deaths = deaths

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            with Path("begun").open("a") as file:
                file.write(f"{trainer.global_step} ")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self.deaths:
            trainer.world.barrier()


@pytest.mark.parametrize(
    ("strategy", "launcher"),
    params(
        [
            ("fsdp", KeepsMachine), (ParameterServer(servers=2, optimizer="server"), KeepsMachine),
            (ParameterServer(servers=0, optimizer="server"), Continues),
        ],
        [
            ("ddp", KeepsMachine), ("local_sgd", KeepsMachine),
            (ParameterServer(compression="topk", pull_compression="topk"), KeepsMachine),
        ],
    ),
    ids=lambda part: getattr(part, "__name__", part) if isinstance(part, (str, type)) else f"servers-{part.servers}",
)  # fmt: skip
def test_ranks_restore_in_memory_checkpoints_if_a_process_of_the_machine_survives(
    strategy: Any, launcher: Any, own_folder: Path
) -> None:
    """Regression: servers with optimizers lost the momentum of earlier updates, and codecs the servers' residuals."""
    runs = []
    faults = [kill(rank=1).during("backward", step=5), kill(rank=0).during("forward", step=9, attempt=1)]
    for callbacks in (
        [],
        [Begins(5, 9), *faults, FaultRecovery(snapshots=False, copy_every_n_steps=1, max_restarts=1)],
    ):
        torch.manual_seed(3)
        module = Ledger(SAMPLES, BATCH)
        trainer = fx.Trainer(
            launcher=launcher(), devices=2, strategy=strategy, max_epochs=EPOCHS, **QUIET, callbacks=callbacks
        )
        trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
        runs.append(module.state_dict())
    assert (trainer.global_step, len(trainer.failures)) == (STEPS, 2 if launcher is KeepsMachine else 0)
    torch.testing.assert_close(runs[1], runs[0], rtol=0.0, atol=0.0)
    assert (own_folder / "begun").read_text() == "0 5 9 "
    deadline = time.monotonic() + 60
    while memory_holder.folder_of(0, os.getpid()).exists():  # the holder process ends a little later
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Resizes(KeepsMachine):
    """Starts another number of ranks each time, as torchrun does with `--nnodes 1:2`."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.counts = list(counts)

    def variables(self, program: Program, machine: Machine) -> list[dict[str, str]]:
        ranks = super().variables(replace(program, processes=self.counts.pop(0)), machine)
        return [{**rank, "OMP_NUM_THREADS": "1"} for rank in ranks]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    params(
        [
            (lambda: Mesh(data="fsdp", tensor=2), 4), (lambda: Mesh(pipeline=2), 4),
            (lambda: Mesh(data=LocalSGD(every=1), tensor=2), 4),
        ],
        [
            (lambda: Mesh(tensor=2), 4), (lambda: Mesh(context=2), 4), (lambda: Mesh(data="fsdp", pipeline=2), 4),
            (lambda: Mesh(data="fsdp", context=2), 4), (DDP, 4), (FSDP, 4), (lambda: Mesh(pipeline=2, tensor=2), 8),
            (lambda: Mesh(data="fsdp", pipeline=2, tensor=2), 8), (lambda: Mesh(pipeline=2, context=2), 8),
        ],
    ),
)  # fmt: skip
def test_a_launcher_may_restart_half_of_the_ranks(strategy: Any, ranks: int, own_folder: Path) -> None:
    """Regression: weights of `fsdp` with `tensor` were wrong, because shards of other tensor ranks were loaded."""
    expected = meshes.train("single", 4, {"max_epochs": 2}, {})
    fx.seed_everything(3)
    made = strategy()
    shares = made.data_ranks_of(ranks) if isinstance(made, Mesh) else ranks
    torch.set_default_dtype(torch.float64)
    try:
        module = meshes.GPT()
        trainer = fx.Trainer(
            launcher=Resizes(ranks, ranks // 2), devices=ranks, strategy=made,
            **{**QUIET, "max_epochs": 2, "gradient_clip_val": 0.5},
            callbacks=[
                Begins(5), kill(rank=1).during("backward", step=5),
                FaultRecovery(snapshots=False, copy_every_n_steps=1),
            ],
        )  # fmt: skip
        trainer.fit(
            module,
            DataLoader(meshes.sentences(meshes.SAMPLES), 4 // shares, shuffle=True),
            DataLoader(meshes.sentences(5), 2),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(trainer.failures) == 1
    if not made.traits.synchronous:  # islands with sharded models resume from checkpoints on disk only
        assert (own_folder / "begun").read_text() == "0 0 "
        return
    assert (own_folder / "begun").read_text() == "0 5 "
    for name, weights in module.named_parameters():
        torch.testing.assert_close(weights.detach(), expected["weights"][name], rtol=0.0, atol=1e-9)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(
        expected["metrics"]
    )


class Waits(fx.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and not trainer.failures:
            Path(f"waits-{trainer.global_rank}").touch()
            time.sleep(0.2 if trainer.interrupted else 60)


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_a_signal_during_the_start_of_ranks_stops_them(strategy: str, own_folder: Path) -> None:
    launcher = KeepsMachine(during=lambda machine: machine.signal(0, signal.SIGTERM))
    trainer = fx.Trainer(launcher=launcher, devices=2, strategy=strategy, max_epochs=2, **QUIET)
    with pytest.raises(SystemExit):
        trainer.fit(TinyModule(), tiny_loader(24, 6))
    assert (trainer.interrupted, trainer.global_step < 4) == (True, True)


def test_requests_to_ended_ranks_do_not_affect_ranks_of_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = threading.Semaphore(0)

    class Endless(Ranks):
        def run(self) -> Ended:
            begun.release()
            while not self._over:
                time.sleep(0.001)
            return Ended(result=self._job)

        def signal(self, number: int) -> None:
            raise AssertionError("a signal of an earlier start")

    monkeypatch.setattr(ranks, "Ranks", Endless)
    machine = Machine()
    with ThreadPoolExecutor(1) as threads, ThreadPoolExecutor(1) as waiting:
        for start, job in ((0, b"a"), (3, b"b")):
            program = Program(job, 1, 1, gpus=False, gpus_unused=False, stops_at_step=True, run_dir="run")
            ended = threads.submit(machine.run, start, program, [])
            begun.acquire()
            for earlier in range(start):
                machine.end(earlier)
                machine.signal(earlier, signal.SIGTERM)
            assert not ended.done()
            again = waiting.submit(machine.ended, start)  # of a process that takes the place of the caller
            assert (machine.newest(), machine.program()) == (start, program)
            assert machine.run(start, program, []) == Ended()  # a late request
            machine.end(start)
            assert ended.result(60).result == again.result(60).result == machine.ended(start).result == job
            machine.end(start)
        earlier = threads.submit(machine.run, 5, program, [])
        begun.acquire()
        newer = waiting.submit(machine.run, 6, program, [])  # of a process that takes the place of a dead caller
        begun.acquire()
        assert (earlier.done(), newer.done()) == (True, False)
        machine.end(6)
        assert newer.result(60).result == job


def test_a_machine_ends_its_ranks_on_request(own_folder: Path) -> None:
    def end(machine: Machine) -> None:
        while len(list(own_folder.glob("waits-*"))) < 2:
            time.sleep(0.02)
        machine.end(0)

    class GivesUp(KeepsMachine):
        def run(self, program: Program) -> Ended:
            ended = super().run(program)
            if ended.result is None:
                assert (ended.failures, ended.reached) == ((), 5)
                return Ended(failures=(Failure(0, 0.0, "death", "another machine was lost", None),), reached=5)
            return ended

    torch.manual_seed(3)
    module = Ledger(SAMPLES, BATCH)
    callbacks = [Begins(), Waits(), FaultRecovery(snapshots=False, copy_every_n_steps=1)]
    trainer = fx.Trainer(
        launcher=GivesUp(end), devices=2, strategy="ddp", max_epochs=EPOCHS, **QUIET, callbacks=callbacks
    )
    trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
    assert (trainer.global_step, exact(module), trainer.failures) == (
        STEPS, True, ["rank 0 failed: another machine was lost"],
    )  # fmt: skip
    assert (own_folder / "begun").read_text() == "0 5 "


def test_an_error_of_a_rank_is_raised_in_the_script_and_ends_the_other_rank(own_folder: Path) -> None:
    trainer = fx.Trainer(launcher=OnThisMachine(), devices=2, strategy="ddp", max_epochs=1, **QUIET)
    with pytest.raises(WorkerFailed, match="rank 1 failed:") as raised:
        trainer.fit(Fails(), tiny_loader(24, 6))
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)


def test_unsupported_options_with_launchers_are_refused(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(cluster="local")
    trainer = fx.Trainer(launcher=slurm, devices=2, strategy=ParameterServer(servers=1), max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match="starts ranks but no server processes, and ParameterServer needs 1"):
        trainer.fit(TinyModule(), tiny_loader(24, 6))
    for devices in ("auto", [0, 1], -1):
        with pytest.raises(ValueError, match="with a launcher, set the number of ranks on each machine"):
            fx.Trainer(launcher=OnThisMachine(), devices=devices)
    with pytest.raises(ValueError, match="launcher='environment', but no launcher has started this process"):
        fx.Trainer(launcher="environment", max_epochs=1, **QUIET).fit(TinyModule(), tiny_loader(24, 6))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    for launcher, message in ((OnThisMachine(), "another launcher has started this process, as rank 1 of 2"),
                              ("local", "launcher='local', but a launcher has started this process")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            fx.Trainer(launcher=launcher, devices=2, strategy="ddp", **QUIET).fit(TinyModule(), tiny_loader(24, 6))


def test_ranks_are_numbered_by_machine() -> None:
    job = torchrun_variables(Program(b"", 3, 2, False, False, True), 2, "node0", 5)
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in job] == [("4", "0"), ("5", "1")]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["GROUP_RANK"]) for rank in job} == {("6", "2", "2")}


def test_servers_are_the_last_processes_of_the_last_machine() -> None:
    program = Program(b"", 2, 2, False, False, True, servers=3)
    jobs = [torchrun_variables(program, node, "node0", 5) for node in (0, 1)]
    assert [[rank["RANK"] for rank in job] for job in jobs] == [["0", "1"], ["2", "3", "4", "5", "6"]]
    assert [job[0]["LOCAL_WORLD_SIZE"] for job in jobs] == ["2", "5"]
    assert {rank["WORLD_SIZE"] for job in jobs for rank in job} == {"7"}
