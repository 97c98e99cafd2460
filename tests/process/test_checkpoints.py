"""Checkpoints of several ranks: written during training, and interrupted by the end of the processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from upath import UPath
from upath.registry import register_implementation

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.checkpoint import sharded_tensors
from fabricx.distributed.world import current
from fabricx.testing import QUIET, TinyModule, run_ranks, tiny_loader
from tests import warm
from tests.faults.outside import kill_session
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

STATE = {"big": torch.arange(60.0).reshape(6, 10), "small": torch.tensor(2.5), "deep": [{"x": torch.arange(3)}, "text"]}


def saved_by_all(path: Path) -> list[str]:
    world = current()
    assert world is not None
    checkpoint.save(path, STATE, {"step": 1}, world)
    world.barrier()
    return list(sharded_tensors.plan({"a": torch.zeros(4), "b": torch.zeros(4)}, world).tensors)


def test_replicated_tensors_are_written_once_and_divided_among_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(saved_by_all, 2, tmp_path / "one")
    assert sorted(first + second) == ["a", "b"]
    assert first != second
    assert {file.name for file in (tmp_path / "one").glob("*.safetensors")} == {
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }
    loaded = checkpoint.load(tmp_path / "one")
    assert torch.equal(loaded["big"], STATE["big"])
    assert torch.equal(loaded["deep"][0]["x"], torch.arange(3))
    assert loaded["deep"][1] == "text"


class SharedStore(LocalFileSystem):  # type: ignore[misc]
    """An object store that several processes share."""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("shelf://"))


class SharedStorePath(UPath):
    """A path in this store."""


fsspec.register_implementation("shelf", SharedStore, clobber=True)
register_implementation("shelf", SharedStorePath, clobber=True)


def test_all_ranks_write_to_a_url_and_resume_from_it(tmp_path: Path) -> None:
    def train(strategy: str, devices: int, **limits: Any) -> Ledger:
        torch.manual_seed(3)
        saver = ModelCheckpoint(f"shelf://{tmp_path}/saved", save_last=True, every_n_train_steps=1)
        options = {**QUIET, "enable_checkpointing": True, "callbacks": [saver], "max_epochs": 2, **limits}
        module = Ledger()
        fx.Trainer(strategy=strategy, devices=devices, **options).fit(module, ledger_loader(), ckpt_path="last")
        return module

    train("ddp", 2, max_steps=2)
    [saved] = checkpoint.list_committed(f"shelf://{tmp_path}/saved")
    assert {file.name for file in saved.glob("*.safetensors")} == {"rank-00000.safetensors", "rank-00001.safetensors"}
    assert (train("single", 1).ledger < 0).all()


def fails_on_the_second_rank(path: Path, number: int) -> Any:
    world = current()
    assert world is not None
    checkpoint.save(path, STATE, {}, world)
    write, calls = sharded_tensors.write, []

    def no_room(file: Path, tensors: Any) -> Any:
        if world.rank == 1:
            raise OSError(number, os.strerror(number))
        return write(file, tensors)

    writer = checkpoint.Writer(world)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        patch.setattr(sharded_tensors, "write", no_room)
        writer.begin(path, {**STATE, "big": torch.zeros(1)}, {}, failed=lambda: calls.append("failed"))
        warnings.simplefilter("always")
        try:
            done: Any = writer.finish()
        except Exception as error:
            done = str(error)
    writer.close()
    return done, calls, any("disk is full" in str(warning.message) for warning in warned)


def test_a_full_disk_on_one_rank_is_reported_on_all_ranks_and_the_earlier_checkpoint_is_kept(tmp_path: Path) -> None:
    assert run_ranks(fails_on_the_second_rank, 2, tmp_path / "one", errno.ENOSPC) == [(False, ["failed"], True)] * 2
    assert torch.equal(checkpoint.load(tmp_path / "one")["big"], STATE["big"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]


def test_any_other_write_error_is_raised_on_all_ranks_and_names_the_checkpoint(tmp_path: Path) -> None:
    for said, calls, warned in run_ranks(fails_on_the_second_rank, 2, tmp_path / "one", errno.EIO):
        assert "one could not be written" in said
        assert "rank 1: " in said
        assert "rank-00001.safetensors: Input/output error" in said
        assert not calls
        assert not warned
    assert torch.equal(checkpoint.load(tmp_path / "one")["big"], STATE["big"])


class Slow(TinyModule):
    """The first checkpoint is written until two more batches are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(checkpoint.is_committed(Path(self.trainer.default_root_dir) / "step=1.ckpt"))
        if len(self.seen) == 3:
            (Path(self.trainer.default_root_dir) / "go").touch()


