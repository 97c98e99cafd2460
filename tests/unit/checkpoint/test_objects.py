"""Objects of users' classes in checkpoints: kept in each form, read with permission, and never executed without."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx import checkpoint
from fabricx.checkpoint import files, objects
from fabricx.checkpoint.command import main
from fabricx.checkpoint.unread import is_unread, name_of
from fabricx.checkpoint.writer import Writer
from fabricx.distributed.world import World
from fabricx.errors import CheckpointError
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.unit.checkpoint.hostile import replace, rewrite


class Loss:
    """A hyperparameter of a user's class."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale


class Table(dict[str, int]):
    """A class that is derived from dict."""


class Row(list[Any]):
    """A class that is derived from list."""


class Moments(NamedTuple):
    """State of a callback in a class of its own."""

    mean: torch.Tensor
    count: int


class Exploit:
    """Creates a folder when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


class Net(TinyModule):
    """Has objects in its hyperparameters, and adds objects to checkpoints."""

    def __init__(self, loss: Any, kinds: Any = (), lr: float = 0.1) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.added: Any = None

    class Mode:
        """A hyperparameter of a nested class."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = {"table": Table(a=1), "row": Row([1]), "metric": nn.MSELoss(), "count": 3}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.added = checkpoint["added"]


def saved(path: Path, *, single_file: bool = False, weights_only: bool = False) -> Path:
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(Loss(2.0), [Loss, nn.ReLU()]), tiny_loader())
    trainer.save_checkpoint(path, weights_only, single_file=single_file)
    return path


def test_plain_data_is_unchanged_and_objects_are_extracted_and_restored() -> None:
    loss, text = Loss(), "a/b"
    state = {"plain": [1, (2.0, None), {"a"}, OrderedDict(b=b"")], text: {"loss": loss, 1: (loss,)}, "kind": Loss}
    rest, taken = objects.taken(state)
    assert rest["plain"] == state["plain"]
    assert list(taken) == ["a%2Fb/loss", "a%2Fb/1/0", "kind"]
    assert objects.put(rest, taken, "x") == state
    name = rest[text]["loss"]["class"]
    unread = objects.put(rest, {}, "x")[text]["loss"]
    assert is_unread(unread)
    assert name_of(unread) == name == f"{__name__}.Loss"


def test_an_object_keeps_its_identity_within_a_checkpoint(tmp_path: Path) -> None:
    loss = Loss()
    path = checkpoint.save(tmp_path / "one", {"a": loss, "b": [loss]}, {})
    state = checkpoint.load(path, trusted=True)
    assert state["a"] is state["b"][0]


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
def test_tensors_in_dicts_and_tuples_of_other_classes_resume_in_these_classes(
    tmp_path: Path, single_file: bool
) -> None:  # fmt: skip
    given = {"default": defaultdict(list, a=[torch.ones(1)]), "named": Moments(torch.ones(2), 3)}
    ordered = OrderedDict(b=torch.ones(1), a=1)
    path, writer = tmp_path / "one", Writer(World())
    writer.begin(path, {"callbacks": {"a": {**given, "ordered": ordered}}}, {}, shown=() if single_file else None)
    writer.finish()
    writer.close()
    state = checkpoint.load(path, trusted=True)["callbacks"]["a"]
    assert (type(state["ordered"]), list(state["ordered"])) == (OrderedDict, ["b", "a"])
    assert (state["default"]["a"], state["default"]["new"]) == ([torch.ones(1)], [])
    assert (state["named"].mean.tolist(), state["named"].count) == ([1.0, 1.0], 3)
    unread = checkpoint.load(path)["callbacks"]["a"]
    assert type(unread["ordered"]) is OrderedDict
    with pytest.raises(CheckpointError, match="Moments, which was not read"):
        unread["named"].mean  # noqa: B018


