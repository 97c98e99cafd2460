"""Attributes that a run in workers has changed, apart from weights and metrics, for the caller's objects."""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import pathlib
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from torch import Tensor, nn

from fabricx import by_value
from fabricx.core.module_hooks import RUN_ATTRIBUTES
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.metrics.objects import attributes_of_metrics
from fabricx.trainer.hooks_of_layers import Hook, Key, keys_of_hooks, new_hooks, register, removed_hooks

if TYPE_CHECKING:
    from fabricx.core.datamodule import DataModule

LIMIT: Final = 64 * 2**20  # bytes of an attribute, and of all together: their copies cost less than a start of workers
_ITEMS: Final = 100_000  # items of a list or dict of a module
_SIMPLE: Final = (type(None), bool, int, float, complex, str)
_PLAIN: Final = (
    *_SIMPLE, bytes, bytearray, np.ndarray, np.generic, Tensor, pathlib.PurePath, datetime.date, datetime.time,
    datetime.timedelta, decimal.Decimal, uuid.UUID, enum.Enum,
)  # fmt: skip
_OF_MODULES: Final = frozenset(vars(nn.Module())) | {*RUN_ATTRIBUTES, "_requires_grad"}
_OF_DATA: Final = frozenset({"trainer", "_in_workers"})


class NotSent(Exception):
    """The reason why an attribute remains in the worker."""


@final
class Digest:
    """A file that keeps only a digest of the written bytes."""

    def __init__(self) -> None:
        self._digest, self.size = hashlib.blake2b(digest_size=16), 0

    def write(self, data: Any) -> int:
        """Add bytes to the digest.

        Args:
            data: bytes or a buffer.
        """
        self.size += (written := memoryview(data).nbytes)
        if self.size > LIMIT:
            raise NotSent(f"more than {LIMIT // 2**20} MiB")
        self._digest.update(data)
        return written

    def digest(self) -> bytes:
        """Return the digest of all bytes."""
        return self._digest.digest()


def refuse_shards(value: object) -> Any:
    """Refuse sharded tensors, which are valid only in their process group.

    Args:
        value: any object.

    Returns:
        `NotImplemented`: other objects are pickled as they are.

    Raises:
        ValueError: it is a shard.
    """
    if is_dtensor(value):
        raise ValueError("a rank's shard")
    return NotImplemented


def small(value: Any) -> Any:
    """Refuse shards, large arrays and tensors, and tensors of an accelerator.

    Args:
        value: any object.

    Returns:
        for a tensor, type, shape and content, because pickles of equal tensors differ; else `NotImplemented`.

    Raises:
        NotSent: the reason.
        ValueError: it is a shard.
    """
    refuse_shards(value)
    size = 0
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise NotSent("on an accelerator, within another object")
        size = value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        size = value.nbytes
    if size > LIMIT:
        raise NotSent(f"more than {LIMIT // 2**20} MiB")
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return NotImplemented
    content = as_bytes(value).numpy().data
    return tuple, ((str(value.dtype), tuple(value.shape), bytes(content)),)


def _fingerprint(value: object) -> tuple[Any, int]:
    """Return a fingerprint of a value, different for different values, and the bytes of the value.

    Raises:
        Exception: the value cannot be pickled, or is too large.
    """
    if type(value) in _SIMPLE:
        return (type(value), value), len(value) if isinstance(value, str) else 0
    by_value.dump(value, file := Digest(), home=True, reduce=small)
    return file.digest(), file.size


def _is_plain(value: object) -> bool:
    """Return whether a value is plain data: no functions, and no objects of other classes."""
    try:
        return _contains_plain_only(value)
    except Exception:  # of a class of the user: a tuple without a length, for example
        return False


def _contains_plain_only(value: object) -> bool:
    count, left = 0, [value]
    while left:
        item = left.pop()
        count += 1
        if count > _ITEMS:
            return False
        if isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            if len(item) > _ITEMS:
                return False
            left += item
        elif not isinstance(item, _PLAIN):
            return False
    return True


def _on_cpu(value: Any) -> Any:
    """Return a tensor in main memory, without the rest of a larger tensor that it is a view of."""
    if not isinstance(value, Tensor) or is_dtensor(value) or isinstance(value, nn.Parameter):
        return value
    if value.device.type not in ("cpu", "meta"):
        return value.detach().cpu()
    part = value.numel() * value.element_size()
    return value.detach().clone() if part < value.untyped_storage().nbytes() else value


