"""Checkpoints of other programs: files of Lightning, torch and Hugging Face (safetensors)."""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import pathlib
import pickle
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fabricx.checkpoint import numpy_data, stand_ins
from fabricx.checkpoint.archive import is_single_file
from fabricx.checkpoint.files import MANIFEST, MARKER, SHARDS, member
from fabricx.checkpoint.storage import Place, as_path, local_copy
from fabricx.checkpoint.unread import PERMISSION, is_unread
from fabricx.distributed.messages.plain_data import check_sizes, reason
from fabricx.errors import CheckpointError

_SAFETENSORS: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_SHOWN: Final = 6  # names in an error message
# Classes of plain data in files of Lightning. torch compares names, so Lightning is not imported.
_PLAIN: Final[list[Any]] = [
    argparse.Namespace,
    *numpy_data.GLOBALS,
    datetime.date,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    (frozenset, "builtins.frozenset"),
    (dict, "fabricx.checkpoint.hyperparameters.AttributeDict"),
    (dict, "fabricx.core.hparams.AttributeDict"),  # of an earlier version
    *((pathlib.Path, f"pathlib{part}.{kind}") for part in ("", "._local") for kind in ("PosixPath", "WindowsPath")),
    *((dict, f"{package}.AttributeDict") for package in (
        "pytorch_lightning.utilities.parsing", "lightning.fabric.utilities.data", "lightning_fabric.utilities.data",
        "lightning.pytorch.utilities.parsing",
    )),
]  # fmt: skip
# Entries that hooks of a module do not receive: names of fabricx's own entries, and states of Lightning's loops.
_NOT_FOR_HOOKS: Final = frozenset({
    "state_dict", "hyper_parameters", "hparams_name", "hparams_type", "loops", "callbacks", "optimizer_states",
    "lr_schedulers", "strategy", "state", "ranks", "hparams", "imported", "schedules", "metrics", "precision",
    "datamodule", "hparams_omitted", "hparams_form", "callback_arguments", "fabricx",
})  # fmt: skip