@pytest.mark.parametrize("value", [np.arange(3.0), Path("a"), Counter("a"), frozenset({1}), np.float32(2)])
def test_arrays_paths_and_similar_values_need_no_permission(value: Any, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", {"value": [value]}, {})
    assert np.array_equal(checkpoint.load(path)["value"][0], value)


def test_objects_that_cannot_be_pickled_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"can't be pickled: callbacks/a \(.*lambda"):
        checkpoint.save(tmp_path / "one", {"callbacks": {"a": lambda: None}, "loss": Loss()}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
@pytest.mark.parametrize("weights_only", [False, True], ids=["whole", "weights"])
def test_objects_are_loaded_with_permission_only(own_folder: Path, single_file: bool, weights_only: bool) -> None:
    path = saved(own_folder / "a.ckpt", single_file=single_file, weights_only=weights_only)
    assert main(["verify", str(path)]) == main(["ls", str(path)]) == 0
    assert main(["export", str(path)]) == 0  # the weights need no permission
    with pytest.raises(CheckpointError) as caught:
        Net.load_from_checkpoint(path)
    for part in (f"{__name__}.Loss", "weights_only=False", "torch.serialization.add_safe_globals", "loss=..."):
        assert part in str(caught.value)
    with pytest.warns(UserWarning, match=r"ReLU, which was not read"):
        partly = Net.load_from_checkpoint(path, loss=None)
    assert (partly.hparams["kinds"], partly.added["count"]) == ((), 3)
    with pytest.raises(CheckpointError, match=f"{__name__}.Table, which was not read"):
        partly.added["table"].items()
    loaded = Net.load_from_checkpoint(path, weights_only=False)
    assert (loaded.hparams["loss"].scale, loaded.hparams["kinds"][0]) == (2.0, Loss)
    assert loaded.added["table"] == Table(a=1)
    assert [type(loaded.added[name]) for name in ("table", "row", "metric")] == [Table, Row, nn.MSELoss]


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
def test_classes_that_the_user_allows_need_no_other_permission(tmp_path: Path, single_file: bool) -> None:
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    trainer.lightning_module.hparams.update(loss=Loss(3.0), scaler=Scaler())  # type: ignore[union-attr]
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path, single_file=single_file)
    for _ in range(2):  # also with numpy functions in the user's own list, which fabricx otherwise replaces
        with torch.serialization.safe_globals([Loss, Scaler]):
            hparams = checkpoint.load(path)["hparams"]
        assert hparams["loss"].scale == 3.0
        assert type(hparams["scaler"].mean) is np.ndarray
    assert is_unread(checkpoint.load(path)["hparams"]["loss"])
    with torch.serialization.safe_globals([Scaler]):  # an allowed class does not hide other classes
        hparams = checkpoint.load(path)["hparams"]
    assert (is_unread(hparams["loss"]), is_unread(hparams["scaler"])) == (True, False)


