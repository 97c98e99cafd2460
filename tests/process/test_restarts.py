"""Restarts of all workers from snapshots, errors that repeat, limits of restarts, and runs without a supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA, FaultRecovery
from fabricx.distributed.stop_consensus import STOP_KEY
from fabricx.errors import WorkerFailed
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.strategies import DDP, FSDP, AsyncSGD, ParameterServer
from fabricx.testing import QUIET, Ledger, TinyModule, fail, kill, tiny_loader
from tests import warm
from tests.soak import params

from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, exact, train


def test_a_repeating_error_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    faults = [fail(rank=1, error="out of luck").during("forward", step=5, attempt=None)]
    with pytest.raises(WorkerFailed, match="out of luck") as error:
        train(DDP(), faults, tmp_path, recovery=FaultRecovery(max_restarts=1, every_n_train_steps=2))
    assert error.value.rank == 1
    assert "RuntimeError: out of luck" in error.value.traceback
    assert list(tmp_path.glob("runs/*/recovery/step=*"))  # for a manual resume


def test_a_run_restarts_after_a_transient_error(tmp_path: Path) -> None:
    module, trainer = train(DDP(), [fail(rank=0, error="a hiccup").during("optimizer", step=5)], tmp_path)
    assert exact(module)
    assert len(trainer.failures) == 1
    assert "a hiccup" in trainer.failures[0]


def test_a_connection_error_in_a_hook_of_an_asynchronous_worker_restarts_all_workers(tmp_path: Path) -> None:
    """Asynchronous workers restart from the last meeting: recovery in place would repeat batches."""
    fault = fail(rank=0, error="Connection reset by peer").during("batch end", step=5)  # raised by a tracking server
    module, trainer = train(AsyncSGD(damp=False), [fault], tmp_path)
    assert exact(module, 2.0 * EPOCHS), module.entries
    [failure] = trainer.failures
    assert "Connection reset by peer" in failure


class Ends(fx.Callback):
    """Ends the program in a hook of rank 1."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world.rank == 1:
            raise self.error


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt("now"), 130), (SystemExit(3), 3)])
def test_an_exit_in_a_hook_ends_the_program_without_a_restart(
    error: BaseException, code: int, tmp_path: Path
) -> None:  # fmt: skip
    trainer = fx.Trainer(
        devices=2, max_epochs=1, callbacks=[Ends(error), FaultRecovery()], default_root_dir=tmp_path, **QUIET
    )
    with pytest.raises(type(error)) as caught:
        trainer.fit(TinyModule(), tiny_loader())
    assert (caught.value.args, caught.value.code) == (error.args, code)  # type: ignore[attr-defined]
    assert trainer.interrupted
    assert not trainer.failures


class NonFiniteLoss(Ledger):
    """The loss of rank 1 isn't finite at step 4."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step == 4 and self.global_rank == 1 else loss


STRATEGIES_WITH_GRADIENTS = {"ddp": DDP, "fsdp": FSDP, "parameter_server": ParameterServer,
                  "optimizer in shared memory": lambda: ParameterServer(servers=0, optimizer="server"),
                  "optimizer on 2 servers": lambda: ParameterServer(servers=2, optimizer="server")}  # fmt: skip


@pytest.mark.parametrize(
    "strategy",
    params(
        ["ddp", "fsdp", "optimizer in shared memory", "optimizer on 2 servers"], ["parameter_server"]
    ),  # optimizers on workers are covered by ddp
)
def test_all_ranks_skip_a_nonfinite_update(strategy: str, tmp_path: Path) -> None:
    recovery = FaultRecovery(bad_gradients="skip")
    module, trainer = train(
        STRATEGIES_WITH_GRADIENTS[strategy](), [], tmp_path, recovery=recovery, module=NonFiniteLoss(SAMPLES, BATCH)
    )
    missing = module.entries.detach() + EPOCHS
    assert int((missing > 0.5).sum()) == BATCH  # the batch of a single step was skipped
    assert bool(torch.isfinite(module.layer.weight).all())
    assert trainer.global_step == STEPS


def test_skipping_nonfinite_updates_is_refused_if_no_rank_has_the_whole_gradient(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"bad_gradients='skip'.*bad_gradients='roll_back'"):
        train(ParameterServer(mode="bounded"), [], tmp_path, recovery=FaultRecovery(bad_gradients="skip"))


def test_the_error_names_the_parameters_of_a_nonfinite_update(tmp_path: Path) -> None:
    recovery = FaultRecovery(bad_gradients="raise", max_restarts=0)
    with pytest.raises(WorkerFailed, match=r"step 4: the gradient isn't finite in entries, layer\.weight"):
        train(DDP(), [], tmp_path, recovery=recovery, module=NonFiniteLoss(SAMPLES, BATCH))


def test_a_nonfinite_update_is_repeated_from_the_snapshot(tmp_path: Path) -> None:
    recovery = FaultRecovery(bad_gradients="roll_back", max_restarts=2, every_n_train_steps=2)
    with pytest.raises(WorkerFailed, match="step 4"):  # the error repeats after each restart
        train(DDP(), [], tmp_path, recovery=recovery, module=NonFiniteLoss(SAMPLES, BATCH))
    assert recovery._restarts == 3


class FlipsBit(fx.Callback):
    """FlipsBit a bit of a weight on rank 1, in the first attempt of a run."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and trainer.world.rank == 1 and not trainer.failures:
            module.layer.weight.data.view(torch.int32)[0, 3] ^= 1 << 20