def test_training_continues_during_the_writing_of_a_checkpoint_which_has_the_state_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sharded_tensors.write

    def waits(path: Path, tensors: Any) -> Any:
        while not (tmp_path / "go").exists():
            time.sleep(0.005)
        return write(path, tensors)

    monkeypatch.setattr(sharded_tensors, "write", waits)
    module = Slow()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {**QUIET, "enable_checkpointing": True, "default_root_dir": tmp_path, "callbacks": [saver]}
    # The second checkpoint would wait for the first, which waits for the third batch: save at step 1 only.
    monkeypatch.setattr(saver, "every_n_train_steps", 4)
    first: list[Tensor] = []
    begin = TinyModule()
    fx.Trainer(max_steps=4, **QUIET).fit(begin, tiny_loader())

    class SaveFirst(fx.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 1:
                first.append(module.layer.weight.detach().clone())
                trainer.save_checkpoint(tmp_path / "step=1.ckpt", wait=False)

    fx.Trainer(max_steps=4, **{**options, "callbacks": [saver, SaveFirst()]}).fit(module, tiny_loader())
    assert not any(module.seen[:3])
    assert checkpoint.is_committed(tmp_path / "step=1.ckpt")
    weights = checkpoint.load(tmp_path / "step=1.ckpt")["strategy"]["module"]["layer.weight"]
    assert torch.equal(weights, first[0])
    assert not torch.equal(weights, module.layer.weight)
    assert torch.equal(module.layer.weight, begin.layer.weight)  # saving has no effect on training


class Ledger(TinyModule):
    """Entry i of the ledger ends at -1/B per training of sample i in a global batch of B samples."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = nn.Parameter(torch.zeros(29, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.ledger[batch[2]].mean()

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layer.parameters()}, {"params": [self.ledger], "lr": 1.0, "momentum": 0.0}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def ledger_loader() -> DataLoader[Any]:
    inputs = torch.randn(29, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(29))
    return DataLoader(data, batch_size=3, shuffle=True)


@pytest.mark.parametrize("accumulate", params([2], [1]))
def test_a_run_on_2_then_3_then_1_ranks_trains_the_weights_of_2_ranks(tmp_path: Path, accumulate: int) -> None:
    def go_on(devices: int, path: Path | None, **limits: Any) -> tuple[Ledger, Path]:
        torch.manual_seed(3)
        module, where = Ledger(), tmp_path / f"{devices}-{path is None}-{len(limits)}.ckpt"
        saver = ModelCheckpoint(tmp_path / where, save_last=True, save_top_k=0)
        options = {**QUIET, "enable_checkpointing": True, "callbacks": [saver], "max_epochs": 2, **limits}
        trainer = fx.Trainer(devices=devices, accumulate_grad_batches=accumulate, strategy="auto", **options)
        trainer.fit(module, ledger_loader(), ckpt_path=path)
        return module, Path(saver.last_model_path)

    whole, _ = go_on(2, None)
    _, first = go_on(2, None, max_steps=1)
    _, second = go_on(3, first, max_steps=4)
    resumed, _ = go_on(1, second)
    # Each sample twice, in batches of 6 * accumulate and a smaller last batch; the same batches with 3 ranks.
    assert torch.equal(resumed.ledger, whole.ledger)
    assert (resumed.ledger < 0).all()
    # float32 sums in a different order
    assert torch.allclose(resumed.layer.weight, whole.layer.weight, rtol=1e-5)


SCRIPT = """
    import sys, torch, fabricx as fx
    from fabricx.callbacks import ModelCheckpoint
    from fabricx.testing import QUIET, TinyModule, tiny_loader

    class Large(TinyModule):
        def __init__(self):
            super().__init__()
            self.register_buffer("ballast", torch.zeros(2_000_000))

    if __name__ == "__main__":
        saver = ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=1, save_last=True)
        options = {**QUIET, "enable_checkpointing": True}
        trainer = fx.Trainer(max_epochs=10**6, devices=int(sys.argv[1]), callbacks=[saver], **options)
        trainer.fit(Large(), tiny_loader(64), ckpt_path="last")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("devices", params([2], [1]))
