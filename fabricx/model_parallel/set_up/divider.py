"""Division of a module over the model's axes of a mesh, by trial runs of the training step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fabricx.consistency.weight_changes import unchanged_weights
from fabricx.core.module_state.evaluation_mode import evaluation_mode
from fabricx.distributed.world import World
from fabricx.model_parallel.set_up.divided import Divided, Settings

if TYPE_CHECKING:
    from fabricx.core.strategy_support.trial import Trial
    from fabricx.model_parallel.pipeline.chain import Blocks


def divide(
    settings: Settings, world: World, module: nn.Module, trial: Trial, layout: Mapping[str, Any], *,
    joins: bool = False,
) -> Divided:  # fmt: skip
    """Divide a module over the tensor axis, and over the context axis or the stages of a pipeline; or its experts.

    Args:
        settings: settings of the mesh.
        world: all ranks, with the axes of the mesh.
        module: whole.
        trial: the training step on two samples.
        layout: layout of the run that is resumed or joined.
        joins: this rank replaces a dead worker: it has no weights yet, and the other ranks don't compare with it.

    Raises:
        RanksDisagree: ranks that compute a batch together have read different samples.
        StepChanged: the divided module computes other values than the whole; the message names the place.
        ValueError: the module can't be divided, or a part of it is compiled.
    """
    from fabricx.model_parallel.set_up.evaluation_trial import check_after, evaluate_before
    from fabricx.model_parallel.set_up.same_batches import SameBatches
    from fabricx.model_parallel.tensor.plan import check_not_compiled

    for axis in ("tensor", "pipeline", "context", "expert"):
        if world.axis(axis).size > 1:
            check_not_compiled(module, f"{axis} parallelism")
    divided = Divided(settings, module, world)
    if not joins:
        SameBatches(world.axis("model")).check(trial.batch)
    if world.axis("pipeline").size > 1:
        from fabricx.model_parallel.set_up.pipeline_division import (
            check_stages,
            divide_blocks,
            find_chain,
            measure_whole,
        )

        chain = find_chain(divided, trial, shared=not joins)
        divided = replace(divided, settings=replace(settings, blocks=chain.blocks))
    else:
        chain = None
    training = module.training
    with ExitStack() as failed:
        # Random numbers in stages differ from a single process.
        with evaluation_mode(module) if chain is not None else nullcontext():
            evaluated = None if joins else evaluate_before(divided, trial, () if chain is None else chain.blocks)
            if world.axis("expert").size > 1:
                divided = _divide_experts(divided, trial, compares=not joins)
            elif chain is None:
                divided = _divide_layers(divided, trial, layout, failed, compares=not joins)
            else:
                whole = None if joins else measure_whole(divided, chain, trial, training=training)
                divided = _divide_layers(divided, trial, layout, failed, compares=not joins)
                divided = divide_blocks(divided, chain, trial, layout, evaluated, prints=not joins)
                if whole is not None:
                    check_stages(divided, trial, whole)
        if evaluated is not None:
            check_after(divided, trial, evaluated)
        failed.pop_all()
    return divided


def _divide_layers(
    divided: Divided, trial: Trial, layout: Mapping[str, Any], failed: ExitStack, *, compares: bool
) -> Divided:  # fmt: skip
    """Divide matrices over the tensor axis, and the sequence over the context axis.

    Args:
        divided: not divided yet.
        trial: the training step.
        layout: layout of the run that is resumed or joined.
        failed: receives the calls that undo the division if it fails later.
        compares: all ranks divide the module now, and compare it before and after.
    """
    blocks = _context_blocks(divided, trial)
    gc.collect()  # graphs of the trial runs remember the shapes of whole parameters
    if divided.world.axis("tensor").size > 1:
        divided = _divide_matrices(divided, trial, layout, compares=compares)
    return _divide_sequence(divided, blocks, trial, layout, failed, compares=compares) if blocks else divided


def _divide_matrices(divided: Divided, trial: Trial, layout: Mapping[str, Any], *, compares: bool) -> Divided:
    """Divide layers over the tensor axis, and compare the outputs of all submodules before and after."""
    from fabricx.model_parallel.pipeline.chain import find_blocks
    from fabricx.model_parallel.tensor.plan import TensorPlan, find_tensor_plan
    from fabricx.model_parallel.tensor.tensor_parallel import TensorParallel
    from fabricx.model_parallel.trial import check_unchanged, fingerprint, recorded_step

    settings, module, world = divided.settings, divided.module, divided.world.axis("tensor")
    with unchanged_weights(module):
        before = recorded_step(module, trial.run) if compares else None
    if compares:  # samples may differ between data ranks, and with them the layers that a step calls
        plan = find_tensor_plan(module, trial.run, world.size, settings.plan)
        plan = TensorPlan.of(divided.world.broadcast_object(plan.plain()))
    else:
        plan = TensorPlan.of(layout["plan"])
    blocks: Blocks = []
    if settings.sequence:
        staged = divided.world.axis("pipeline").size > 1
        blocks = find_blocks(module, settings.blocks, trial.run, streams=True, single=not staged)
    gc.collect()  # graphs of the trial runs remember the shapes of whole parameters
    tensor = TensorParallel(module, plan, world, sequence=settings.sequence, blocks=[block for _, block in blocks])
    divided = replace(divided, tensor=tensor)
    if before is None:
        return divided
    divided.print(plan.describe())
    run = replace(trial, step=divided.sharded(trial.step)).run
    after = recorded_step(module, run, world, lambda name, output: fingerprint(tensor.ordinary(output)))
    check_unchanged(before, after, list(tensor.placements), world.size)
    return divided


def _context_blocks(divided: Divided, trial: Trial) -> Blocks:
    if divided.world.axis("context").size == 1:
        return []
    from fabricx.model_parallel.context.context_parallel import context_blocks

    with unchanged_weights(divided.module):
        return context_blocks(divided.module, divided.settings.blocks, trial.run)


def _divide_sequence(
    divided: Divided, blocks: Blocks, trial: Trial, layout: Mapping[str, Any], failed: ExitStack, *, compares: bool
) -> Divided:  # fmt: skip
    """Divide the sequence in the blocks, and compare the outputs of all submodules before and after."""
    from fabricx.model_parallel.context.context_parallel import ContextParallel

    settings, tensor = divided.settings, divided.tensor
    if tensor is not None:
        tensor.divide_sequence()
    run = replace(trial, step=divided.sharded(trial.step)).run
    context = ContextParallel(
        divided.module, blocks, divided.world.axis("context"), dim=settings.sequence_dim,
        ring=settings.context_method == "ring",
        ordinary=tensor.ordinary if tensor is not None else lambda output: output,
    )  # fmt: skip
    failed.callback(context.undo)
    if compares:
        context.check(run)
        divided.print(context.describe())
    else:
        context.adopt(run, layout["lengths"])
    return replace(divided, context=context)


def _divide_experts(divided: Divided, trial: Trial, *, compares: bool) -> Divided:
    """Divide experts over data ranks, and compare the outputs of all submodules before and after."""
    from fabricx.model_parallel.experts.expert_parallel import REMEDY, ExpertParallel
    from fabricx.model_parallel.experts.modules import find_experts
    from fabricx.model_parallel.trial import check_unchanged, recorded_step

    module, world = divided.module, divided.world.axis("expert")
    expert_modules = find_experts(module, divided.settings.experts, world.size)
    with evaluation_mode(module):  # experts on different ranks draw different random numbers
        whole = functools.partial(_sum_gradients, list(module.parameters()), world)
        with unchanged_weights(module):
            before = recorded_step(module, trial.run, complete=whole, remedy=REMEDY) if compares else None
        experts = ExpertParallel(module, expert_modules, world)
        divided = replace(divided, experts=experts)
        if before is None:
            return divided
        divided.print([experts.describe()])
        others = [parameter for name, parameter in module.named_parameters() if name not in experts.placements]
        rest = functools.partial(_sum_gradients, others, world)
        run = replace(trial, step=divided.sharded(trial.step)).run

        def compared() -> Any:
            outputs = run()
            experts.begin_backward()
            return outputs

        after = recorded_step(module, compared, world, complete=rest, remedy=REMEDY)
    for record in (before, after):  # rows of other ranks, in other order
        record.outputs = [entry for entry in record.outputs if not experts.inside(entry[0])]
    check_unchanged(before, after, list(experts.placements), world.size, REMEDY)
    return divided


def _sum_gradients(parameters: Iterable[Tensor], world: World) -> None:
    """Sum the gradients of parameters over ranks with different samples."""
    for parameter in parameters:
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.contiguous()
            world.all_reduce(parameter.grad)
