"""Hooks that a program registers on layers: kept in workers, and returned to the caller's module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

_METHODS: Final = {  # by the attribute of a module that has the hooks
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}

Key = tuple[str, str, int]  # path of a module, attribute with its hooks, number of a hook
Hook = tuple[str, str, Any, dict[str, bool]]  # path of a module, method that registers the hook, hook, options


def _hooks(module: nn.Module) -> Iterator[tuple[Key, nn.Module, Any]]:
    for path, part in module.named_modules():
        for attribute in _METHODS:
            for number, hook in getattr(part, attribute).items():
                yield (path, attribute, number), part, hook


def keys_of_hooks(module: nn.Module) -> set[Key]:
    """Return the keys of all hooks of a module and its submodules.

    Args:
        module: of the user.
    """
    return {key for key, _, _ in _hooks(module)}


def reserve_numbers(module: nn.Module) -> None:
    """Make new hooks have other numbers than those of a module that this process has received.

    torch counts hooks in each process, and a new hook replaces a hook of its module with an equal number.

    Args:
        module: this rank's copy.
    """
    numbers = [number + 1 for _, _, number in keys_of_hooks(module)]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *numbers])


def new_hooks(module: nn.Module, before: set[Key], can_be_sent: Callable[[Any], bool]) -> list[Hook]:
    """Return the hooks that a run has registered, without those of fabricx and torch, which each run registers.

    Without them, attributes that return would tell a program that its hooks exist: transformers 5 registers hooks in
    the first forward, and an attribute then prevents others.

    Args:
        module: of the run.
        before: keys of the hooks at the beginning of the run.
        can_be_sent: whether a hook can be pickled and is small.
    """
    found: list[Hook] = []
    for key, part, hook in _hooks(module):
        path, attribute, number = key
        partial_backward = attribute == "_backward_hooks" and not part._is_full_backward_hook
        if key in before or partial_backward or not _of_user(hook) or not can_be_sent(hook):
            continue
        options = {}
        if attribute == "_forward_pre_hooks":
            options = {"with_kwargs": number in part._forward_pre_hooks_with_kwargs}
        elif attribute == "_forward_hooks":
            options = {
                "with_kwargs": number in part._forward_hooks_with_kwargs,
                "always_call": number in part._forward_hooks_always_called,
            }
        found.append((path, _METHODS[attribute], hook, options))
    return found


def register(module: nn.Module, hooks: list[Hook]) -> None:
    """Register the hooks of `new_hooks` on the caller's module.

    Args:
        module: of the caller.
        hooks: in the order of their calls.
    """
    parts = dict(module.named_modules())
    for path, method, hook, options in hooks:
        if path in parts:
            getattr(parts[path], method)(hook, **options)


def _of_user(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", "fabricx")
