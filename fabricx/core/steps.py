"""A module's steps in the form that the loop calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.core.hooks import accepts

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer


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
        manual = not t.module.automatic_optimization
        wrapped = t.precision_plugin.wrap_step(step, updates_weights=manual)
        t.training_step = _fitting(wrapped, accepts(step, 2), 2)
        t.steps["training"] = t.training_step


def _fitting(step: Callable[..., Any], takes: int, given: int) -> Callable[..., Any]:
    if takes >= given:
        return step
    return lambda *args: step(*args[:takes])


def checked_loss(loss: Any) -> Tensor:
    """Return the loss of `training_step`, shape [].

    Raises:
        ValueError: it is no tensor of one element with a gradient.
    """
    if not isinstance(loss, Tensor):
        what = f"a dict without 'loss' ({sorted(loss)})" if isinstance(loss, Mapping) else type(loss).__name__
        raise ValueError(f"training_step returned {what}; it returns a loss tensor, a dict with 'loss', or None")
    if loss.numel() != 1:
        raise ValueError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; a loss is one number, such as loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "training_step returned a loss without a gradient: it doesn't depend on any parameter that "
            "requires one. Is it detached, computed under no_grad, or are all parameters frozen?"
        )
    return loss.reshape(())


def detached(outputs: Any) -> Any:
    """Return what a training step has returned, for hooks: without its graph."""
    if isinstance(outputs, Mapping):
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in outputs.items()}
    return outputs