def test_a_rank_with_different_weights_is_named_and_all_ranks_restart(tmp_path: Path) -> None:
    expected, _ = train(DDP(), [], tmp_path / "a", devices=3)
    recovery = FaultRecovery(every_n_train_steps=2, compare_every_n_steps=1)
    module, trainer = train(DDP(), [FlipsBit()], tmp_path / "b", recovery=recovery, devices=3)  # type: ignore[list-item]
    [failure] = trainer.failures
    assert "step 6: the weights of rank 1 differ" in failure
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


class StopsAndFails(Ledger):
    """Requests a stop of all workers, and fails after the request is published."""

    supervisor = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 4 and self.global_rank == 1:
            os.kill(self.supervisor, signal.SIGTERM)
            self.trainer.world.store.wait([STOP_KEY])  # type: ignore[union-attr]
            raise ValueError("while stopping")
        return super().training_step(batch, batch_idx)


def test_a_run_that_was_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    module = StopsAndFails(SAMPLES, BATCH)
    vars(module)["supervisor"] = os.getpid()
    with pytest.raises(WorkerFailed, match="while stopping"):
        train(DDP(), [], tmp_path, module=module)
    assert snapshots(tmp_path)  # for a resume


def test_restarts_without_progress_are_limited(tmp_path: Path) -> None:
    recovery = FaultRecovery(max_restarts=1, every_n_train_steps=100)
    faults = [kill(rank=1).during("forward", step=5, attempt=None)]
    with pytest.raises(WorkerFailed, match=r"SIGKILL(.|\n)*workers failed 2 times"):  # in place only
        train(DDP(), faults, tmp_path, recovery=recovery)


@pytest.mark.parametrize(
    "options",
    [
        {"max_restarts": -1},
        {"every_n_train_steps": 0},
        {"bad_gradients": "skipp"},
        {"compare_every_n_steps": -1},
        {"frozen_after": 0.1},
        {"stuck_after": 0.5},
    ],
)
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FaultRecovery(**options)


