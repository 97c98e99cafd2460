"""A module from a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeVar

from fabricx.checkpoint.files import load
from fabricx.errors import CheckpointError

T = TypeVar("T")


def load_module(
    cls: type[T], path: str | PathLike[str], map_location: Any, strict: bool, override: Mapping[str, Any]
) -> T:
    """Make an instance of `cls` with the hyperparameters of a checkpoint, and load its weights.

    Raises:
        CheckpointError: the checkpoint lacks an argument that `cls` needs.
    """
    state = load(path, map_location or "cpu")
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {name: v for name, v in state["hparams"].items() if takes_all or name in parameters} | dict(override)
    needed = [
        name
        for name, p in list(parameters.items())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in arguments
    ]
    if needed:
        raise CheckpointError(
            f"{cls.__name__} needs {', '.join(needed)}, which the checkpoint doesn't hold: give it to "
            "load_from_checkpoint, or call self.save_hyperparameters() in __init__"
        )
    module: Any = cls(**arguments)
    module.configure_model()
    module.on_load_checkpoint(state)
    module.load_state_dict(state["strategy"]["module"], strict=strict)
    if map_location is not None:
        module.to(map_location if not callable(map_location) else "cpu")
    return module  # type: ignore[no-any-return]
