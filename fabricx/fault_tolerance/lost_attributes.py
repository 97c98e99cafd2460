"""Attributes of the module and of callbacks that training has changed and a recovery does not restore."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np
from torch import Tensor, nn

from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import overrides
from fabricx.core.module_hooks import RUN_ATTRIBUTES, ModuleHooks
from fabricx.fault_tolerance.hook_entries import has_both
from fabricx.metrics.objects import attributes_of_metrics

_NOT_OF_USERS: Final = frozenset(vars(nn.Module())) | {*RUN_ATTRIBUTES, "_requires_grad"}
_VALUES: Final = (bool, int, float, complex, str, bytes, np.generic)
_SEQUENCES: Final = (list, tuple, deque)
_DEPTH: Final = 3  # of collections within collections
_ITEMS: Final = 64  # items of a collection, and elements of a tensor, of which the values are compared
_SHOWN: Final = 5  # attributes in a message


@final
class NotedAttributes:
    """Attributes at the start of training, and the names of those that have changed since.

    Numbers, texts, tensors, arrays and collections are compared. Parameters, buffers and metric objects are part of the
    run's state, and so are attributes of an object that adds them to checkpoints by `on_save_checkpoint` or
    `state_dict`. Callbacks of fabricx and their subclasses have their own state.

    Args:
        module: of the run.
        callbacks: of the run.
    """

    def __init__(self, module: nn.Module, callbacks: Sequence[Callback]) -> None:
        self._module, self._callbacks = module, callbacks
        self._before: dict[str, Any] | None = None

    def note(self) -> None:
        """Note the present attributes."""
        self._before = dict(self._contents())

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed since `note`; none before it."""
        if self._before is None:
            return []
        before = self._before
        return [name for name, content in self._contents() if content != before.get(name)]

    def _contents(self) -> Iterator[tuple[str, Any]]:
        """Yield names of attributes, and what they contain unless they are empty."""
        module = self._module
        if not has_both(module, ModuleHooks):
            of_metrics = attributes_of_metrics(module)
            for path, part in module.named_modules():
                if path not in of_metrics:
                    yield from _of(f"self.{path}" if path else "self", vars(part))
        for callback in self._callbacks:
            if _has_no_state(callback):
                yield from _of(type(callback).__name__, vars(callback))


def message(changed: Iterable[Sequence[str]]) -> str:
    """Return a message about attributes that have changed; an empty string without any.

    Args:
        changed: results of `NotedAttributes.changed` of all ranks.
    """
    names = list(dict.fromkeys(name for of_rank in changed for name in of_rank))
    if not names:
        return ""
    listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return (
        f"attributes that training has changed are not restored after the death of a worker: {listed}. A replacement "
        "begins with their initial values, so results that depend on them differ from those of an undisturbed run. "
        "Register a buffer for a number or a tensor of the module; or save and restore the attribute in "
        "on_save_checkpoint and on_load_checkpoint, or in state_dict and load_state_dict of a callback"
    )


def _has_no_state(callback: Callback) -> bool:
    """Return whether a callback is of a user, and adds nothing to checkpoints."""
    of_library = [base for base in type(callback).__mro__ if base.__module__.startswith("fabricx.")]
    if any(base not in Callback.__mro__ for base in of_library):
        return False
    return not overrides(callback, "state_dict", Callback) and not has_both(callback, Callback)


def _of(owner: str, attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        if name not in _NOT_OF_USERS and (content := _content(value, _DEPTH)) is not None:
            yield f"{owner}.{name}", content


def _content(value: Any, depth: int) -> Any:
    """Return what a value contains, in a form that can be compared; None if it is empty or of another kind."""
    if isinstance(value, _VALUES):
        return repr(value)  # also NaN
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else _of_tensor(value)
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes() if value.size <= _ITEMS and not value.dtype.hasobject else id(value)
    if not depth or not value:
        return None
    if type(value) in _SEQUENCES:
        items = [_content(item, depth - 1) for item in value] if len(value) <= _ITEMS else []
        return len(value), items
    if isinstance(value, (set, frozenset)):
        return len(value), sorted(repr(item) for item in value if isinstance(item, _VALUES))
    if isinstance(value, dict):
        return [(repr(key), _content(item, depth - 1)) for key, item in value.items() if isinstance(key, _VALUES)]
    return None


def _of_tensor(value: Tensor) -> Any:
    if type(value) is not Tensor or value.is_meta or value.is_sparse:
        return None
    if value.device.type == "cpu" and value.numel() <= _ITEMS:
        return value.dtype, value.shape, repr(value.detach().tolist())
    # The values would have to be waited for, or are many.
    return value.dtype, value.shape, id(value), 0 if value.is_inference() else value._version
