"""Balance the load of ranks: distribute each global batch in proportion to their speeds; gradients are unchanged."""

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

from fabricx.callbacks.balancing_policy import Measurement, SharePolicy, share_batch
from fabricx.core.callback import Callback
from fabricx.core.strategy_parts import MeasuresWaiting, ModelParallel, as_part
from fabricx.distributed.statistics.sync_batchnorm import has_own_statistics, synchronised
from fabricx.distributed.stop_consensus import Agreement
from fabricx.errors import did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

_WARM_UP = 2  # steps that are too irregular for a measurement of speed
_SLOWER = 1.5  # a rank that is slower by this factor in two consecutive steps requests an immediate decision
_clock = time.perf_counter


@final
class LoadBalancer(Callback):
    """Assign samples of each global batch to ranks in proportion to their speeds, so that all finish simultaneously.

    The global batches do not change, and neither does the gradient: it is the mean over all samples, regardless of
    their distribution. The speed of a rank is that of its computation, without waiting. Every `every_n_steps` steps
    the ranks exchange their speeds with a small collective, and immediately when a rank becomes much slower. When
    ranks join or leave a run, the shares follow the latest speeds; a new rank is assumed to have the median speed. A
    change that does not shorten steps is reverted.

    The callback does nothing under asynchronous strategies (`async_sgd`, or `parameter_server` with `mode="async"`,
    `mode="bounded"` or `backup_workers`), where a rank requests the next batch as soon as it is done with the last.

    Batch normalisation computes statistics from the samples of a rank, and thus depends on the shares; SyncBatchNorm
    does not. A share above `max_batch_size` is computed in several pieces, with the same `batch_idx` for each piece.

    Args:
        shares: fixed fractions of the global batch, such as [0.5, 0.3, 0.2], shape [world_size]; "round_robin" for
            equal shares with the remainder rotating over the ranks; None for shares by measured speed.
        every_n_steps: weight updates between two decisions.
        max_batch_size: largest number of samples that a rank computes at a time; a larger share is computed in several
            pieces. None sets no limit until a rank runs out of memory: then all ranks repeat the step, and that rank
            halves the samples that it computes at a time.

    Raises:
        ValueError: an argument is out of range, or `shares` do not sum to 1, or (when training starts) the strategy,
            the module or the data do not support unequal shares.
    """

    watches_metrics: ClassVar[bool] = True  # called after each batch, also if a rank has no sample of it
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
                raise ValueError(
                    f"LoadBalancer(shares={shares!r}): must be numbers, 'round_robin', or None to measure.{near}"
                )
        elif shares is not None:
            shares = [float(share) for share in shares]
            if not shares or not min(shares) > 0.0 or not abs(sum(shares) - 1.0) <= 1e-6:  # also NaN
                raise ValueError(
                    f"LoadBalancer(shares={shares}): the fractions of a global batch must be more than 0 and sum to 1; "
                    f"they sum to {sum(shares):g}"
                )
        for name, value in (("every_n_steps", every_n_steps), ("max_batch_size", max_batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"LoadBalancer({name}={value}): must be 1 or more")
        self.shares = shares
        self.every_n_steps, self.max_batch_size = every_n_steps, max_batch_size
        self._policy: SharePolicy | None = None  # None if shares are not measured
        self._saved: list[int] = []  # shares loaded from a checkpoint
        self._generation = -1  # process group generation that the shares apply to
        self._limits: tuple[int, ...] | None = None  # most samples at a time, by rank
        self._max_fitting = 0  # most samples at a time on this rank, after it ran out of memory; 0 before
        self._speed = 0.0  # this rank's smoothed speed at the newest decision, known to all ranks; 0 before
        self._step, self._logged = -1, 0  # steps of the last measurement and of the last logged row
        self._pauses: list[tuple[Any, Any]] = []  # waiting times of this microbatch, on a device
        self._alarm: Agreement | None = None  # requests an immediate decision of all ranks
        self._alarms = self._slow = 0  # number of alarms so far; consecutive slow steps
        self._restart_window(0)

    # -- before training --------------------------------------------------------------------------------------------

    def check_fit(self, trainer: TrainerProtocol, pl_module: Module, global_batch: int | None) -> None:
        strategy, ranks = trainer.strategy, len(trainer.device_ids) * trainer.num_nodes
        ranks = max(ranks, trainer.world.axis("data").size)
        if ranks == 1 or not strategy.traits.lockstep:
            return
        name = type(strategy).__name__
        if strategy.traits.batch_parts or not strategy.traits.synchronous:
            raise ValueError(f"LoadBalancer: {name} needs equal shares; use strategy=ddp, fsdp or parameter_server")
        if isinstance(strategy, ModelParallel) and strategy.divides:
            raise ValueError(
                f"LoadBalancer: {name} computes the samples of a data rank on several ranks, whose speeds can't be "
                "balanced separately; remove the callback"
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "LoadBalancer: manual optimization doesn't weight losses by the samples of a rank; use automatic "
                "optimization, or remove the callback"
            )
        if global_batch == 0:
            raise ValueError(
                "LoadBalancer: the global batches of this data can't be divided; use a map-style DataLoader with "
                "batch_size and without batch_sampler, and use_distributed_sampler=True"
            )
        together = trainer.sync_batchnorm or synchronised(pl_module)
        if together and (self.max_batch_size is not None or trainer.accumulate_grad_batches > 1):
            raise ValueError(
                "LoadBalancer: SyncBatchNorm normalises the samples that ranks compute at a time, which depend on the "
                "shares with max_batch_size or accumulation; remove both, or use another normalisation"
            )
        if global_batch is not None and global_batch * trainer.accumulate_grad_batches < ranks:
            raise ValueError(
                f"LoadBalancer: a global batch of {global_batch} samples is too small for {ranks} ranks; increase the "
                "batch size or use fewer devices"
            )
        if isinstance(self.shares, list) and len(self.shares) != ranks:
            raise ValueError(f"LoadBalancer: {len(self.shares)} shares for {ranks} ranks; pass a share for each rank")

    def on_fit_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._generation = -1
        self.check_fit(trainer, pl_module, trainer.session.data.train_feed.global_batch)
        if trainer.world.main_rank and has_own_statistics(pl_module):
            warnings.warn(
                "LoadBalancer: batch normalisation uses the statistics of each rank's samples, whose number will "
                "differ between ranks, so that results differ from those with equal shares; "
                "set sync_batchnorm=True for exact results, or use another normalisation",
                stacklevel=2,
            )

    def on_train_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._inactive(trainer) or self._generation == trainer.world.generation:
            return
        resumed = self._saved if self._generation < 0 and trainer.world.generation == 0 else []
        self._generation, self._step = trainer.world.generation, trainer.global_step
        world = trainer.world.axis("data")
        limit_and_speed = [float(self._max_fitting or self.max_batch_size or 0), self._speed]
        local = torch.tensor(limit_and_speed, device=world.device)
        by_rank = world.all_gather(local).tolist()
        limits = [int(limit) or 2**31 for limit, _ in by_rank]
        self._limits = tuple(limits) if min(limits) < 2**31 else None
        measures = self.shares is None and world.size > 1
        self._policy = (
            self._policy_from(trainer, _assumed([speed for _, speed in by_rank]), resumed) if measures else None
        )
        weights = self._policy.shares if self._policy is not None else self._fixed(world.size)
        self._apply(trainer, weights, 0)
        if self._policy is not None and self._policy.speeds:
            self._log_shares(trainer, self._policy.shares)
        self._pauses = as_part(trainer.strategy, MeasuresWaiting).record_pauses(_event) if measures else []
        self._restart_window(_WARM_UP)
        self._alarms = 0  # also on the ranks that did not join just now: all count from the same point
        self._start_alarm(trainer if measures else None)

    def _start_alarm(self, trainer: TrainerProtocol | None) -> None:
        """Listen for ranks that become slower from now on, discarding earlier requests; None stops listening."""
        if self._alarm is not None:
            self._alarm.close()
        self._alarms += 1
        self._alarm = None if trainer is None else Agreement(trainer.world, f"balance/{self._alarms}")

    def _policy_from(self, trainer: TrainerProtocol, speeds: list[float], resumed: Sequence[int] = ()) -> SharePolicy:
        """Return a policy that begins with `resumed` shares if they fit, or with shares by `speeds` if not empty."""
        samples, ranks = _samples(trainer), trainer.world.axis("data").size
        fits = len(resumed) == ranks and sum(resumed) == samples
        return SharePolicy(samples, list(resumed) if fits else share_batch(speeds or [1.0] * ranks, samples), speeds)

    @staticmethod
    def _log_shares(trainer: TrainerProtocol, shares: list[int]) -> None:
        trainer.session.metrics.loggers.event("rebalance", f"shares of the ranks: {shares}", trainer.global_step)

    def _fixed(self, ranks: int) -> Sequence[float]:
        """Return the fixed shares; equal shares if the number of ranks changed."""
        return self.shares if isinstance(self.shares, list) and len(self.shares) == ranks else [1.0] * ranks

    def _apply(self, trainer: TrainerProtocol, weights: Sequence[float], ahead: int) -> None:
        """Set the shares from the global batch on that follows `ahead` prefetched batches."""
        state, turns = trainer.state, self.shares == "round_robin"
        position = state.samples + ahead * _samples(trainer)
        trainer.session.balance.change(state.epoch, position, tuple(weights), turns=turns, most=self._limits)

    # -- measurement ------------------------------------------------------------------------------------------------

    def _restart_window(self, skip: int) -> None:
        """Discard the measurements, and measure again after `skip` steps."""
        self._steps_to_skip = skip
        self._speeds: list[float] = []
        self._steps: list[float] = []
        self._begun: Any = None
        self._computed: list[_Computed] = []  # microbatches of this step
        self._samples = 0
        # Samples and microbatches of steps that a device may still compute.
        self._computing: deque[tuple[int, list[_Computed]]] = deque()
        self._ended = _clock()

    def on_train_batch_start(self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if self._policy is not None:
            self._pauses.clear()
            self._begun = _now(trainer)
            self._samples += trainer.session.metrics.logbook.size or 0

    def on_before_backward(self, trainer: TrainerProtocol, pl_module: Module, loss: Tensor) -> None:
        if self._begun is None or not loss.requires_grad:
            return
        begun, self._begun = self._begun, None

        def computed() -> None:
            self._computed.append(_Computed(begun, _now(trainer), tuple(self._pauses)))

        # A callback queued at the start of backward runs when all gradients are computed, before waiting for peers.
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(computed))  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        policy = self._policy
        if policy is None or trainer.global_step == self._step:
            return
        self._step, now = trainer.global_step, _clock()
        microbatches, samples = self._computed, self._samples
        self._computed, self._samples = [], 0
        if self._steps_to_skip:
            self._steps_to_skip, self._ended = self._steps_to_skip - 1, now
            return
        self._steps.append(now - self._ended)
        self._ended = now
        if samples and microbatches:
            self._computing.append((samples, microbatches))
        while self._computing and self._computing[0][1][-1].is_over():
            samples, microbatches = self._computing.popleft()
            self._speeds.append(samples / max(1e-9, sum(microbatch.seconds() for microbatch in microbatches)))
            self._check_slowdown(policy, trainer.global_rank)
        at_once = self._alarm is not None and self._alarm.at_boundary(self._step)
        if at_once or len(self._steps) == self.every_n_steps:
            self._decide(trainer, policy)
        if at_once:
            self._start_alarm(trainer)

    def _check_slowdown(self, policy: SharePolicy, rank: int) -> None:
        slower = bool(policy.speeds) and self._speeds[-1] * _SLOWER < policy.speeds[rank]
        self._slow = self._slow + 1 if slower else 0
        if self._slow == 2 and self._alarm is not None:
            self._speeds = self._speeds[-2:]
            self._alarm.request("slower")

    def _decide(self, trainer: TrainerProtocol, policy: SharePolicy) -> None:
        """Exchange measurements and decide about the shares. Collective; the decision is the same on all ranks."""
        data = trainer.world.axis("data")
        measurements = [Measurement(*row) for row in data.all_gather(self._measurement(trainer)).tolist()]
        self._restart_window(0)
        if policy.samples != _samples(trainer):  # accumulation has changed
            self._policy = policy = self._policy_from(trainer, policy.speeds)
            self._apply(trainer, policy.shares, trainer.session.data.train_feed.ahead)
            return
        if not all(measurement.speed > 0.0 for measurement in measurements):
            return
        before, shares = policy.shares, policy.decide(measurements)
        self._speed = policy.speeds[trainer.global_rank]
        if shares is not None:
            ahead = trainer.session.data.train_feed.ahead
            self._apply(trainer, shares, ahead)
            self._restart_window(ahead + 1)
            self._log_shares(trainer, shares)
        due = trainer.global_step - self._logged >= (trainer.log_every_n_steps or 1)
        if trainer.session.metrics.loggers and (due or shares is not None):
            self._logged = trainer.global_step
            row = _metrics(policy, before, measurements)
            trainer.session.metrics.loggers.measured(row, trainer.global_step)

    def _measurement(self, trainer: TrainerProtocol) -> Tensor:
        speeds, speed, spread = self._speeds, 0.0, 0.0
        if speeds:
            speed = statistics.median(speeds)
            deviation = statistics.median(abs(value - speed) for value in speeds)  # times 1.48: a standard deviation
            spread = 1.25 * 1.48 * deviation / speed / len(speeds) ** 0.5
        measurement = [speed, spread, statistics.median(self._steps)]
        return torch.tensor(measurement, dtype=torch.float32, device=trainer.world.device)

    def on_exception(self, trainer: TrainerProtocol, pl_module: Module, exception: BaseException) -> None:
        self._start_alarm(None)

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        # Not a condition on `_alarm`: a rank that has joined after the last batch has none, and a rank that repeats
        # this hook has closed it.
        if self.shares is None and not self._inactive(trainer):
            trainer.world.barrier()  # a peer may still wait for this rank's answer to a request
        self._start_alarm(None)
        policy = self._policy
        if policy is not None and policy.gain > 1.0 and trainer.is_global_zero:
            text = (
                f"shares {policy.shares}: by the measured speeds, steps are {policy.gain:.2f} times as fast as with "
                "equal shares"
            )
            trainer.session.metrics.loggers.event("rebalance", text, trainer.global_step)
            trainer.print(text)

    # -- out-of-memory errors, and state ----------------------------------------------------------------------------

    def repeats_after(self, trainer: TrainerProtocol, error: Exception) -> bool:
        size = trainer.session.metrics.logbook.size or 0
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out_of_memory or size < 2 or self._inactive(trainer) or synchronised(trainer.session.module):
            return False
        self._max_fitting = size // 2
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"shares": list(self._policy.shares) if self._policy is not None else self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["shares"]

    def _inactive(self, trainer: TrainerProtocol) -> bool:
        alone = trainer.world.axis("data").size == 1 and self.max_batch_size is None and not self._max_fitting
        return alone or not trainer.strategy.traits.lockstep


def _samples(trainer: TrainerProtocol) -> int:
    return trainer.session.data.train_feed.global_batch * trainer.accumulate_grad_batches


def _assumed(speeds: Sequence[float]) -> list[float]:
    """Return the speeds of all ranks; an unknown speed (0, of a rank that just joined) becomes the median.

    >>> _assumed([4.0, 0.0, 2.0, 3.0]), _assumed([0.0, 0.0])
    ([4.0, 3.0, 2.0, 3.0], [])
    """
    measured = [speed for speed in speeds if speed > 0.0]
    return [speed or statistics.median(measured) for speed in speeds] if measured else []


def _now(trainer: TrainerProtocol) -> Any:
    """Return a time stamp: an event on CUDA devices, else seconds without the time spent waiting for peers."""
    if trainer.world.device.type == "cuda":
        return _event()
    return _clock() - as_part(trainer.strategy, MeasuresWaiting).waited_s


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class _Computed:
    """Begin and end of a microbatch's computation, and the intervals in which the device waited for peers."""

    begun: Any
    ended: Any
    pauses: tuple[tuple[Any, Any], ...] = ()

    def is_over(self) -> bool:
        return isinstance(self.ended, float) or bool(self.ended.query())

    def seconds(self) -> float:
        """Return the seconds of computation, without waiting."""
        return _between(self.begun, self.ended) - sum(_between(*pause) for pause in self.pauses)


def _between(begun: Any, ended: Any) -> float:
    return float(ended - begun) if isinstance(begun, float) else float(begun.elapsed_time(ended)) / 1000.0


def _metrics(policy: SharePolicy, shares: Sequence[int], measurements: Sequence[Measurement]) -> dict[str, float]:
    metrics = {"balance/gain": policy.gain}
    for rank, (share, measurement) in enumerate(zip(shares, measurements, strict=True)):
        metrics[f"balance/share_{rank}"] = share / policy.samples
        metrics[f"balance/samples_per_s_{rank}"] = measurement.speed
        metrics[f"balance/wait_{rank}"] = max(0.0, 1.0 - share / measurement.speed / measurement.step_s)
    return metrics
