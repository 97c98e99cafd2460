"""Hooks that a program registers on layers: kept in workers, and returned to the caller's module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
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
Hook = tuple[Key, Any, dict[str, bool]]  # a hook, and the options with which it is registered


def _hooks(module: nn.Module) -> Iterator[tuple[Key, nn.Module, Any]]:
    for path, part in module.named_modules():
        for attribute in _METHODS:
            for number, hook in getattr(part, attribute).items():
                yield (path, attribute, number), part, hook


def keys_of_hooks(module: nn.Module) -> dict[Key, bool]:
    """Return the keys of all hooks of a module and its submodules, and whether the hook is the user's.

    Args:
        module: of the user.
    """
    return {key: _of_user(hook) for key, _, hook in _hooks(module)}


def reserve_numbers(module: nn.Module) -> None:
    """Make new hooks have other numbers than those of a module that this process has received.

    torch counts hooks in each process, and a new hook replaces a hook of its module with an equal number.

    Args:
        module: this rank's copy.
    """
    numbers = [number + 1 for _, _, number in keys_of_hooks(module)]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *numbers])


def new_hooks(module: nn.Module, before: Container[Key], can_be_sent: Callable[[Any], bool]) -> list[Hook]:
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
        _, attribute, number = key
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
        found.append((key, hook, options))
    return found


def removed_hooks(module: nn.Module, before: Mapping[Key, bool]) -> list[Key]:
    """Return the keys of the user's hooks that a run has removed from layers which the module still has.

    Args:
        module: of the run.
        before: result of `keys_of_hooks` at the beginning of the run.
    """
    now, parts = keys_of_hooks(module), dict(module.named_modules())
    return [key for key, of_user in before.items() if of_user and key not in now and key[0] in parts]


def register(module: nn.Module, hooks: list[Hook], removed: Iterable[Key] = ()) -> None:
    """Register and remove hooks of the caller's module as the run has done.

    Args:
        module: of the caller.
        hooks: from `new_hooks`. Their numbers remain, by which handles in attributes find them.
        removed: from `removed_hooks`.
    """
    parts = dict(module.named_modules())
    for path, attribute, number in removed:
        if path in parts:
            for items in (attribute, f"{attribute}_with_kwargs", f"{attribute}_always_called"):
                getattr(parts[path], items, {}).pop(number, None)
    following = RemovableHandle.next_id
    for (path, attribute, number), hook, options in hooks:
        if path in parts:
            RemovableHandle.next_id = number if number not in getattr(parts[path], attribute) else following
            getattr(parts[path], _METHODS[attribute])(hook, **options)
            following = max(following, RemovableHandle.next_id)
    RemovableHandle.next_id = following


def _of_user(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", "fabricx")