class Scaler:
    """Has an array, as scalers of scikit-learn have."""

    def __init__(self) -> None:
        self.mean = np.arange(2.0)


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
def test_a_run_resumes_and_evaluates_with_permission(own_folder: Path, single_file: bool) -> None:
    path = saved(own_folder / "a.ckpt", single_file=single_file)
    trainer = fx.Trainer(max_epochs=2, **QUIET)
    with pytest.raises(CheckpointError, match="was not read"):
        trainer.fit(Net(Loss()), tiny_loader(), ckpt_path=path)
    again = Net(Loss())
    trainer.fit(again, tiny_loader(), ckpt_path=path, weights_only=False)
    assert again.added["table"] == {"a": 1}
    again.added = None
    trainer.validate(again, tiny_loader(), ckpt_path=path, weights_only=False)
    assert again.added["row"] == [1]


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
def test_a_malicious_pickle_is_not_executed_without_permission(own_folder: Path, single_file: bool) -> None:
    path, marker = own_folder / "a.ckpt", own_folder / "marker"
    if single_file:
        content = torch.load(saved(path, single_file=True), weights_only=False)
        content["fabricx"]["added"] = content["added"] = Exploit(marker)
        torch.save(content, path)
    else:
        replace(saved(path), "objects.pt", objects.pickled({"hparams/loss": Exploit(marker)}))
    for call in (
        lambda: Net.load_from_checkpoint(path),
        lambda: Net.load_from_checkpoint(path, loss=None),
        lambda: fx.Trainer(max_epochs=2, **QUIET).fit(Net(None), tiny_loader(), ckpt_path=path),
        lambda: fx.Trainer(max_epochs=2, **QUIET).validate(Net(None), tiny_loader(), ckpt_path=path),
    ):
        with pytest.raises(CheckpointError, match=r"refused, and nothing in it was executed.*mkdir"):
            call()
    main(["verify", str(path)])
    main(["export", str(path)])
    assert not marker.exists()
    checkpoint.load(path, trusted=True)  # the file does contain the attack
    assert marker.exists()


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
def test_weights_are_read_beside_an_object_of_a_class_within_a_class(own_folder: Path, single_file: bool) -> None:
    trainer, path = fx.Trainer(max_epochs=1, **QUIET), own_folder / "a.ckpt"
    trainer.fit(Net(Net.Mode()), tiny_loader())
    trainer.save_checkpoint(path, single_file=single_file)
    assert main(["export", str(path)]) == 0
    assert Net.load_from_checkpoint(path, loss=None).added["count"] == 3
    with torch.serialization.safe_globals([Net.Mode]):
        assert type(Net.load_from_checkpoint(path).hparams["loss"]) is Net.Mode


def test_an_export_omits_states_that_are_no_tensors_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {"w": torch.ones(2), "a._extra_state": {"count": 3}, "b._extra_state": Loss()}
    path = checkpoint.save(tmp_path / "one", {"strategy": {"module": weights}}, {})
    assert main(["export", str(path)]) == 0
    output = capsys.readouterr().out
    assert "1 tensors" in output
    assert "omitted states that are no tensors: a._extra_state, b._extra_state" in output


