"""The trial: a module computes the same step before and after it is parallelised, or training does not begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fabricx.core.module_state.buffers import BufferMark
from fabricx.core.module_state.rng import RandomState
from fabricx.core.tensors.complex_numbers import as_real
from fabricx.distributed.world import World
from fabricx.errors import FabricxError

_REMEDY = "Keep layers whole: set plan={'LAYER': 'replicate'} with their names"
_IN_STEP = (
    "The compared outputs of submodules are equal, so the step itself computes with weights or outputs that ranks have "
    "parts of: in place of a penalty on weights, set weight_decay of the optimizer; compute other terms in a submodule"
)


class StepChanged(FabricxError):
    """The step of a parallelised module differs from the step of a single process; the message names the place."""


@dataclass
class Record:
    """Loss, outputs and gradient norms of a step, for comparison with a second record.

    Attributes:
        loss: loss of the step; None without a loss.
        outputs: fingerprint of the output of each call of a submodule, in order: names and [norm, projections].
        gradients: norm of the gradient of each parameter by name, on each rank.
        precision: largest rounding error of the dtypes of outputs, relative.
    """

    loss: float | None = None
    outputs: list[tuple[str, list[float]]] = field(default_factory=list)
    gradients: dict[str, list[float]] = field(default_factory=dict)
    precision: float = torch.finfo(torch.float64).eps

    @property
    def tolerance(self) -> float:
        """Return the largest relative difference that rounding may cause: half of the digits are compared."""
        return math.sqrt(self.precision)


def recorded_step(
    module: nn.Module, run: Callable[[], Any], world: World | None = None,
    mark: Callable[[str, Tensor], list[float]] = lambda name, output: fingerprint(output),
    complete: Callable[[], None] = lambda: None, remedy: str = _REMEDY,
) -> Record:  # fmt: skip
    """Run the step once, and record its loss, the outputs of all submodules, and the norms of gradients.

    Weights, gradients, buffers and random states are as before afterwards. Random numbers are equal for all records.

    Args:
        module: root module.
        run: computes the training step for a few samples; returns its outputs.
        world: ranks with gradients to record; None for this rank only.
        mark: returns the fingerprint of an output of a submodule with a name.
        complete: called after the backward, to complete gradients.
        remedy: sentences for the message of an error in the step.
    """
    record = Record()
    entered: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_unchanged(module))
        for hook in _hooks(module, record, entered, mark):
            stack.callback(hook.remove)
        try:
            outputs = run()
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor):
                if loss.requires_grad:
                    loss.backward()
                    complete()
                record.loss = float(loss.detach())
        except (ValueError, FabricxError) as error:
            error.add_note(f"in the trial of the parallelised step, in {_innermost(entered)}. {remedy}")
            raise
        except Exception as error:
            raise StepChanged(
                f"the parallelised step fails in {_innermost(entered)}, but not in one process: "
                f"{type(error).__name__}: {error}. {remedy}"
            ) from error
        _record_gradients(module, record, world)
    return record


def check_unchanged(
    before: Record, after: Record, sharded: Sequence[str], ranks: int, remedy: str = _REMEDY
) -> None:  # fmt: skip
    """Compare the steps of a module before and after it was parallelised.

    Args:
        before: record of a single process.
        after: record of the parallelised module, on the same samples.
        sharded: names of parameters of which each rank has a part.
        ranks: number of ranks of the parallelised module.
        remedy: sentences for the message; by default it is completed by the pattern of a plan.

    Raises:
        StepChanged: the steps differ; the message names the first submodule or parameter that differs.
    """
    tolerance = max(before.tolerance, after.tolerance)
    changed = first_difference(before, after)
    where = f" The first output that differs is that of {changed}." if changed else ""
    if not _close(before.loss, after.loss, tolerance):
        raise StepChanged(
            f"the loss of the parallelised step is {after.loss}, but {before.loss} in one process.{where} "
            f"{_remedy_of_loss(changed, remedy)}"
        )
    total = math.sqrt(sum(norms[0] ** 2 for norms in before.gradients.values()))
    for name, norms in before.gradients.items():
        combined = after.gradients.get(name, [0.0])  # norms by rank
        if name in sharded and len(combined) == ranks:
            combined = [math.sqrt(sum(norm**2 for norm in combined))]
        for norm in combined:
            if not abs(norm - norms[0]) <= tolerance * max(total, 1e-30):  # True for NaN
                pattern = _pattern(changed or name.rpartition(".")[0]) if remedy is _REMEDY else ""
                raise StepChanged(
                    f"the gradient of {name} has the norm {norm} in the parallelised step, but {norms[0]} in one "
                    f"process.{where} {remedy}{pattern}"
                )


def first_difference(before: Record, after: Record) -> str:
    """Return the name of the first submodule with a different output; "" without a difference.

    Args:
        before: record of a single process.
        after: record of the parallelised module.
    """
    tolerance = max(before.tolerance, after.tolerance)
    for (name, wanted), (other, computed) in zip(before.outputs, after.outputs, strict=False):
        if name != other:
            return name
        if any(abs(a - b) > tolerance * max(wanted[0], 1e-30) for a, b in zip(wanted, computed, strict=True)):
            return name
    if len(before.outputs) != len(after.outputs):
        longer = max(before.outputs, after.outputs, key=len)
        return longer[min(len(before.outputs), len(after.outputs))][0]
    return ""


def _innermost(entered: Sequence[str]) -> str:
    """Return the innermost submodule that is computing."""
    return entered[-1] if entered else "the step or its backward"


def _remedy_of_loss(changed: str, remedy: str) -> str:
    """Return the sentences for a loss that differs.

    Args:
        changed: name of the first submodule with another output; "" without.
        remedy: as for `check_unchanged`.
    """
    if not changed:
        return _IN_STEP if remedy is _REMEDY else f"{_IN_STEP}. {remedy}"
    return f"{remedy}{_pattern(changed)}" if remedy is _REMEDY else remedy


def _pattern(name: str) -> str:
    return f", such as plan={{'{name}*': 'replicate'}}" if name else ""


def _close(before: float | None, after: float | None, tolerance: float) -> bool:
    if before is None or after is None:
        return before is after
    if math.isnan(before) or math.isinf(before):
        return math.isnan(after) == math.isnan(before)
    return abs(before - after) <= tolerance * max(abs(before), 1e-30)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients and random states at the end, and begin with a fixed seed."""
    buffers = BufferMark(module)
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    random = RandomState()  # of this rank's device: torch.random.fork_rng would warn of all others
    torch.manual_seed(0)
    try:
        yield
    finally:
        random.restore()
        buffers.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _hooks(
    module: nn.Module, record: Record, entered: list[str], mark: Callable[[str, Tensor], list[float]]
) -> Iterator[Any]:  # fmt: skip
    for name, part in module.named_modules():
        if part is not module:
            yield part.register_forward_pre_hook(_entering(name, entered), prepend=True)
            yield part.register_forward_hook(_leaving(name, record, entered, mark))


