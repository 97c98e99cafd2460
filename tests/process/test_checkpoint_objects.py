"""Objects in checkpoints of two ranks: resumed with permission, and after a restart within the run."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.errors import WorkerFailed
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.strategies import FSDP, Mesh
from fabricx.testing import QUIET, Ledger, TinyModule, kill, tiny_loader
from tests.soak import params

from .ledgers import BATCH, SAMPLES, exact, train

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Loss:
    """An object of a user-defined class, with a tensor."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor([scale])


class WithLoss(TinyModule):
    """Adds its loss to each checkpoint, and reads it from checkpoints."""

    def __init__(self, loss: Loss | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loss, self.read = loss, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.loss.scale[0]  # type: ignore[union-attr]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss"] = self.loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loss = checkpoint["loss"]
        self.read = float(self.loss.scale)  # type: ignore[union-attr]


def fitted(
    strategy: str, folder: Path, epochs: int, single_file: bool, devices: int = 2, **call: Any
) -> tuple[WithLoss, Any]:
    saver = ModelCheckpoint(folder / "saved", "{epoch}", save_top_k=-1, single_file=single_file)
    trainer = fx.Trainer(
        max_epochs=epochs, devices=devices, strategy=strategy if devices > 1 else "auto", default_root_dir=folder,
        callbacks=[saver], **{**QUIET, "enable_checkpointing": True},
    )  # fmt: skip
    module = WithLoss(None if call else Loss(0.5))
    trainer.fit(module, tiny_loader(), **call)
    return module, saver


@pytest.mark.parametrize(  # to a file, or a folder
    ("strategy", "single_file"), params([("ddp", False), ("fsdp", True)], [("ddp", True), ("fsdp", False)])
)
def test_a_run_of_two_ranks_resumes_with_its_objects(strategy: str, single_file: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, saver = fitted(strategy, tmp_path, 2, single_file)
    path = tmp_path / "saved" / "epoch=0.ckpt"
    with pytest.raises(WorkerFailed, match=r"(?s)Loss, which was not read.*weights_only=False"):
        fitted(strategy, tmp_path, 2, single_file, ckpt_path=path)
    with torch.serialization.safe_globals([Loss]):
        allowed, _ = fitted(strategy, tmp_path / "allowed", 2, single_file, ckpt_path=path)
    trusted, _ = fitted(strategy, tmp_path / "trusted", 2, single_file, ckpt_path=path, weights_only=False)
    alone, _ = fitted(strategy, tmp_path / "alone", 2, single_file, devices=1, ckpt_path=path, weights_only=False)
    for module in (allowed, trusted, alone):
        assert module.read == 0.5
        for weight, expected in zip(module.parameters(), whole.parameters(), strict=True):
            assert torch.equal(weight, expected) or module is alone  # other order of summation
            assert torch.allclose(weight, expected)
    loaded = WithLoss.load_from_checkpoint(saver.best_model_path, weights_only=False)
    assert torch.equal(loaded.hparams["loss"].scale, torch.tensor([0.5]))


def test_an_object_with_a_sharded_tensor_is_refused(tmp_path: Path) -> None:
    module = AddsShardedLayer()
    trainer = fx.Trainer(max_epochs=1, devices=2, strategy="fsdp", default_root_dir=tmp_path, **QUIET)
    with pytest.raises(WorkerFailed, match=r"can't be pickled: layer .*divided over ranks"):
        trainer.fit(module, tiny_loader())


class AddsShardedLayer(TinyModule):
    """Adds a sharded layer to the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["layer"] = self.layer

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "a.ckpt")


class NeedsObject(Ledger):
    """Needs an object of the checkpoint; its machine has no memory for in-memory checkpoints."""

    read = 0.0

    def on_fit_start(self) -> None:
        memory_checkpoint.free = lambda: 1000.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.trainer.finish_checkpoint()  # otherwise the death may precede a complete snapshot

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss"] = [nn.MSELoss(), Loss(2.0)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read = float(checkpoint["loss"][1].scale)


def test_a_restart_from_a_snapshot_reads_the_objects_of_its_own_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [kill(rank=1).during("backward", step=5)]
    module, _ = train(FSDP(), faults, tmp_path, module=NeedsObject(SAMPLES, BATCH))
    assert exact(module)
    assert module.read == 2.0
    assert "all workers restart from step" in capfd.readouterr().err


class Means(NamedTuple):
    """State of a callback."""

    mean: torch.Tensor
    count: int


class KeepsContainers(fx.Callback):
    """Its state consists of containers with tensors, of classes that plain data has not."""

    def __init__(self) -> None:
        self.means, self.parts = Means(torch.zeros(1), 0), defaultdict[str, list[torch.Tensor]](list)
        self.ordered = OrderedDict(first=torch.zeros(1), last=torch.zeros(1))

    def on_train_batch_end(self, *_: Any) -> None:
        self.means = Means(self.means.mean + 1, self.means.count + 1)
        self.parts[f"part {self.means.count}"].append(self.means.mean)
        self.ordered.move_to_end("first")

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means, "parts": self.parts, "ordered": self.ordered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.means, self.parts, self.ordered = state_dict["means"], state_dict["parts"], state_dict["ordered"]


@pytest.mark.parametrize("strategy", params([Mesh(tensor=2)], [("ddp",), (FSDP(),), (Mesh(pipeline=2),)]))
def test_containers_of_other_classes_are_resumed(strategy: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "saved")
    for epochs, call in ((1, {}), (2, {"ckpt_path": "last", "weights_only": False})):
        callbacks = [keeper := KeepsContainers(), saver]
        options: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "callbacks": callbacks, "max_epochs": epochs}
        trainer = fx.Trainer(devices=2, strategy=strategy, default_root_dir=tmp_path, **options)
        trainer.fit(WideModule(), tiny_loader(), **call)
    steps = 8 if isinstance(strategy, Mesh) else 4
    assert (float(keeper.means.mean), keeper.means.count, len(keeper.parts)) == (steps, steps, steps)
    assert list(keeper.ordered) == ["last", "first"]


class WideModule(TinyModule):
    """Has two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.blocks(inputs))
