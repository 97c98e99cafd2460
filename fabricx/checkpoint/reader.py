"""Loads a state or a module from a checkpoint."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from fabricx.checkpoint import sharded_tensors, tree
from fabricx.checkpoint.files import INDEX, STATE, check_size, deserialized, read_listed, read_manifest, verify
from fabricx.checkpoint.index import parse
from fabricx.checkpoint.storage import Place, as_path
from fabricx.errors import CheckpointError
from fabricx.redaction import masked_keys

T = TypeVar("T")


def load(
    path: Place,
    map_location: Any = "cpu",
    sharded: Mapping[str, Tensor] | None = None,
    *,
    verified: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint of any number of ranks and any strategy; the files are never executed.

    Args:
        path: folder of the checkpoint.
        map_location: device of the tensors.
        sharded: sharded parameters by name; all tensors saved for them (weights, moments, averages) are loaded as the
            same shards.
        verified: skip the verification of checksums, which the caller has just done.

    Returns:
        The saved state.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or has a newer format.
    """
    path = as_path(path)
    manifest = read_manifest(path) if verified else verify(path)
    for name, listed in manifest["files"].items():  # also if verified, which may be some time ago in another process
        check_size(path, name, listed)
    index = parse(read_listed(path, INDEX, manifest), manifest["files"], path / INDEX)
    rest = deserialized(read_listed(path, STATE, manifest), path / STATE)
    tensors = sharded_tensors.read(path, index, tree.like(sharded or {}, map_location))
    try:
        state = tree.join(rest, tensors)
    except (KeyError, TypeError, RecursionError):
        raise CheckpointError(
            f"{path / STATE} is damaged: it has places for tensors that {INDEX} doesn't have"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} is damaged: it holds a {type(state).__name__}, and no state")
    return state


def weights_of(state: Mapping[str, Any], path: Place) -> dict[str, Tensor]:
    """Return the module's weights in a loaded state.

    Args:
        state: result of `load`.
        path: of the checkpoint, for the message.

    Raises:
        CheckpointError: the state has no weights, so it was not saved by a trainer.
    """
    try:
        weights: dict[str, Tensor] = dict(state["strategy"]["module"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} holds no weights of a module: it isn't a checkpoint of a trainer") from None
    return weights


def load_module(cls: type[T], path: Place, map_location: Any, strict: bool, override: Mapping[str, Any]) -> T:
    """Create a module with the hyperparameters of a checkpoint, and load its weights.

    Args:
        cls: class of the module.
        path: folder of the checkpoint.
        map_location: device of the module; None for the CPU.
        strict: see `Module.load_state_dict`.
        override: arguments of `cls` that replace those of the checkpoint.

    Raises:
        CheckpointError: the checkpoint lacks a required argument of `cls`.
    """
    state = load(path, map_location or "cpu")
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    weights, kept = weights_of(state, path), state.get("hparams")
    known = kept if isinstance(kept, dict) else {}
    hidden = {key.partition(".")[0] for key in masked_keys(known)} - override.keys()
    arguments = {name: v for name, v in known.items() if (takes_all or name in parameters) and name not in hidden}
    arguments |= override
    needed = [
        name
        for name, p in list(parameters.items())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in arguments
    ]
    if needed:
        raise CheckpointError(
            f"{cls.__name__} needs {', '.join(needed)}, which the checkpoint doesn't hold: pass it to "
            "load_from_checkpoint, or call self.save_hyperparameters() in __init__ (secrets are never saved)"
        )
    if hidden := hidden & parameters.keys():
        warnings.warn(
            f"{cls.__name__}: no secret is saved in a checkpoint, so {', '.join(sorted(hidden))} has its default; pass "
            "it to load_from_checkpoint",
            stacklevel=4,
        )
    module: Any = cls(**arguments)
    module.configure_model()
    module.on_load_checkpoint(state)
    module.load_state_dict(weights, strict=strict)
    if map_location is not None:
        module.to(map_location if not callable(map_location) else "cpu")
    return module  # type: ignore[no-any-return]
