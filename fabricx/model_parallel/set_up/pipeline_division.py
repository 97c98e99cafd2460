"""Division of a module in the stages of a pipeline, and the comparison of the step before and after."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fabricx.consistency.weight_changes import unchanged_weights
from fabricx.core.hook_calls.loss import loss_of
from fabricx.core.module_state.rng import seed_often
from fabricx.core.strategy_support.trial import Trial
from fabricx.model_parallel.context.context_parallel import ContextParallel
from fabricx.model_parallel.microbatches import rows_of
from fabricx.model_parallel.pipeline.chain import Chain, find_blocks, trace_chain
from fabricx.model_parallel.pipeline.checks import check_counters, check_evaluation
from fabricx.model_parallel.pipeline.cuts import Cuts, describe
from fabricx.model_parallel.pipeline.cuts import divide as divide_chain
from fabricx.model_parallel.pipeline.seeds import seeded
from fabricx.model_parallel.pipeline.stages import Pipeline
from fabricx.model_parallel.set_up.divided import Divided, Settings, stage_channels
from fabricx.model_parallel.set_up.evaluation_trial import Evaluated
from fabricx.model_parallel.tensor.tensor_parallel import TensorParallel
from fabricx.model_parallel.trial_run import IN_PARTS, Measured, changed_by_parts, gradients_in_parts, measure


@dataclass(frozen=True)
class WholeStep:
    """The step of a module before it is divided in stages.

    Attributes:
        measured: loss and gradient norm of two samples, with the random numbers of a pipeline with a single microbatch.
        changed: the first batch with another gradient than its microbatches, and these; None if all agree.
        untried: why the two samples can't be compared with their parts; "" if they can.
    """

    measured: Measured
    changed: tuple[Measured, Measured] | None
    untried: str


def find_chain(whole: Divided, trial: Trial, *, shared: bool) -> Chain:
    """Return the blocks of a module and the tensors between blocks, as a run of the step uses them.

    Args:
        whole: the module, before its division.
        trial: the training step.
        shared: all ranks call it, and have the same times.
    """

    def run() -> Any:
        if (outputs := trial.step(trial.batch, 0)) is None:
            raise ValueError(
                f"strategy={whole.settings.name} finds its stages in a run of training_step on the first two samples, "
                "for which it returned None: begin the data with samples that have a loss"
            )
        return outputs

    chunks = whole.world.axis("pipeline").size * whole.settings.virtual
    # Outside of the traces, in which this context would use all buffers.
    with trial.undisturbed(), unchanged_weights(whole.module):
        streams = whole.settings.sequence or whole.world.axis("context").size > 1
        chain = _traced(whole.module, whole.settings, run, chunks, streams=streams)
    if shared and (names := check_counters(whole.module, chain.blocks, trial, _microbatches(whole))):
        note = (
            f"training_step changes {', '.join(names)}: in a pipeline for each microbatch, and after the call of the "
            "blocks on the last stage only"
        )
        chain = replace(chain, notes=(*chain.notes, note))
    return replace(chain, costs=whole.world.broadcast_object(chain.costs)) if shared else chain  # times differ


def _traced(
    module: nn.Module, settings: Settings, run: Callable[[], Any], chunks: int, *, streams: bool
) -> Chain:  # fmt: skip
    """Return the chain of a module. Tensors pass blocks by only if the blocks can't be divided otherwise.

    Args:
        module: the user's module.
        settings: settings of the mesh.
        run: computes a training step.
        chunks: groups of blocks that are needed.
        streams: see `find_blocks`.
    """

    def traced(*, carries: bool) -> Chain:
        chosen = find_blocks(module, settings.blocks, run, outside=True, carries=carries, streams=streams)
        return trace_chain(module, chosen, run, carries=carries)

    def divisible(chain: Chain) -> bool:
        return len(chain.blocks) - len(chain.joined) >= chunks

    plain: Chain | ValueError
    try:
        plain = traced(carries=False)
    except ValueError as refusal:
        plain = refusal
    # Under `sequence`, stages can't replace shards.
    if not settings.sequence and (isinstance(plain, ValueError) or not divisible(plain)):
        with contextlib.suppress(ValueError):
            passing = traced(carries=True)
            if divisible(passing):
                return passing
    if isinstance(plain, ValueError):
        raise plain
    return plain


def measure_whole(whole: Divided, chain: Chain, trial: Trial, *, training: bool) -> WholeStep:
    """Compute the step before the module is divided, with its submodules in evaluation mode.

    Args:
        whole: the module, before its division.
        chain: blocks of the module.
        trial: the training step.
        training: mode of the module in the training step, where the loss may differ from that in evaluation mode.

    Raises:
        ValueError: the loss or the gradient is not finite.
    """
    measured = functools.partial(_measured, whole, norm=_plain_norm)
    before = measured(functools.partial(_seeded_gradients, whole.module, chain.blocks, trial))
    if not before.finite:
        raise ValueError(
            f"strategy={whole.settings.name} compares the divided module with the whole module before training, but "
            f"for the first two samples of the loader the loss is {before.loss} and the norm of the gradient "
            f"{before.norm}: correct or remove samples without a finite loss"
        )
    if _microbatches(whole) == 1:
        return WholeStep(before, None, "")
    with _mode(whole.module, training=training):
        return WholeStep(before, *_compare_parts(trial, functools.partial(measured, least=IN_PARTS)))


def divide_blocks(
    divided: Divided, chain: Chain, trial: Trial, layout: Mapping[str, Any], evaluated: Evaluated | None, *,
    prints: bool,
) -> Divided:  # fmt: skip
    """Divide the blocks over the stages.

    Args:
        divided: the module, with its other parts.
        chain: blocks of the module.
        trial: the training step.
        layout: layout of the run that is resumed or joined.
        evaluated: values of the validation step, if it can be tried.
        prints: print the stages.

    Raises:
        ValueError: the validation step needs tensors that the stages would not have, or batches can't be split.
    """
    settings, stages, microbatches = divided.settings, divided.world.axis("pipeline"), _microbatches(divided)
    cuts = divide_chain(chain.costs, stages.size * settings.virtual, chain.joined)
    if layout.get("blocks") == list(chain.blocks) and len(layout["cuts"]) == len(cuts):
        cuts = [(begin, end) for begin, end in layout["cuts"]]  # measured times would result in other cuts
    if evaluated is not None:
        _check_validation(divided, trial, chain, cuts, evaluated)
    pipeline = Pipeline(
        divided.module, chain, cuts, stages, schedule=settings.schedule, microbatches=microbatches,
        virtual=settings.virtual, channels=stage_channels(divided.world), weight=trial.weight,
        begin=functools.partial(_begin_blocks, divided.context, divided.tensor),
    )  # fmt: skip
    if microbatches > 1 and trial.samples is not None and rows_of(trial.batch) != trial.samples:
        raise ValueError(
            f"the first dimension of a batch of {trial.samples} samples has {rows_of(trial.batch)} elements, and a "
            "pipeline splits batches along their first dimension: let the loader return batches with the samples along "
            "it, or set microbatches=1"
        )
    if prints:
        numbers = (settings.virtual, microbatches, trial.rows)
        divided.print(describe(chain, cuts, stages.size, settings.schedule, *numbers))
    return replace(divided, pipeline=pipeline)


def _begin_blocks(context: ContextParallel | None, tensor: TensorParallel | None, inputs: Any) -> None:
    """Begin the blocks on a stage that does not compute the first, with the arguments of the first."""
    if context is not None:
        context.begin(inputs)
    if tensor is not None:
        tensor.begin()


def check_stages(divided: Divided, trial: Trial, whole: WholeStep) -> None:
    """Compare loss and gradient of two samples before and after the division; all ranks call it.

    Args:
        divided: the module.
        trial: the training step.
        whole: the step before the division.

    Raises:
        ValueError: the stages compute a different model, or the loss is not the mean over microbatches.
    """
    name, before = divided.settings.name, whole.measured
    after = _measured(divided, functools.partial(_staged_gradients, divided, trial), norm=divided.norm_of_data_rank)
    if before.differs(after):
        raise ValueError(
            f"strategy={name} computes another model: for two samples the loss is {after.loss:.9g} "
            f"and the norm of the gradient {after.norm:.9g}, but without stages {before.loss:.9g} and "
            f"{before.norm:.9g}. "
            "Choose other blocks by blocks=CLASS or a list of names, or set pipeline=1"
        )
    if whole.changed:
        raise ValueError(changed_by_parts(name, *whole.changed, weighted=trial.weight is not None))
    if whole.untried:
        divided.print([
            f"  note: the loss of two samples can't be compared with the mean of both: {whole.untried}. If it isn't "
            "the mean over samples, define batch_weight or set microbatches=1"
        ])  # fmt: skip


def _measured(
    divided: Divided, compute: Callable[[], float], *, norm: Callable[[Iterable[Tensor]], Tensor], least: float = 0.0
) -> Measured:  # fmt: skip
    return measure(compute, divided.module.parameters(), norm, divided.dtypes(), least=least)


def _microbatches(divided: Divided) -> int:
    return divided.settings.microbatches or 2 * divided.world.axis("pipeline").size


@contextlib.contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of a module, without its submodules."""
    before, module.training = module.training, training
    try:
        yield
    finally:
        module.training = before


