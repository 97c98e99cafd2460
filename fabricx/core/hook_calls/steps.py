"""Steps of a module in the form that the loop calls, and checks of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fabricx.core.hook_calls.signatures import accepts, requires

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.precision import Precision


def wrap_steps(module: Module, precision: Precision, *, several_loaders: bool) -> dict[str, Callable[..., Any]]:
    """Return the module's steps, wrapped in the precision and adapted to the number of their parameters.

    Args:
        module: the user's module.
        precision: the run's precision.
        several_loaders: evaluation steps are called with the index of the loader.

    Returns:
        functions by name: "training", "validation", "test", "predict"; those that the module has.
    """
    steps: dict[str, Callable[..., Any]] = {}
    names = {"validation": "validation_step", "test": "test_step", "predict": "predict_step"}
    for word, name in names.items():
        step = getattr(module, name, None)
        if callable(step):
            wrapped = precision.wrap_step(step)
            if requires(step) > 2 and not several_loaders:
                steps[word] = _of_first_loader(wrapped)
            else:
                steps[word] = _fitting(wrapped, accepts(step, 3), 3 if several_loaders else 2)
    step = getattr(module, "training_step", None)
    if callable(step):
        wrapped = precision.wrap_step(step, updates_weights=not module.automatic_optimization)
        steps["training"] = _fitting(wrapped, accepts(step, 2), 2)
    return steps


def _fitting(step: Callable[..., Any], accepted: int, passed: int) -> Callable[..., Any]:
    if accepted >= passed:
        return step
    return lambda *args: step(*args[:accepted])


def _of_first_loader(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: step(*args, 0)


def detached(outputs: Any) -> Any:
    """Return the outputs of a training step without their graph, for hooks.

    Args:
        outputs: outputs of the step; only tensors of a mapping are detached.
    """
    if isinstance(outputs, Mapping):
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in outputs.items()}
    return outputs
