"""Step hooks of optimizers whose parameters are divided over ranks: they see whole weights, as other hooks do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from torch.optim import Optimizer

HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # attributes of torch's optimizers


def step_beside_hooks(
    optimizer: Optimizer, context: Callable[[], AbstractContextManager[Any]], step: Callable[[], Any]
) -> Any:  # fmt: skip
    """Step an optimizer, and call the hooks of its step before and after it in a context of their own.

    Args:
        optimizer: the user's optimizer.
        context: context of the hooks.
        step: calls the step of the optimizer.

    Returns:
        the result of `step`.

    Raises:
        ValueError: a hook replaces the arguments of the step.
    """
    hooks = {name: vars(optimizer)[name] for name in HOOKS}
    if not any(hooks.values()):
        return step()
    before, after = hooks.values()
    with context():
        for hook in list(before.values()):
            if hook(optimizer, (), {}) is not None:
                raise ValueError(
                    f"a hook of register_step_pre_hook replaces the arguments of the step of "
                    f"{type(optimizer).__name__}, whose parameters are divided over ranks: return None, or use "
                    "strategy=ddp"
                )
    vars(optimizer).update({name: OrderedDict() for name in HOOKS})
    try:
        result = step()
    finally:
        vars(optimizer).update(hooks)
    with context():
        for hook in list(after.values()):
            hook(optimizer, (), {})
    return result
