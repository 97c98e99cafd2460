"""Steps of an optimizer that the user's code calls: in manual optimization, `optimizer_step` or `training_step`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from fabricx.consistency.weight_changes import WeightChanges
from fabricx.distributed.sharding.dtensors import is_dtensor
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
        ValueError: it has stepped with gradients of a scaled loss, or has assigned to the data of a shard.
    """
    session.fault_tolerance.settle()
    changes = WeightChanges(_weights(optimizer), values=True)
    steps: list[Any] = []
    name = f"{type(optimizer).__name__}.{method.__name__}"
    with _noting_steps(optimizer, steps), _RefusesAssignments(name):
        result = method(*args, **options)
    if session.batch.in_step and changes.first(_weights(optimizer)) is not None:
        if session.precision.scaler is not None and steps:
            raise ValueError(
                f"{name} updates weights with the gradients of a scaled loss: use precision='bf16-mixed' or '32-true', "
                "or define step(self, closure) in the optimizer, which calls the closure for each gradient"
            )
        session.fault_tolerance.begin_update()
        if steps and not session.module.automatic_optimization:
            session.user_steps.other_update = True
    return result


@contextlib.contextmanager
def _noting_steps(optimizer: Optimizer, steps: list[Any]) -> Iterator[None]:
    """Append to a list when an optimizer steps, also by `super().step()`, for which torch calls no hooks."""

    def noting(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def noted(*args: Any, **options: Any) -> Any:
            steps.append(args)
            return step(*args, **options)

        return noted

    watch = register_optimizer_step_post_hook(lambda stepped, args, options: steps.append(stepped))
    patched = [(part, vars(part)["step"]) for part in type(optimizer).__mro__ if "step" in vars(part)]
    for part, step in patched:
        part.step = noting(step)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        watch.remove()
        for part, step in patched:
            part.step = step  # type: ignore[attr-defined]


class _RefusesAssignments(TorchFunctionMode):
    """Refuses `parameter.data = values` of sharded parameters, which torch does not pass to the shards."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__set__ and is_dtensor(args[0]):  # type: ignore[attr-defined]
            raise ValueError(
                f"{self._name} assigns to the data of a sharded parameter, which its shard does not receive: use "
                "parameter.copy_(values) in no_grad, or strategy=ddp"
            )
        return func(*args, **(kwargs or {}))


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
