from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx import checkpoint
from fabricx.checkpoint.command import main
from fabricx.checkpoint.foreign import is_foreign, read_foreign
from fabricx.errors import CheckpointError
from fabricx.testing import QUIET


class Body:
    def __init__(self, width: int, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, width)
        self.loaded: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.net(batch[0]).mean())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = len(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded += [*sorted(checkpoint["state_dict"]), str(checkpoint.get("note"))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Ours(Body, fx.Module):
    pass


class Theirs(Body, L.LightningModule):
    pass


class Whole(fx.Module):
    """Takes all hyperparameters as a single argument."""

    def __init__(self, config: dict[str, Any], scale: float = 1.0) -> None:
        super().__init__()
        self.config, self.scale = config, scale
        self.net = nn.Linear(3, config["width"])


class Tied(fx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 3)), 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint that Lightning's own trainer has written."""
    folder = tmp_path_factory.mktemp("lightning")
    module = Theirs(2, lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's records of versions and of this machine
        trainer = L.Trainer(
            max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, accelerator="cpu",
        )  # fmt: skip
        trainer.fit(module, data())
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt", module


def test_a_checkpoint_of_lightning_has_its_weights_hyperparameters_and_additions(trained):
    path, module = trained
    loaded = Ours.load_from_checkpoint(path)
    assert loaded.net.weight.equal(module.net.weight)
    assert (loaded.hparams.width, loaded.hparams.lr) == (2, 0.5)
    assert loaded.loaded == ["net.bias", "net.weight", "2"]
    assert Ours.load_from_checkpoint(path, lr=0.25).hparams.lr == 0.25


def test_hyperparameters_of_a_file_replace_those_of_the_checkpoint(trained, tmp_path):
    (tmp_path / "h.yaml").write_text("width: 2\nlr: 0.75\n")
    assert Ours.load_from_checkpoint(trained[0], hparams_file=tmp_path / "h.yaml").hparams.lr == 0.75
    (tmp_path / "h.yaml").write_text("!!python/object/apply:os.getcwd []")
    with pytest.raises(CheckpointError, match="hparams_file"):
        Ours.load_from_checkpoint(trained[0], hparams_file=tmp_path / "h.yaml")


def test_evaluation_has_the_weights_and_fit_begins_with_them(trained, tmp_path, capsys):
    path, module = trained
    assert main(["import", str(path), str(tmp_path / "new")]) == 0
    assert "2 tensors, 2 hyperparameters" in capsys.readouterr().out
    for source in (path, tmp_path / "new"):
        trainer, evaluated = fx.Trainer(**QUIET), Ours(2)
        trainer.validate(evaluated, data(), ckpt_path=source, verbose=False)
        assert evaluated.net.weight.equal(module.net.weight)
        begun, seen = Ours(2, lr=0.0), fx.Trainer(max_epochs=1, **QUIET)
        seen.fit(begun, data(), ckpt_path=source)
        assert begun.net.weight.equal(module.net.weight)
        assert seen.global_step == 2
        output = capsys.readouterr().out
        assert "training begins at step 0 with the weights of" in output
        assert "epoch 1, step 2); states of its optimizers, schedules, callbacks and data are not restored" in output
    assert Ours.load_from_checkpoint(tmp_path / "new").hparams.lr == 0.5


def test_a_lightning_class_loads_checkpoints_of_both_libraries_after_a_fit(trained, tmp_path):
    path, module = trained
    fitted, trainer = Theirs(2), fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(fitted, data())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    loaded = Theirs.load_from_checkpoint(tmp_path / "ours.ckpt")
    assert loaded.net.weight.equal(fitted.net.weight)
    assert loaded.loaded[-1] == "2"  # on_save_checkpoint saw both entries of the state dict
    assert Theirs.load_from_checkpoint(path, weights_only=True).net.weight.equal(module.net.weight)
    assert type(fitted).load_from_checkpoint(path).hparams.width == 2


def test_plain_data_that_is_saved_as_objects_is_read_and_other_objects_need_permission(tmp_path):
    weights = nn.Linear(3, 2).state_dict()
    hparams = AttributeDict(width=2, folder=Path("/data"))
    torch.save({"state_dict": weights, "hyper_parameters": hparams}, tmp_path / "dict.ckpt")
    assert read_foreign(tmp_path / "dict.ckpt").hparams == {"width": 2, "folder": Path("/data")}
    torch.save({"state_dict": weights, "hyper_parameters": argparse.Namespace(width=2)}, tmp_path / "space.ckpt")
    assert read_foreign(tmp_path / "space.ckpt").hparams == {"width": 2}
    torch.save({"state_dict": weights, "hyper_parameters": {"data": data()}}, tmp_path / "bad.ckpt")
    content = read_foreign(tmp_path / "bad.ckpt")
    assert set(content.weights) == set(weights)
    with pytest.raises(
        CheckpointError, match=r"(?s)DataLoader, which was not read.*weights_only=False.*add_safe_globals"
    ):
        len(content.hparams["data"])
    assert len(read_foreign(tmp_path / "bad.ckpt", trusted=True).hparams["data"]) == len(data())


def test_an_open_file_is_read(tmp_path):
    weights = {f"net.{name}": tensor for name, tensor in nn.Linear(3, 2).state_dict().items()}
    file = io.BytesIO()
    torch.save({"state_dict": weights, "hyper_parameters": {"width": 2, "act": nn.ReLU()}}, file)
    file.seek(0)
    loaded = Ours.load_from_checkpoint(file, weights_only=False)
    assert torch.equal(loaded.net.weight, weights["net.weight"])


def test_an_import_omits_objects_by_name(tmp_path, capsys):
    weights = nn.Linear(3, 2).state_dict()
    torch.save({"state_dict": weights, "hyper_parameters": {"width": 2, "act": [nn.ReLU()]}}, tmp_path / "a.ckpt")
    assert main(["import", str(tmp_path / "a.ckpt"), str(tmp_path / "new")]) == 0
    assert "omitted objects, which are not read: act (torch.nn.modules.activation.ReLU)" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "new")["hparams"] == {"width": 2}


def test_an_import_omits_objects_among_the_weights_by_name(tmp_path, capsys):
    weights = {**nn.Linear(3, 2).state_dict(), "head._extra_state": {"act": nn.ReLU()}}
    torch.save({"state_dict": weights, "hyper_parameters": {}}, tmp_path / "a.ckpt")
    assert main(["import", str(tmp_path / "a.ckpt"), str(tmp_path / "new")]) == 0
    output = capsys.readouterr().out
    assert "2 tensors" in output
    assert "head._extra_state (torch.nn.modules.activation.ReLU)" in output
    assert "prefix" not in output


def test_a_configuration_of_a_custom_class_may_be_passed(tmp_path):
    class Configured(Body, fx.Module):
        def __init__(self, config: Any) -> None:
            super().__init__(2)

    path = tmp_path / "a.ckpt"
    weights = {"net.weight": torch.ones(2, 3), "net.bias": torch.ones(2)}
    torch.save({"state_dict": weights, "hyper_parameters": nn.ReLU(), "hparams_name": "config"}, path)
    with pytest.raises(CheckpointError, match=r"(?s)ReLU, which was not read.*config=\.\.\."):
        Configured.load_from_checkpoint(path)
    assert torch.equal(Configured.load_from_checkpoint(path, config=None).net.weight, torch.ones(2, 3))
    assert main(["import", str(path), str(tmp_path / "new")]) == 0


class Exploit:
    """Creates a folder when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def hostile(kind: str, folder: Path) -> Path:
    """Write a file that would run code, or use much memory, if it was loaded without checks."""
    path, exploit = folder / "hostile.ckpt", Exploit(folder / "marker")
    if kind == "raw":
        path.write_bytes(pickle.dumps(exploit))
    elif kind == "tar":  # torch's format before 0.1.10
        with tarfile.open(path, "w") as archive:
            for name in ("pickle", "storages", "tensors"):
                data = pickle.dumps(exploit)
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    elif kind == "script":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(exploit, 2))
            archive.writestr("archive/version", "3")
            archive.writestr("archive/constants.pkl", pickle.dumps((), 2))
    elif kind == "bomb":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * 10**6 + b"N.")
            archive.writestr("archive/version", "3")
    else:
        content = {"state_dict": {}, "hyper_parameters": {"it": exploit}}
        torch.save(content, path, _use_new_zipfile_serialization=kind != "legacy")
    return path


@pytest.mark.parametrize("kind", ["object", "legacy", "raw", "tar", "script", "bomb"])
def test_a_malicious_file_is_refused_without_advice_to_trust_it(kind, tmp_path):
    with pytest.raises(CheckpointError) as error:
        read_foreign(hostile(kind, tmp_path))
    assert not (tmp_path / "marker").exists()
    for advice in ("weights_only", "safe_globals", "False"):  # torch's advice to disable the protection
        assert advice not in str(error.value)


def test_hyperparameters_of_a_single_argument_are_loaded(tmp_path):
    weights = {f"net.{name}": tensor for name, tensor in nn.Linear(3, 2).state_dict().items()}
    content = {"state_dict": weights, "hyper_parameters": {"width": 2, "depth": 1}, "hparams_name": "config"}
    torch.save(content, tmp_path / "a.ckpt")
    loaded = Whole.load_from_checkpoint(tmp_path / "a.ckpt", scale=3.0, depth=5)
    assert (loaded.config, loaded.scale) == ({"width": 2, "depth": 5}, 3.0)


def test_safetensors_are_read_from_a_file_an_index_and_a_folder(tmp_path):
    module = Ours(2)
    first, second = {"net.weight": module.net.weight.data}, {"net.bias": module.net.bias.data}
    save_file({**first, **second}, tmp_path / "all.safetensors")
    shards = tmp_path / "shards"
    shards.mkdir()
    save_file(first, shards / "model-00001-of-00002.safetensors")
    save_file(second, shards / "model-00002-of-00002.safetensors")
    files = {"net.weight": "model-00001-of-00002.safetensors", "net.bias": "model-00002-of-00002.safetensors"}
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for path in (tmp_path / "all.safetensors", index, shards):
        assert is_foreign(path)
        assert Ours.load_from_checkpoint(path, width=2).net.weight.equal(module.net.weight)
        assert read_foreign(path, "meta").weights["net.bias"].shape == (2,)
    index.write_text(json.dumps({"weight_map": {"a": "../all.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a plain name"):
        read_foreign(shards)
    (tmp_path / "all.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="damaged"):
        read_foreign(tmp_path / "all.safetensors")


def test_a_tied_weight_may_have_any_of_its_names(tmp_path):
    module = Tied()
    weights = {name: tensor for name, tensor in module.state_dict().items() if name != "second.weight"}
    save_file(weights, tmp_path / "a.safetensors")
    assert Tied.load_from_checkpoint(tmp_path / "a.safetensors").second.weight.equal(module.first.weight)


def test_different_names_are_an_error_with_a_remedy_that_works(tmp_path, capsys):
    torch.save(
        {f"model.net.{name}": tensor for name, tensor in nn.Linear(3, 2).state_dict().items()}, tmp_path / "a.pt"
    )
    with pytest.raises(CheckpointError) as caught:
        fx.Trainer(**QUIET).validate(Ours(2), data(), ckpt_path=tmp_path / "a.pt")
    for part in ("missing: net.weight, net.bias", "not in the module: model.net.weight", "--strip-prefix model."):
        assert part in str(caught.value)
    assert main(["import", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--strip-prefix", "model."]) == 0
    fx.Trainer(**QUIET).validate(Ours(2), data(), ckpt_path=tmp_path / "b", verbose=False)
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"the names lack 'net.'.*--add-prefix net."):
        Ours.load_from_checkpoint(tmp_path / "c.pt", width=2)
    with pytest.warns(UserWarning, match="are not all those"):
        Ours.load_from_checkpoint(tmp_path / "c.pt", width=2, strict=False)
    assert main(["import", str(tmp_path / "a.pt"), str(tmp_path / "b")]) == 1
    assert main(["import", str(tmp_path / "a.pt"), str(tmp_path / "d"), "--strip-prefix", "x."]) == 1
    assert "exists already" in (output := capsys.readouterr().err)
    assert "no name in" in output


@pytest.mark.parametrize("content", [3, {"a": 1}, {}])
def test_a_file_without_weights_is_an_error(content, tmp_path):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="no state_dict"):
        read_foreign(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_text("nothing")
    with pytest.raises(CheckpointError):
        read_foreign(tmp_path / "b.pt")


class Head(fx.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(2, 3), nn.Linear(3, classes)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.head(self.backbone(batch)).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class NewHead(Head):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("head.weight", "head.bias"):
            del checkpoint["state_dict"][name]


@pytest.mark.parametrize("form", ["torch", "fabricx"])
def test_weights_of_a_different_shape_are_named_with_a_remedy_that_loads_all_other_weights(
    tmp_path: Path, form: str
) -> None:
    old, path = Head(classes=2), tmp_path / "old.ckpt"
    if form == "torch":
        torch.save(old.state_dict(), path)
    else:
        trainer = fx.Trainer(devices=1, max_steps=1, default_root_dir=tmp_path, **QUIET)
        trainer.fit(old, DataLoader(torch.zeros(2, 2)))
        trainer.save_checkpoint(path)
    for strict in (True, False):  # permitted differences in names do not permit differences in shapes
        with pytest.raises(CheckpointError, match=r"(?s)head.weight: shape \[2, 3\] .*, \[5, 3\] .*on_load_checkpoint"):
            Head.load_from_checkpoint(path, strict=strict)
    with pytest.warns(UserWarning, match="missing: head.weight, head.bias"):
        new = NewHead.load_from_checkpoint(path, strict=False)
    assert torch.equal(new.backbone.weight, old.backbone.weight)
