"""Manual optimization on several ranks: the module's own calls of backward, clipping and step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.trainer.trainer import Trainer

FIRST_STEPS: Final = 2  # of a run, whose gradients are compared over ranks
COMPARE_EVERY: Final = 64  # and of later ones, every so many


def check_options(t: Trainer) -> None:
    """Refuse options that only automatic optimization can follow.

    Raises:
        ValueError: one of them is set; the message names what to write in `training_step` instead.
    """
    refused = {
        f"accumulate_grad_batches={t.accumulate_grad_batches}": (
            t.accumulate_grad_batches != 1,
            "call optimizer.step() and optimizer.zero_grad() only every so many batches, on a loss divided by that",
        ),
        f"gradient_clip_val={t.gradient_clip_val}": (
            t.gradient_clip_val is not None,
            "call self.clip_gradients(optimizer, limit, algorithm) before optimizer.step()",
        ),
        "batch_weight": (
            t.overridden.batch_weight,
            "divide the loss by the global weight, from self.all_gather, or take automatic optimization",
        ),
    }
    for option, (given, instead) in refused.items():
        if given:
            raise ValueError(f"{option} has no effect on a manually optimised module: {instead}")


def train_manually(t: Trainer, micro: Microbatch, batch: Any) -> Any:
    """Run one training step that computes its gradients and steps its optimizers itself; count the updates."""
    t.window.took_part(micro)
    t.window.loss_factor = micro.factor * t.strategy.gradient_factor
    outputs = t.training_step(batch, micro.index)
    t.count_manual_steps()
    return outputs


def train_without_data(t: Trainer, micro: Microbatch, company: tuple[Any, ...]) -> None:
    """Take the same steps as the other ranks in a batch of which this rank has no sample.

    How often a manual step calls `backward`, and for which parameters, is known to that step alone. So it runs on a
    sample of another rank, or the newest batch of this one, with a loss of zero weight; logs, metric objects, random
    numbers and batch statistics stay as they are.

    Raises:
        ValueError: this rank has had no batch at all.
    """
    if t.shared is not None:
        t.shared.before_forward(t, micro)
    t.window.loss_factor = 0.0
    if not company:
        raise ValueError(
            f"rank {t.world.rank} has not had a batch yet, and a manually optimised module needs all ranks in each "
            "step: let each rank's stream begin with one, or take fewer devices"
        )
    devices = [t.world.device] if t.world.device.type == "cuda" else []
    with t.logbook.muted(), torch.random.fork_rng(devices=devices), _statistics_kept(t.module):
        t.training_step(*company)
    t.logbook.pass_batch(t.state.step + 1)
    t.count_manual_steps()


@contextlib.contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Undo what happens inside to the running statistics of batch normalisation."""
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    copies = [buffer.clone() for buffer in buffers]
    yield
    for buffer, copy in zip(buffers, copies, strict=True):
        buffer.copy_(copy)


def backward(t: Trainer, loss: Tensor, *args: Any, **options: Any) -> None:
    """Compute gradients that are the mean over the global batch."""
    factor = t.window.loss_factor
    scaled = t.precision_plugin.scale(loss if factor == 1.0 else loss * factor)
    for hook in t.hooks.on_before_backward:
        hook(loss)
    t.backward(scaled, *args, **options)
    for hook in t.hooks.on_after_backward:
        hook()


def step(t: Trainer, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
    """Step one optimizer, and count that."""
    t.precision_plugin.unscale(optimizer)
    for hook in t.hooks.on_before_optimizer_step:
        hook(optimizer)
    t.precision_plugin.step(optimizer, t.strategy.step, closure)
    t.precision_plugin.updated()
    t.overridden.manual_steps[id(optimizer)] = t.overridden.manual_steps.get(id(optimizer), 0) + 1


def watch_gradients(t: Trainer) -> None:
    """Compare the gradients of all ranks before an optimizer steps, in the first updates and then now and then.

    A gradient that didn't come through `manual_backward` (`loss.backward()`, `torch.autograd.grad`) is a rank's own:
    the ranks' weights would silently part.
    """
    traits = t.strategy.traits
    if not traits.synchronous or traits.sharded:
        return

    def compare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if t.world.size == 1 or (t.state.step >= FIRST_STEPS and t.state.step % COMPARE_EVERY):
            return
        own = _fingerprint(optimizer).to(t.world.device)
        largest, smallest = t.world.all_reduce(torch.stack([own, -own]), "max")
        # Equal to the bit when they were joined; clipping may round in another way on another kind of processor.
        if bool((largest + smallest > 1e-4 * largest[:, :1]).any()):
            raise RanksDisagree(
                f"step {t.state.step}: the gradients of {type(optimizer).__name__} differ between ranks. A manually "
                "optimised module computes them with self.manual_backward(loss), which joins them; loss.backward() "
                "and torch.autograd.grad give each rank its own"
            )

    t.overridden.undo += [optimizer.register_step_pre_hook(compare).remove for optimizer in t.optimizers]


def _fingerprint(optimizer: Optimizer) -> Tensor:
    """Return the norm and the scaled sum of each gradient, shape [parameters, 2]; zeros where there is none."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = torch.zeros(len(parameters), 2, dtype=torch.float64)
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None:
            values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach().double()
            found[number, 0] = values.norm().nan_to_num()
            found[number, 1] = (values.sum() / max(1, values.numel()) ** 0.5).nan_to_num()
    return found
