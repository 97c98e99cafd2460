"""A checkpoint creates objects of classes that it names only if it is trusted."""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.checkpoint.class_paths import check_classes, classes_named, derived, instantiate_module
from fabricx.errors import CheckpointError


class _Kind(enum.Enum):
    PLAIN = 1


class _Base:
    def __init__(self, path: Path = Path("a"), kind: _Kind = _Kind.PLAIN, **options: Any) -> None:
        self.path, self.kind = path, kind


class _Net(_Base):
    def __init__(
        self, layer: nn.Module | str, optimizer: Callable[[Any], Any] | None = None, sizes: tuple[int, ...] = (),
        free: Any = None, untyped=None, **options: Any,  # type: ignore[no-untyped-def]
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self.layer, self.optimizer, self.sizes = layer, optimizer, sizes


def test_classes_and_functions_are_resolved_for_arguments_that_accept_them() -> None:
    data = {"path": "a.b", "kind": "PLAIN", "sizes": [1], "free": "a.b", "lr": 0.1}
    assert classes_named(_Net, data) == set()
    nested = {"class_path": "torch.nn.ReLU", "init_args": {"inner": [{"class_path": "os.system"}]}}
    assert classes_named(_Net, {**data, "free": nested}) == {"torch.nn.ReLU", "os.system"}
    assert classes_named(_Net, {"layer": "a.b", "optimizer": "torch.optim.SGD", "untyped": "c.d"}) == {
        "a.b", "torch.optim.SGD", "c.d",
    }  # fmt: skip


class _Typed:
    def __init__(
        self, free: Any = None, table: dict[str, Any] | None = None, items: list | None = None,  # type: ignore[type-arg]
        functions: list[Callable[[], Any]] | None = None, layer: nn.Module | None = None, untyped=None,  # type: ignore[no-untyped-def]
        act=nn.ReLU(), name: str = "", mode: Literal["a.b"] = "a.b",  # type: ignore[no-untyped-def] # noqa: B008
    ) -> None:  # fmt: skip
        self.free, self.layer = free, layer


ESCAPED = '{"class\\u005fpath": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"free": ESCAPED}, "torch.nn.Linear"),
        ({"free": f"[1, {ESCAPED}]"}, "torch.nn.Linear"),
        ({"table": {"x": "<<: {class_path: a.B}"}}, "a.B"),
        ({"items": [ESCAPED]}, "torch.nn.Linear"),
        ({"untyped": ESCAPED}, "torch.nn.Linear"),
        ({"elsewhere": "[2020-99-99, {class_path: a.B}]"}, "a.B"),
        ({"layer": "ReLU"}, "ReLU"),
        ({"layer": ESCAPED}, f"{ESCAPED[:80]}..."),
        ({"act": "Tanh"}, "Tanh"),
        ({"functions": ["os.getcwd"]}, "os.getcwd"),
        ({"class_path": "a.B", "init_args": {}}, "a.B"),
    ],
)
def test_strings_that_jsonargparse_reads_as_classes_are_included(value: dict[str, Any], expected: str) -> None:
    assert classes_named(_Typed, value) == {expected}


def test_other_strings_and_explicit_values_are_unchanged() -> None:
    plain = {"free": "a.b", "table": {"x": "a: b"}, "items": ["x"], "untyped": "relu", "name": ESCAPED, "mode": "a.b"}
    assert classes_named(_Typed, plain) == set()
    explicit = {"table": {"x": ESCAPED}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jsonargparse 5 does not change such values
        instantiate_module(_Typed, explicit)
    assert explicit == {"table": {"x": ESCAPED}}


def test_classes_are_refused_with_a_remedy() -> None:
    check_classes(set(), "x.ckpt")
    with pytest.raises(CheckpointError, match=r"x.ckpt has hyperparameters that name classes.* a.b, c.d.*weights_only"):
        check_classes({"c.d", "a.b"}, "x.ckpt")


def test_an_imported_class_is_found_by_its_path() -> None:
    assert derived(_Base, f"{__name__}._Net") is _Net
    assert derived(_Net, f"{__name__}._Net") is _Net
    assert derived(_Net, f"{__name__}._Base") is None


def test_objects_are_created_and_values_converted() -> None:
    relu = {"class_path": "torch.nn.ReLU", "init_args": {"inplace": True}}
    net = instantiate_module(_Net, {"layer": relu, "sizes": [1, 2], "path": "b", "kind": "PLAIN"})
    assert isinstance(net.layer, nn.ReLU)
    assert net.layer.inplace
    assert (net.sizes, net.path, net.kind) == ((1, 2), Path("b"), _Kind.PLAIN)
    selected = {"_class_path": f"{__name__}._Net", "layer": relu}
    if sys.modules.get(__name__):
        assert type(instantiate_module(_Base, selected)) is _Net


class _Attacked(fx.Module):
    def __init__(self, layer: Any = None) -> None:
        super().__init__()
        self.layer = layer


def test_a_checkpoint_creates_no_object_from_a_string(tmp_path: Path) -> None:
    hparams = {"layer": ESCAPED, "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": hparams, "pytorch-lightning_version": "2.6.6"}, path)
    with pytest.raises(CheckpointError, match=r"name classes to create: torch.nn.Linear"):
        _Attacked.load_from_checkpoint(path)
