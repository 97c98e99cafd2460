"""`LightningModule` as a module of fabricx."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

from torch import nn

from fabricx.checkpoint import is_committed
from fabricx.core.module import LightningModule, Module
from fabricx.core.module_hooks import RUN_ATTRIBUTES
from fabricx.lightning.classes import Absent, adapted_class, form, is_lightning, lightning_base, local_name

# State that Lightning's constructor creates and users' constructors change, before fabricx has seen the object.
_KEPT: Final = (
    "automatic_optimization", "example_input_array", "strict_loading", "save_hyperparameters", "hparams",
    "hparams_initial", "_set_hparams",
)  # fmt: skip
# Lightning's empty steps, which would make a module without a step look as if it had the step.
_EMPTY: Final = ("training_step", "validation_step", "test_step")
_STEPS: Final = (*_EMPTY, "predict_step")
_REPLACED: Final = {"configure_sharded_model": "configure_model"}


def adapt_module(module: Any) -> Any:
    """Make a `LightningModule`, and those within it, modules of fabricx; other objects are returned as they are.

    Args:
        module: its class is replaced by a class that derives from it.

    Returns:
        the same object.

    Raises:
        ValueError: the class uses a feature of Lightning that fabricx does not have; the message names it.
    """
    if not isinstance(module, nn.Module):
        return module
    for part in module.modules():
        cls = type(part)
        if not isinstance(part, Module) and lightning_base(cls, "LightningModule") is not None:
            check_supported(cls)
            _add_loading(cls)
            part.__class__ = module_class(cls)
            vars(part).update(dict.fromkeys(RUN_ATTRIBUTES))  # it may have a trainer of Lightning
    return module


def _add_loading(cls: type) -> None:
    """Let `load_from_checkpoint` of a user's class also load checkpoints of fabricx."""
    base: Any = lightning_base(cls, "LightningModule")
    original = vars(base)["load_from_checkpoint"]
    if not is_lightning(cls) and inspect.getattr_static(cls, "load_from_checkpoint") is original:
        cls.load_from_checkpoint = classmethod(_load_from_checkpoint)  # type: ignore[attr-defined]


def _load_from_checkpoint(cls: Any, checkpoint_path: Any, *args: Any, **options: Any) -> Any:
    """Create a module from a checkpoint of fabricx or Lightning; see the `load_from_checkpoint` of each.

    Args:
        cls: the user's class, or its adapted class.
        checkpoint_path: checkpoint of fabricx or Lightning.
        args, options: further arguments.
    """
    if issubclass(cls, Module) or is_committed(checkpoint_path):
        load: Any = vars(Module)["load_from_checkpoint"]
        return load.__get__(None, module_class(cls))(checkpoint_path, *args, **options)
    base: Any = lightning_base(cls, "LightningModule")
    return vars(base)["load_from_checkpoint"].__get__(None, cls)(checkpoint_path, *args, **options)


@form("module")
def module_class(cls: type) -> type:
    """Return the class of an adapted module.

    Args:
        cls: the user's class.
    """
    base = lightning_base(cls, "LightningModule")
    assert base is not None
    # Lightning's `forward` only calls that of the next class; torch.compile compiles a module that has a forward.
    defined = next(owner for owner in cls.__mro__ if "forward" in vars(owner))
    forward = next(vars(owner)["forward"] for owner in cls.__mro__ if "forward" in vars(owner) and owner is not base)
    return adapted_class(cls, _bridge(base), {"forward": forward} if defined is base else None)


@functools.cache
def _bridge(base: type) -> type:
    kept = {name: inspect.getattr_static(base, name) for name in _KEPT}
    kept |= {"single_file_checkpoints": True, "predict_step": LightningModule.predict_step}
    kept["__jit_unused_properties__"] = [*base.__jit_unused_properties__, *Module.__jit_unused_properties__]  # type: ignore[attr-defined]
    kept["__qualname__"] = local_name("FabricxModule")
    return type("FabricxModule", (Module, base), {**kept, **{name: Absent() for name in _EMPTY}})


def check_supported(cls: type) -> None:
    """Refuse a class that overrides methods which fabricx never calls, or calls with other arguments.

    Args:
        cls: the user's class; derives from `LightningModule`.

    Raises:
        ValueError: names the method.
    """
    for owner in cls.__mro__:
        if is_lightning(owner) or owner in Module.__mro__:
            continue
        for name, successor in _REPLACED.items():
            if name in vars(owner):
                raise ValueError(f"{owner.__name__}.{name} is never called: rename it to {successor}")
        for name in _STEPS:
            step = vars(owner).get(name)
            if inspect.isfunction(step) and "dataloader_iter" in inspect.signature(step).parameters:
                raise ValueError(
                    f"{owner.__name__}.{name}(dataloader_iter): fabricx passes batches, and not the iterator: define "
                    f"{name}(self, batch, batch_idx)"
                )
