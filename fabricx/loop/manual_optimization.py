"""Manual optimization on several ranks: calls of backward, clipping and step by the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.strategy_support.held_gradients import HeldGradients
from fabricx.core.tensors.complex_numbers import as_real
from fabricx.distributed.collective_guard import ALL_JOIN, along, together
from fabricx.errors import RanksDisagree, WrongLoss
from fabricx.loop.no_batch import no_batch_step
from fabricx.session.accumulation import accumulation_set
from fabricx.session.schedule import count_update, count_without_update

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.session.session import Session

FIRST_STEPS: Final = 2  # first steps of a run, whose gradients are compared over ranks
COMPARE_EVERY: Final = 64  # steps between later comparisons


def check_options(session: Session) -> None:
    """Refuse options that only automatic optimization supports.

    Args:
        session: its module is manually optimised.

    Raises:
        ValueError: such an option is set; the message gives the equivalent code for `training_step`.
    """
    accumulates = accumulation_set(session.options, session.callbacks)
    refused = {
        accumulates: (
            bool(accumulates),
            "divide the loss by the number of batches, and call optimizer.step() and optimizer.zero_grad() after these",
        ),
        f"gradient_clip_val={session.options.gradient_clip_val}": (
            bool(session.options.gradient_clip_val),  # 0 clips nothing
            "call self.clip_gradients(optimizer, limit, algorithm) before optimizer.step()",
        ),
        "batch_weight": (
            session.overridden.batch_weight,
            "divide the loss by the global weight, from self.all_gather, or use automatic optimization",
        ),
    }
    for option, (is_set, remedy) in refused.items():
        if is_set:
            raise ValueError(f"{option} has no effect on a manually optimised module: {remedy}")


def train_manually(session: Session, micro: Microbatch, batch: Any) -> Any:
    """Run a training step that calls backward and steps its optimizers; count the updates.

    Args:
        session: its module is manually optimised.
        micro: share of this rank in the global batch.
        batch: batch on the device.

    Returns:
        the outputs of `training_step`.

    Raises:
        WrongLoss: the outputs are neither a tensor nor a dict.
    """
    session.window.took_part(micro)
    _begin_batch(session)
    session.window.loss_factor = micro.loss_factor * session.gradient_factor
    step = session.training_step if batch is not None else no_batch_step(session)
    with along(micro.idle) if micro.idle else ALL_JOIN, _can_be_repeated(session):
        outputs = step(batch, micro.index)
    if outputs is not None and not isinstance(outputs, (Tensor, Mapping)):
        raise WrongLoss(
            f"{type(session.module).__name__}.training_step returned {type(outputs).__name__}: in manual optimization "
            "return a tensor, a dict for hooks, or nothing"
        )
    count_manual_steps(session)
    return outputs


def train_without_data(session: Session, micro: Microbatch, example: tuple[Any, ...]) -> None:
    """Run the training step for a batch of which this rank has no sample, with a loss of zero weight.

    Only the manual step determines how often it calls `backward`, and for which parameters, and all ranks have to make
    the same calls. It therefore computes a sample of another rank, or this rank's newest batch; logs, metric objects,
    random numbers and batch statistics do not change.

    Args:
        session: its module is manually optimised.
        micro: share of this rank in the global batch, without samples.
        example: arguments of the step; empty without any batch.

    Raises:
        ValueError: this rank has not had a batch.
    """
    session.settings_check.before_forward(micro)
    _begin_batch(session)
    session.window.loss_factor = 0.0
    if not example:
        raise ValueError(
            f"rank {session.world.rank} has not received a batch yet, but with manual optimization every rank takes "
            "part in each step; provide at least one batch per rank, or use fewer devices"
        )
    devices = [session.world.device] if session.world.device.type == "cuda" else []
    unchanged = _statistics_kept(session.module)
    with (
        session.metrics.logbook.muted(), torch.random.fork_rng(devices=devices), unchanged, _can_be_repeated(session)
    ):  # fmt: skip
        session.training_step(*example)
    session.metrics.logbook.pass_batch(session.state.step + 1)
    count_manual_steps(session)


def count_manual_steps(session: Session) -> None:
    """Count the weight updates of a manual batch: the steps of the optimizer that stepped most often.

    Without a step, other methods of an optimizer that have stepped an optimizer are an update together.

    Args:
        session: this rank's session.
    """
    steps = session.user_steps.manual_steps
    if steps or session.user_steps.other_update:
        count = max(steps.values(), default=1)
        session.user_steps.other_update = False
        steps.clear()  # first: a rank that waits for a dead rank in `after_update` repeats the batch
        for _ in range(count):
            count_update(session)
        session.batch.without_update, session.batch.updates = 0, count
    else:
        count_without_update(session)


def _begin_batch(session: Session) -> None:
    """Begin a batch: one that adds to gradients of earlier batches, or uses these, can't be tried again."""
    session.precision.begin()
    held = session.user_steps.held
    if held is not None and held.begin_batch():
        session.fault_tolerance.begin_unrepeatable()


