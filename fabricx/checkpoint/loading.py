"""A state, or a module, from a checkpoint."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fabricx.checkpoint import shards, tree
from fabricx.checkpoint.files import INDEX, STATE, verify
from fabricx.checkpoint.places import Place, as_path
from fabricx.errors import CheckpointError

T = TypeVar("T")


def load(
    path: Place,
    map_location: Any = "cpu",
    sharded: Mapping[str, Tensor] | None = None,
    *,
    verified: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, from however many ranks and whatever strategy; nothing in the files is executed.

    Args:
        path: the folder.
        map_location: device of the tensors.
        sharded: parameters by name that this rank has a shard of only; whatever is kept for them (weights, moments,
            averages) is read as the same shard.
        verified: somebody has called `verify` just now.

    Raises:
        CheckpointError: it isn't complete, is damaged, or was written by a newer format.
    """
    path = as_path(path)
    if not verified:
        verify(path)
    index = json.loads((path / INDEX).read_text())
    rest = torch.load(io.BytesIO((path / STATE).read_bytes()), map_location="cpu", weights_only=True)
    state: dict[str, Any] = tree.join(rest, shards.read(path, index, tree.like(sharded or {}, map_location)))
    return state


def load_module(cls: type[T], path: Place, map_location: Any, strict: bool, override: Mapping[str, Any]) -> T:
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
