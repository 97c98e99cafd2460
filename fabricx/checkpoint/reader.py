"""Loads a state or a module from a checkpoint."""

from __future__ import annotations

import functools
import hmac
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import yaml
from torch import Tensor, nn

from fabricx.checkpoint import archive, objects, sharded_tensors, single_file, tree
from fabricx.checkpoint.class_paths import check_classes, classes_named, derived, instantiate_module
from fabricx.checkpoint.files import (
    INDEX,
    OBJECTS,
    STATE,
    check_size,
    deserialized,
    read_listed,
    read_manifest,
    verify,
)  # fmt: skip
from fabricx.checkpoint.foreign import is_foreign, load_objects, mismatch, read_foreign, shapes_differ
from fabricx.checkpoint.hyperparameters import CLASS_PATH, INSTANTIATOR, Form, without_origin
from fabricx.checkpoint.index import parse
from fabricx.checkpoint.single_file import ReadsFiles
from fabricx.checkpoint.storage import Place, as_path, is_local
from fabricx.checkpoint.stored_tensors import stored_tensors
from fabricx.checkpoint.unread import names_in, permission_needed
from fabricx.distributed.messages.authentication import tag
from fabricx.distributed.sharding.fsdp_internals import shard_like
from fabricx.errors import CheckpointError, MissingArguments, did_you_mean
from fabricx.redaction import masked_keys

T = TypeVar("T")


