"""Slow ranks get fewer samples of each global batch, fast ones more; the gradient stays what it was."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor
from torch.autograd import Variable

from fabricx.callbacks.balancing_policy import Law, Seen, share_batch
from fabricx.core.callback import Callback
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.sync_batchnorm import has_own_statistics, synchronised
from fabricx.errors import did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer

_WARM_UP = 2  # steps that say nothing of a speed
_SLOWER = 1.5  # times as long as before, two steps in a row: then all decide at once
_clock = time.perf_counter


@final
class LoadBalancer(Callback):
    """Give each rank as many samples of a global batch as it has speed, so that all have done at the same time.

    Global batches stay what they are, and so does the gradient: the mean over all samples, whoever computes which. A
    rank's speed is that of its own work, without waiting; all look at each other's every so many steps, at the cost of
    one small collective, and at once when a rank becomes much slower. When ranks come or go, shares follow at once the
    speeds that are known; who has just come counts as one of the middle. A change that doesn't make steps shorter is
    taken back.

    Strategies in which each rank goes at its own pace (`async_sgd`, or `parameter_server` with `mode="async"`,
    `mode="bounded"` or `backup_workers`) need none of this: there a rank takes the next batch of the one order when it
    has done the last, and the callback does nothing.

    Batch normalisation sees a rank's own samples, so that its statistics depend on who gets how many; SyncBatchNorm is
    exact. `batch_idx` comes again for each of the pieces in which a large share is computed.

    Args:
        shares: of the ranks, such as [0.5, 0.3, 0.2], fixed; "round_robin" for equal ones, of which what is left over
            goes to each in turn; None to measure.
        every_n_steps: weight updates between two decisions.
        max_batch_size: the most samples that a rank computes at once; a larger share is computed in several pieces.
            None for any number, until a rank runs out of memory: then all begin that step again, and it computes half
            as many at once.

    Raises:
        ValueError: shares that aren't positive, or don't sum to 1.
    """

    watches_metrics: ClassVar[bool] = True  # called after each batch, also one of which a rank has no sample
    needs_all_ranks: ClassVar[bool] = True

    def __init__(
        self,
        shares: Sequence[float] | Literal["round_robin"] | None = None,
        every_n_steps: int = 10,
        max_batch_size: int | None = None,
    ) -> None:
        if isinstance(shares, str):
            if shares != "round_robin":
                near = did_you_mean(shares, ["round_robin"])
                raise ValueError(f"LoadBalancer(shares={shares!r}): numbers, 'round_robin', or None to measure.{near}")
        elif shares is not None:
            shares = [float(share) for share in shares]
            if not shares or min(shares) <= 0.0 or abs(sum(shares) - 1.0) > 1e-6:
                raise ValueError(
                    f"LoadBalancer(shares={shares}): a part of each global batch for each rank, more than 0; they sum "
                    f"to {sum(shares):g}, and have to sum to 1"
                )
        for name, value in (("every_n_steps", every_n_steps), ("max_batch_size", max_batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"LoadBalancer({name}={value}): 1 or more")
        self.shares = shares
        self.every_n_steps, self.max_batch_size = every_n_steps, max_batch_size
        self._law: Law | None = None  # None where nothing is measured
        self._saved: list[int] = []  # shares that a checkpoint had
        self._generation = -1  # for which shares hold
        self._most: tuple[int, ...] | None = None  # samples at once, by rank
        self._fits = 0  # samples at once on this rank, since it has run out of memory
        self._speed = 0.0  # of this rank, as all know it since the newest decision; 0 before
        self._step, self._logged = -1, 0
        self._pauses: list[tuple[Any, Any]] = []  # of this microbatch, on a device
        self._alarm: Agreement | None = None  # to decide at once
        self._alarms = self._slow = 0  # how many there were, and how many steps in a row were slow
        self._forget(0)

    # -- before training --------------------------------------------------------------------------------------------

    def check_fit(self, trainer: Trainer, module: Module, global_batch: int | None) -> None:
        strategy, ranks = trainer.strategy, len(trainer.device_ids) * trainer.num_nodes
        ranks = max(ranks, trainer.world.size)
        if ranks == 1 or strategy.dealer is not None:
            return
        name = type(strategy).__name__
        if strategy.parts or not strategy.traits.synchronous:
            raise ValueError(f"LoadBalancer: {name} needs equal shares; take strategy=ddp, fsdp or parameter_server")
        if not module.automatic_optimization:
            raise ValueError(
                "LoadBalancer: a manual loop doesn't weight its losses by samples; automatic optimization does"
            )
        if global_batch == 0:
            raise ValueError(
                "LoadBalancer: global batches can't be divided here: that takes a map-style DataLoader with a "
                "batch_size, no batch_sampler of its own, and use_distributed_sampler=True"
            )
        together = trainer.sync_batchnorm or synchronised(module)
        if together and (self.max_batch_size is not None or trainer.accumulate_grad_batches > 1):
            raise ValueError(
                "LoadBalancer: SyncBatchNorm sees what ranks compute at once, and with max_batch_size or accumulation "
                "that would depend on the shares; leave those out, or take another normalisation"
            )
        if global_batch is not None and global_batch * trainer.accumulate_grad_batches < ranks:
            raise ValueError(f"LoadBalancer: a global batch of {global_batch} samples is too small for {ranks} ranks")
        if isinstance(self.shares, list) and len(self.shares) != ranks:
            raise ValueError(f"LoadBalancer: {len(self.shares)} shares for {ranks} ranks")

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self._generation = -1
        self.check_fit(trainer, module, trainer.train_feed.global_batch)
        if trainer.is_global_zero and has_own_statistics(module):
            warnings.warn(
                "LoadBalancer: batch normalisation uses the statistics of each rank's own samples, and ranks will have "
                "different numbers of them, so that results differ from those with equal shares; "
                "sync_batchnorm=True makes them exact, as does another normalisation",
                stacklevel=2,
            )

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        if self._idle(trainer) or self._generation == trainer.world.generation:
            return
        resumed = self._saved if self._generation < 0 and trainer.world.generation == 0 else []
        self._generation, self._step = trainer.world.generation, trainer.global_step
        own = torch.tensor([float(self._fits or self.max_batch_size or 0), self._speed], device=trainer.world.device)
        told = trainer.world.all_gather(own).tolist()
        most = [int(n) or 2**31 for n, _ in told]
        self._most = tuple(most) if min(most) < 2**31 else None
        measures = self.shares is None and trainer.world.size > 1
        self._law = self._law_of(trainer, _assumed([speed for _, speed in told]), resumed) if measures else None
        weights = self._law.shares if self._law is not None else self._fixed(trainer.world.size)
        self._apply(trainer, weights, 0)
        if self._law is not None and self._law.speeds:
            self._tell(trainer, self._law.shares)
        self._pauses = trainer.strategy.pauses(_event) if measures else []
        self._forget(_WARM_UP)
        self._alarms = 0  # who comes counts from here
        self._listen(trainer if measures else None)

    def _listen(self, trainer: Trainer | None) -> None:
        """Hear of ranks that become slower from now on, and not of what was before; None to end that."""
        if self._alarm is not None:
            self._alarm.close()
        self._alarms += 1
        self._alarm = None if trainer is None else Agreement(trainer.world, f"balance/{self._alarms}")

    def _law_of(self, trainer: Trainer, speeds: list[float], resumed: Sequence[int] = ()) -> Law:
        """Return a law that begins with the shares of an earlier run, or with those of speeds, if they are known."""
        samples, ranks = _samples(trainer), trainer.world.size
        fits = len(resumed) == ranks and sum(resumed) == samples
        return Law(samples, list(resumed) if fits else share_batch(speeds or [1.0] * ranks, samples), speeds)

    @staticmethod
    def _tell(trainer: Trainer, shares: list[int]) -> None:
        trainer.logger_dispatcher.event("rebalance", f"shares of the ranks: {shares}", trainer.global_step)

    def _fixed(self, ranks: int) -> Sequence[float]:
        """Return the shares that were asked for; equal ones if they were for other ranks."""
        return self.shares if isinstance(self.shares, list) and len(self.shares) == ranks else [1.0] * ranks

    def _apply(self, trainer: Trainer, weights: Sequence[float], ahead: int) -> None:
        state, turns = trainer.state, self.shares == "round_robin"
        place = state.samples + ahead * _samples(trainer)
        trainer.balance.change(state.epoch, place, tuple(weights), turns=turns, most=self._most)

    # -- what is measured -------------------------------------------------------------------------------------------

    def _forget(self, steps: int) -> None:
        """Measure anew, after so many steps."""
        self._skip = steps
        self._speeds: list[float] = []
        self._steps: list[float] = []
        self._begun: Any = None
        self._own: list[_Computed] = []  # the microbatches of this step
        self._samples = 0
        self._computing: deque[tuple[int, list[_Computed]]] = deque()  # the same of steps that a device may be at
        self._ended = _clock()

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if self._law is not None:
            self._pauses.clear()
            self._begun = _now(trainer)
            self._samples += trainer.logbook.size or 0

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        if self._begun is None or not loss.requires_grad:
            return
        begun, self._begun = self._begun, None

        def computed() -> None:
            self._own.append(_Computed(begun, _now(trainer), tuple(self._pauses)))

        # What is queued where a backward begins is called when all is computed, before others are waited for.
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(computed))  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        law = self._law
        if law is None or trainer.global_step == self._step:
            return
        self._step, now = trainer.global_step, _clock()
        own, samples = self._own, self._samples
        self._own, self._samples = [], 0
        if self._skip:
            self._skip, self._ended = self._skip - 1, now
            return
        self._steps.append(now - self._ended)
        self._ended = now
        if samples and own:
            self._computing.append((samples, own))
        while self._computing and self._computing[0][1][-1].is_over():
            samples, own = self._computing.popleft()
            self._speeds.append(samples / max(1e-9, sum(one.seconds() for one in own)))
            self._look_whether_slower(law, trainer.global_rank)
        at_once = self._alarm is not None and self._alarm.at_boundary(self._step)
        if at_once or len(self._steps) == self.every_n_steps:
            self._decide(trainer, law)
        if at_once:
            self._listen(trainer)

    def _look_whether_slower(self, law: Law, rank: int) -> None:
        slower = bool(law.speeds) and self._speeds[-1] * _SLOWER < law.speeds[rank]
        self._slow = self._slow + 1 if slower else 0
        if self._slow == 2 and self._alarm is not None:
            self._speeds = self._speeds[-2:]
            self._alarm.request("slower")

    def _decide(self, trainer: Trainer, law: Law) -> None:
        """Look at what all ranks have measured; all of them come to the same decision."""
        seen = [Seen(*row) for row in trainer.world.all_gather(self._seen(trainer)).tolist()]
        self._forget(0)
        if law.samples != _samples(trainer):  # accumulation has changed
            self._law = law = self._law_of(trainer, law.speeds)
            self._apply(trainer, law.shares, trainer.train_feed.ahead)
            return
        if not all(one.speed > 0.0 for one in seen):
            return
        before, shares = law.shares, law.decide(seen)
        self._speed = law.speeds[trainer.global_rank]
        if shares is not None:
            ahead = trainer.train_feed.ahead
            self._apply(trainer, shares, ahead)
            self._forget(ahead + 1)
            self._tell(trainer, shares)
        due = trainer.global_step - self._logged >= (trainer.log_every_n_steps or 1)
        if trainer.logger_dispatcher and (due or shares is not None):
            self._logged = trainer.global_step
            found = _for_loggers(law, before, seen)
            trainer.logger_dispatcher.measured(found, trainer.global_step)

    def _seen(self, trainer: Trainer) -> Tensor:
        speeds, speed, spread = self._speeds, 0.0, 0.0
        if speeds:
            speed = statistics.median(speeds)
            off = statistics.median(abs(one - speed) for one in speeds)  # 1.48 of those are a standard deviation
            spread = 1.25 * 1.48 * off / speed / len(speeds) ** 0.5
        found = [speed, spread, statistics.median(self._steps)]
        return torch.tensor(found, dtype=torch.float32, device=trainer.world.device)

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._listen(None)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if self._alarm is not None:
            trainer.world.barrier()  # another rank may still wait to hear where this one is
        self._listen(None)
        law = self._law
        if law is not None and law.gain > 1.0 and trainer.is_global_zero:
            text = (
                f"shares {law.shares}: by the ranks' speeds steps are {law.gain:.2f} times as fast as with equal ones"
            )
            trainer.logger_dispatcher.event("rebalance", text, trainer.global_step)
            trainer.print(text)

    # -- memory, and what outlives a process ------------------------------------------------------------------------

    def repeats_after(self, trainer: Trainer, error: Exception) -> bool:
        size = trainer.logbook.size or 0
        out = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out or size < 2 or self._idle(trainer) or synchronised(trainer.module):
            return False
        self._fits = size // 2
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"shares": list(self._law.shares) if self._law is not None else self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["shares"]

    def _idle(self, trainer: Trainer) -> bool:
        alone = trainer.world.size == 1 and self.max_batch_size is None and not self._fits
        return alone or trainer.strategy.dealer is not None


def _samples(trainer: Trainer) -> int:
    return trainer.train_feed.global_batch * trainer.accumulate_grad_batches


def _assumed(speeds: Sequence[float]) -> list[float]:
    """Return the speeds of all ranks; one that isn't known, as of a rank that has just come, is that of the middle one.

    >>> _assumed([4.0, 0.0, 2.0, 3.0]), _assumed([0.0, 0.0])
    ([4.0, 3.0, 2.0, 3.0], [])
    """
    known = [speed for speed in speeds if speed > 0.0]
    return [speed or statistics.median(known) for speed in speeds] if known else []


def _now(trainer: Trainer) -> Any:
    """Return the time as this rank's device sees it."""
    return _event() if trainer.world.device.type == "cuda" else _clock() - trainer.strategy.waited_s


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class _Computed:
    """When a microbatch began and was computed, and when the device waited for other ranks in between."""

    begun: Any
    ended: Any
    pauses: tuple[tuple[Any, Any], ...] = ()

    def is_over(self) -> bool:
        return isinstance(self.ended, float) or bool(self.ended.query())

    def seconds(self) -> float:
        """Return for how long this rank has worked."""
        return _between(self.begun, self.ended) - sum(_between(*pause) for pause in self.pauses)


def _between(begun: Any, ended: Any) -> float:
    return float(ended - begun) if isinstance(begun, float) else float(begun.elapsed_time(ended)) / 1000.0


def _for_loggers(law: Law, shares: Sequence[int], seen: Sequence[Seen]) -> dict[str, float]:
    found = {"balance/gain": law.gain}
    for rank, (share, one) in enumerate(zip(shares, seen, strict=True)):
        found[f"balance/share_{rank}"] = share / law.samples
        found[f"balance/samples_per_s_{rank}"] = one.speed
        found[f"balance/wait_{rank}"] = max(0.0, 1.0 - share / one.speed / one.step_s)
    return found
