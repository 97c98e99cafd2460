"""A module's steps, as the loop calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fabricx.hooks import accepts

if TYPE_CHECKING:
    from fabricx.trainer import Trainer


def wrap_steps(t: Trainer) -> None:
    """Look at the steps' signatures once, and put the precision around them."""
    names = {"validation": "validation_step", "test": "test_step", "predict": "predict_step"}
    for word, name in names.items():
        step = getattr(t.module, name, None)
        if callable(step):
            t.steps[word] = _fitting(
                t.precision_plugin.wrap_step(step), accepts(step, 3), 3 if t.several_loaders else 2
            )
    if callable(getattr(t.module, "training_step", None)):
        step = t.module.training_step
        t.training_step = _fitting(t.precision_plugin.wrap_step(step), accepts(step, 2), 2)
        t.steps["training"] = t.training_step


def _fitting(step: Callable[..., Any], takes: int, given: int) -> Callable[..., Any]:
    if takes >= given:
        return step
    return lambda *args: step(*args[:takes])