@dataclass
class Foreign:
    """A checkpoint of another program.

    Attributes:
        weights: weights by name.
        source: name of the program, with the version if the file has it.
        hparams: arguments of the module's constructor.
        argument: the constructor's argument for `hparams` as a dict; "" if each entry is an argument.
        epoch, step: position of the run.
        others: additional entries, from hooks.
    """

    weights: dict[str, Tensor]
    source: str
    hparams: dict[str, Any] = field(default_factory=dict)
    argument: str = ""
    epoch: int = 0
    step: int = 0
    others: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return the content in the form of a weights-only checkpoint of fabricx."""
        imported = {"source": self.source, "epoch": self.epoch, "step": self.step, "argument": self.argument}
        return {**self.others, "strategy": {"module": self.weights}, "hparams": self.hparams, "imported": imported}


def is_foreign(path: Place) -> bool:
    """Return whether a path is a file or a folder of safetensors that fabricx has not written.

    Args:
        path: any path.
    """
    path = as_path(path)
    if path.is_file():
        return path.name not in (MANIFEST, MARKER) and not is_single_file(path)
    if not path.is_dir() or (path / MANIFEST).exists() or (path / MARKER).exists() or any(path.glob(SHARDS)):
        return False
    return any(path.glob(f"*{_SAFETENSORS}")) or any(path.glob(f"*{_INDEX}"))


def read_foreign(path: Place, map_location: Any = "cpu", *, trusted: bool = False) -> Foreign:
    """Read a checkpoint of another program; no code of the file is executed unless it is trusted.

    Args:
        path: a file of Lightning or torch, a file or an index of safetensors, or a folder of Hugging Face.
        map_location: device of the tensors; "meta" reads their shapes only.
        trusted: see `torch_load`.

    Raises:
        CheckpointError: the file is damaged, contains objects other than tensors and plain data, or has no weights.
    """
    path = as_path(path)
    files = _safetensors(path)
    if files is None:
        return _from_torch(path, torch_load(path, map_location, trusted=trusted))
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= _from_safetensors(file, map_location)
    return Foreign(weights, "safetensors")


def _safetensors(path: Path) -> list[Path] | None:
    """Return the files of a checkpoint in safetensors; None for other formats."""
    if path.is_dir():
        indices, files = sorted(path.glob(f"*{_INDEX}")), sorted(path.glob(f"*{_SAFETENSORS}"))
        named = [file for file in (path / f"model{_INDEX}", path / f"model{_SAFETENSORS}") if file.is_file()]
        candidates = named[:1] or indices or files
        if len(candidates) != 1:
            raise CheckpointError(
                f"{path} has {len(candidates)} files of weights and no model{_SAFETENSORS}; set the path to one of "
                f"them: {_listed(file.name for file in candidates)}"
            )
        return _safetensors(candidates[0])
    if path.name.endswith(_INDEX):
        try:
            names = set(json.loads(path.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{path} is damaged: it has no weight_map with names of files") from None
        files = [member(path.parent, name) for name in sorted(names, key=str)]
        if absent := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(f"{path} names files that are missing: {_listed(absent)}")
        return files
    return [path] if path.suffix == _SAFETENSORS else None


def _from_safetensors(file: Path, map_location: Any) -> dict[str, Tensor]:
    device = str(map_location) if isinstance(map_location, (str, torch.device)) else "cpu"
    try:
        if device == "meta":
            with local_copy(file) as local, safe_open(local, "pt") as opened:
                shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        with local_copy(file) as local, safe_open(local, "pt", device=device) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged, or is not a safetensors file: {error}") from None


def torch_load(path: Path, map_location: Any, *, mapped: bool = False, trusted: bool = False) -> Any:
    """Return the content of a file of torch; no code of the file is executed unless it is trusted.

    Args:
        path: path of the file.
        map_location: device of the tensors.
        mapped: map the tensors into memory.
        trusted: also read objects of any class, which runs code that the file names. Otherwise, objects of classes that
            the user has not allowed by `torch.serialization.add_safe_globals` are `Unread`.

    Raises:
        CheckpointError: the file is damaged, or attacks, or its objects can't be read.
    """
    with local_copy(path) as local:
        return _loaded(local, path, map_location, mapped=mapped, trusted=trusted)


def load_objects(data: bytes, path: Path, map_location: Any, *, trusted: bool) -> dict[str, Any]:
    """Return objects by name; none if they can't be read in part, and the file does not attack; see `torch_load`.

    Args:
        data: result of `objects.pickled`.
        path: path of the checkpoint, for messages.
        map_location: device of the tensors in the objects.
        trusted: see `torch_load`.
    """
    try:
        objects = _loaded(io.BytesIO(data), path, map_location, mapped=False, trusted=trusted)
    except CheckpointError as error:  # tensors and plain data are in other files
        if trusted or isinstance(error.__context__, stand_ins.Attack):
            raise
        return {}
    if type(objects) is not dict:
        raise CheckpointError(f"{path} is damaged: its objects are a {type(objects).__name__}, not a dict")
    return objects


def _loaded(file: Any, path: Path, map_location: Any, *, mapped: bool, trusted: bool) -> Any:
    options = {"map_location": map_location, "mmap": mapped or None}
    if trusted:
        try:
            return torch.load(file, weights_only=False, **options)
        except Exception as error:
            raise CheckpointError(
                f"an object in {path} can't be read: {type(error).__name__}: {error}\n  if its class has moved or "
                "changed, make it importable under its former name"
            ) from error
    own = {stand_ins.global_name(entry) for entry in torch.serialization.get_safe_globals()}
    plain = [entry for entry in _PLAIN if stand_ins.global_name(entry) not in own]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch describes files that it refuses
            archive = zipfile.is_zipfile(file)
            if archive:
                check_sizes(file, os.path.getsize(file) if isinstance(file, Path) else len(file.getvalue()))
            if isinstance(file, io.BytesIO):
                file.seek(0)
            try:
                with torch.serialization.safe_globals(plain):
                    return numpy_data.settled(torch.load(file, weights_only=True, **options))
            except (pickle.UnpicklingError, ValueError):  # the latter of an array of objects
                if not archive:
                    raise
                return numpy_data.settled(stand_ins.load(file, plain, path, **options))
    except pickle.UnpicklingError as error:
        permission = f"; if you trust the file, {PERMISSION}" if isinstance(error, stand_ins.Unsupported) else ""
        raise CheckpointError(
            f"{path} was refused, and nothing in it was executed: {reason(error)}\n  only tensors and plain data are "
            f"read{permission}. In the program that made the file, write them to a new file: "
            f'torch.save({{"state_dict": module.state_dict(), "hyper_parameters": {{...}}}}, "plain.ckpt")'
        ) from None
    except (
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
        AttributeError,
    ) as error:
        plainly = isinstance(error, (RuntimeError, OSError)) and "weights_only" not in str(error)
        detail = str(error) if plainly else reason(error)
        raise CheckpointError(
            f"{path} is not a checkpoint of fabricx, Lightning, torch or safetensors, or is damaged: {detail}"
        ) from None


def _from_torch(path: Path, content: Any) -> Foreign:
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        version = content.get("pytorch-lightning_version")
        weights, source = dict(content["state_dict"]), f"Lightning {version}" if version else "torch"
        hparams, argument = content.get("hyper_parameters"), str(content.get("hparams_name") or "")
        if is_unread(hparams) and argument not in ("", "kwargs"):  # a configuration of a class of its own
            hparams = {argument: hparams}
        hparams = hparams or {}
        hparams = dict(vars(hparams) if isinstance(hparams, argparse.Namespace) else hparams)
        others = {name: value for name, value in content.items() if name not in _NOT_FOR_HOOKS}
        epoch, step = (value if isinstance(value := content.get(key), int) else 0 for key in ("epoch", "global_step"))
        return Foreign(weights, source, hparams, "" if argument == "kwargs" else argument, epoch, step, others)
    if isinstance(content, Mapping) and content and all(isinstance(value, Tensor) for value in content.values()):
        return Foreign(dict(content), "torch")
    has = f"entries {_listed(map(str, content))}" if isinstance(content, Mapping) else f"a {type(content).__name__}"
    raise CheckpointError(
        f"{path} has {has}, and no state_dict: save the weights as torch.save(module.state_dict(), path)"
    )


def renamed(weights: Mapping[str, Tensor], strip: str = "", add: str = "") -> dict[str, Tensor]:
    """Return weights with new names: a prefix is removed, then a new prefix is added.

    Args:
        weights: weights by name.
        strip: prefix to remove; weights without this prefix are omitted.
        add: prefix to add.
    """
    return {add + name.removeprefix(strip): tensor for name, tensor in weights.items() if name.startswith(strip)}


def mismatch(saved_names: Iterable[str], wanted: Iterable[str], path: object) -> str:
    """Return the error message for weights with other names than in the module.

    Args:
        saved_names: names in the checkpoint.
        wanted: names in the module.
        path: path of the checkpoint.

    >>> print(mismatch(["model.a", "model.b"], ["a", "b"], "x.ckpt"))
    the weights in x.ckpt are not those of the module
      missing: a, b
      not in the module: model.a, model.b
      the names begin with 'model.': fabricx checkpoint import x.ckpt NEW --strip-prefix model.
    """
    saved_names, wanted = list(saved_names), list(wanted)
    missing, more = [n for n in wanted if n not in set(saved_names)], [n for n in saved_names if n not in set(wanted)]
    lines = [f"the weights in {path} are not those of the module"]
    lines += [f"  missing: {_listed(missing)}"] if missing else []
    lines += [f"  not in the module: {_listed(more)}"] if more else []
    if prefix := _common_prefix(saved_names, wanted):
        lines.append(f"  the names begin with {prefix!r}: fabricx checkpoint import {path} NEW --strip-prefix {prefix}")
    elif prefix := _common_prefix(wanted, saved_names):
        lines.append(f"  the names lack {prefix!r}: fabricx checkpoint import {path} NEW --add-prefix {prefix}")
    else:
        lines.append(
            "  create the module with the arguments of the checkpoint; or rename the entries of "
            "checkpoint['state_dict'] in on_load_checkpoint; or load the matching weights only: "
            "Module.load_from_checkpoint(path, strict=False)"
        )
    return "\n".join(lines)


def shapes_differ(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: object) -> str:
    """Return the error message for weights with other shapes than in the module; "" if all shapes are equal.

    Args:
        saved: tensors of the checkpoint by name.
        wanted: tensors of the module by name.
        path: path of the checkpoint.

    >>> import torch
    >>> print(shapes_differ({"head": torch.empty(2, 3)}, {"head": torch.empty(5, 3)}, "x.ckpt"))
    the weights in x.ckpt are not those of the module
      head: shape [2, 3] in the checkpoint, [5, 3] in the module
      create the module with the arguments of the checkpoint; or load the other weights only: delete these names
      from checkpoint['state_dict'] in on_load_checkpoint, then Module.load_from_checkpoint(path, strict=False)
    """
    differ = [
        f"  {name}: shape {list(tensor.shape)} in the checkpoint, {list(wanted[name].shape)} in the module"
        for name, tensor in saved.items()
        if name in wanted and isinstance(tensor, Tensor) and tensor.shape != wanted[name].shape
    ]
    if not differ:
        return ""
    lines = [f"the weights in {path} are not those of the module", *differ[:_SHOWN]]
    lines += [f"  and {len(differ) - _SHOWN} more"] if len(differ) > _SHOWN else []
    lines.append(
        "  create the module with the arguments of the checkpoint; or load the other weights only: delete these names\n"
        "  from checkpoint['state_dict'] in on_load_checkpoint, then Module.load_from_checkpoint(path, strict=False)"
    )
    return "\n".join(lines)


def _common_prefix(longer: Iterable[str], shorter: Iterable[str]) -> str:
    """Return the prefix whose removal turns `longer` names into most of the `shorter` names; "" if none does."""
    names = set(shorter)
    prefixes = Counter(
        name[: at + 1] for name in longer for at, c in enumerate(name) if c == "." and name[at + 1 :] in names
    )
    prefix, count = prefixes.most_common(1)[0] if prefixes else ("", 0)
    return prefix if 2 * count > len(names) else ""


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
