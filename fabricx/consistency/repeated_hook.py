"""Undoes changes of weights and optimizers by a hook that is called again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.module_state.buffers import persistent_buffers
from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.data.data_state import equal_states
from fabricx.distributed.sharding.dtensors import own_part

_CONSTANT: Final = frozenset({float, int, bool, str, type(None)})
_PARAMETERS: Final = frozenset({"params", "param_names"})


@final
class GroupOptions:
    """Options of the parameter groups of an optimizer, such as the learning rate.

    Args:
        optimizer: an optimizer of the module.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before = [  # most options are constants; they are noted before each batch of a run that can recover
            {
                name: value if type(value) in _CONSTANT else _copy(value)
                for name, value in group.items()
                if name not in _PARAMETERS
            }
            for group in optimizer.param_groups
        ]

    def remove_added(self) -> bool:
        """Remove the groups that were added since; return whether there was any."""
        added = self._optimizer.param_groups[len(self._before) :]
        del self._optimizer.param_groups[len(self._before) :]
        return bool(added)

    def restore(self) -> bool:
        """Restore the options, except for those of added groups; return whether an option had changed."""
        groups = zip(self._optimizer.param_groups, self._before, strict=False)
        return any([_restore_entries(group, before) for group, before in groups])  # noqa: C419


@final
class RepeatedHook:
    """Weights, persistent buffers and optimizers before a hook is called again.

    Other buffers and `requires_grad` stay as the hook sets them.

    Args:
        module: the user's module.
        optimizers: its optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._weights = {name: _copy(tensor) for name, tensor in self._held()}
        self._states = [
            {parameter: _copied(state) for parameter, state in optimizer.state.items()} for optimizer in optimizers
        ]
        self._options = list(map(GroupOptions, optimizers))

    def undo(self) -> str:
        """Restore the values before the hook.

        Returns:
            name of the first changed weight or optimizer, and the number of further names; "" without a change.
        """
        held = dict(self._held())
        changed = [name for name, kept in self._weights.items() if name in held and _restore(held[name], kept)]
        for optimizer, states, options in zip(self._optimizers, self._states, self._options, strict=True):
            if _restore_states(optimizer, states):
                changed.append(f"the state of {type(optimizer).__name__}")
            if options.remove_added():
                changed.append(f"parameter groups of {type(optimizer).__name__}")
            if options.restore():
                changed.append(f"options of {type(optimizer).__name__}")
        return "" if not changed else changed[0] + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")

    def _held(self) -> list[tuple[str, Tensor]]:
        tensors = [*self._module.named_parameters(), *persistent_buffers(self._module)]
        return [(name, tensor) for name, tensor in tensors if not is_placeholder(tensor)]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _copied(entries: dict[Any, Any]) -> dict[Any, Any]:
    return {name: _copy(value) for name, value in entries.items()}


def _same(value: Any, kept: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(kept, Tensor):
        return torch.equal(own_part(value), own_part(kept))
    return equal_states(value, kept)


def _restore(tensor: Tensor, kept: Tensor) -> bool:
    """Restore values in place; return False for equal values and for tensors of different shapes."""
    now, before = own_part(tensor), own_part(kept)
    if now.shape != before.shape or torch.equal(now, before):
        return False
    with torch.no_grad():
        now.copy_(before)
    return True


def _restore_entries(entries: dict[Any, Any], kept: dict[Any, Any]) -> bool:
    """Restore the entries of a dictionary; return whether an entry had changed."""
    changed = False
    for name, before in kept.items():
        now = entries.get(name)
        if name in entries and _same(now, before):
            continue
        changed = True
        if not (isinstance(now, Tensor) and isinstance(before, Tensor) and _restore(now, before)):
            entries[name] = before
    return changed


def _restore_states(optimizer: Optimizer, kept: dict[Any, dict[Any, Any]]) -> bool:
    added = [parameter for parameter in optimizer.state if parameter not in kept]
    for parameter in added:
        del optimizer.state[parameter]
    restored = [_restore_entries(optimizer.state[parameter], entries) for parameter, entries in kept.items()]
    return bool(added) or any(restored)