def _entering(name: str, entered: list[str]) -> Callable[..., None]:
    return lambda part, args: entered.append(name)


def _leaving(
    name: str, record: Record, entered: list[str], mark: Callable[[str, Tensor], list[float]]
) -> Callable[..., None]:  # fmt: skip
    def hook(part: nn.Module, args: Any, output: Any) -> None:
        entered.pop()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        for tensor in tensors:
            record.precision = max(record.precision, torch.finfo(tensor.dtype).eps)
            with torch.no_grad():
                record.outputs.append((name, mark(name, tensor.detach())))

    return hook


def fingerprint(tensor: Tensor, index: Tensor | None = None) -> list[float]:
    """Return the norm of a tensor, and projections that depend on the order of the elements.

    Args:
        tensor: of any shape.
        index: number of each element in a larger tensor of which this is a part, int64 of the same shape.
    """
    real = as_real(tensor.detach())
    flat = real.reshape(-1).double()
    if index is None:
        index = torch.arange(len(flat), device=flat.device)
    elif real.dim() > index.dim():  # a complex number has two elements
        index = torch.stack((2 * index, 2 * index + 1), -1)
    index = index.reshape(-1).double()
    projections = [(flat * (index * frequency).cos()).sum() for frequency in (0.0, 1.0, 0.37)]
    return [float(value) for value in (flat.norm(), *projections)]


def _record_gradients(module: nn.Module, record: Record, world: World | None) -> None:
    names = [name for name, _ in module.named_parameters()]
    norms = [0.0 if p.grad is None else float(as_real(p.grad.detach()).double().norm()) for p in module.parameters()]
    if world is None or not names:
        record.gradients = {name: [norm] for name, norm in zip(names, norms, strict=True)}
        return
    gathered = world.all_gather(torch.tensor(norms, dtype=torch.float64, device=world.device))
    record.gradients = {name: gathered[:, at].tolist() for at, name in enumerate(names)}
