"""Constructor arguments as hyperparameters of a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import ListConfig, OmegaConf
from torch import nn

import fabricx as fx
from fabricx.checkpoint.hyperparameters import Form, is_omegaconf, storable
from fabricx.core.hparams import HyperParameters
from fabricx.errors import DifferentValues, PossibleUserWarning
from fabricx.loggers import CSVLogger
from fabricx.testing import TinyModule, tiny_loader


class Small(HyperParameters):
    def __init__(self, size: int = 3, net: Any = None, **options: Any) -> None:
        later = "no argument"  # noqa: F841
        self.save_hyperparameters(ignore="net")


class Large(Small):
    def __init__(self, depth: int, size: int = 5) -> None:
        super().__init__(2 * size, nn.Linear(1, 1), rate=0.5)


def test_arguments_of_each_constructor_are_saved_and_the_outermost_take_precedence() -> None:
    assert Small(4).hparams == {"size": 4}
    assert Large(7).hparams == {"depth": 7, "size": 5, "rate": 0.5}


class Helped(HyperParameters):
    def __init__(self, size: int = 3) -> None:
        self._prepare()

    def _prepare(self) -> None:
        size = "a local variable"  # noqa: F841
        self.save_hyperparameters()


def test_a_method_that_the_constructor_calls_saves_the_arguments_of_the_constructor() -> None:
    assert Helped(size=7).hparams == {"size": 7}


def test_the_object_of_a_constructor_may_have_any_name() -> None:
    @dataclass(eq=False)
    class Data(fx.Module):
        size: int = 3

        def __post_init__(this) -> None:  # noqa: N805  # pyright: ignore[reportSelfClsParameterName]
            super().__init__()
            (lambda module: module.save_hyperparameters())(this)

    class More(Data):
        def __init__(*args: Any, rate: float = 0.5) -> None:
            (lambda: Data.__init__(args[0], 4))()

    class Options(Data):
        def __init__(self, **options: Any) -> None:
            fx.Module.__init__(self)
            self.save_hyperparameters()

    assert Options().hparams == {}
    assert Data().hparams == {"size": 3}
    assert More().hparams == {"size": 4, "rate": 0.5}


def test_different_values_of_the_module_and_the_data_module_are_an_error(quiet: dict[str, Any]) -> None:
    class Data(fx.DataModule):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return tiny_loader()

    module = TinyModule(lr=0.5)
    fx.Trainer(max_epochs=1, **quiet).fit(module, Data(0.5))
    with pytest.raises(DifferentValues, match=r"different hyperparameters 'lr': 0\.5 and 0\.25. Rename one"):
        fx.Trainer(max_epochs=1, **quiet).fit(module, Data(0.25))


def test_a_module_as_a_hyperparameter_is_a_warning() -> None:
    class Owner(fx.Module):
        def __init__(self, encoder: Any, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(PossibleUserWarning, match="'encoder' is an instance of `nn.Module`.*weights_only=False"):
        owner = Owner(torch.nn.Linear(1, 1), 3)
    assert [*owner.hparams] == ["encoder", "width"]


def test_changes_do_not_affect_the_initial_hyperparameters() -> None:
    module = Large(7)
    module.hparams.depth = 8
    module.hparams["new"] = 1
    assert module.hparams_initial == {"depth": 7, "size": 5, "rate": 0.5}
    module.hparams_initial["depth"] = 9
    assert module.hparams_initial.depth == 7


class Chosen(HyperParameters):
    def __init__(self, a: int = 1, b: int = 2, names: tuple[Any, ...] = ()) -> None:
        self.save_hyperparameters(*names)


@pytest.mark.parametrize(
    ("names", "saved"),
    [(("a",), {"a": 1}), (({"x": 3},), {"x": 3}), ((Namespace(y=4),), {"y": 4}), (("b", "a"), {"a": 1, "b": 2})],
)
def test_arguments_are_selected_by_name_or_passed(names: tuple[Any, ...], saved: dict[str, Any]) -> None:
    assert Chosen(names=names).hparams == saved


def test_a_name_that_is_no_argument_is_an_error_with_the_valid_names() -> None:
    with pytest.raises(ValueError, match=r"'c'.*no such argument.\n  known: \['a', 'b', 'names'\]"):
        Chosen(names=("c",))
    with pytest.raises(AttributeError, match=r"no hyperparameter 'dept'.\n  known: \['depth', 'rate', 'size'\]"):
        Large(7).hparams.dept  # noqa: B018


class Color(str, Enum):  # noqa: UP042
    RED = "red"


def test_a_checkpoint_holds_hyperparameters_with_their_types_and_omits_others_with_a_warning(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Net(TinyModule):
        def __init__(self, net: Any = None, **options: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    options = {
        "sizes": (1, 2), "names": {0: "a"}, "rate": np.float64(0.5), "count": np.int64(3), "kind": Color.RED,
        "place": Path("a"), "precision": torch.float32, "weights": torch.ones(2), "kinds": {"a"},
    }  # fmt: skip
    trainer = fx.Trainer(max_epochs=1, **{**quiet, "logger": CSVLogger()})
    trainer.fit(Net(nn.Linear(1, 1), **options), tiny_loader())
    with pytest.warns(UserWarning, match=r"checkpoints omit the hyperparameters net \(Linear\)"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.save_checkpoint(tmp_path / "a.ckpt")  # a second warning would be an error in this test
    with pytest.warns(UserWarning, match=r"omits net \(Linear\).*pass it to load_from_checkpoint"):
        loaded = Net.load_from_checkpoint(tmp_path / "a.ckpt").hparams
    assert torch.equal(loaded.pop("weights"), torch.ones(2))
    assert loaded == {
        "lr": 0.1, "net": None, "sizes": (1, 2), "names": {0: "a"}, "rate": 0.5, "count": 3, "kind": "red",
        "place": "a", "precision": torch.float32, "kinds": {"a"},
    }  # fmt: skip
    assert [type(loaded[name]) for name in ("rate", "count", "kind")] == [float, int, str]
    Net.load_from_checkpoint(tmp_path / "a.ckpt", net=nn.ReLU())


def test_several_calls_add_hyperparameters_and_ignored_ones_are_removed() -> None:
    class Base(fx.Module):
        def __init__(self, width: int = 2, loss: str = "mse") -> None:
            super().__init__()
            self.save_hyperparameters({"width": width, "loss": loss})

    class Derived(Base):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters({"lr": lr}, ignore="loss")

    net = Derived()
    assert net.hparams == net.hparams_initial == {"width": 2, "lr": 0.1}


class Dotted(TinyModule):
    """Reads its only argument by attributes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.remove_ignored_hparams(["config"])  # saved by TinyModule
        self.save_hyperparameters(config)
        self.second = nn.Linear(self.hparams["net"]["width"], 1)
        self.width = config.net.width if is_omegaconf(config) else None


