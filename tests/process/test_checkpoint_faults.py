"""Deaths of workers and hanging disks during the writing of a checkpoint: training continues, the next is written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import FaultRecovery, ModelCheckpoint
from fabricx.checkpoint import sharded_tensors
from fabricx.checkpoint.writer import Writer
from fabricx.distributed import world
from fabricx.strategies import DDP, FSDP, AsyncSGD
from fabricx.testing import QUIET, Fault, Ledger, fail, kill, layered_data
from tests.soak import params

from .ledgers import EPOCHS, STEPS, exact, train


class DiesWriting(fx.Callback):
    """Kill ranks while they write their part and another rank waits for it; the disk of rank 0 hangs the first time.

    Args:
        folder: contains a FIFO per death, by which the waiting rank releases the other rank.
        deaths: rank and step of each death, in order.
    """

    def __init__(self, folder: Path, deaths: list[tuple[int, int]]) -> None:
        self.folder, self.deaths = folder, deaths
        for rank, step in deaths:
            os.mkfifo(folder / f"{rank}-{step}")
        os.mkfifo(folder / "never")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        write, finish = sharded_tensors.write, Writer.finish

        def due() -> tuple[int, int] | None:
            number = len(trainer.failures)
            fault = self.deaths[number] if number < len(self.deaths) else (0, STEPS + 1)
            return fault if trainer.global_step >= fault[1] else None

        def slow(file: Path, tensors: Any) -> Any:
            if (death := due()) is not None:
                if trainer.world.rank == death[0]:
                    (self.folder / f"{death[0]}-{death[1]}").read_bytes()
                    os.kill(os.getpid(), signal.SIGKILL)
                elif death == self.deaths[0]:
                    (self.folder / "never").read_bytes()
            return write(file, tensors)

        def finish_and_release(writer: Writer) -> bool:
            if (death := due()) is not None and trainer.world.rank != death[0] and writer._write is not None:
                path = self.folder / f"{death[0]}-{death[1]}"
                threading.Thread(target=path.write_bytes, args=(b"x",), daemon=True).start()  # blocks until it is read
            return finish(writer)

        sharded_tensors.write, Writer.finish = slow, finish_and_release  # type: ignore[method-assign]


def test_a_death_during_the_writing_of_a_checkpoint_loses_at_most_that_checkpoint(tmp_path: Path) -> None:
    saver = ModelCheckpoint(
        tmp_path / "saved",
        monitor="step",
        mode="max",
        every_n_train_steps=3,
        save_top_k=-1,
        save_last=True,
        asynchronous=False,
    )
    faults: list[Any] = [DiesWriting(tmp_path, [(1, 3), (0, 6), (1, STEPS)]), saver]
    recovery = FaultRecovery(every_n_train_steps=1000)
    module, trainer = train(DDP(), faults, tmp_path, recovery=recovery, enable_checkpointing=True)
    expected, _ = train(DDP(), [], tmp_path / "quiet")
    assert len(trainer.failures) == 3
    assert exact(module)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    kept = checkpoint.list_committed(tmp_path / "saved")
    # Each checkpoint was repeated with the interrupted batch, including the last.
    assert [checkpoint.read_manifest(path)["step"] for path in kept] == [3, 6, 9, STEPS]
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"last.ckpt", *(path.name for path in kept)}
    assert (tmp_path / "saved" / "last.ckpt").resolve() == kept[-1]
    assert Path(saver.best_model_path) == kept[-1]
    assert sorted(saver.best_k_models) == sorted(map(str, kept))
    for path in kept:
        checkpoint.verify(path)


def test_a_lost_background_checkpoint_is_forgotten_and_the_last_checkpoint_is_written_again(
    tmp_path: Path,
) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", monitor="step", mode="max", every_n_train_steps=6, save_top_k=-1)
    faults: list[Any] = [DiesWriting(tmp_path, [(1, 6), (1, STEPS)]), saver]
    recovery = FaultRecovery(every_n_train_steps=1000)
    module, trainer = train(DDP(), faults, tmp_path, recovery=recovery, enable_checkpointing=True)
    assert len(trainer.failures) == 2
    assert exact(module)
    [kept] = checkpoint.list_committed(tmp_path / "saved")
    assert checkpoint.read_manifest(kept)["step"] == STEPS
    assert [*(tmp_path / "saved").iterdir()] == [kept]
    assert list(saver.best_k_models) == [saver.best_model_path] == [str(kept)]


class GivesUpWithinSection(fx.Callback):
    """The disk of rank 1 hangs, and rank 1 dies with a lease; rank 0 notices it after a lease, before all ranks meet.

    By then, the writer of rank 0 has abandoned its checkpoint. Rank 0 trains the rest of the section without rank 1.

    Args:
        said: file for the lines that rank 0 prints.
    """

    def __init__(self, said: Path) -> None:
        self.said = said

    def on_train_start(self, trainer: Any, module: Any) -> None:
        def note(text: str) -> None:
            with self.said.open("a") as file:
                file.write(text if trainer.is_global_zero else "")

        trainer.print = note
        if trainer.world.rank == 1 and not trainer.failures:
            sharded_tensors.write = lambda file, tensors: threading.Event().wait()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        writer = trainer.session.checkpoints.writer
        if trainer.world.rank == 0 and writer is not None and trainer.global_step > 2 and not trainer.failures:
            assert writer._write.done.wait(60)


def test_a_death_during_a_checkpoint_of_asynchronous_workers_repeats_no_batch(
    tmp_path: Path,
) -> None:
    faults: list[Any] = [kill(rank=1).during("forward", step=2), GivesUpWithinSection(tmp_path / "said")]
    module, trainer = train(AsyncSGD(damp=False), faults, tmp_path, recovery=FaultRecovery(every_n_train_steps=2))
    assert exact(module, 2.0 * EPOCHS), module.entries
    assert len(trainer.failures) == 1
    assert "recovered 1 time, 0 samples lost" in (tmp_path / "said").read_text()


class SavesWithoutWaiting(fx.Callback):
    """Save the user's own checkpoint after update 3; the disk of rank 1 hangs, and rank 1 dies at update 5.

    Args:
        path: of the checkpoint.
        error: rank 1 raises an error after the save instead, so that all workers restart.
    """

    def __init__(self, path: Path, *, error: bool = False) -> None:
        self.path, self.error = path, error

    def on_train_start(self, trainer: Any, module: Any) -> None:
        def note(text: str) -> None:
            with self.path.with_suffix(".printed").open("a") as file:
                file.write(text if trainer.is_global_zero else "")

        trainer.print = note

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.failures:
            return
        if trainer.global_step == 3:
            trainer.finish_checkpoint()  # completes the previous snapshot: only this checkpoint hangs
            if trainer.world.rank == 1:
                sharded_tensors.write = lambda file, tensors: threading.Event().wait()
            trainer.save_checkpoint(self.path, wait=False)
            if self.error and trainer.world.rank == 1:
                raise RuntimeError("of the user's code")
        if trainer.global_step == 5 and trainer.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_loss_of_a_users_checkpoint_after_a_death_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "user.ckpt"
    module, trainer = train(
        DDP(), [SavesWithoutWaiting(path)], tmp_path, recovery=FaultRecovery(every_n_train_steps=1000)
    )
    assert len(trainer.failures) == 1
    assert exact(module)
    assert not path.exists()
    assert path.with_suffix(".printed").read_text().count(f"the checkpoint {path} was lost") == 1


def test_the_loss_of_a_users_checkpoint_after_a_restart_of_all_workers_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "user.ckpt"
    faults = [SavesWithoutWaiting(path, error=True)]
    module, trainer = train(DDP(), faults, tmp_path, recovery=FaultRecovery(every_n_train_steps=2))
    [failure] = trainer.failures  # also if the other rank reports lost connections first
    assert "of the user's code" in failure
    assert exact(module)
    assert not path.exists()
    said = capfd.readouterr().err
    assert said.count(f"the checkpoint {path} was lost: it was being written at step 3") == 1
    assert said.count("was lost") == 1


@pytest.mark.parametrize("way", ["restart of all workers", "in-memory snapshot"])
def test_a_run_that_repeats_steps_replaces_its_own_checkpoints(way: str, tmp_path: Path) -> None:
    options_of_both: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "asynchronous": False}
    saver, other = (
        ModelCheckpoint(tmp_path / "saved", **options_of_both),
        ModelCheckpoint(tmp_path / "saved", monitor="loss", **options_of_both),
    )
    if way == "restart of all workers":
        strategy: Any = DDP()
        fault, recovery = fail(rank=0, error="a hiccup"), FaultRecovery(max_restarts=1, every_n_train_steps=3)
    else:
        strategy, fault, recovery = FSDP(), kill(rank=1), FaultRecovery(max_restarts=1, every_n_train_steps=100)
    options: dict[str, Any] = {"enable_checkpointing": True, "max_steps": 6}
    _, trainer = train(
        strategy, [fault.during("batch end", step=5), saver, other], tmp_path, recovery=recovery, **options
    )  # fmt: skip
    assert len(trainer.failures) == 1
    saved = sorted(path.name for path in checkpoint.list_committed(tmp_path / "saved"))
    names = [f"epoch={(step - 1) // 4}-step={step}" for step in range(1, 7)]
    # One checkpoint per callback.
    assert saved == sorted(f"{name}{version}.ckpt" for name in names for version in ("", "-v1"))
    # Another run does not replace them.
    train(DDP(), [ModelCheckpoint(tmp_path / "saved", every_n_train_steps=6)], tmp_path, **options)
    assert (tmp_path / "saved" / "epoch=1-step=6-v2.ckpt").is_dir()


class Stream:
    """Batches numbered by the rank of the process at its start; a replacement has the number 3."""

    samples, batch = 24, 4

    def __init__(self) -> None:
        self.owner, self.at = -1, 0

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return self.rest()

    def rest(self) -> Iterator[Any]:
        if self.owner < 0:
            present = world.current()
            self.owner = 3 if present is None else present.rank
        data = layered_data(self.samples)
        while self.at < self.samples:
            numbers = torch.arange(self.at, self.at + self.batch)
            self.at += self.batch
            yield (*data[numbers], numbers + self.owner * self.samples)
        self.at = 0


class Resumed(Stream):
    """A stream with a resumable position."""

    def __iter__(self) -> Iterator[Any]:
        return self.rest()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


DEATH, ERROR = kill(rank=2).during("forward", step=6), fail(rank=0, error="a hiccup").during("batch end", step=6)


@pytest.mark.parametrize(
    ("fault", "source"), params([(DEATH, Stream), (ERROR, Resumed)], [(DEATH, Resumed), (ERROR, Stream)])
)
def test_each_rank_resumes_its_own_stream_at_its_own_position(fault: Fault, source: Any, tmp_path: Path) -> None:
    """Ranks train different numbers of batches until they meet, so each rank restores its own position."""
    torch.manual_seed(3)
    module, ranks = Ledger(4 * Stream.samples, Stream.batch), 3 if fault is DEATH else 2
    trainer = fx.Trainer(
        devices=ranks, strategy=AsyncSGD(damp=False), max_epochs=2, default_root_dir=tmp_path,
        callbacks=[fault, FaultRecovery(every_n_train_steps=4)], **QUIET,
    )  # fmt: skip
    trainer.fit(module, source())
    trained = -module.entries.detach().view(4, Stream.samples)
    assert trainer.failures
    assert bool((trained[:2] == 2.0).all()), (trainer.failures, trained)
