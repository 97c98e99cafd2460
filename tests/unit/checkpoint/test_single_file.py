"""Single-file checkpoints: torch and Lightning read them, and runs resume from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from fabricx.checkpoint import single_file
from fabricx.checkpoint.command import find, main
from fabricx.checkpoint.storage import as_path
from fabricx.errors import CheckpointError, is_full
from fabricx.testing import QUIET, TinyModule, tiny_loader


class OfLightningsUser(fx.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = ["a", "b"]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(folder: Path, module: fx.Module, epochs: int, **options: Any) -> tuple[fx.Trainer, ModelCheckpoint]:
    fx.seed_everything(3)
    saver = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3, save_last=True)
    trainer = fx.Trainer(max_epochs=epochs, **{**QUIET, "enable_checkpointing": True}, callbacks=[saver])
    trainer.fit(module, tiny_loader(20, shuffle=True), **options)
    return trainer, saver


def test_torch_loads_the_checkpoint_of_a_lightning_project_as_lightnings(tmp_path: Path) -> None:
    module = OfLightningsUser()
    _, saver = fit(tmp_path, module, 2)
    assert os.path.isfile(saver.best_model_path)
    content = torch.load(saver.last_model_path)
    assert (content["epoch"], content["global_step"], content["vocabulary"]) == (2, 10, ["a", "b"])
    assert content["hyper_parameters"] == {"width": 3}
    module.load_state_dict(content["state_dict"])
    names = torch.load(saver.best_model_path, mmap=True)["state_dict"]
    assert list(names) == list(module.state_dict())


class Data(fx.DataModule):
    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return tiny_loader(8, self.hparams.batch_size)


def test_the_file_has_the_hyperparameters_of_the_data_module_under_the_name_of_lightning(tmp_path: Path) -> None:
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(OfLightningsUser(), datamodule=Data(batch_size=4))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt")[Data.CHECKPOINT_HYPER_PARAMS_KEY] == {"batch_size": 4}
    assert Data.load_from_checkpoint(tmp_path / "one.ckpt").hparams.batch_size == 4


def test_a_run_resumed_from_a_file_ends_like_an_uninterrupted_run(tmp_path: Path) -> None:
    whole, resumed = OfLightningsUser(), OfLightningsUser()
    _, saver = fit(tmp_path / "whole", whole, 2)
    early = min(Path(saver.dirpath).glob("epoch=*.ckpt"))
    trainer, _ = fit(tmp_path / "resumed", resumed, 2, ckpt_path=early)
    assert trainer.global_step == 10
    for name, weight in whole.state_dict().items():  # also the state of Adam, the order of samples, and dropout
        assert torch.equal(weight, resumed.state_dict()[name]), name


@pytest.mark.parametrize("form", ["file", "folder"])
def test_entries_of_hooks_may_have_names_of_fabricx_and_state_dict_no_parameters(tmp_path: Path, form: str) -> None:
    names = ("state", "strategy", "ranks", "hparams", "metrics", "schedules", "mine")

    class Net(OfLightningsUser):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return super().state_dict()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint.update({name: {"of": torch.ones(1)} for name in names})

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = [checkpoint[name] for name in names]

    trainer, path, net = fx.Trainer(max_epochs=1, **QUIET), tmp_path / "saved", Net(5)
    trainer.fit(net, tiny_loader(4))
    trainer.save_checkpoint(path, single_file=form == "file")
    if form == "file":
        assert all(torch.load(path)[name] == {"of": torch.ones(1)} for name in names)
    resumed, loaded = Net(5), Net.load_from_checkpoint(path)
    trainer = fx.Trainer(max_epochs=2, **QUIET)
    trainer.fit(resumed, tiny_loader(4), ckpt_path=path)
    assert trainer.global_step == 2 * trainer.num_training_batches
    assert resumed.loaded == loaded.loaded == [{"of": torch.ones(1)}] * len(names)
    assert loaded.hparams == {"width": 5}
    assert torch.equal(loaded.net[0].weight, net.net[0].weight)


def test_lightning_loads_weights_and_hyperparameters(tmp_path: Path) -> None:
    class Theirs(lightning.LightningModule):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))

    module = OfLightningsUser(5)
    fit(tmp_path, module, 1)
    theirs = Theirs.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert theirs.hparams["width"] == 5
    assert torch.equal(theirs.net[0].weight, torch.load(tmp_path / "last.ckpt")["state_dict"]["net.0.weight"])


def test_the_class_the_callback_and_the_call_choose_between_file_and_folder(tmp_path: Path) -> None:
    class Folders(OfLightningsUser):
        single_file_checkpoints = False

    def is_file(module: fx.Module, name: str, **chosen: Any) -> bool:
        saver = ModelCheckpoint(tmp_path / name, **chosen)
        trainer = fx.Trainer(max_steps=1, **{**QUIET, "enable_checkpointing": True}, callbacks=[saver])
        trainer.fit(module, tiny_loader())
        assert checkpoint.list_committed(tmp_path / name) == [Path(saver.best_model_path)]
        return os.path.isfile(saver.best_model_path)

    assert not is_file(TinyModule(), "own")
    assert not is_file(Folders(), "class")
    assert is_file(OfLightningsUser(), "theirs")
    assert is_file(TinyModule(), "callback", single_file=True)
    assert not is_file(OfLightningsUser(), "callback of theirs", single_file=False)
    trainer = fx.Trainer(max_steps=1, **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.save_checkpoint(tmp_path / "a.ckpt", single_file=True).is_file()
    assert trainer.save_checkpoint(tmp_path / "a.ckpt").is_dir()  # replaces the file
    assert trainer.save_checkpoint(tmp_path / "a.ckpt", single_file=True).is_file()  # and the file the folder
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("a.ckpt")] == ["a.ckpt"]


def saved(path: Path, state: dict[str, Any]) -> Path:
    with single_file.written(path, state, {"step": 7}) as put_in_place:
        assert not path.exists()
        put_in_place()
    return path


STATE = {"strategy": {"module": {"weight": torch.arange(1000.0)}}, "names": ["a"]}


@pytest.fixture(params=["a folder", "a URL"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path if request.param == "a folder" else as_path(f"memory://{tmp_path.name}")


def test_a_file_is_listed_verified_loaded_and_removed_like_a_folder(folder: Path) -> None:
    path = saved(folder / "one.ckpt", STATE)
    assert checkpoint.list_committed(folder) == find(folder) == [path]
    assert checkpoint.verify(path)["step"] == 7
    assert not checkpoint.is_foreign(path)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded["strategy"]["module"]["weight"], torch.arange(1000.0))
    assert loaded["names"] == ["a"]
    checkpoint.remove(path)
    assert not path.exists()


def test_a_tensor_is_stored_once(tmp_path: Path) -> None:
    assert saved(tmp_path / "a.ckpt", STATE).stat().st_size < 2 * 4000


def test_a_flipped_bit_and_a_truncated_file_are_detected(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", STATE)
    content = bytearray(path.read_bytes())
    at = content.index(torch.tensor([500.0, 501.0]).numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(path)
    assert main(["verify", str(path)]) == 1
    path.write_bytes(content[:-100])
    assert not checkpoint.is_committed(path)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(path)


def test_a_file_without_the_manifest_is_not_a_fabricx_checkpoint(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE["strategy"]["module"]}, tmp_path / "a.ckpt")  # type: ignore[index]
    assert checkpoint.is_foreign(tmp_path / "a.ckpt")
    assert not checkpoint.is_committed(tmp_path / "a.ckpt")


def test_files_that_a_killed_run_has_not_completed_are_swept(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", STATE)
    path.rename(tmp_path / ".a.ckpt.0123.partial")
    assert checkpoint.list_committed(tmp_path) == []
    checkpoint.sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_after_a_failure_the_newest_file_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = saved(tmp_path / "newest.ckpt", STATE)
    OnExceptionCheckpoint(tmp_path).after_failure(newest)
    OnExceptionCheckpoint(tmp_path).after_failure(newest)  # replaces it
    assert checkpoint.verify(tmp_path / "on_exception.ckpt")["step"] == 7
    assert "copied the newest checkpoint" in capsys.readouterr().out


def test_on_save_checkpoint_reads_and_changes_hyperparameters(tmp_path: Path) -> None:
    class Net(fx.LightningModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any) -> Any:
            return self.layer(torch.ones(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY].update(width=3, loss=torch.nn.MSELoss())

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["hyper_parameters"]
            self.position = checkpoint["epoch"], checkpoint["global_step"]

    trainer = fx.Trainer(**{**QUIET, "max_steps": 1})
    trainer.fit(Net(), tiny_loader())
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    content = torch.load(tmp_path / "net.ckpt", weights_only=False)["hyper_parameters"]
    assert type(content.pop("loss")) is torch.nn.MSELoss
    assert content == {"lr": 0.1, "width": 3}
    net = Net.load_from_checkpoint(tmp_path / "net.ckpt")
    loaded = net.loaded
    assert (loaded["width"], net.position) == (3, (0, 1))
    with pytest.raises(CheckpointError, match="MSELoss, which was not read"):
        loaded["loss"](torch.ones(1), torch.ones(1))
    loaded = Net.load_from_checkpoint(tmp_path / "net.ckpt", weights_only=False).loaded
    assert loaded["loss"](torch.ones(1), torch.ones(1)) == 0


@pytest.mark.parametrize("how", ["replaced", "removed", "none"])
def test_on_save_checkpoint_replaces_or_removes_hyperparameters(tmp_path: Path, how: str) -> None:
    replaced = how == "replaced"

    class Net(TinyModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if replaced:
                checkpoint["hyper_parameters"]["loss"] = "mse"
            elif how == "none":
                checkpoint["hyper_parameters"] = None
            else:
                del checkpoint["hyper_parameters"]

    net = Net()
    net.hparams.update(lr=0.1, **({"loss": torch.nn.MSELoss()} if replaced else {}))
    trainer = fx.Trainer(**{**QUIET, "max_steps": 1})
    trainer.fit(net, tiny_loader())
    trainer.save_checkpoint(tmp_path / "net")  # without a warning that the loss is omitted
    state = checkpoint.load(tmp_path / "net", "cpu")
    assert (state["hparams"], state["hparams_omitted"]) == ({"lr": 0.1, "loss": "mse"} if replaced else {}, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux on which each write fails")
def test_a_full_disk_raises_the_error_of_the_operating_system(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as failure:
        single_file._write_archive(tmp_path / "full", {"weight": torch.zeros(100_000)}, {}, b"")
    assert is_full(failure.value)


def test_torch_s_optimizer_loads_its_state_and_callbacks_have_theirs(tmp_path: Path) -> None:
    module = OfLightningsUser()
    trainer, saver = fit(tmp_path, module, 2)
    content = torch.load(saver.last_model_path)
    optimizer = module.configure_optimizers()
    optimizer.load_state_dict(content["optimizer_states"][0])
    [trained] = trainer.optimizers
    for loaded_state, theirs in zip(optimizer.state.values(), trained.state.values(), strict=True):
        assert loaded_state["step"] == 10
        assert loaded_state["exp_avg"].equal(theirs["exp_avg"])
    assert content["callbacks"][saver.state_key]["dirpath"] == str(tmp_path)
    assert content["lr_schedulers"] == []
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not {"optimizer_states", "callbacks"} & set(torch.load(tmp_path / "weights.ckpt"))
