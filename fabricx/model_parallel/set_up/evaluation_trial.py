"""The trial of the validation step: it computes the same values before and after a module is divided."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fabricx.core.module_state.rng import seed_often
from fabricx.core.strategy_support.trial import Trial, Validation
from fabricx.core.tensors.complex_numbers import as_real
from fabricx.errors import FabricxError
from fabricx.model_parallel.nested import leaves
from fabricx.model_parallel.pipeline.seeds import seeded
from fabricx.model_parallel.pipeline.trace import log_calls
from fabricx.model_parallel.set_up.divided import Divided
from fabricx.model_parallel.trial import StepChanged, fingerprint
from fabricx.model_parallel.trial_run import tolerance_of

NEAR_ZERO: Final = 0.01  # smaller values are compared as if they had this size
MASKED: Final = 1e30  # size of elements that are compared by their places


@dataclass(frozen=True)
class Evaluated:
    """Values of a validation step on two samples of each loader.

    Attributes:
        values: norm and projections of each value that the step returns or logs, and of each state of a metric.
        begins: the step needs the hooks at the begin of a validation.
    """

    values: Mapping[str, list[float]]
    begins: bool


def evaluate_before(whole: Divided, trial: Trial, blocks: Sequence[str]) -> Evaluated | None:
    """Compute the validation step before the module is divided; all ranks call it.

    Args:
        whole: the module, before its division.
        trial: has the step.
        blocks: names of the blocks of a pipeline, which have random numbers of their own.

    Returns:
        its values; None without a validation that can be computed on all ranks.
    """
    evaluated = evaluate_whole(
        trial, (lambda copied: seeded(copied, blocks, seed_often)) if blocks else lambda copied: nullcontext()
    )
    computed = all(whole.world.gather_objects(isinstance(evaluated, Evaluated)))
    if isinstance(evaluated, str):
        whole.print([f"  note: validation_step is not checked before the run; it fails in one process: {evaluated}"])
    return evaluated if computed and isinstance(evaluated, Evaluated) else None


def check_after(divided: Divided, trial: Trial, before: Evaluated) -> None:
    """Compute the validation step of a divided module, and compare it with that of one process; all ranks call it.

    Args:
        divided: the module.
        trial: has the step.
        before: values before the division.

    Raises:
        StepChanged: the step computes other values.
    """
    world, settings, pipeline = divided.world, divided.settings, divided.pipeline
    parts = [divided.tensor, divided.context, *([] if divided.experts is None else divided.experts.forwards)]
    validation = trial.validation([part for part in parts if part is not None])
    if not all(world.gather_objects(validation is not None)) or validation is None:
        divided.print(["  note: validation_step is not checked before the run; the divided module can't be copied"])
        return
    step = divided.sharded(validation.step)
    if pipeline is not None:
        step = functools.partial(pipeline.evaluate, step, seed=seed_often)
    with trial.undisturbed():
        # In 16 bits, rounding may change predictions, and with them an accuracy.
        complete = not settings.half and (pipeline is None or pipeline.last)
        tolerance = tolerance_of(divided.dtypes())
        difference = check_evaluated(trial, validation, step, before, tolerance, complete=complete)
    differences = [text for text in world.gather_objects(difference) if text]
    if differences:
        raise StepChanged(
            f"validation_step of the module divided by strategy={settings.name} computes other values: "
            f"{differences[0]}. Compute the values from outputs of the model, as training_step does, or divide other "
            "layers (plan=...) or blocks (blocks=...)"
        )


def evaluate_whole(
    trial: Trial, context: Callable[[nn.Module], AbstractContextManager[Any]] = lambda module: nullcontext()
) -> Evaluated | str | None:  # fmt: skip
    """Compute the validation step before the module is divided.

    Args:
        trial: has the step.
        context: called with the copy of the module; returns the context of the step.

    Returns:
        its values; the reason why it can't be computed; or None without a validation.
    """
    reason = ""
    for begins in (False, True):  # without hooks if possible: they may write to loggers
        try:
            validation = trial.validation(())
            if validation is None:
                return None
            return Evaluated(_values(trial, validation, validation.step, context, begins=begins), begins)
        except Exception as error:  # such as a step that needs a trained model
            reason = reason or f"{type(error).__name__}: {error}"
    return reason


def check_evaluated(
    trial: Trial, validation: Validation, step: Callable[..., Any], before: Evaluated, tolerance: float, *,
    complete: bool,
) -> str:  # fmt: skip
    """Compute the validation step of the divided module, and compare it with that of one process.

    Args:
        trial: the trial of `evaluate_whole`.
        validation: of the divided module.
        step: computes `validation.step` with all ranks.
        before: values before the division.
        tolerance: relative difference that rounding explains.
        complete: this rank has all values.

    Returns:
        the difference, as text; "" without one.

    Raises:
        StepChanged: the step fails.
    """
    try:
        after = _values(trial, validation, step, begins=before.begins)
    except (ValueError, FabricxError) as error:
        error.add_note("in the trial of validation_step")
        raise
    except Exception as error:
        raise StepChanged(
            f"validation_step fails in the divided module, but not in one process: {type(error).__name__}: {error}. "
            "Make it call the model as training_step does, or use strategy=ddp"
        ) from error
    return next(_differences(before.values, after, tolerance), "") if complete else ""


def _differences(
    before: Mapping[str, list[float]], after: Mapping[str, list[float]], tolerance: float
) -> Iterator[str]:  # fmt: skip
    for name in before.keys() ^ after.keys():
        yield f"{name} {'is missing' if name in before else 'is not computed in one process'}"
    for name, wanted in before.items():
        size = max(wanted[0], NEAR_ZERO)
        computed = after[name]
        if len(computed) != len(wanted) or any(
            not abs(a - b) <= tolerance * size for a, b in zip(wanted, computed, strict=True)
        ):
            yield f"{name} has the norm {computed[0]:.9g}, but {wanted[0]:.9g} in one process"


def _marks(tensor: Tensor) -> list[float]:
    """Return the fingerprint of a tensor; of infinite elements and masks, which would hide all others, their places."""
    found = fingerprint(tensor)
    if all(abs(value) < MASKED for value in found):
        return found
    real = as_real(tensor.detach())
    large = real.abs() >= MASKED
    places = torch.stack([real.isnan(), large & (real > 0), large & (real < 0)])
    return [*fingerprint(real.where(~places.any(0), 0)), *fingerprint(places.double())]


def _values(
    trial: Trial, validation: Validation, step: Callable[..., Any],
    context: Callable[[nn.Module], AbstractContextManager[Any]] = lambda module: nullcontext(), *, begins: bool,
) -> dict[str, list[float]]:  # fmt: skip
    values: dict[str, list[float]] = {}

    def add(name: str, value: Any) -> None:
        for path, leaf in leaves(value):
            tensor = torch.as_tensor(leaf) if isinstance(leaf, (int, float)) else leaf
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or not isinstance(leaf, Tensor)):
                label = name + "".join(f"[{key!r}]" for key in path)
                values[f"{label} ({len(values)})" if label in values else label] = _marks(tensor)

    with torch.no_grad(), trial.undisturbed(), log_calls(validation.module, lambda n, v: add(f"the logged {n!r}", v)):
        if begins:
            validation.begin()
        for number, args in enumerate(validation.args):
            with context(validation.module):
                add(f"the output for loader {number}" if number else "the output", step(*args))
        for name, part in validation.module.named_modules():
            add(f"the state of {name}", getattr(part, "metric_state", None))  # of a metric of torchmetrics
    return values