def _of_module(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield paths and plain attributes of a module and its submodules; without public attributes of the module."""
    of_metrics = attributes_of_metrics(module)
    for path, part in module.named_modules():
        if path in of_metrics:
            continue
        # Without `detach`, the buffer would be sent as a name: the caller has it, too.
        buffers = ((name, part._buffers.get(name)) for name in part._non_persistent_buffers_set)
        unsaved = {name: None if buffer is None else buffer.detach() for name, buffer in buffers}
        attributes = {name: value for name, value in vars(part).items() if path or name.startswith("_")}
        kept = {name: value for name, value in attributes.items() if name not in _OF_MODULES} | unsaved
        yield path, {name: value for name, value in kept.items() if _is_plain(value)}


def _of_data(data: DataModule | None) -> dict[str, Any]:
    return {} if data is None else {name: value for name, value in vars(data).items() if name not in _OF_DATA}


@dataclass
class Changed:
    """Attributes that a run has changed.

    Attributes:
        module: of the module and its submodules, by path and name.
        hooks: that the run has registered on the module and its submodules.
        removed: keys of hooks that the run has removed from them.
        requires_grad: of parameters, by name.
        data: of the data module.
        remaining: reasons why other changed attributes of the data module are not sent, by name.
    """

    module: dict[str, dict[str, Any]] = field(default_factory=dict)
    hooks: list[Hook] = field(default_factory=list)
    removed: list[Key] = field(default_factory=list)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    remaining: dict[str, str] = field(default_factory=dict)

    def absorb(self, module: nn.Module, data: DataModule | None) -> None:
        """Set the attributes of the caller's objects.

        Args:
            module: of the caller.
            data: data module of the caller, if any.
        """
        parts = dict(module.named_modules())
        for path in self.module.keys() & parts.keys():
            part = parts[path]
            for name, value in self.module[path].items():
                buffer = part._buffers.get(name)
                if name not in part._buffers:
                    part.__dict__[name] = value
                elif isinstance(buffer, Tensor) and isinstance(value, Tensor) and buffer.shape == value.shape:
                    buffer.data = value.to(buffer.device)  # the same object: other attributes may refer to it
                else:
                    part._buffers[name] = value
        register(module, self.hooks, self.removed)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.requires_grad.get(name, parameter.requires_grad))
        if data is not None:
            vars(data).update(self.data)
            vars(data)["_in_workers"] = self.remaining


@final
class AttributesBefore:
    """Digests of the attributes at the beginning of a run in a worker.

    Args:
        module: of the run.
        data: data module of the run, if any.
    """

    def __init__(self, module: nn.Module, data: DataModule | None) -> None:
        self._module = {path: _digests(attributes) for path, attributes in _of_module(module)}
        self._hooks, self._requires_grad = keys_of_hooks(module), _requires_grad(module)
        self._data = _digests(_of_data(data))

    def changed(
        self, module: nn.Module, data: DataModule | None, gather: Callable[[Any], list[Any]], *, main_rank: bool
    ) -> Changed:  # fmt: skip
        """Return the attributes that have changed since the beginning; all ranks call it with a data module.

        An attribute of the data module is sent if it is equal on all ranks: in the next run, all ranks begin with it.
        Attributes of the module are those of the main rank.

        Args:
            module, data: of the run.
            gather: returns an object of each rank.
            main_rank: this rank sends its attributes.
        """
        changed, left = Changed(), LIMIT
        if main_rank:
            for path, attributes in _of_module(module):
                kept: dict[str, Any] = {}
                before = self._module.get(path, {})
                for name, value in attributes.items():
                    left = _add(kept, name, value, before.get(name), left)
                if kept:
                    changed.module[path] = kept
            changed.hooks = new_hooks(module, self._hooks, lambda hook: not isinstance(_digest_of(hook), _Unsent))
            changed.removed = removed_hooks(module, self._hooks)
            changed.requires_grad = dict(_requires_grad(module).items() - self._requires_grad.items())
        if data is None:
            return changed
        now = _digests(_of_data(data))
        differing = {name: digest for name, digest in now.items() if self._data.get(name) != digest}
        shown = {name: digest[0] if isinstance(digest, tuple) else digest for name, digest in differing.items()}
        everywhere = gather({name: _portable(digest) for name, digest in shown.items()})
        if not main_rank:
            return changed
        values = _of_data(data)
        for name, digest in differing.items():
            if isinstance(digest, _Unsent):
                changed.remaining[name] = digest.reason
            elif any(other.get(name) != everywhere[0].get(name) for other in everywhere):
                changed.remaining[name] = "different on each rank"
            elif digest[1] > left:
                changed.remaining[name] = f"more than {LIMIT // 2**20} MiB with the others"
            else:
                left -= digest[1]
                changed.data[name] = _on_cpu(values[name])
        return changed


@dataclass(frozen=True)
class _Unsent:
    """In the place of a digest.

    Attributes:
        reason: the reason why the attribute is not sent.
        number: identity of the object.
    """

    reason: str
    number: int


def _digest_of(value: Any) -> Any:
    try:
        return _fingerprint(_on_cpu(value))
    except NotSent as error:
        return _Unsent(str(error), id(value))
    except Exception:
        return _Unsent("can't be pickled", id(value))


def _digests(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _digest_of(value) for name, value in attributes.items()}


def _requires_grad(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def _portable(shown: Any) -> str:
    return shown.reason if isinstance(shown, _Unsent) else repr(shown)


def _add(kept: dict[str, Any], name: str, value: Any, before: Any, left: int) -> int:
    """Add an attribute of a module if it has changed and is small enough; returns the remaining bytes."""
    digest = _digest_of(value)
    if isinstance(digest, _Unsent) or digest == before or digest[1] > left:
        return left
    kept[name] = _on_cpu(value)
    return left - int(digest[1])
