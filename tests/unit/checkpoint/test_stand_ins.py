"""Files of torch with objects: all other data is read, and no name in the file is imported or called."""

from __future__ import annotations

import datetime
import enum
import io
import pickle
import sys
import zipfile
from argparse import Namespace
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch import nn

from fabricx.checkpoint.foreign import torch_load
from fabricx.checkpoint.unread import is_unread, name_of
from fabricx.errors import CheckpointError


class Attributes:
    """Has attributes, and a tensor."""

    def __init__(self) -> None:
        self.weight, self.names = torch.ones(2), ["a"]


class Slots:
    """Has no dict of attributes."""

    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


class Mapped(dict[str, Any]):
    """Is a dict with attributes."""

    def __init__(self) -> None:
        super().__init__(a=1)
        self.name = "a"


class Listed(list[int]):
    """Is a list."""


class Calls:
    """Is created by a function."""

    def __reduce__(self) -> Any:
        return make, ([1, 2],), {"a": 1}, iter([3]), iter([("b", 4)])


def test_an_array_of_plain_objects_alone_is_not_read(tmp_path: Path) -> None:
    torch.save({"it": np.array([1, None], object)}, tmp_path / "a.ckpt")
    assert is_unread(torch_load(tmp_path / "a.ckpt", "cpu")["it"])


def make(values: list[int]) -> Any:
    raise AssertionError(f"called with {values}")


class Outer:
    """Has a nested class."""

    class Inner:
        """A class within."""

        def method(self) -> None:
            """Does nothing."""

    class Kind(enum.Enum):
        """A nested class."""

        A = 1

    @staticmethod
    def attack() -> None:
        """Fails if called."""
        raise AssertionError


KINDS = {
    "attributes": Attributes(), "module": nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), "class": Attributes,
    "function": make, "slots": Slots(), "dict": Mapped(), "list": Listed([1, 2]), "default": defaultdict(list, a=[1]),
    "set": {Slots()}, "key": {Slots(): 1}, "array": np.array([Slots(), None], object),
    "nested": OrderedDict(a=Attributes()),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_all_other_data_of_a_file_is_read(kind: str, tmp_path: Path) -> None:
    plain = {
        "tensor": torch.arange(3.0), "namespace": Namespace(a=[torch.ones(1)]), "path": Path("a"), "set": {1},
        "date": datetime.date(2020, 1, 1), "array": np.arange(2), "ordered": OrderedDict(a=(1, b"2")),
        "dtype": torch.int8,
    }  # fmt: skip
    torch.save({"before": plain, "it": [KINDS[kind]], "after": plain}, tmp_path / "a.ckpt")
    content = torch_load(tmp_path / "a.ckpt", "cpu")
    for part in ("before", "after"):
        assert str(content[part]) == str(plain)
        assert [type(item) for item in content[part].values()] == [type(item) for item in plain.values()]
    stand_in = content["it"][0]
    if kind == "nested":
        stand_in = stand_in["a"]
    assert is_unread(stand_in), stand_in
    with pytest.raises(CheckpointError, match=name_of(stand_in)):
        stand_in.anything  # noqa: B018


def test_a_file_with_an_object_that_torch_cannot_read_is_refused(tmp_path: Path) -> None:
    torch.save({"it": Calls()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"(?s)refused, and nothing in it was executed.*weights_only=False"):
        torch_load(tmp_path / "a.ckpt", "cpu")


@pytest.mark.parametrize("value", [Outer.Inner(), Outer.Inner, Outer.Inner().method, {Outer.Kind.A}, Outer.Kind.A])
def test_an_object_of_a_class_within_a_class_has_its_name(value: Any, tmp_path: Path) -> None:
    torch.save({"it": value, "after": torch.ones(2)}, tmp_path / "a.ckpt")
    content = torch_load(tmp_path / "a.ckpt", "cpu")
    assert torch.equal(content["after"], torch.ones(2))
    name = "Kind" if value is Outer.Kind.A or isinstance(value, set) else "Inner"
    assert name_of(content["it"]).startswith(f"{__name__}.Outer.{name}")
    assert not any(type(entry) is tuple for entry in torch.serialization.get_safe_globals())


@pytest.mark.parametrize("others", [[], ["Outer"]])
def test_a_class_within_a_class_is_allowed_by_its_name(others: list[str], tmp_path: Path) -> None:
    torch.save({"it": Outer.Inner(), "kind": Outer.Kind}, tmp_path / "a.ckpt")
    with torch.serialization.safe_globals([Outer.Inner, *(globals()[name] for name in others)]):
        content = torch_load(tmp_path / "a.ckpt", "cpu")
    assert type(content["it"]) is Outer.Inner
    assert name_of(content["kind"]) == f"{__name__}.Outer.Kind"


def test_attributes_named_by_a_file_are_not_accessed(tmp_path: Path) -> None:
    torch.save({"it": CreatedByAttribute()}, tmp_path / "a.ckpt")
    with torch.serialization.safe_globals([Outer]):
        assert is_unread(torch_load(tmp_path / "a.ckpt", "cpu")["it"])


class CreatedByAttribute:
    """Is created by an attribute of a class that the user has allowed."""

    def __reduce__(self) -> Any:
        return Outer.attack, ()


def test_times_in_a_zone_are_read(tmp_path: Path) -> None:
    plain, named = datetime.datetime.now(datetime.UTC), datetime.datetime.now(ZoneInfo("UTC"))
    torch.save({"plain": plain, "named": named, "kind": Slots()}, tmp_path / "a.ckpt")
    content = torch_load(tmp_path / "a.ckpt", "cpu")
    assert content["plain"] == plain
    assert name_of(content["named"]) == "datetime.datetime"


def test_a_file_with_attributes_for_an_object_without_attributes_is_refused(tmp_path: Path) -> None:
    file = hostile(b"builtins\nset")
    content = pickle.PROTO + b"\x02cbuiltins\nset\n)R}X\x01\x00\x00\x00aK\x01sb."
    changed = tmp_path / "a.ckpt"
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(changed, "w") as after:
        for entry in before.infolist():
            after.writestr(entry.filename, content if entry.filename.endswith("data.pkl") else before.read(entry))
    with pytest.raises(CheckpointError, match="damaged"):
        torch_load(changed, "cpu")


def hostile(text: bytes) -> io.BytesIO:
    """Return a file that calls a function with the text `marker`."""
    file = io.BytesIO()
    torch.save({"it": Slots()}, file)
    content = pickle.PROTO + b"\x02c" + text + b"\nX\x06\x00\x00\x00marker\x85R."
    changed = io.BytesIO()
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(changed, "w") as after:
        for entry in before.infolist():
            data = content if entry.filename.endswith("data.pkl") else before.read(entry)
            after.writestr(entry.filename, data)
    return changed


@pytest.mark.parametrize("name", ["os\nmkdir", "builtins\nexec", "subprocess\ncall", "runpy\nrun_path", "sys\nexit"])
def test_files_that_call_dangerous_functions_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(hostile(name.encode()).getvalue())
    with pytest.raises(CheckpointError, match="refused, and nothing in it was executed") as caught:
        torch_load(path, "cpu")
    assert "trust" not in str(caught.value)


def test_no_module_that_a_file_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attack_on_import.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "a.ckpt"
    path.write_bytes(hostile(b"attack_on_import\nrun").getvalue())
    assert name_of(torch_load(path, "cpu")) == "attack_on_import.run"
    assert "attack_on_import" not in sys.modules
    assert not any("attack_on_import" in str(entry) for entry in torch.serialization.get_safe_globals())
