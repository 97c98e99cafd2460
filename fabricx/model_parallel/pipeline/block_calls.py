"""Intercepted calls of single modules, before their hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def intercept(module: nn.Module, call: Call) -> Callable[[], None]:
    """Pass the calls of a module through a function.

    The class of the module is replaced by a subclass with the same name. Hooks and a replaced `forward` would run
    inside of the hooks of `fully_shard`, which an early end of the step would skip, and inside of the checkpointing of
    transformers' layers.

    Args:
        module: any.
        call: called with the module's own call, and its arguments.

    Returns:
        function that restores the class.
    """
    before: Any = type(module)

    def intercepted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(before.__call__, self), args, kwargs)

    names = {"__module__": before.__module__, "__qualname__": before.__qualname__, "__call__": intercepted}
    after: Any = type(before.__name__, (before,), names)
    module.__class__ = after

    def restore() -> None:
        assert type(module) is after, f"the class of {before.__name__} was replaced again"
        module.__class__ = before

    return restore
