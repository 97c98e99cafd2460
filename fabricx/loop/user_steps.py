"""Steps of an optimizer that the user's code calls: in manual optimization, `optimizer_step` or `training_step`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from fabricx.consistency.weight_changes import WeightChanges
from fabricx.loop import manual_optimization
from fabricx.loop.update import clip

if TYPE_CHECKING:
    from fabricx.session.session import Session


def step_optimizer(
    session: Session, optimizer: Optimizer, closure: Callable[[], Any] | None, **options: Any
) -> Any:  # fmt: skip
    """Step an optimizer for the module: in manual optimization, or in its `optimizer_step`.

    Args:
        session: this rank's session.
        optimizer: optimizer of the module.
        closure: computes the loss and the gradients; None without.
        options: further arguments of the optimizer's `step`.

    Returns:
        the loss of the first call of the closure in manual optimization; otherwise None.

    Raises:
        ValueError: servers step the optimizer, which have no further arguments.
    """
    if options:
        if session.serving.servers:
            raise ValueError(
                f"step({', '.join(f'{name}=...' for name in options)}): servers run the step of "
                f"{type(optimizer).__name__}, without these arguments; set them in the constructor of the optimizer"
            )
        with _step_with(optimizer, options):
            return step_optimizer(session, optimizer, closure)
    with session.gradients.weights_as_stored():
        session.fault_tolerance.begin_update()
        if session.module.automatic_optimization and session.batch.in_step and not session.user_steps.in_optimizer_step:
            return _step_early(session, optimizer, closure)
        if session.module.automatic_optimization:
            session.user_steps.own_steps += 1
            used = closure if id(optimizer) in session.overridden.closures else None
            session.precision.step(optimizer, session.strategy.optimizer_step, used)
            return None
        return manual_optimization.step(session, optimizer, closure)


def call_method(
    session: Session, optimizer: Optimizer, method: Callable[..., Any], *args: Any, **options: Any
) -> Any:  # fmt: skip
    """Call a method of an optimizer that is none of torch's, such as `first_step` of SAM; it may update weights.

    Args:
        session: this rank's session.
        optimizer: optimizer of the module.
        method: of the optimizer.
        args: of the method.
        options: of the method.

    Returns:
        the result of the method.

    Raises:
        ValueError: it has changed weights, and a rank has only shards of these, or gradients are scaled.
    """
    session.fault_tolerance.settle()
    changes = WeightChanges(_weights(optimizer), values=True)
    result = method(*args, **options)
    if session.batch.in_step and changes.first(_weights(optimizer)) is not None:
        name = f"{type(optimizer).__name__}.{method.__name__}"
        if session.strategy.traits.sharded:
            raise ValueError(
                f"{name} updates weights outside of optimizer.step(), where {type(session.strategy).__name__} has only "
                "shards of these, which assignments such as `p.data = old` do not change: use strategy=ddp, or an "
                "optimizer whose step(closure) makes all updates"
            )
        if session.precision.scaler is not None:
            raise ValueError(
                f"{name} updates weights with the gradients of a scaled loss: use precision='bf16-mixed' or '32-true', "
                "or define step(self, closure) in the optimizer, which calls the closure for each gradient"
            )
        session.fault_tolerance.begin_update()
        session.user_steps.other_update = not session.module.automatic_optimization
    return result


def _weights(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _step_early(session: Session, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """Step an optimizer for a `training_step` that steps it itself, although the module is optimised automatically."""
    if session.world.size > 1 or session.serving.servers:
        raise ValueError(
            f"training_step calls the step of {type(optimizer).__name__} itself, and with several ranks automatic "
            "optimization averages only the gradients of a returned loss: set self.automatic_optimization = False in "
            "__init__, and compute the gradients with self.manual_backward(loss)"
        )

    def prepare() -> None:
        clip(session, optimizer)

    return manual_optimization.count_step(session, optimizer, closure, prepare)


@contextlib.contextmanager
def _step_with(optimizer: Optimizer, options: Mapping[str, Any]) -> Iterator[None]:
    """Context in which each call of an optimizer's `step` has further arguments."""
    wrapper, step = vars(optimizer).get("step"), optimizer.step  # a scheduler has its own wrapper in the object
    vars(optimizer)["step"] = functools.partial(step, **options)
    try:
        yield
    finally:
        if wrapper is None:
            del vars(optimizer)["step"]
        else:
            vars(optimizer)["step"] = wrapper