def load(
    path: Place,
    map_location: Any = "cpu",
    sharded: Mapping[str, Tensor] | None = None,
    *,
    callbacks: Collection[str] = (),
    verified: bool = False,
    trusted: bool = False,
    key: bytes = b"",
    plugin: ReadsFiles | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of any number of ranks and any strategy; no code of its files is executed unless it is trusted.

    Args:
        path: path of the checkpoint; or weights in the format of Lightning, torch or safetensors, see `read_foreign`.
        map_location: device of the tensors.
        sharded: sharded parameters by name; all tensors saved for them (weights, moments, averages) are loaded as the
            same shards.
        callbacks: names of the callbacks whose averages are loaded as shards.
        verified: skip the verification of checksums, which the caller has just done.
        trusted: also read objects of any class, which runs code that the files name. Otherwise, objects of classes that
            the user has not allowed by `torch.serialization.add_safe_globals` are `Unread`, whose use is an error.
        key: secret of this run; objects that the run has written itself are read.
        plugin: reads a checkpoint that is a single file; the user has passed it to the Trainer.

    Returns:
        The saved state.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or has a newer format.
    """
    path = as_path(path)
    if is_foreign(path):
        state = read_foreign(path, map_location, trusted=trusted).state()
        weights = state["strategy"]["module"]
        weights |= {n: _shard(n, weights[n], like, path) for n, like in (sharded or {}).items() if n in weights}
        return state
    manifest = read_manifest(path) if verified else verify(path)
    own = _objects_of_run(path, manifest, key, map_location)
    if path.is_file():
        read = functools.partial(single_file.read_state, trusted=trusted, plugin=plugin)
        state = _load_single_file(path, map_location, sharded or {}, callbacks, read)
        return objects.filled(state, own, ()) if own else state
    for name, listed in manifest["files"].items():  # also if verified: another process may have verified it earlier
        check_size(path, name, listed)
    index = parse(read_listed(path, INDEX, manifest), manifest["files"], path / INDEX)
    rest = deserialized(read_listed(path, STATE, manifest), path / STATE)
    tensors = sharded_tensors.read(path, index, tree.like(sharded or {}, map_location, callbacks))
    try:
        state = tree.join(rest, tensors)
    except (KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path / STATE} is damaged: it refers to tensors that {INDEX} does not list") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE} is damaged: it contains a {type(state).__name__}, not a dict")
    if OBJECTS in manifest["files"]:
        if not own:
            own = load_objects(read_listed(path, OBJECTS, manifest), path, map_location, trusted=trusted)
        state = objects.put(state, own, path)
    return state


def _objects_of_run(path: Path, manifest: Mapping[str, Any], key: bytes, map_location: Any) -> dict[str, Any]:
    """Return the objects of a checkpoint that this run has written itself; none of other checkpoints."""
    if not key or objects.TAG not in manifest or not (path.is_file() or OBJECTS in manifest["files"]):
        return {}
    data = archive.read_objects(path) if path.is_file() else read_listed(path, OBJECTS, manifest)
    if not hmac.compare_digest(str(manifest[objects.TAG]).encode(), tag(key, [objects.TAG], data).hex().encode()):
        return {}
    return objects.unpickled(data, map_location)


def _load_single_file(
    path: Path, map_location: Any, sharded: Mapping[str, Tensor], callbacks: Collection[str],
    read: Callable[..., dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Load the state of a single file; of tensors of sharded parameters, this rank's shards."""
    if not sharded:
        return read(path, map_location)
    rest, tensors = tree.split(read(path, "cpu", mapped=is_local(path)))
    parameter_of = tree.owner(sharded, callbacks)

    def on_device(name: str, tensor: Tensor) -> Tensor:
        like = parameter_of(name, tensor.shape)
        return tensor.to(map_location, copy=True) if like is None else shard_like(tensor, like).clone()

    state: dict[str, Any] = tree.join(rest, {name: on_device(name, tensor) for name, tensor in tensors.items()})
    return state


def _shard(name: str, whole: Tensor, like: Tensor, path: Path) -> Tensor:
    if whole.shape != like.shape:
        raise CheckpointError(
            f"the weights in {path} are not those of the module: {name} has the shape {list(whole.shape)} there, and "
            f"{list(like.shape)} in the module; create the module with the arguments of the checkpoint"
        )
    return shard_like(whole, like)


def weights_of(state: Mapping[str, Any], path: Place) -> dict[str, Tensor]:
    """Return the module's weights in a loaded state.

    Args:
        state: result of `load`.
        path: path of the checkpoint, for the message.

    Raises:
        CheckpointError: the state has no weights, so it was not saved by a trainer.
    """
    try:
        weights: dict[str, Tensor] = dict(state["strategy"]["module"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path} contains no weights of a module: it was not written by a trainer. Pass a checkpoint of "
            "ModelCheckpoint or trainer.save_checkpoint"
        ) from None
    return weights


def load_weights(module: nn.Module, weights: dict[str, Tensor], path: Place, *, strict: bool = True) -> None:
    """Load weights into a module.

    Args:
        module: module with parameters.
        weights: weights by name; a tied weight may have any of its names.
        path: path of the checkpoint, for the message.
        strict: require that the names of all weights match; False warns.

    Raises:
        CheckpointError: names or shapes differ; the message names the remedy.
    """
    now = stored_tensors(module)
    names_of: dict[int, list[str]] = {}
    for name, tensor in now.items():
        names_of.setdefault(id(tensor), []).append(name)
    for names in names_of.values():
        present = next((name for name in names if name in weights), None)
        if present is not None and len(names) > 1:
            weights = {**weights, **{name: weights[present] for name in names if name not in weights}}
    try:
        keys = module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        if differ := shapes_differ(weights, now, path):
            raise CheckpointError(differ) from None
        if now.keys() == weights.keys():
            raise CheckpointError(f"the weights in {path} are not those of the module: {error}") from None
        raise CheckpointError(mismatch(weights, now, path)) from None
    if not strict and keys is not None and (keys.missing_keys or keys.unexpected_keys):
        warnings.warn(mismatch(weights, now, path).replace("are not", "are not all"), stacklevel=4)


def load_hparams(file: str | PathLike[str]) -> dict[str, Any]:
    """Return hyperparameters from a YAML file.

    Args:
        file: file with a mapping of names to values.

    Raises:
        CheckpointError: the file is missing or is not a mapping of plain data.
    """
    try:
        values = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise CheckpointError(f"hparams_file={str(file)!r}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(
            f"hparams_file={str(file)!r} is no YAML file with a line for each argument, such as lr: 0.1"
        )
    return values


def load_module(
    cls: type[T],
    path: Place,
    map_location: Any,
    strict: bool | None,
    override: Mapping[str, Any],
    hparams_file: str | PathLike[str] | None = None,
    *,
    trusted: bool = False,
) -> T:
    """Create a module with the hyperparameters of a checkpoint, and load its weights.

    Args:
        cls: class of the module.
        path: path of the checkpoint, see `load`.
        map_location: device of the module; the CPU for None, a function and a dict.
        strict: see `Module.load_state_dict`; None for `strict_loading` of the module.
        override: arguments of `cls` that replace the checkpoint's.
        hparams_file: YAML file with arguments in place of all arguments of the checkpoint.
        trusted: see `load`.

    Raises:
        CheckpointError: the weights do not match the module, or the checkpoint lacks a required argument of `cls`.
        TypeError: `override` has a name similar to an argument of `cls`.
        ValueError: `strict` contradicts `strict_loading` of the module.
    """
    if callable(map_location) or isinstance(map_location, Mapping):  # of torch.load, by the places of tensors
        map_location = "cpu"
    state = load(path, map_location or "cpu", trusted=trusted)
    weights, kept = weights_of(state, path), state.get("hparams")
    known = load_hparams(hparams_file) if hparams_file is not None else kept if isinstance(kept, dict) else {}
    form = Form.read(state.get("hparams_form"))
    if imported := state.get("imported", {}).get("argument"):
        form = Form(imported)
    known = _readable(cls, known, override, path, form.argument)
    if lost := [f"{name} ({kind})" for name, kind in state.get("hparams_omitted", {}).items() if name not in override]:
        warnings.warn(
            f"{cls.__name__}: {path} omits {', '.join(lost)}, which has weights or can't be pickled: it has its "
            "default; pass it to load_from_checkpoint",
            stacklevel=3,
        )
    module: Any = _create(cls, known, override, form, path, trusted=trusted)
    strict = _strictness(module, strict)
    module.configure_model()
    state |= {"state_dict": weights, "hyper_parameters": kept or {}}  # by which hooks of Lightning read them
    if isinstance(position := state.get("state"), dict):
        state |= {"epoch": position["epoch"], "global_step": position["step"]}
    state |= state.get(single_file.OF_HOOKS, {})
    module.on_load_checkpoint(state)
    load_weights(module, state["state_dict"], path, strict=strict)
    if map_location is not None:
        module.to(map_location)
    return module  # type: ignore[no-any-return]


def _readable(
    cls: type, known: dict[str, Any], override: Mapping[str, Any], path: Place, argument: str
) -> dict[str, Any]:  # fmt: skip
    """Return the hyperparameters without those that hold objects that were not read.

    Raises:
        CheckpointError: the constructor needs one of them.
    """
    unread = {name: classes for name, value in known.items() if (classes := set(names_in(value)))}
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    takes_all = argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    lacks = [name for name in unread if name not in override and (takes_all or name in parameters)]
    if lacks:
        text = permission_needed(set().union(*(unread[name] for name in lacks)), path)
        remedy = f"{cls.__name__}: {text}\n  or pass {', '.join(f'{name}=...' for name in lacks)}"
        if any(name in parameters and parameters[name].default is inspect.Parameter.empty for name in lacks):
            raise CheckpointError(f"{remedy} to load_from_checkpoint")
        warnings.warn(f"{remedy}; now {', '.join(lacks)} has the default", stacklevel=4)
    return {name: value for name, value in known.items() if name not in unread}


def _strictness(module: Any, strict: bool | None) -> bool:
    """Return whether all names of weights must match.

    Raises:
        ValueError: the module has set `strict_loading` to another value.
    """
    chosen = getattr(module, "strict_loading", None) is not False  # None is the default
    # Lightning's class has "_strict_loading".
    of_module = vars(module).get("strict_loading", vars(module).get("_strict_loading"))
    if strict is not None and strict != chosen and (of_module is not None or not chosen):
        raise ValueError(
            f"load_from_checkpoint(strict={strict}) contradicts {type(module).__name__}.strict_loading = {chosen}: "
            "remove one of them, or set both alike"
        )
    return chosen if strict is None else strict


def load_data(
    cls: type[T], path: Place, override: Mapping[str, Any], hparams_file: str | PathLike[str] | None = None, *,
    trusted: bool = False,
) -> T:  # fmt: skip
    """Create a data module with its hyperparameters of a checkpoint.

    Args:
        cls: class of the data module.
        path: path of the checkpoint, see `load`.
        override: arguments of `cls` that replace the checkpoint's.
        hparams_file: YAML file with arguments in place of all arguments of the checkpoint.
        trusted: see `load`.

    Raises:
        CheckpointError: the checkpoint lacks a required argument of `cls`.
    """
    form = Form()
    if hparams_file is not None:
        known: Any = load_hparams(hparams_file)
    elif is_foreign(path):
        others = read_foreign(as_path(path), trusted=trusted).others
        known, argument = others.get("datamodule_hyper_parameters"), others.get("datamodule_hparams_name")
        form = Form(argument if argument and argument != "kwargs" else "")
    else:
        manifest = read_manifest(as_path(path))
        known, form = manifest.get("datamodule_hparams"), Form.read(manifest.get("datamodule_hparams_form"))
        if manifest.get("datamodule_objects"):
            known = load(path, trusted=trusted).get("datamodule_hparams", known)
    known = _readable(cls, dict(known), override, path, form.argument) if isinstance(known, Mapping) else {}
    return _create(cls, known, override, form, path, trusted=trusted)


def data_state(cls: type, path: Place, *, trusted: bool = False) -> dict[str, Any]:
    """Return the result of `state_dict` of a data module that a checkpoint contains; empty without one.

    Args:
        cls: class of the data module, by whose name a checkpoint of Lightning has the state.
        path: path of the checkpoint, see `load`.
        trusted: see `load`.
    """
    if is_foreign(path):
        state = read_foreign(as_path(path), trusted=trusted).others.get(cls.__qualname__)
    else:
        state = load(path, trusted=trusted)["datamodule"]
    return state if isinstance(state, dict) else {}


def _create(
    cls: type[T], known: dict[str, Any], override: Mapping[str, Any], form: Form, path: Place, *, trusted: bool
) -> T:  # fmt: skip
    """Create an object with its hyperparameters of a checkpoint.

    Args:
        cls: the class, or a base class if the hyperparameters have the path of a class.
        known, override, form: see `_arguments`.
        path: path of the checkpoint.
        trusted: classes that only the checkpoint names may be created.

    Raises:
        CheckpointError: see `_arguments`; or the checkpoint names classes, and is not trusted.
    """
    if INSTANTIATOR not in known:
        return cls(**_arguments(cls, known, override, form))
    selected, known = str(known.get(CLASS_PATH, "")), {**form.restored(without_origin(known)), **override}
    selected_class = derived(cls, selected) if selected else cls
    if not trusted:
        check_classes(
            classes_named(selected_class or cls, {name: value for name, value in known.items() if name not in override})
            | ({selected} if selected_class is None else set()),
            path,
        )
    return instantiate_module(cls, {**known, CLASS_PATH: selected} if selected else known)


def _arguments(
    cls: type, known: dict[str, Any], override: Mapping[str, Any], form: Form
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments of a constructor: values of a checkpoint, and the caller's values in their place.

    Args:
        cls: the class.
        known: hyperparameters of the checkpoint.
        override: arguments that replace them.
        form: of the hyperparameters of the checkpoint.

    Raises:
        CheckpointError: a required argument is missing.
        TypeError: `override` has a name similar to an argument.
    """
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    argument, known = form.argument, form.restored(known)
    if argument in parameters and known:
        others = {name: value for name, value in override.items() if name not in parameters}
        known = {argument: form.whole({**known, **others})}
        override = {name: value for name, value in override.items() if name in parameters}
    hidden = {key.partition(".")[0] for key in masked_keys(known)} - override.keys()
    arguments = {name: v for name, v in known.items() if (takes_all or name in parameters) and name not in hidden}
    arguments |= override if takes_all else _accepted(cls, override, list(parameters)[1:])
    needed = [
        name
        for name, p in list(parameters.items())[1:]
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in arguments
    ]
    if needed:
        saved = f"it has {', '.join(known)}" if known else "self.save_hyperparameters() in __init__ saves them"
        passed = ", ".join(f"{name}=..." for name in needed)
        raise MissingArguments(
            f"{cls.__name__} needs {', '.join(needed)}, which the checkpoint doesn't hold: call load_from_checkpoint("
            f"..., {passed})\n  hyperparameters of the checkpoint: {saved}; secrets and ignored ones are never saved"
        )
    if hidden := hidden & parameters.keys():
        warnings.warn(
            f"{cls.__name__}: no secret is saved in a checkpoint, so {', '.join(sorted(hidden))} has its default; pass "
            "it to load_from_checkpoint",
            stacklevel=5,
        )
    return arguments


def _accepted(cls: type, override: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Return the arguments that a constructor accepts; further arguments are ignored with a warning, as in Lightning.

    Raises:
        TypeError: a name is similar to an argument of the constructor, which would silently keep its default.
    """
    for name in override.keys() - set(known):
        text = f"load_from_checkpoint({name}=...): {cls.__name__}.__init__ has no such argument"
        if near := did_you_mean(name, known):
            raise TypeError(f"{text}.{near}")
        warnings.warn(f"{text}, so it is ignored", stacklevel=6)
    return {name: value for name, value in override.items() if name in known}