class Nested(TinyModule):
    def __init__(self, net: Any, depth: int = 1, parts: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.second = nn.Linear(self.hparams.net.width, 1)


OBJECTS = {"allow_objects": True}  # as hydra.utils.instantiate sets it
CONFIG = {"net": {"width": 3, "height": "${net.width}"}, "rate": 0.1}


class Given(HyperParameters):
    def __init__(self, array: Any, config: Any, other: Any = None) -> None:
        self.save_hyperparameters(config)


def test_the_argument_with_all_hyperparameters_is_found_beside_arrays() -> None:
    values = {"array": np.ones(2)}
    assert vars(Given(np.ones(2), {**values}, other=values))["_hparams_name"] == "config"
    assert vars(Given(torch.ones(2), values))["_hparams_name"] == "config"
    namespace = Namespace(width=3)
    assert Form.of(Given(1, vars(namespace), namespace)) == Form("config")


@pytest.mark.parametrize("single_file", [True, False])
@pytest.mark.parametrize(
    "config", [OmegaConf.create(CONFIG), {**CONFIG}, Namespace(**CONFIG)], ids=["omegaconf", "dict", "namespace"]
)
def test_a_checkpoint_restores_the_argument_that_has_all_hyperparameters(
    config: Any, single_file: bool, quiet: dict[str, Any], tmp_path: Path
) -> None:
    trainer = fx.Trainer(max_steps=1, **quiet)
    trainer.fit(Dotted(config), tiny_loader())
    path = trainer.save_checkpoint(tmp_path / "a.ckpt", single_file=single_file)
    loaded = Dotted.load_from_checkpoint(path, map_location={"cuda:1": "cpu"})
    assert loaded.second.in_features == 3
    assert loaded.hparams.rate == 0.1
    assert loaded.width == (3 if is_omegaconf(config) else None)
    assert Dotted.load_from_checkpoint(path, rate=0.2).hparams.rate == 0.2
    if single_file:
        assert torch.load(path, weights_only=True)["hparams_name"] == "config"
        trainer.fit(TinyModule(), tiny_loader())
        trainer.save_checkpoint(path, single_file=True)
        assert torch.load(path, weights_only=True)["hparams_name"] == "kwargs"  # each is an argument


def test_a_checkpoint_restores_arguments_of_omegaconf(quiet: dict[str, Any], tmp_path: Path) -> None:
    trainer = fx.Trainer(max_steps=1, **quiet)
    config = OmegaConf.create(CONFIG)
    trainer.fit(Nested(config.net, depth=2, parts={"all": [config]}), tiny_loader())
    loaded = Nested.load_from_checkpoint(trainer.save_checkpoint(tmp_path / "a.ckpt"))
    assert loaded.hparams.net.width == loaded.hparams.net.height == 3
    assert loaded.hparams.depth == 2
    assert is_omegaconf(loaded.hparams.net)
    assert loaded.hparams.parts["all"][0].net.width == 3


def test_a_checkpoint_restores_lists_of_omegaconf_that_hold_objects(quiet: dict[str, Any], tmp_path: Path) -> None:
    trainer = fx.Trainer(max_steps=1, **quiet)
    net, losses = OmegaConf.create(CONFIG).net, ListConfig([nn.L1Loss(), {"of": nn.MSELoss()}], flags=OBJECTS)
    trainer.fit(Nested(net, parts=losses), tiny_loader())
    path = trainer.save_checkpoint(tmp_path / "a.ckpt")
    parts = Nested.load_from_checkpoint(path, weights_only=False).hparams.parts
    assert is_omegaconf(parts)
    assert [type(parts[0]), type(parts[1].of)] == [nn.L1Loss, nn.MSELoss]


class Configured(HyperParameters):
    def __init__(self, config: Any, ignore: Any = (), also: Any = None) -> None:
        self.save_hyperparameters(config, ignore=ignore)
        self.save_hyperparameters(config)  # a derived class
        if also is not None:
            self.save_hyperparameters("also")


def test_a_config_of_omegaconf_is_the_hyperparameters() -> None:
    config = OmegaConf.create({**CONFIG, "depth": "???"})
    OmegaConf.set_struct(config, True)
    hparams: Any = Configured(config).hparams
    assert hparams is config  # OmegaConf.to_yaml(self.hparams), hydra.utils.instantiate(self.hparams.net)
    assert Form.of(Configured(config)) == Form("config", ((),))
    assert Form.of(Configured(OmegaConf.masked_copy(config, "net"))).omegaconf == ((),)
    assert Configured(config, ignore="rate").hparams_initial.net.height == 3

    class Omits(HyperParameters):
        def __init__(self, config: Any) -> None:
            self.save_hyperparameters(config, ignore=["rate"])
            self.save_hyperparameters({"more": 1}, ignore="depth")

    assert Omits(config).hparams == {"net": {"width": 3, "height": 3}, "more": 1}
    assert "rate" in config
    both = Configured(OmegaConf.create(CONFIG), also=2).hparams
    assert (both.net.height, both.also) == (3, 2)

    class Unnamed(HyperParameters):
        def __init__(self, width: int) -> None:
            self.save_hyperparameters(OmegaConf.create({"net": {"width": width}, "rate": 0.1, "depth": "???"}))

    assert Form.of(Unnamed(3)) == Form("", (("net",),))


def test_missing_values_of_omegaconf_stay_missing() -> None:
    kept, omitted = storable({"net": OmegaConf.create({"width": "???"})})
    assert (kept, omitted) == ({"net": {"width": "???"}}, {})