def test_a_run_is_resumed_from_its_snapshot_after_the_kill_of_its_supervisor(own_folder: Path) -> None:
    command = [sys.executable, "-m", "fabricx"]
    options: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    overrides = ["callbacks=fault_recovery", "callbacks.fault_recovery.every_n_train_steps=5", "trainer.devices=2"]
    first = warm.Popen([*command, "fit", "experiment=digits", *overrides, "trainer.max_epochs=1000"], **options)
    with first:
        wait_for(lambda: snapshots(own_folder) and snapshots(own_folder)[-1] >= 5)
        [run] = own_folder.glob("runs/*")
        again = warm.run([*command, "resume", str(run)], **options, timeout=100, check=False)
        assert again.returncode == 1
        assert f"process {first.pid} is training in" in again.stdout
        workers = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    assert not psutil.wait_procs(workers, timeout=60)[1]
    steps = snapshots(own_folder)[-1] + 50  # more steps than until the next checkpoint of an epoch
    more = ["trainer.max_epochs=-1", f"trainer.max_steps={steps}"]
    done = warm.run([*command, "resume", str(run), *more], **options, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{steps} steps" in done.stdout, done.stdout


LONG_SCRIPT = """
import sys
from pathlib import Path
import fabricx as fx
from torch.utils.data import DataLoader
from fabricx.callbacks import EarlyStopping, FaultRecovery
from fabricx.testing import QUIET, Ledger
from tests.process.ledgers import BATCH, SAMPLES, Numbered

class Counts(fx.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        Path(f"step-{trainer.global_rank}").write_text(str(trainer.global_step))

if __name__ == "__main__":
    callbacks = [Counts(), FaultRecovery(every_n_train_steps=5)]
    trainer = fx.Trainer(devices=2, max_epochs=10**6, callbacks=callbacks, **QUIET)
    trainer.fit(Ledger(SAMPLES, BATCH), DataLoader(Numbered(), BATCH // 2, shuffle=True))
"""


def test_training_continues_while_the_supervisor_and_its_store_are_stopped(own_folder: Path) -> None:
    (own_folder / "script.py").write_text(LONG_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def steps() -> int:
        texts = [path.read_text() for path in own_folder.glob("step-*")]
        return min((int(text or 0) for text in texts), default=0)

    with warm.Popen([sys.executable, "script.py"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        for number, more in ((signal.SIGSTOP, 100), (signal.SIGCONT, 20), (signal.SIGTERM, 0)):
            wait_for(lambda: steps() > 5)
            before = steps()
            process.send_signal(number)
            wait_for(lambda before=before, more=more: steps() >= before + more)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "failed" not in errors


class LowMemory(Ledger):
    """Simulates a machine with little free memory."""

    def on_fit_start(self) -> None:
        memory_checkpoint.free = lambda: 1000.0


def test_a_run_restarts_from_the_snapshot_if_memory_is_insufficient_for_in_memory_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [kill(rank=1).during("backward", step=5)]
    module, trainer = train(FSDP(), faults, tmp_path, module=LowMemory(SAMPLES, BATCH))
    assert "no in-memory checkpoint has valid parts" in trainer.failures[1]  # as the survivors have found
    assert exact(module)
    assert "all workers restart from step" in capfd.readouterr().err  # the newest complete snapshot


def snapshots(folder: Path) -> list[int]:
    """Return the steps of the complete snapshots of all runs."""
    paths = [path for recovery in folder.glob("runs/*/recovery") for path in checkpoint.list_committed(recovery)]
    return sorted(int(path.name.partition("=")[2]) for path in paths)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class ChangesWeights(fx.Callback):
    """Changes the weights in a hook; in a validation, exchanges them for others."""

    def __init__(self, hook: str) -> None:
        self.hook, self.kept = hook, list[Tensor]()

    def change(self, module: Any, hook: str) -> None:
        for parameter in module.parameters() if hook == self.hook else ():
            parameter.data.mul_(0.9)  # without a new version

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.change(module, "batch start")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.change(module, "before the update")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.kept = [parameter.detach().clone() for parameter in module.parameters()]
        self.change(module, "validation")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for parameter, kept in zip(module.parameters(), self.kept, strict=True):
                parameter.copy_(kept)


class DiesInValidation(fx.Callback):
    """Kills a rank in the third validation, which is within the second window of gradients."""

    validations = 0

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validations += batch_idx == 0
        if trainer.world.rank == 1 and self.validations == 3 and not trainer.failures:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("callback", "fault"),
    params(
        [
            (lambda: EMA(0.5), DiesInValidation),
            (lambda: ChangesWeights("validation"), lambda: kill(1).during("validation", step=2)),
            (lambda: ChangesWeights("before the update"), lambda: kill(1).during("optimizer", step=2)),
        ],
        [
            (lambda: ChangesWeights("batch start"), lambda: kill(0).during("backward", step=3)),
            (lambda: ChangesWeights("batch start"), lambda: kill(0).during("batch end", step=2)),
            (lambda: ChangesWeights("validation"), DiesInValidation),
        ],
    ),
)
def test_weights_that_hooks_change_are_changed_once(callback: Any, fault: Any, tmp_path: Path) -> None:
    """The ranks that were left kept what hooks of the interrupted batch or validation had made of their weights."""

    def trained(*faults: Any) -> tuple[list[Any], int]:
        fx.seed_everything(3)
        module, recovery = TinyModule(), FaultRecovery(max_restarts=20, every_n_train_steps=1)
        trainer = fx.Trainer(
            devices=2, max_epochs=2, accumulate_grad_batches=2, val_check_interval=1, num_sanity_val_steps=0,
            callbacks=[callback(), *faults, recovery], default_root_dir=tmp_path, **QUIET,
        )  # fmt: skip
        trainer.fit(module, tiny_loader(16, 2), tiny_loader(8, 2))
        return [p.tolist() for p in module.parameters()], len(trainer.failures)

    weights, failures = trained()
    assert failures == 0
    again, failures = trained(fault())
    assert failures  # also that of a rank that can't continue, if it is noticed first
    assert again == weights