def _compare_parts(
    trial: Trial, measured: Callable[[Callable[[], float]], Measured]
) -> tuple[tuple[Measured, Measured] | None, str]:  # fmt: skip
    """Compare the gradients of batches with the gradients of their microbatches.

    Returns:
        the gradients of the first batch that differs, and of its parts; and why the samples can't be compared.
    """
    untried = ""
    for number, batch in enumerate([trial.batch, *trial.others()]):
        together, apart = gradients_in_parts(trial, batch)
        try:
            whole, parts = measured(together), measured(apart)
        except Exception as error:  # such as a step that needs several samples, or a batch without a loss
            untried = untried or ("" if number else str(error))
            continue
        # The loss of a batch is nan if that of a sample is nan: such a batch cannot be compared.
        if (whole.finite or parts.finite) and parts.differs(whole):
            return (whole, parts), untried
    return None, untried


def _check_validation(divided: Divided, trial: Trial, chain: Chain, cuts: Cuts, evaluated: Evaluated) -> None:
    """Refuse a validation step that needs tensors that the stages would not have."""
    validation = trial.validation([divided.tensor] if divided.tensor is not None else [])
    if validation is None:
        return
    stages = divided.world.axis("pipeline").size
    for args in validation.args:
        run = functools.partial(divided.sharded(validation.step), *args)
        with torch.no_grad(), trial.undisturbed():
            if evaluated.begins:
                validation.begin()
            check_evaluation(validation.module, chain, cuts, stages, "validation_step", run)


