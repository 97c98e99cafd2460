"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from fabricx.core.callback import Callback
from fabricx.errors import WrongArgument, did_you_mean


@final
class LambdaCallback(Callback):
    """Call functions at hooks.

    >>> callback = LambdaCallback(on_train_start=lambda trainer, module: print("begins"))
    >>> callback.on_train_start(None, None)
    begins

    Args:
        **hooks: functions by name of the hook, with the arguments of the hook; None for no function.

    Raises:
        ValueError: no hook has that name, or the value is not callable.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        known = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
        for name, function in hooks.items():
            if name not in known:
                raise WrongArgument(
                    f"LambdaCallback({name}=...): there is no hook of that name.{did_you_mean(name, known)}"
                )
            if function is not None and not callable(function):
                raise ValueError(f"LambdaCallback({name}={function!r}): must be a function")
            if function is not None:
                setattr(self, name, function)
