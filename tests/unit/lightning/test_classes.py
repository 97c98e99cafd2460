from __future__ import annotations

import abc
import copy
import pickle
from typing import Any

import lightning as L  # noqa: N812
import pytorch_lightning
from torch import nn

import fabricx as fx
from fabricx.lightning import adapt_module, is_lightning
from fabricx.lightning.classes import lightning_base


class Plain(L.LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, width)


class Registered(L.LightningModule, abc.ABC):
    names: list[str] = []

    def __init_subclass__(cls, *, label: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.names.append(label)


class Labelled(Registered, label="first"):
    pass


class Factory(L.LightningModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __reduce__(self) -> Any:
        return Factory, (self.size,)


class Abstract(abc.ABC, L.LightningModule):
    pass


class Older(pytorch_lightning.LightningModule):
    pass


def test_users_methods_precede_fabricx_and_fabricx_precedes_lightning():
    module = adapt_module(Plain())
    order = type(module).__mro__
    assert order.index(Plain) < order.index(fx.Module) < order.index(L.LightningModule) < order.index(nn.Module)
    assert isinstance(module, Plain)
    assert (type(module).__name__, type(module).__qualname__, type(module).__module__) == ("Plain", "Plain", __name__)


def test_an_adapted_object_is_adapted_once_and_its_class_is_shared():
    first, second = adapt_module(Plain()), adapt_module(Plain())
    assert type(first) is type(second)
    assert type(adapt_module(first)) is type(first)


def test_copies_and_pickles_are_adapted_too():
    module = adapt_module(Plain(3))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), pickle.loads(pickle.dumps(module, 0))):
        assert type(twin) is type(module)
        assert twin.hparams.width == 3
        assert twin.layer.weight.equal(module.layer.weight)


def test_a_class_with_its_own_pickles_is_adapted_after_loading():
    module = adapt_module(Factory(7))
    twin = pickle.loads(pickle.dumps(module))
    assert type(twin) is type(module)
    assert twin.size == 7


def test_adapting_does_not_call_init_subclass():
    assert isinstance(adapt_module(Labelled()), fx.Module)
    assert Registered.names == ["first"]


def test_both_package_names_of_lightning_are_recognised():
    assert lightning_base(Plain, "LightningModule") is L.LightningModule
    assert lightning_base(Older, "LightningModule") is pytorch_lightning.LightningModule
    assert isinstance(adapt_module(Older()), fx.Module)
    assert isinstance(adapt_module(Abstract()), fx.Module)  # whose first base class has a different layout
    assert lightning_base(nn.Linear, "LightningModule") is None
    assert is_lightning(L.LightningModule)
    assert not is_lightning(Plain)
