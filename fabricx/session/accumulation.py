"""Accumulation windows: the microbatches of a weight update, and the divisor of their gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fabricx.data import Microbatch
from fabricx.distributed.statistics.sync_batchnorm import synchronised
from fabricx.session.absences import NO_BATCH, NO_LOSS, Absences
from fabricx.session.rank_state import LoggedMark

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricx.consistency.shared_settings import OwnSettings
    from fabricx.core.callback import Callback
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.data.run_data import RunData
    from fabricx.metrics.run_metrics import RunMetrics


def accumulation_set(options: TrainerOptions, callbacks: Sequence[Callback]) -> str:
    """Return what sets several batches per weight update, at present or later; "" if nothing does.

    Args:
        options: of the run.
        callbacks: of the run.
    """
    if options.accumulate_grad_batches > 1:
        return f"accumulate_grad_batches={options.accumulate_grad_batches}"
    several = (callback for callback in callbacks if callback.accumulates > 1)
    return next((f"{type(callback).__name__} of {callback.accumulates} batches per update" for callback in several), "")


class AccumulationWindow:
    """State of the present accumulation window on this rank.

    Args:
        options: the run's options.
        module: the user's module.
        strategy: the run's strategy.
        state: position of the run.
        data, metrics: of the run.
        optimizers: optimizers of the module.
    """

    def __init__(
        self, options: TrainerOptions, module: Module, strategy: Strategy, state: RunState, data: RunData,
        metrics: RunMetrics, optimizers: Sequence[Optimizer],
    ) -> None:  # fmt: skip
        self._options, self._module, self._strategy = options, module, strategy
        self._data, self._metrics, self._optimizers = data, metrics, optimizers
        self.by_weight = False  # the gradient is divided by the sum of `Module.batch_weight` over the global batch
        self.accumulate = 1  # microbatches of a rank in a window, in this epoch
        self.planned = 1
        self.taken = 0.0  # microbatches with a gradient, over all ranks
        self._skipped = 0.0  # microbatches that all ranks skip, as none has a loss
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None  # gradient norm, if the gradient was clipped by its norm
        self.outputs: Any = None  # of the newest batch, for callbacks that watch metrics
        self.batch: Any = None
        self.factor: float | None = None  # loss factor of the newest batch, with `batch_weight`
        self.global_loss_factor: float | None = None  # the same factor with the weight of all ranks
        self.loss_factor = 1.0  # of each loss of a manually optimised batch
        self.computing = False  # whether a backward of the newest microbatch has begun
        self.joined = False  # the gradient is added to those of other leases, and their sum divided by that of `share`
        self.mark: LoggedMark | None = None  # before a batch whose gradient may be dropped
        self._factors = self._factors_with_loss = 0.0  # sums of loss factors: all of this rank, and those with a loss
        self._weights: list[float] = []  # of this rank's batches
        self._share = 0.0  # share of these batches in the global batch
        self._number = 0  # of the newest microbatch, counted from 1
        self._closed = True  # whether that is the last of its window
        self._absences = Absences(state)

    @property
    def unfinished(self) -> bool:
        """Return whether some microbatches of the window are trained, and others are not."""
        return self._number > 0 and not self._closed

    def begin(self, micro: Microbatch) -> None:
        """Begin a microbatch; the first microbatch of a window resets it.

        Args:
            micro: share of this rank in the global batch.

        Raises:
            ValueError: `accumulate_grad_batches` was changed within the epoch.
        """
        accumulate = self._options.accumulate_grad_batches
        if accumulate != self.accumulate:
            raise ValueError(
                f"accumulate_grad_batches was changed from {self.accumulate} to {accumulate} "
                "within an epoch, whose windows are already determined; change it in on_train_epoch_start, or with the "
                "callback GradientAccumulation"
            )
        self.computing, self.loss, self.factor, self.global_loss_factor = False, None, None, None
        if micro.opens:
            self.planned, self.taken, self.norm = micro.planned, 0.0, None
            self._skipped = self._share = self._factors = self._factors_with_loss = 0.0
            self._number, self._weights = 0, []
            if self._absences.published:
                self._absences.published.clear()

    def keep(self, outputs: Any, batch: Any) -> None:
        """Keep the newest batch for callbacks that watch metrics.

        Args:
            outputs: outputs of the training step, without their graph; None without a sample.
            batch: batch on the device; None without a sample.
        """
        self.outputs, self.batch = outputs, batch

    def weigh(self, micro: Microbatch) -> None:
        """Weight the newest batch by `Module.batch_weight`; the sum over ranks is computed at the end of the window.

        Args:
            micro: share of this rank in the global batch.
        """
        weight = self._metrics.logbook.weight
        self._weights.append(weight)
        self._share += micro.loss_factor
        self.factor = weight / self._usual()

    def took_part(self, micro: Microbatch, loss: Tensor | None = None, *, first: bool = True) -> None:
        """Count a microbatch with a gradient.

        Args:
            micro: share of this rank in the global batch.
            loss: loss of the microbatch, shape []; None if no closure will return it.
            first: the first backward of the microbatch.
        """
        if first:
            self._number, self._closed = self._number + 1, micro.closes
            self.taken += micro.window_weight
            self._factors_with_loss += micro.loss_factor
            self._factors += micro.loss_factor
        self.loss = None if loss is None else loss.detach()

    def sit_out(self, micro: Microbatch, why: str, settings: OwnSettings, example: tuple[Any, ...] = ()) -> None:
        """Participate in a microbatch without a gradient, and publish the reason to the other ranks.

        Args:
            micro: share of this rank in the global batch.
            why: `NO_BATCH` or `NO_LOSS`.
            settings: compared with the other ranks, before they compute.
            example: see `Strategy.backward_without_data`.

        Raises:
            ValueError: SyncBatchNorm needs a sample of each rank.
            TypeError: `backward_without_data` returns no bool.
        """
        world = self._strategy.world.axis("data")
        self._number, self._closed = self._number + 1, micro.closes
        if world.size > 1 and synchronised(self._module):  # the other ranks wait for this rank's statistics
            raise ValueError(
                f"rank {world.rank} {why}, and SyncBatchNorm needs all ranks in each batch; provide a sample for each "
                "rank, or use another normalisation"
            )
        if why == NO_LOSS:
            self._factors += micro.loss_factor
            if world.size == 1 or micro.leased:
                self._skipped += micro.window_weight
        if micro.leased:  # a leased microbatch: the update without a gradient returns the lease
            return
        if why == NO_BATCH:
            settings.before_forward(micro)
        settings.before_backward(micro)
        if world.size == 1:
            if why == NO_BATCH:  # an empty part of a global batch
                self.taken += micro.window_weight
                if micro.closes:
                    self._strategy.backward_without_data(example)
            return
        world = self._strategy.step_ranks
        if world.size == 1:  # no rank waits for this rank's gradient
            if why == NO_BATCH:
                self.taken += micro.window_weight
                self._strategy.backward_without_data(example)
            else:
                self._skipped += micro.window_weight
            return
        self._absences.publish(world, why, micro.window_weight, (micro.index, self._number))
        with self._metrics.logbook.muted():
            joined: object = self._strategy.backward_without_data(example)
        if not isinstance(joined, bool):
            raise TypeError(
                f"{type(self._strategy).__name__}.backward_without_data returned {joined!r}, and has to return True if "
                "it took part in a reduction that is complete on no rank before all ranks have reached it, else False"
            )
        if micro.closes or self._strategy.traits.joint_steps:  # all ranks compute each microbatch
            self._absences.together = joined

    @property
    def share(self) -> float:
        """Return the part of the window's samples that have a gradient; collective if some do not."""
        return (self.taken + self._skipped) / self.planned * self._share_with_loss()

    def _share_with_loss(self) -> float:
        """Return the part of the loss factors that belongs to microbatches with a loss, over the ranks of the step."""
        if not self._skipped:
            return 1.0
        world = self._strategy.step_ranks
        sums = torch.tensor([self._factors_with_loss, self._factors], dtype=torch.float64, device=world.device)
        if world.size > 1:
            world.all_reduce(sums)
        return float(sums[0] / sums[1])

    def finish_gradient(self) -> bool:
        """Divide the gradient by the samples that have a loss; return whether a weight update follows. Collective.

        Called after the last backward of all ranks: each rank without a gradient has published its reason by then.

        Raises:
            RanksDisagree: only some ranks have a loss for a batch.
            ValueError: with `deterministic="elastic"`, only a part of a global batch has no loss.
        """
        if self._absences.published:
            for skipped, portion in self._absences.compared(self._strategy.step_ranks):
                self._skipped += portion if skipped else 0.0
                self.taken += 0.0 if skipped else portion
        if self.taken == 0:
            return False
        if self.by_weight:
            return self._divide_by_weight()
        if self.taken != self.planned and not self.joined:  # fewer samples than the divisor of the loss
            if self._strategy.traits.batch_parts:
                raise ValueError(
                    "training_step returned None for a part of a global batch, and under deterministic='elastic' a "
                    "batch can only be skipped as a whole; return a loss of zero"
                )
            self._scale_gradients(1.0 / self.share)
        return True

    def _divide_by_weight(self) -> bool:
        """Divide the gradient by the weight of the global batch; return whether an update follows."""
        share = 1.0
        if self._strategy.traits.synchronous:
            weight = self._global_weight()
        else:  # the gradient is of this rank only
            weight = math.fsum(self._weights)
            share = self._share if self.joined else self._share / self.share  # without microbatches that have no loss
        if weight:
            self.global_loss_factor = (self.factor or 0.0) * self._usual() * share / weight
            self._scale_gradients(self._usual() * share / weight)
        return weight > 0.0 or not self._strategy.traits.synchronous

    def _global_weight(self) -> float:
        """Return the weight of the global batch; of a fixed division into parts with the same bits on any ranks."""
        world, own = self._strategy.world.axis("data"), self._weights
        if world.size == 1:
            return math.fsum(own)
        if not self._strategy.traits.batch_parts:
            own = [math.fsum(own)]
        count = self.planned if self._strategy.traits.batch_parts else 1
        weights = torch.zeros(world.size, count, dtype=torch.float64, device=world.device)
        weights[world.rank, : len(own)] = torch.tensor(own, dtype=torch.float64)
        world.all_reduce(weights)
        return math.fsum(weights.flatten().tolist())  # independent of the order

    def _usual(self) -> int:
        """Return the provisional divisor of summed gradients, which avoids overflow until the total weight is known."""
        return max(1, self._data.train_feed.global_batch * self._options.accumulate_grad_batches)

    def _scale_gradients(self, factor: float) -> None:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        parameters = dict.fromkeys(p for group in groups for p in group["params"])  # once, also if optimizers share one
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