@contextlib.contextmanager
def _can_be_repeated(session: Session) -> Iterator[None]:
    """Context of a step that is repeated after the death of a worker: an error undoes what the step has frozen."""
    if session.world.size == 1:
        yield
        return
    required = [(parameter, parameter.requires_grad) for parameter in session.module.parameters()]
    try:
        yield
    except BaseException:
        vars(session.module).pop("_requires_grad", None)  # of `toggle_optimizer`
        for parameter, before in required:
            parameter.requires_grad_(before)
        session.user_steps.manual_steps.clear()
        session.user_steps.other_update = False
        raise


@contextlib.contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Context that restores the running statistics of batch normalisation at its end."""
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    copies = [buffer.clone() for buffer in buffers]
    yield
    for buffer, copy in zip(buffers, copies, strict=True):
        buffer.copy_(copy)


def backward(session: Session, loss: Tensor, *args: Any, **options: Any) -> None:
    """Compute gradients as the mean over the global batch, for `Module.manual_backward`.

    Args:
        session: its module is manually optimised.
        loss: mean over this rank's samples, shape [].
        args: passed to `Module.backward`.
        options: passed to `Module.backward`.
    """
    if session.user_steps.held is not None:
        session.user_steps.held.before_backward()
    factor = session.window.loss_factor
    scaled = session.precision.scale(loss if factor == 1.0 else loss * factor, between_steps=True)
    for hook in session.hooks.on_before_backward:
        hook(loss)
    session.backward(scaled, *args, **options)
    for hook in session.hooks.on_after_backward:
        hook()


def step(session: Session, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
    """Step an optimizer, and count the step.

    Args:
        session: its module is manually optimised.
        optimizer: optimizer to step.
        closure: computes the loss and the gradients; None without.

    Returns:
        the loss of the first call of the closure; None without.
    """

    def call_hooks() -> None:
        with together() if session.batch.idle_ranks else ALL_JOIN:  # gradients are those of all ranks
            for hook in session.hooks.on_before_optimizer_step:
                hook(optimizer)

    return count_step(session, optimizer, closure, call_hooks)


def count_step(
    session: Session, optimizer: Optimizer, closure: Callable[[], Any] | None, prepare: Callable[[], None]
) -> Any:  # fmt: skip
    """Step an optimizer from within `training_step`, and count the step.

    Args:
        session: this rank's session.
        optimizer: optimizer to step.
        closure: computes the loss and the gradients; None without.
        prepare: called with the gradients of the step, without the scale of the loss, before the weights change.

    Returns:
        the loss of the first call of the closure; None without.
    """
    losses: list[Any] = []

    held = session.user_steps.held

    def with_gradients() -> None:
        session.precision.unscale(optimizer)
        prepare()
        if held is not None:
            held.before_step(optimizer)

    def computed() -> Any:
        assert closure is not None
        losses.append(closure())
        with_gradients()
        return losses[-1]

    if closure is None:
        with_gradients()
    session.precision.step(optimizer, session.strategy.optimizer_step, None if closure is None else computed)
    session.precision.updated(optimizer)
    if held is not None:
        held.after_step(optimizer)
    session.user_steps.manual_steps[id(optimizer)] = session.user_steps.manual_steps.get(id(optimizer), 0) + 1
    return losses[0] if losses else None


def watch_gradients(session: Session) -> None:
    """Watch gradients that batches leave for later ones, and compare the gradients of all ranks before optimizers step.

    They are compared in the first updates and then periodically.

    A gradient that was not computed by `manual_backward` (but by `loss.backward()` or `torch.autograd.grad`) is not
    averaged over ranks: the weights of the ranks would silently diverge.

    Args:
        session: its module is manually optimised.

    Raises:
        RanksDisagree: when an optimizer steps: gradients differ between ranks.
    """
    held = session.user_steps.held = HeldGradients(session.optimizers)
    session.undo.append(held.close)
    traits = session.strategy.traits
    if not traits.synchronous or traits.sharded:
        return

    def compare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        world = session.world.axis("data")  # ranks along the other axes have other parts of the gradients
        if world.size == 1 or (session.state.step >= FIRST_STEPS and session.state.step % COMPARE_EVERY):
            return
        fingerprint = _fingerprint(optimizer).to(world.device)
        largest, smallest = world.all_reduce(torch.stack([fingerprint, -fingerprint]), "max")
        # Averaged gradients are bitwise equal; clipping may round differently on other kinds of processors.
        if bool((largest + smallest > 1e-4 * largest[:, :1]).any()):
            raise RanksDisagree(
                f"step {session.state.step}: the gradients of {type(optimizer).__name__} differ between ranks. Compute "
                "them with self.manual_backward(loss), which averages them over ranks; loss.backward() and "
                "torch.autograd.grad do not"
            )

    session.undo.extend(optimizer.register_step_pre_hook(compare).remove for optimizer in session.optimizers)


def _fingerprint(optimizer: Optimizer) -> Tensor:
    """Return the norm and the scaled sum of each gradient, shape [parameters, 2]; zeros for parameters without one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fingerprint = torch.zeros(len(parameters), 2, dtype=torch.float64)
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None:
            values = as_real((gradient.coalesce().values() if gradient.is_sparse else gradient).detach()).double()
            fingerprint[number, 0] = values.norm().nan_to_num()
            fingerprint[number, 1] = (values.sum() / max(1, values.numel()) ** 0.5).nan_to_num()
    return fingerprint