def _seeded_gradients(module: nn.Module, blocks: Sequence[str], trial: Trial) -> float:
    """Compute the gradients of the two samples, with the random numbers of a pipeline; return the loss."""
    with trial.undisturbed(), seeded(module, blocks, seed_often):
        loss = loss_of(trial.step(trial.batch, 0))
        loss.backward()
    return float(loss.detach())


def _staged_gradients(divided: Divided, trial: Trial) -> float:
    """Compute the gradients of the two samples in stages; return the loss, on all stages."""
    pipeline = divided.pipeline
    assert pipeline is not None

    def backward(outputs: Any) -> Any:
        pipeline.backward(loss_of(outputs))
        return outputs

    microbatches, pipeline.microbatches = pipeline.microbatches, 1
    with trial.undisturbed():
        outputs = pipeline.forward_backward(divided.sharded(trial.step), backward, trial.batch, 0, seed=seed_often)
        pipeline.reduce_shared()
        if divided.context is not None:
            divided.context.average_gradients()
    pipeline.microbatches = microbatches
    stages = divided.world.axis("pipeline")
    loss = float(outputs["loss"] if isinstance(outputs, Mapping) else outputs) if pipeline.last else 0.0
    return float(stages.broadcast_object(loss, stages.size - 1))


def _plain_norm(parameters: Iterable[Tensor]) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
