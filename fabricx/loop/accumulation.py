"""The batches of one weight update, and the divisor of their gradient."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricx.data import Microbatch
from fabricx.distributed.generations import membership
from fabricx.distributed.sync_batchnorm import synchronised
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

NO_BATCH: Final = "has no batch"
NO_LOSS: Final = "gave no loss"
ALL_SKIP_S: Final = 120.0  # until all ranks say that they skip a batch, where no collective waits


class AccumulationWindow:
    """What has happened in the accumulation window so far."""

    def __init__(self) -> None:
        self.planned = 1
        self.taken = 0.0  # microbatches of all ranks that gave a gradient
        self.loss: Tensor | None = None
        self.norm: Tensor | None = None  # of the gradient, where it was clipped by that
        self.outputs: Any = None  # of the newest batch, for those that are told of it last
        self.batch: Any = None
        self.factor: float | None = None  # of the newest batch, where the module says what it weighs
        self.again: float | None = None  # the same, once the weight of all is known
        self.loss_factor = 1.0  # of each loss of a manually optimised batch
        self._weight = self._share = 0.0  # of this rank's batches, and which part of the global batch they are
        self._number = 0  # of the newest microbatch, counted from 1
        self._absences: list[tuple[str, str, float]] = []
        self._together = True  # have all ranks come as far as this one?

    def begin(self, planned: int) -> None:
        """Open a window of so many microbatches."""
        self.planned, self.taken, self.norm = planned, 0.0, None
        self._weight = self._share = 0.0
        self._number = 0
        self._absences.clear()

    def weigh(self, t: Trainer, micro: Microbatch) -> float:
        """Let the newest batch count by its weight; returns that. The sum over all ranks is known in the end only."""
        weight = t.logbook.weight
        self._weight += weight
        self._share += micro.factor
        self.factor = weight / _usual(t)
        return weight

    def took_part(self, micro: Microbatch, loss: Tensor | None = None) -> None:
        """Count a microbatch that gave a gradient."""
        self._number += 1
        self.taken += micro.portion
        self.loss = None if loss is None else loss.detach()

    def sit_out(self, t: Trainer, micro: Microbatch, why: str, *company: Any) -> None:
        """Contribute nothing to a microbatch, and say so where the other ranks can see it.

        Args:
            t: the trainer.
            micro: the microbatch.
            why: `NO_BATCH` or `NO_LOSS`.
            company: see `Strategy.backward_nothing`.
        """
        world = t.world
        self._number += 1
        if world.size > 1 and synchronised(t.module):  # the others wait for what only this rank's step would give
            raise ValueError(f"rank {world.rank} {why}, and SyncBatchNorm needs all ranks in each batch")
        if micro.apart:  # it has a lease of its own, which an update without a gradient gives back
            return
        if t.shared is not None:
            if why == NO_BATCH:
                t.shared.before_forward(t, micro)
            t.shared.before_backward(t, micro)
        if world.size == 1:
            if why == NO_BATCH:  # an empty part of a global batch
                self.taken += micro.portion
                if micro.closes:
                    t.strategy.backward_nothing(*company)
            return
        if not t.strategy.traits.synchronous:  # nobody waits for this rank's gradient
            self.taken += micro.portion
            if why == NO_BATCH:
                t.strategy.backward_nothing(*company)
            return
        assert world.store is not None
        place = (world.generation, t.state.epoch, t.state.step, micro.index, self._number)
        key = world.key("nothing/" + "/".join(map(str, place)))
        world.store.set(f"{key}/{world.rank}", why)
        self._absences.append((key, why, micro.portion))
        if micro.closes or t.strategy.traits.sharded:  # others gather weights in each microbatch
            with t.logbook.muted():
                self._together = t.strategy.backward_nothing(*company)
        elif why == NO_BATCH:
            t.strategy.forward_nothing()

    def ready(self, t: Trainer) -> bool:
        """Close the window; returns whether there is a gradient to update the weights with.

        All ranks have been in the last backward, so whoever else had nothing has said so by now.

        Raises:
            RanksDisagree: some ranks gave a loss for a batch and others none.
        """
        for absence in self._absences:
            self._settle(t, *absence)
        if self.taken == 0:
            return False
        if t.overridden.batch_weight and t.module.automatic_optimization:
            return self._divide_by_weight(t)
        if self.taken != self.planned:  # fewer batches than the loss was divided by
            if t.strategy.parts:
                raise ValueError(
                    "training_step gave no loss for a part of a global batch, and under deterministic='elastic' a "
                    "batch can only be skipped as a whole: return a loss of zero"
                )
            _scale_gradients(t, self.planned / self.taken)
        return True

    def _divide_by_weight(self, t: Trainer) -> bool:
        """Turn the gradient into a mean; returns whether it is one of anything."""
        total, share = torch.tensor([self._weight], device=t.world.device), 1.0
        if t.strategy.traits.synchronous:
            t.world.all_reduce(total)
        else:  # each rank's gradient is its own
            share = self._share * self.planned / self.taken  # of microbatches without a loss it has no share
        weight = float(total)
        if weight:
            self.again = (self.factor or 0.0) * _usual(t) * share / weight
            _scale_gradients(t, _usual(t) * share / weight)
        return weight > 0.0 or not t.strategy.traits.synchronous

    def _settle(self, t: Trainer, key: str, why: str, portion: float) -> None:
        store, size = t.world.store, t.world.size
        assert store is not None
        keys = [f"{key}/{rank}" for rank in range(size)]
        if not self._together:
            deadline = time.monotonic() + ALL_SKIP_S  # after that, somebody trains on
            while not store.check(keys) and time.monotonic() < deadline:
                membership().check(t.world.generation)  # the store's own wait wouldn't notice a death
                time.sleep(0.002)
        if store.check(keys):  # all skip it, or it is an empty part of the global batch on all
            self.taken += portion * all(store.get(one).decode() == NO_BATCH for one in keys)
            return
        if why != NO_BATCH:
            absent = [rank for rank in range(size) if store.check([keys[rank]])]
            raise RanksDisagree(
                f"step {t.state.step}: training_step gave no loss on rank {', '.join(map(str, absent))} and a loss on "
                "the others; a batch can only be skipped on all ranks together"
            )
        self.taken += portion  # others had a batch


def _usual(t: Trainer) -> int:
    """Return by what sums of gradients are divided until the weight of all is known, so that they don't overflow."""
    return max(1, t.train_feed.global_batch * t.accumulate_grad_batches)


def _scale_gradients(t: Trainer, factor: float) -> None:
    gradients = [
        p.grad for o in t.optimizers for group in o.param_groups for p in group["params"] if p.grad is not None
    ]
    if gradients:
        torch._foreach_mul_(gradients, factor)