def test_a_run_killed_at_any_moment_has_a_complete_checkpoint(own_folder: Path, devices: int) -> None:
    (own_folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    steps = [0]
    for round in range(4):
        process = warm.Popen([sys.executable, "script.py", str(devices)], start_new_session=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            committed = checkpoint.list_committed(own_folder / "saved")
            if committed and _step(committed[-1]) > steps[-1] + 3:
                break
            time.sleep(0.01)
        time.sleep(0.013 * round)  # another moment of the writing
        kill_session(process.pid)  # at once: a surviving rank writes for another second
        process.wait()
        newest = checkpoint.list_committed(own_folder / "saved")[-1]
        checkpoint.verify(newest)
        checkpoint.verify(own_folder / "saved" / "last.ckpt")
        assert _step(newest) > steps[-1]  # continued from the previous checkpoint
        steps.append(_step(newest))
        assert len(list((own_folder / "saved").glob(".*.partial"))) <= 3  # files of earlier runs are removed


def _step(path: Path) -> int:
    try:
        return int(checkpoint.read_manifest(path)["step"])
    except Exception:  # deleted in the meantime
        return 0


SIGNALLED = """
    import os, sys, fabricx as fx
    from pathlib import Path
    from fabricx.callbacks import ModelCheckpoint
    from fabricx.testing import QUIET, TinyModule, tiny_loader

    class PublishesPid(TinyModule):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step == 5:
                Path(f"rank-{self.global_rank}").write_text(str(os.getpid()))

    if __name__ == "__main__":
        options = {**QUIET, "enable_checkpointing": True, "callbacks": [ModelCheckpoint("saved")]}
        trainer = fx.Trainer(max_epochs=10**6, devices=int(sys.argv[1]), strategy=sys.argv[2], **options)
        trainer.fit(PublishesPid(), tiny_loader(10**6, 1, num_workers=int(sys.argv[3])))
        print("fit returned")
"""


@pytest.mark.parametrize(
    ("devices", "whom", "sent", "code"),
    params(
        [
            (2, "rank-0", signal.SIGUSR1, 143),
            (2, "main", signal.SIGINT, 0),
            (2, "all", signal.SIGTERM, 143),  # as schedulers do: also to servers, loader processes and the fork server
        ],
        [
            (1, "main", signal.SIGTERM, 143),
            (2, "main", signal.SIGTERM, 143),
            (2, "rank-1", signal.SIGTERM, 143),
            (1, "all", signal.SIGTERM, 143),
        ],
    ),
    ids=str,
)
def test_a_signal_to_any_process_leaves_a_single_complete_checkpoint(
    own_folder: Path, devices: int, whom: str, sent: signal.Signals, code: int
) -> None:
    (own_folder / "script.py").write_text(textwrap.dedent(SIGNALLED))
    strategy, workers = "parameter_server" if whom == "all" and devices == 2 else "auto", "1" if whom == "all" else "0"
    process = warm.Popen(
        [sys.executable, "script.py", str(devices), strategy, workers],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "SLURM_JOB_ID": "7"},
    )  # fmt: skip
    ranks = [own_folder / f"rank-{rank}" for rank in range(devices)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in ranks):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    if whom == "all":
        # The fork server, the resource tracker, two workers with a loader process each, a server.
        assert len(processes) >= (7 if devices == 2 else 2)
        for target in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # a loader process ends when its rank stops
                target.send_signal(sent)
    else:
        os.kill(process.pid if whom == "main" else int((own_folder / whom).read_text()), sent)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert ("fit returned" in printed) is (code == 0)
    [saved] = checkpoint.list_committed(own_folder / "saved")
    checkpoint.verify(saved)
    assert _step(saved) >= 5
    assert not psutil.wait_procs(processes, timeout=60)[1]
