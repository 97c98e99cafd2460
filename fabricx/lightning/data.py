"""`LightningDataModule` as a data module of fabricx."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

from fabricx.core.datamodule import DataModule
from fabricx.lightning.classes import adapted_class, form, lightning_base, local_name

_KEPT: Final = ("save_hyperparameters", "hparams", "hparams_initial", "_set_hparams")


def adapt_data(data: Any) -> Any:
    """Make a `LightningDataModule` a data module of fabricx; other objects are returned as they are.

    Args:
        data: its class is replaced by a class that derives from it.

    Returns:
        the same object.
    """
    cls = type(data)
    if not isinstance(data, DataModule) and lightning_base(cls, "LightningDataModule") is not None:
        data.__class__ = data_class(cls)
        data.trainer = None
    return data


@form("data")
def data_class(cls: type) -> type:
    """Return the class of an adapted data module.

    Args:
        cls: the user's class.
    """
    base = lightning_base(cls, "LightningDataModule")
    assert base is not None
    return adapted_class(cls, _bridge(base))


@functools.cache
def _bridge(base: type) -> type:
    kept = {name: inspect.getattr_static(base, name) for name in _KEPT}
    return type("FabricxDataModule", (DataModule, base), {**kept, "__qualname__": local_name("FabricxDataModule")})