def test_weights_are_read_beside_objects_that_torch_cannot_read(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", {"w": torch.ones(2), "it": Named([1]), "loss": Loss()}, {})
    state = checkpoint.load(path)
    assert torch.equal(state["w"], torch.ones(2))
    assert (name_of(state["it"]), name_of(state["loss"])) == (f"{__name__}.Named", f"{__name__}.Loss")
    assert checkpoint.load(path, trusted=True)["it"] == [1]


class Named(list[int]):
    """A list with attributes, which torch's unpickler refuses."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.name = "a"


def test_data_in_the_form_of_an_object_stays_data(tmp_path: Path) -> None:
    pose = {"__object__": "loss", "class": "a"}
    path = checkpoint.save(tmp_path / "one", {"a": [pose], "loss": Loss()}, {})
    for trusted in (False, True):
        assert checkpoint.load(path, trusted=trusted)["a"] == [pose]


def test_versions_without_support_for_objects_refuse_a_folder_with_objects(tmp_path: Path) -> None:
    formats = [
        files.read_manifest(checkpoint.save(tmp_path / name, {"a": value}, {}))["format"]
        for name, value in {"plain": 1, "object": Loss()}.items()
    ]
    assert formats == [2, 3]


def test_a_class_name_sends_no_control_characters_to_the_terminal(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", {"loss": Loss()}, {})
    rest, _ = objects.taken({"loss": Loss()})
    rest["loss"]["class"] = "a\x1b[2J.\n  it is safe"
    replace(path, "state.pt", files.serialized(rest))
    replace(path, "objects.pt", objects.pickled({}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)["loss"].scale  # noqa: B018
    assert "\x1b" not in str(caught.value)
    assert "\n  it is" not in str(caught.value)


def test_tensors_of_objects_are_on_the_device_of_all_other_tensors(tmp_path: Path) -> None:
    key = b"k" * 32
    writer = checkpoint.Writer(World(), key)
    writer.begin(tmp_path / "one", {"loss": Scaled()}, {"step": 1})
    writer.finish()
    writer.close()
    for options in ({"key": key}, {"trusted": True}):
        assert checkpoint.load(tmp_path / "one", "meta", **options)["loss"].scale.device.type == "meta"  # type: ignore[arg-type]


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
def test_tensors_in_a_dict_whose_keys_are_objects_are_kept(tmp_path: Path, single_file: bool) -> None:
    path, key = tmp_path / "one", b"k" * 32
    writer = checkpoint.Writer(World(), key)
    saved = {"by_class": {Loss: torch.ones(2), nn.ReLU: [torch.zeros(1)]}, "rows": Row([torch.ones(1), 2])}
    writer.begin(path, saved, {"step": 1}, shown=["by_class"] if single_file else None)
    writer.finish()
    writer.close()
    for options in ({"key": key}, {"trusted": True}):
        state = checkpoint.load(path, **options)  # type: ignore[arg-type]
        assert torch.equal(state["by_class"][Loss], torch.ones(2))
        assert torch.equal(state["by_class"][nn.ReLU][0], torch.zeros(1))
        assert state["rows"] == [torch.ones(1), 2]
    assert is_unread(checkpoint.load(path)["by_class"])


class Scaled:
    """Has a tensor."""

    def __init__(self) -> None:
        self.scale = torch.ones(1)


@pytest.mark.parametrize("tag", ["\xe9", 1, None, "0" * 64])
def test_a_different_tag_does_not_grant_permission(tag: Any, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", {"loss": Loss()}, {"objects_tag": tag})
    assert is_unread(checkpoint.load(path, key=b"k" * 32)["loss"])
    plain = checkpoint.save(tmp_path / "two", {"lr": 1}, {"objects_tag": tag})
    assert checkpoint.load(plain, key=b"k" * 32) == {"lr": 1}


@pytest.mark.parametrize("single_file", [False, True], ids=["folder", "file"])
def test_a_restarted_run_loads_only_its_own_objects(tmp_path: Path, single_file: bool) -> None:
    path, key = tmp_path / "one", b"k" * 32
    writer = checkpoint.Writer(World(), key)
    writer.begin(path, {"loss": [Loss(4.0)]}, {"step": 1}, shown=() if single_file else None)
    writer.finish()
    writer.close()
    assert checkpoint.load(path, key=key)["loss"][0].scale == 4.0
    for other in (b"", b"o" * 32):
        assert is_unread(checkpoint.load(path, key=other)["loss"][0])
    if not single_file:
        replace(path, "objects.pt", objects.pickled({"loss/0": Loss(5.0)}))
        assert is_unread(checkpoint.load(path, key=key)["loss"][0])
        rewrite(path, lambda manifest: manifest.pop("objects_tag"))
        assert is_unread(checkpoint.load(path, key=key)["loss"][0])


def test_objects_are_saved_with_their_state_at_the_time_of_saving(tmp_path: Path) -> None:
    loss = Loss(1.0)
    writer = checkpoint.Writer(World())
    writer.begin(tmp_path / "one", {"loss": loss}, {"step": 1}, shown=["loss"])
    loss.scale = 2.0
    writer.finish()
    writer.close()
    assert torch.load(tmp_path / "one", weights_only=False)["loss"].scale == 1.0


def test_a_class_that_cannot_be_found_is_named(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "one", {"loss": Loss()}, {})
    data = (path / "objects.pt").read_bytes()
    assert b"Loss" in data
    replace(path, "objects.pt", data.replace(b"Loss", b"Lost"))
    with pytest.raises(CheckpointError, match=r"(?s)an object in .* can't be read: .*importable under its former name"):
        checkpoint.load(path, trusted=True)
    assert json.loads((path / "manifest.json").read_text())["files"]["objects.pt"]["bytes"] == len(data)


def test_hyperparameters_with_weights_are_not_stored_again() -> None:
    assert objects.is_storable(nn.ReLU())
    assert not objects.is_storable(nn.Linear(1, 1))
    assert not objects.is_storable(lambda: None)
    assert pickle.loads(pickle.dumps(Loss())).scale == 1.0
