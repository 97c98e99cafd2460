"""A checkpoint creates objects of classes that it names only if it is trusted."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

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


def test_classes_and_functions_are_found_where_an_argument_can_be_one() -> None:
    data = {"path": "a.b", "kind": "PLAIN", "sizes": [1], "free": "a.b", "lr": 0.1}
    assert classes_named(_Net, data) == set()
    nested = {"class_path": "torch.nn.ReLU", "init_args": {"inner": [{"class_path": "os.system"}]}}
    assert classes_named(_Net, {**data, "free": nested}) == {"torch.nn.ReLU", "os.system"}
    assert classes_named(_Net, {"layer": "a.b", "optimizer": "torch.optim.SGD", "untyped": "c.d"}) == {
        "a.b", "torch.optim.SGD", "c.d",
    }  # fmt: skip


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
