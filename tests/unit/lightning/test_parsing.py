"""Functions that read arguments and signatures are compared with Lightning's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import fabricx as fx
from fabricx.lightning import parsing

theirs: Any = pytest.importorskip("lightning.pytorch.utilities.parsing")
signatures: Any = pytest.importorskip("lightning.pytorch.utilities.signature_utils")


class Plain:
    def __init__(self, width: int, *rest: int, depth: int = 2, **options: Any) -> None:
        super().__init__()
        frame = inspect.currentframe()
        assert frame is not None
        self.found = [library.get_init_args(frame) for library in (parsing, theirs)]


def test_arguments_of_a_constructor_are_found() -> None:
    ours, expected = Plain(3, 4, lr=0.1).found
    assert ours == expected == {"width": 3, "depth": 2, "lr": 0.1}
    frame = inspect.currentframe()
    assert frame is not None
    assert parsing.get_init_args(frame) == {}
    assert parsing.parse_class_init_keys(Plain) == theirs.parse_class_init_keys(Plain)


@pytest.mark.parametrize("options", [{}, {"explicit": True}, {"min_args": 2}])
@pytest.mark.parametrize("name", ["batch", "dataloader_idx"])
def test_parameters_of_hooks_are_found(name: str, options: Any) -> None:
    hooks: list[Any] = [lambda self, batch: 0, lambda self, batch, idx: 0, lambda self, *args: 0]
    for hook in hooks:
        expected = signatures.is_param_in_hook_signature(hook, name, **options)
        assert parsing.is_param_in_hook_signature(hook, name, **options) is expected


def test_an_attribute_is_found_in_the_module_and_in_its_hyperparameters() -> None:
    class Net(fx.LightningModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.width = 3

    net = Net()
    assert [parsing.lightning_hasattr(net, name) for name in ("lr", "width", "no")] == [True, True, False]
    parsing.lightning_setattr(net, "lr", 0.2)
    assert (net.hparams.lr, parsing.lightning_getattr(net, "lr"), parsing.lightning_getattr(net, "width")) == (
        0.2,
        0.2,
        3,
    )
    with pytest.raises(AttributeError, match="have no attribute 'no'"):
        parsing.lightning_getattr(net, "no")


def test_values_that_cannot_be_pickled_are_removed() -> None:
    values: dict[str, Any] = {"lr": 0.1, "function": lambda: None}
    parsing.clean_namespace(values)
    assert values == {"lr": 0.1}
