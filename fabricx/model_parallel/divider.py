"""Division of a module over the model's axes of a mesh, by trial runs of its training step."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from fabricx.consistency.weight_changes import WeightChanges, refused_change
from fabricx.core.evaluation_mode import evaluation_mode
from fabricx.core.loss import loss_of
from fabricx.core.rng import seed_often
from fabricx.distributed.point_to_point import open_channels
from fabricx.distributed.world import World
from fabricx.model_parallel.block_calls import seeded
from fabricx.model_parallel.division import Division
from fabricx.model_parallel.expert_modules import find_experts
from fabricx.model_parallel.expert_parallel import REMEDY, ExpertParallel
from fabricx.model_parallel.microbatches import rows_of
from fabricx.model_parallel.trial_run import (
    IN_PARTS,
    Measured,
    changed_by_parts,
    gradients_in_parts,
    measure,
    tolerance_of,
)  # fmt: skip

if TYPE_CHECKING:
    from fabricx.core.trial import Trial
    from fabricx.model_parallel.context_parallel import ContextParallel
    from fabricx.model_parallel.evaluation_trial import Evaluated
    from fabricx.model_parallel.pipeline import Pipeline
    from fabricx.model_parallel.pipeline_chain import Blocks, Chain
    from fabricx.model_parallel.pipeline_cuts import Cuts
    from fabricx.model_parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Settings:
    """Options of a mesh that determine how a module is divided; see `Mesh`.

    Attributes:
        name: the strategy's name, for messages.
        half: the run computes in 16 bits.
        apart: data ranks have different gradients and weights.
    """

    name: str
    plan: Mapping[str, str]
    sequence: bool
    sequence_dim: int
    context_method: str
    blocks: str | Sequence[str]
    microbatches: int | None
    schedule: str
    virtual: int
    experts: str | Sequence[str]
    half: bool
    apart: bool = False


@final
class Divider:
    """Divides a module over the tensor axis, and over the context axis or the stages of a pipeline; or its experts.

    Args:
        settings: settings of the mesh.
        world: all ranks, with the axes of the mesh.

    Attributes:
        tensor, context, pipeline, experts: the parts of the division; None without that axis, and before `divide`.
        division: parts of the module's tensors on this rank; None before `divide`.
        plan: plan of tensor parallelism, as plain data.
    """

    def __init__(self, settings: Settings, world: World) -> None:
        self._settings, self._world = settings, world
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self.pipeline: Pipeline | None = None
        self.experts: ExpertParallel | None = None
        self.division: Division | None = None
        self.plan: dict[str, Any] | None = None
        self._evaluated: Evaluated | None = None  # values of the validation step before the division

    def world_changed(self, module: nn.Module, world: World) -> None:
        """Use other process groups, with the same place of this rank in the mesh; all ranks call it.

        Args:
            module: divided.
            world: all ranks, with the axes of the mesh.
        """
        self._world = world
        if self.tensor is not None:
            self.tensor.world_changed(world.axis("tensor"))
        if self.context is not None:
            self.context.world_changed(world.axis("context"))
        if self.pipeline is not None:
            self.pipeline.world_changed(world.axis("pipeline"), self._channels())
        if self.experts is not None:
            self.experts.world_changed(world.axis("expert"))
        self.division = Division(module, world, self.tensor or self.experts, self.pipeline)

    def sharded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that computes with the shards of matrices and sequences, or with divided experts.

        Args:
            step: step of the module.
        """
        step = step if self.tensor is None else self.tensor.wrap_step(step)
        step = step if self.experts is None else self.experts.wrap_step(step)
        return step if self.context is None else self.context.wrap_step(step)

    @property
    def layout(self) -> dict[str, Any]:
        """Return the division as plain data, for a resumed run and for replacements of dead workers."""
        plan: dict[str, Any] = {} if self.plan is None else {"plan": self.plan}
        if self.context is not None:
            plan["lengths"] = self.context.lengths
        if self.pipeline is None:
            return plan
        blocks, cuts = self.pipeline.chain.blocks, self.pipeline.cuts
        return {**plan, "blocks": list(blocks), "cuts": [list(cut) for cut in cuts]}

    def divide(self, module: nn.Module, trial: Trial, layout: Mapping[str, Any], *, joins: bool = False) -> None:
        """Divide the module.

        Args:
            module: whole.
            trial: the training step on two samples.
            layout: layout of the run that is resumed or joined.
            joins: this rank replaces a dead worker: it has no weights yet, and the other ranks don't compare with it.
        """
        in_stages = self._world.axis("pipeline").size > 1  # whose random numbers are not those of one process
        chain = self._chain(module, trial, shared=not joins) if in_stages else None
        with evaluation_mode(module) if in_stages else nullcontext():
            self._evaluated = None if joins else self._evaluate_whole(trial, chain)
            if self._world.axis("expert").size > 1:
                self._divide_experts(module, trial, compares=not joins)
            elif chain is not None and not joins:
                self._divide_in_stages(module, chain, trial, layout)
            else:
                self._divide_tensors(module, chain, trial, layout, compares=not joins)
        if self._evaluated is not None:
            self._check_evaluated(module, trial, self._evaluated)

    def _evaluate_whole(self, trial: Trial, chain: Chain | None) -> Evaluated | None:
        """Compute the validation step before the division; None without one that can be tried on all ranks."""
        from fabricx.model_parallel.evaluation_trial import Evaluated, evaluate_whole

        if chain is None:
            found = evaluate_whole(trial)
        else:
            found = evaluate_whole(trial, lambda copied: seeded(copied, chain.blocks, seed_often))
        tried = all(self._world.gather_objects(isinstance(found, Evaluated)))
        if isinstance(found, str):
            self._print([f"  note: validation_step is not tried before the run, since it fails: {found}"])
        return found if tried and isinstance(found, Evaluated) else None

    def _check_evaluated(self, module: nn.Module, trial: Trial, before: Evaluated) -> None:
        """Refuse a validation step that computes other values than in one process."""
        from fabricx.model_parallel.evaluation_trial import check_evaluated
        from fabricx.model_parallel.trial import StepChanged

        own = [self.tensor, self.context, *([] if self.experts is None else self.experts.forwards)]
        validation = trial.validation([part for part in own if part is not None])
        if not all(self._world.gather_objects(validation is not None)) or validation is None:
            self._print(["  note: validation_step is not tried, since the divided module can't be copied"])
            return
        step, pipeline = self.sharded(validation.step), self.pipeline
        if pipeline is not None:
            step = functools.partial(pipeline.evaluate, step, seed=seed_often)
        with trial.undisturbed():
            tolerance = tolerance_of(self._dtypes(module))
            # In 16 bits, rounding may change predictions, and with them an accuracy.
            complete = not self._settings.half and (pipeline is None or pipeline.last)
            difference = check_evaluated(trial, validation, step, before, tolerance, complete=complete)
        found = [text for text in self._world.gather_objects(difference) if text]
        if found:
            raise StepChanged(
                f"validation_step of the module divided by strategy={self._settings.name} computes other values: "
                f"{found[0]}. Compute them from outputs of the model, as training_step does, or choose other layers or "
                "blocks by plan or blocks"
            )

    def _dtypes(self, module: nn.Module) -> set[torch.dtype]:
        """Return the data types in which the module computes."""
        return {parameter.dtype for parameter in module.parameters()} | (
            {torch.bfloat16} if self._settings.half else set()
        )

    def _divide_tensors(
        self, module: nn.Module, chain: Chain | None, trial: Trial, layout: Mapping[str, Any], *, compares: bool = True
    ) -> None:  # fmt: skip
        """Divide matrices over the tensor axis, and the sequence over the context axis or blocks over stages."""
        blocks = self._context_blocks(module, trial)
        gc.collect()  # graphs of the trial runs remember the shapes of whole parameters
        if self._world.axis("tensor").size > 1:
            self._divide_matrices(module, trial, layout, compares=compares)
        if blocks:
            self._divide_sequence(module, blocks, trial, layout, compares=compares)
        if chain is not None:
            self._divide_blocks(module, chain, layout, trial, prints=compares)
        self.division = Division(module, self._world, self.tensor, self.pipeline)

    def _divide_experts(self, module: nn.Module, trial: Trial, *, compares: bool) -> None:
        """Divide experts over data ranks, and compare the outputs of all submodules before and after."""
        from fabricx.model_parallel.tensor_plan import check_not_compiled
        from fabricx.model_parallel.trial import check_unchanged, recorded_step

        world = self._world.axis("expert")
        check_not_compiled(module, "expert parallelism")
        expert_modules = find_experts(module, self._settings.experts, world.size)
        with evaluation_mode(module):  # the experts of another rank draw other random numbers
            whole = functools.partial(_sum_gradients, list(module.parameters()), world)
            with _unchanged_weights(module):
                before = recorded_step(module, trial.run, complete=whole, remedy=REMEDY) if compares else None
            self.experts = experts = ExpertParallel(module, expert_modules, world)
            self.division = Division(module, self._world, experts, None)
            if before is None:
                return
            self._print([experts.describe()])
            others = [parameter for name, parameter in module.named_parameters() if name not in experts.placements]
            rest = functools.partial(_sum_gradients, others, world)
            run = replace(trial, step=self.sharded(trial.step)).run

            def compared() -> Any:
                outputs = run()
                experts.begin_backward()
                return outputs

            after = recorded_step(module, compared, world, complete=rest, remedy=REMEDY)
        for record in (before, after):  # rows of other ranks, in other order
            record.outputs = [entry for entry in record.outputs if not experts.inside(entry[0])]
        check_unchanged(before, after, list(experts.placements), world.size, REMEDY)

    def _context_blocks(self, module: nn.Module, trial: Trial) -> Blocks:
        if self._world.axis("context").size == 1:
            return []
        from fabricx.model_parallel.context_parallel import context_blocks

        with _unchanged_weights(module):
            return context_blocks(module, self._settings.blocks, trial.run)

    def _divide_sequence(
        self, module: nn.Module, blocks: Blocks, trial: Trial, layout: Mapping[str, Any], *, compares: bool
    ) -> None:  # fmt: skip
        """Divide the sequence in the blocks, and compare the outputs of all submodules before and after."""
        from fabricx.model_parallel.context_parallel import ContextParallel

        run = replace(trial, step=self.sharded(trial.step)).run
        ordinary = self.tensor.ordinary if self.tensor is not None else lambda output: output
        world = self._world.axis("context")
        self.context = ContextParallel(
            module, blocks, world, dim=self._settings.sequence_dim, ring=self._settings.context_method == "ring",
            ordinary=ordinary,
        )  # fmt: skip
        if compares:
            self.context.check(run)
            self._print(self.context.describe())
        else:
            self.context.adopt(run, layout["lengths"])

    def _divide_in_stages(self, module: nn.Module, chain: Chain, trial: Trial, layout: Mapping[str, Any]) -> None:
        """Divide a module in stages, and compare loss and gradient of two samples before and after.

        Random numbers are those of a pipeline with one microbatch in both.
        """
        measured = functools.partial(measure, parameters=list(module.parameters()), dtypes=self._dtypes(module))
        before = measured(functools.partial(_seeded_gradients, module, chain.blocks, trial), norm=_plain_norm)
        if not before.finite:
            raise ValueError(
                f"strategy={self._settings.name} compares the divided module with the whole, and for the first two "
                f"samples of the loader the loss is {before.loss} and the norm of the gradient {before.norm}: correct "
                "or remove samples without a finite loss"
            )
        changed, untried = self._compare_parts(trial, functools.partial(measured, norm=_plain_norm, least=IN_PARTS))
        self._divide_tensors(module, chain, trial, layout)
        after = measured(functools.partial(self._staged_gradients, trial), norm=self._trial_norm)
        if before.differs(after):
            raise ValueError(
                f"strategy={self._settings.name} computes another model: for two samples the loss is {after.loss:.9g} "
                f"and the norm of the gradient {after.norm:.9g}, and without stages {before.loss:.9g} and "
                f"{before.norm:.9g}. "
                "Choose other blocks by blocks=CLASS or a list of names, or set pipeline=1"
            )
        if changed:
            raise ValueError(changed_by_parts(self._settings.name, *changed, weighted=trial.weight is not None))
        elif untried:
            self._print([
                f"  note: the loss of two samples can't be compared with the mean of both: {untried}. If it isn't the "
                "mean over samples, define batch_weight or set microbatches=1"
            ])  # fmt: skip

    def _compare_parts(
        self, trial: Trial, measured: Callable[[Callable[[], float]], Measured]
    ) -> tuple[tuple[Measured, Measured] | None, str]:  # fmt: skip
        """Compare the gradients of batches with those of their parts.

        Returns:
            the gradients of the first batch that differs, and of its parts; and why the samples can't be compared.
        """
        if self._microbatches == 1:
            return None, ""
        untried = ""
        for number, batch in enumerate([trial.batch, *trial.others()]):
            together, apart = gradients_in_parts(trial, batch)
            try:
                whole, parts = measured(together), measured(apart)
            except Exception as error:  # such as a step that needs several samples, or a batch without a loss
                untried = untried or ("" if number else str(error))
                continue
            # A sample whose loss is nan makes that of the batch nan: it shows nothing about the others.
            if (whole.finite or parts.finite) and parts.differs(whole):
                return (whole, parts), untried
        return None, untried

    @property
    def _microbatches(self) -> int:
        return self._settings.microbatches or 2 * self._world.axis("pipeline").size

    def _divide_matrices(
        self, module: nn.Module, trial: Trial, layout: Mapping[str, Any], *, compares: bool
    ) -> None:  # fmt: skip
        """Divide layers over the tensor axis, and compare the outputs of all submodules before and after."""
        from fabricx.model_parallel.pipeline_chain import find_blocks
        from fabricx.model_parallel.tensor_parallel import TensorParallel
        from fabricx.model_parallel.tensor_plan import TensorPlan, find_tensor_plan
        from fabricx.model_parallel.trial import check_unchanged, recorded_step

        world = self._world.axis("tensor")
        with _unchanged_weights(module):
            before = recorded_step(module, trial.run) if compares else None
        if compares:  # samples may differ between data ranks, and with them the layers that a step calls
            plan = find_tensor_plan(module, trial.run, world.size, self._settings.plan)
            plan = TensorPlan.of(self._world.broadcast_object(plan.plain()))
        else:
            plan = TensorPlan.of(layout["plan"])
        self.plan = plan.plain()
        blocks = (
            [block for _, block in find_blocks(module, self._settings.blocks, trial.run)]
            if self._settings.sequence
            else []
        )
        gc.collect()  # graphs of the trial runs remember the shapes of whole parameters
        self.tensor = TensorParallel(module, plan, world, sequence=self._settings.sequence, blocks=blocks)
        if before is None:
            return
        self._print(plan.describe())
        sharded = replace(trial, step=self.sharded(trial.step))
        after = recorded_step(module, sharded.run, world, self.tensor.ordinary)
        check_unchanged(before, after, list(self.tensor.placements), world.size)

    def _chain(self, module: nn.Module, trial: Trial, *, shared: bool) -> Chain:
        from fabricx.model_parallel.pipeline_chain import find_blocks, trace_chain

        def run() -> Any:
            return trial.step(trial.batch, 0)

        # Outside of the traces, in which it would use all buffers.
        with trial.undisturbed(), _unchanged_weights(module):
            chain = trace_chain(module, find_blocks(module, self._settings.blocks, run), run)
        return replace(chain, costs=self._world.broadcast_object(chain.costs)) if shared else chain  # times differ

    def _check_validation(self, trial: Trial, chain: Chain, cuts: Cuts) -> None:
        """Refuse a validation step that needs tensors that the stages would not have."""
        from fabricx.model_parallel.pipeline_checks import check_evaluation

        validation = trial.validation([self.tensor] if self.tensor is not None else [])
        if validation is None:
            return
        stages = self._world.axis("pipeline").size
        for args in validation.args:
            run = functools.partial(self.sharded(validation.step), *args)
            with torch.no_grad(), trial.undisturbed():
                if self._evaluated is not None and self._evaluated.begins:
                    validation.begin()
                check_evaluation(validation.module, chain, cuts, stages, "validation_step", run)

    def _divide_blocks(
        self, module: nn.Module, chain: Chain, layout: Mapping[str, Any], trial: Trial, *, prints: bool
    ) -> None:  # fmt: skip
        from fabricx.model_parallel.pipeline import Pipeline
        from fabricx.model_parallel.pipeline_cuts import describe, divide

        settings, stages = self._settings, self._world.axis("pipeline")
        cuts = divide(chain.costs, stages.size * settings.virtual, chain.joined)
        if layout.get("blocks") == list(chain.blocks) and len(layout["cuts"]) == len(cuts):
            cuts = [(begin, end) for begin, end in layout["cuts"]]  # measured times would give other cuts
        if self._evaluated is not None:
            self._check_validation(trial, chain, cuts)
        microbatches = self._microbatches
        self.pipeline = Pipeline(
            module, chain, cuts, stages, schedule=settings.schedule, microbatches=microbatches,
            virtual=settings.virtual, channels=self._channels(), weight=trial.weight,
        )  # fmt: skip
        if microbatches > 1 and trial.samples is not None and rows_of(trial.batch) != trial.samples:
            raise ValueError(
                f"the first dimension of a batch of {trial.samples} samples has {rows_of(trial.batch)} elements, and a "
                "pipeline splits batches by their first dimension: let the loader return the samples first, or set "
                "microbatches=1"
            )
        if prints:
            numbers = (settings.virtual, microbatches, trial.rows)
            self._print([*describe(chain, cuts, stages.size, settings.schedule, *numbers)])

    def _channels(self) -> dict[str, Any]:
        """Build the groups of the stages' transfers, where the backend needs several; all ranks call it."""
        if not self._world.silent:
            return {}
        pipeline = self._world.axis("pipeline")
        members: dict[str, list[int]] = {}
        for rank, coordinate in enumerate(self._world.gather_objects(pipeline.coordinate)):
            members.setdefault(coordinate, []).append(rank)
        return open_channels(self._world, list(members.values()))

    def _staged_gradients(self, trial: Trial) -> float:
        """Compute the gradients of the two samples in stages; returns the loss, on all stages."""
        assert self.pipeline is not None
        microbatches, self.pipeline.microbatches = self.pipeline.microbatches, 1
        with trial.undisturbed():
            outputs = self.pipeline.forward_backward(
                self.sharded(trial.step), self._trial_backward, trial.batch, 0, seed=seed_often
            )
            self.pipeline.reduce_shared()
        self.pipeline.microbatches = microbatches
        stages = self._world.axis("pipeline")
        loss = float(outputs["loss"] if isinstance(outputs, Mapping) else outputs) if self.pipeline.last else 0.0
        return float(stages.broadcast_object(loss, stages.size - 1))

    def _trial_backward(self, outputs: Any) -> Any:
        assert self.pipeline is not None
        self.pipeline.backward(loss_of(outputs))
        return outputs

    def _print(self, lines: Sequence[str]) -> None:
        if self._world.main_rank:
            print("\n".join(lines), flush=True)

    def _trial_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of the gradient of this data rank's samples; data ranks may have different samples."""
        from fabricx.model_parallel.gradient_norm import total_norm

        return total_norm(parameters, *self._of_data_rank())

    def _of_data_rank(self) -> tuple[World, Callable[[Tensor], float]]:
        """Return the ranks that compute with the same data, as `gradient_ranks` does."""
        assert self.division is not None
        copies, shares = self.division.copies, self._world.axis("data").size
        return self._world.axis("model"), lambda parameter: copies(parameter) / shares

    def gradient_ranks(self) -> tuple[World, Callable[[Tensor], float]]:
        """Return the ranks that have the parts of a gradient, and a function of a parameter.

        The function returns the number of these ranks that have the same elements of the parameter's gradient.
        """
        assert self.division is not None
        return self._of_data_rank() if self._settings.apart else (self._world, self.division.copies)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of the gradient of all ranks, or of this data rank's gradient if that is its own.

        Args:
            parameters: this rank's parameters, with gradients.
        """
        from fabricx.model_parallel.gradient_norm import total_norm

        return total_norm(parameters, *self.gradient_ranks())


@contextmanager
def _unchanged_weights(module: nn.Module) -> Iterator[None]:
    """Refuse a step that changes weights; it runs inside, on the whole module.

    Raises:
        ValueError: a parameter was changed.
    """
    changes = WeightChanges(module.parameters(), values=True)
    yield
    if (changed := changes.first_name(module)) is not None:
        raise ValueError(refused_change(changed))


def _seeded_gradients(module: nn.Module, blocks: Sequence[str], trial: Trial) -> float:
    """Compute the gradients of the two samples, with the random numbers of a pipeline; return the loss."""
    with trial.undisturbed(), seeded(module, blocks, seed_often):
        loss = loss_of(trial.step(trial.batch, 0))
        loss.backward()
    return float(loss.detach())


def _sum_gradients(parameters: Iterable[Tensor], world: World) -> None:
    """Sum the gradients of parameters over ranks whose samples may differ."""
    for parameter in parameters:
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient.contiguous()
            world.all_reduce(parameter.grad)


def _plain_norm(parameters: Iterable[Tensor]) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
