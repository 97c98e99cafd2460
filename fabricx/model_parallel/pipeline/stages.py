"""A module divided into stages: each rank runs the user's whole step, and computes the blocks of its stage."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from fabricx.consistency.weight_changes import WeightChanges, refused_change
from fabricx.core.module_state.buffers import BufferMark
from fabricx.core.module_state.rng import random_kept
from fabricx.distributed.membership.lost_peers import raise_peer_lost
from fabricx.distributed.point_to_point import Transfers
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.world import World
from fabricx.errors import PeerLost
from fabricx.model_parallel import microbatches as rows
from fabricx.model_parallel.nested import copied, leaves
from fabricx.model_parallel.pipeline import placeholders
from fabricx.model_parallel.pipeline.block_calls import intercept
from fabricx.model_parallel.pipeline.chain import Chain
from fabricx.model_parallel.pipeline.cuts import Cuts
from fabricx.model_parallel.pipeline.links import Links
from fabricx.model_parallel.pipeline.loss_terms import LossTerms
from fabricx.model_parallel.pipeline.schedule import Action, check_schedule, schedule
from fabricx.model_parallel.pipeline.stage_pass import Pass, StageEnd
from fabricx.model_parallel.pipeline.weight_gradients import DeferredWeights

Step = Callable[..., Any]
_ELSEWHERE: Final = (
    "the step changes or uses a parameter that this stage of the pipeline does not hold, since the step of the trial "
    "run before training did not use it in this way. Use the same parameters in each step, for example by adding 0.0 * "
    "output.sum() to the loss; change weights in on_before_optimizer_step or on_train_batch_end; or use "
    "strategy=tensor or strategy=fsdp"
)
_NOTHING: Final = contextlib.nullcontext()
_SHARED: Final = 1 << 20  # tags of shared parameters; those of activations are smaller
_SWALLOWED: Final = (
    "the step has caught StageEnd, by which a stage of a pipeline ends it: use `except Exception` in place of "
    "`except:` and `except BaseException`"
)
_NO_LOSS: Final = (
    "training_step returned None after it has called the model; in a pipeline the other stages have computed this "
    "batch already. Return None before the model is called, or a loss of zero, such as 0.0 * outputs.sum()"
)
_NO_BLOCKS: Final = (
    "training_step returned a loss without a call of the model; the other stages of the pipeline can't compute such a "
    "batch. Return None to skip a batch"
)
_SOME_LOSSES: Final = (
    "training_step returned None for microbatch {number} of {parts}, and a loss for others, so that the mean over the "
    "microbatches is not that of the batch. Let batch_weight(self, batch) of the module return 0 for such samples, or "
    "the number of terms of the mean; or set microbatches=1"
)
_UNFROZEN: Final = (
    "training_step changes requires_grad after it has called the blocks; the other stages of the pipeline end the step "
    "before. Change it in on_train_batch_start or on_train_epoch_start"
)
_ZERO_BUBBLE_FSDP: Final = (
    "schedule=zero_bubble computes gradients of weights after their backward, and fsdp reduces them in the backward: "
    "use schedule=1f1b, or data=ddp"
)


@final
class Pipeline:
    """The stages of a module on the ranks of a pipeline.

    Code before the blocks runs on all stages with placeholders of the parameters, to compute masks and shapes. Blocks
    of earlier stages return stand-ins of the right shapes; the first block of a stage uses the tensors that it has
    received. The call of the next stage's first block sends its arguments, and ends the step on this stage.

    Args:
        module: the user's module, on its device; `fully_shard` may have been applied to own blocks and to the rest.
        chain: chain of the module; the same on all ranks.
        cuts: blocks of each chunk, by `divide`; chunk c belongs to rank `c % pipeline.size`.
        pipeline: ranks along the pipeline.
        schedule: a name of `schedule.SCHEDULES`.
        microbatches: microbatches of a batch.
        virtual: chunks of each rank.
        channels: result of `open_channels`, for NCCL.
        weight: weight of a microbatch; its number of samples, if None.
        begin: called with the arguments of the first block by stages that do not compute it.

    Attributes:
        own_names: parameters and buffers that this stage holds, also if other stages hold them, too.
        shared_names: parameters that several stages use, with these stages.
        owners: stages of each parameter and buffer.
        transfers: transfers to other stages; counts the bytes.

    Raises:
        ValueError: options don't fit together, or the module can't be trained by this schedule.
    """

    def __init__(
        self, module: nn.Module, chain: Chain, cuts: Cuts, pipeline: World, *, schedule: str, microbatches: int,
        virtual: int = 1, channels: Mapping[str, Any] | None = None, weight: Callable[[Any], float] | None = None,
        begin: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        check_schedule(schedule, pipeline.size, virtual, microbatches)
        assert len(cuts) == pipeline.size * virtual
        self.module, self.chain, self.cuts = module, chain, list(cuts)
        self.schedule, self.microbatches, self.virtual, self._weight = schedule, microbatches, virtual, weight
        self._begin = begin
        self.world_changed(pipeline, channels)
        self.owners = {name: chain.stages_of(name, self.cuts, pipeline.size) for name in chain.uses}
        self.own_names = frozenset(name for name, stages in self.owners.items() if pipeline.rank in stages)
        self.shared_names = {
            name: stages for name, stages in self.owners.items() if len(stages) > 1 and name not in chain.buffers
        }
        if schedule == "zero_bubble" and any(is_dtensor(parameter) for parameter in module.parameters()):
            raise ValueError(_ZERO_BUBBLE_FSDP)
        # Buffers are small, and code that copies a module's state writes to them.
        placeholders.release(module, self.owners.keys() - self.own_names - chain.buffers)
        self._deferred = DeferredWeights() if schedule == "zero_bubble" else None
        self._restore = [
            intercept(module.get_submodule(name), functools.partial(self._call, number))
            for number, name in enumerate(chain.blocks)
        ]
        self._restore += [
            intercept(module.get_submodule(name), functools.partial(self._call_outside, name))
            for name in sorted({path[1] for path in chain.carried if path[0] == "module"})
        ]
        self._inside = {part for name in chain.blocks for part in module.get_submodule(name).modules()}
        self._before: BufferMark | None = None  # buffers outside of blocks, until the first block of a further chunk
        self._pass: Pass | None = None
        self._computed = False  # gradients of the present microbatch
        self._trained: tuple[bool, ...] = ()  # `requires_grad` of all parameters at the call of the last block

    def world_changed(self, pipeline: World, channels: Mapping[str, Any] | None = None) -> None:
        """Use another process group, and forget interrupted transfers.

        Args:
            pipeline: ranks along the pipeline; as many as before.
            channels: result of `open_channels`, for NCCL.
        """
        self.world, self.transfers = pipeline, Transfers(pipeline, channels)
        self._links = Links(self.transfers, pipeline.rank, pipeline.size, pipeline.device)

    @property
    def last(self) -> bool:
        """Return whether this rank computes the loss."""
        return self.world.rank == self.world.size - 1

    # -- a step -------------------------------------------------------------------------------------------------------

    def forward_backward(
        self, step: Step, backward: Callable[[Any], Any], batch: Any, index: int, *, seed: Callable[[int], None]
    ) -> Any:  # fmt: skip
        """Compute the gradients of a batch.

        `backward` is not called for a microbatch of weight 0, unless all are.

        Args:
            step: the user's training step; called with a microbatch and `index`.
            backward: called on each stage for each microbatch, and calls `Pipeline.backward` with the loss. Its
                argument on the last stage is the result of `step`, with its loss multiplied by the microbatch's part of
                the batch; on other stages it is a surrogate loss. If the step has returned None for all microbatches,
                it is called once with None.
            batch: the same on all stages.
            index: index of the batch.
            seed: seeds random numbers; its argument numbers the pairs of microbatch and `Chain.seeds`. Called at
                the begin of each step, alike on all stages, and before and after each block, so that random numbers do
                not depend on the cuts.

        Returns:
            the result of the step for the whole batch on the last stage; None on other stages.

        Raises:
            PeerLost: another rank has died.
            ValueError: the batch can't be split; the step ends, or calls the blocks, in another way than in the trial
                run; it returns None after it has called the blocks, or for a part of the batch; or its loss is a mean
                over ignored or weighted targets that the microbatches have in unequal parts.
        """
        parts = rows.split(batch, self.microbatches)
        shares, samples = rows.shares(parts, self._weight), [rows.rows_of(part) for part in parts]
        actions = schedule(self.schedule, self.world.rank, self.world.size, self.virtual, len(parts))
        trained = self._trained_now()
        keys = [None if self.chain.changing else (trained, _signature(part)) for part in parts]
        passes = {action[1:]: self._new_pass(action, keys, seed) for action in actions if action.kind == "forward"}
        delayed: dict[tuple[int, int], list[Callable[[], None]]] = {}
        outputs: list[Any] = [None] * len(parts)
        self._take_deferred()  # of an interrupted batch
        terms = LossTerms(weighted=self._weight is not None) if self.last and len(parts) > 1 else None
        changes = WeightChanges(self.module.parameters(), values=False)
        with self._naming_changes(changes), random_kept():
            for action, following in zip(actions, [*actions[1:], None], strict=True):
                now = passes[action[1:]]
                self._expect(passes, action, following)
                if action.kind == "forward":
                    seed_next = functools.partial(seed, now.microbatch)
                    counting = terms if self._is_last(now) else None
                    with counting or _NOTHING:
                        self._forward(now, step, parts[now.microbatch], (index,), seed_next)
                    if counting is not None:
                        counting.end_microbatch(shares[now.microbatch], now.output, samples[now.microbatch] or 1)
                    self._check_output(now)
                elif action.kind == "weight_gradient":
                    for compute in delayed.pop(action[1:]):
                        compute()
                else:
                    self._backward(now, backward, shares[now.microbatch])
                    delayed[action[1:]] = self._take_deferred()
                    if self._is_last(now):
                        outputs[now.microbatch] = now.take_output()
            self.transfers.finish()
        self._check_parameters(changes)
        reached = {now.microbatch for now in passes.values() if now.reached}
        if reached and (without := [number for number, share in enumerate(shares) if share and number not in reached]):
            raise ValueError(_SOME_LOSSES.format(number=without[0] + 1, parts=len(parts)))
        if terms is not None:
            terms.check()
        if not reached:
            backward(None)
        return rows.joined(outputs, samples, shares) if self.last else None

    @contextlib.contextmanager
    def _naming_changes(self, changes: WeightChanges) -> Iterator[None]:
        """Explain errors of autograd where a microbatch changes weights that the backward of another needs."""
        try:
            yield
        except PeerLost:
            raise
        except RuntimeError as error:
            if (changed := changes.first_name(self.module)) is None:
                raise
            raise ValueError(refused_change(changed)) from error

    def _check_parameters(self, changes: WeightChanges) -> None:
        """Refuse weights that the step has changed, and gradients of weights that this stage doesn't hold."""
        if (changed := changes.first_name(self.module)) is not None:
            raise ValueError(refused_change(changed))
        for name, parameter in self.module.named_parameters():
            if name not in self.own_names and parameter.grad is not None:
                raise ValueError(f"{name}: {_ELSEWHERE}")

    def _expect(self, passes: Mapping[tuple[int, int], Pass], action: Action, following: Action | None) -> None:
        """Begin to receive the inputs of this action and of the next, so that transfers and computation overlap."""
        if self.world.silent:  # NCCL's operations of a group wait for each other
            return
        for planned in (action, following):
            if planned is not None and planned.kind == "forward":
                if not passes[planned[1:]].expect_arguments():
                    return  # messages arrive in the order of the forwards
            elif planned is not None and planned.kind != "weight_gradient":
                passes[planned[1:]].expect_gradients()

    def _trained_now(self) -> tuple[bool, ...]:
        return tuple(parameter.requires_grad for parameter in self.module.parameters())

    def _check_output(self, now: Pass) -> None:
        """Refuse results and changes of a training step that other stages would not have."""
        if now.reached and self._is_last(now) and self._trained_now() != self._trained:
            raise ValueError(_UNFROZEN)
        if now.reached and now.output is None and self._is_last(now):
            raise ValueError(_NO_LOSS)
        if not now.reached and now.output is not None:
            raise ValueError(_NO_BLOCKS)

    def evaluate(self, step: Step, batch: Any, *args: Any, seed: Callable[[int], None]) -> Any:
        """Compute a validation, test or predict step on a whole batch.

        A stage doesn't wait for the next stage, so that consecutive batches are computed at the same time.

        Args:
            step: called with the batch and `args`.
            batch: the same on all stages.
            *args: further arguments of the step.
            seed: see `forward_backward`.

        Returns:
            the result of the step on the last stage; None on other stages.
        """
        before, output = self.transfers.under_way, None
        with random_kept():
            for chunk in range(self.virtual):
                now = self._new_pass(Action("forward", chunk, 0), [None], seed)
                self._forward(now, step, batch, args, functools.partial(seed, 0))
                output = now.output if self._is_last(now) else None
        self.transfers.finish(self.transfers.under_way - before)
        return output

    def _new_pass(self, action: Action, keys: Sequence[Any], seed: Callable[[int], None]) -> Pass:
        chunk, microbatch = action.chunk * self.world.size + self.world.rank, action.microbatch
        parts = len(keys)  # numbers below are those of steps, which begin with the same random numbers on all stages

        def seed_at(number: int) -> None:
            seed(number * parts + microbatch)

        return Pass(self.chain, self.cuts, chunk, microbatch, self._links, keys[microbatch], seed_at)

    def _is_last(self, now: Pass) -> bool:
        return now.chunk == len(self.cuts) - 1

    def _forward(self, now: Pass, step: Step, batch: Any, args: tuple[Any, ...], seed: Callable[[], None]) -> None:
        """Run the user's step until the end of a chunk."""
        if self.virtual > 1:  # each chunk of this rank begins with the same batch and buffers
            batch = copied(batch)
        if now.chunk >= self.world.size:
            self._before = BufferMark(self.module, self._inside)
        seed()
        self._pass = now
        # The last stage counts what the step logs and updates before the blocks in the pass of its last chunk only.
        log_to = vars(self.module).get("_log_to") if self.last and not self._is_last(now) else None
        try:
            with self._deferred or _NOTHING, _NOTHING if log_to is None else log_to.muted():
                now.output = step(batch, *args)
        except StageEnd:
            return
        except BaseException as error:
            if now.ended:
                raise RuntimeError(_SWALLOWED) from error
            if placeholders.refuses(error):
                raise ValueError(_ELSEWHERE) from error
            raise
        finally:
            self._pass = None
            self._restore_buffers()  # if the step has returned before the blocks
        if now.ended:
            raise RuntimeError(_SWALLOWED)
        if not now.reached:
            now.pass_by()
        elif not self._is_last(now):
            raise ValueError(
                f"the step has ended before it called {self.chain.blocks[self.cuts[now.chunk][1]]}; in a pipeline a "
                "step has to call all blocks, or none: call the whole model once"
            )

    def _backward(self, now: Pass, backward: Callable[[Any], Any], share: float) -> None:
        """Compute the gradients of a chunk, and send the gradients of its inputs to the chunk before."""
        if not now.reached:  # the step has returned None before the blocks, on all stages
            return
        output = _scaled(now.output, share)
        if now.ended:
            leaf = torch.zeros((), device=self.world.device, requires_grad=True)
            output = _Surrogate.apply(leaf, now.gradients(), *now.sent)  # type: ignore[no-untyped-call]
        self._pass, self._computed = now, False
        try:
            with now.computing_again():
                if share:
                    backward(output)
        finally:
            self._pass = None
        now.send_gradients(computed=self._computed)

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        """Compute the gradients of this stage; called within `backward` of `forward_backward`.

        Args:
            loss: loss of the last stage; other stages have a surrogate, of any value and scale.
            compute: called instead of `loss.backward`.

        Raises:
            PeerLost: torch communicates in this backward, and another rank has died.
        """
        self._computed = True
        try:
            with self._deferred or _NOTHING:
                (compute or loss.backward)()
        except RuntimeError as error:
            if placeholders.refuses(error):
                raise ValueError(_ELSEWHERE) from error
            raise_peer_lost(error, f"stage {self.world.rank} of {self.world.size}, backward")
            raise

    def _take_deferred(self) -> list[Callable[[], None]]:
        if self._deferred is None:
            return []
        taken, self._deferred.queue = self._deferred.queue, []
        return taken

    def _call(self, number: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pass is None:
            raise RuntimeError(
                f"{self.chain.blocks[number]} was called outside of a step: under a pipeline this rank holds only a "
                "part of the module, so call the model in training_step, validation_step, test_step or predict_step"
            )
        if number == 0 and self._pass.chunk and self._begin is not None:
            self._begin((args, kwargs))
        if number == len(self.chain.blocks) - 1:
            self._trained = self._trained_now()
        if number == self.cuts[self._pass.chunk][0]:
            self._restore_buffers()
        return self._pass.call(number, call, args, kwargs)

    def _restore_buffers(self) -> None:
        """Undo changes of buffers by code that this rank has computed before, in the pass of its first chunk."""
        if self._before is not None:
            self._before.restore()
            self._before = None

    def _call_outside(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        output = call(*args, **kwargs)
        return output if self._pass is None else self._pass.returned(name, output)

    # -- state --------------------------------------------------------------------------------------------------------

    def reduce_shared(self) -> None:
        """Sum the gradients of shared parameters over their stages; each stage calls it after the last backward.

        The sum is computed on the first of the stages, so that it is the same to the bit on all of them.

        Raises:
            PeerLost: another rank has died.
            ValueError: a gradient is sparse.
        """
        parameters = dict(self.module.named_parameters())
        for number, (name, stages) in enumerate(sorted(self.shared_names.items())):
            if self.world.rank in stages and parameters[name].requires_grad:
                self._sum(name, parameters[name], stages, number)
        self.transfers.finish()

    def _sum(self, name: str, parameter: Tensor, stages: Sequence[int], number: int) -> None:
        gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{name} is used by stages {stages} and has a sparse gradient: set sparse=False in its layer"
            )
        local = gradient.to_local() if is_dtensor(gradient) else gradient
        # The last element counts the stages with a gradient: without any, the optimizer skips the parameter.
        total = torch.cat([local.reshape(-1), local.new_full((1,), parameter.grad is not None)])
        first, *others = stages
        event, tag = f"sum of the gradients of {name} over stages {', '.join(map(str, stages))}", _SHARED + number
        if self.world.rank != first:
            self.transfers.begin_send(total, first, "backward", tag, event)
            room = torch.empty_like(total)
            total = self.transfers.complete(self.transfers.expect(room, first, "forward", tag, event))
        else:
            for other in others:
                room = torch.empty_like(total)
                total.add_(self.transfers.complete(self.transfers.expect(room, other, "backward", tag, event)))
            for other in others:
                self.transfers.begin_send(total, other, "forward", tag, event)
        if total[-1]:
            local.copy_(total[:-1].view_as(local))
            parameter.grad = gradient

    def undo(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Make the module whole again; it must not be used by the pipeline afterwards.

        Args:
            values: whole tensors of the parameters and buffers, by name; placeholders without a value stay.
        """
        while self._restore:
            self._restore.pop()()
        placeholders.restore(self.module, values or {})


class _Surrogate(torch.autograd.Function):
    """A surrogate loss with the gradients that the next stage has sent, for any incoming scale."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, gradients: list[Tensor | None], *sent: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros_like(leaf)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.gradients


def _scaled(output: Any, share: float) -> Any:
    """Return the result of a step with its loss multiplied by a microbatch's part of the batch."""
    if share == 1.0 or output is None:
        return output
    if isinstance(output, Mapping):
        return {**output, "loss": output["loss"] * share} if isinstance(output.get("loss"), Tensor) else output
    return output * share if isinstance(output, Tensor) else output


def _signature(part: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a microbatch, on which the shapes of activations depend."""
    return tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, (int, float, bool)) else None
        for _, leaf in leaves(part)
    )
