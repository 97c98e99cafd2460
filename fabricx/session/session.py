"""The run-time parts of one run on one rank."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.optim import Optimizer

from fabricx.consistency.hook_effects import HookChecks
from fabricx.consistency.shared_settings import OwnSettings, SharedSettings
from fabricx.core.hook_calls.hooks import Hooks
from fabricx.core.hook_calls.steps import wrap_steps
from fabricx.core.module import batch_weight
from fabricx.core.optimizers import OptimizerHandle, Schedule
from fabricx.core.precision import Precision
from fabricx.core.strategy_parts import (
    DealsData,
    Elastic,
    HasServers,
    HidesGradients,
    ModelParallel,
    ShardsWeights,
    WrapsStep,
    as_part,
)
from fabricx.core.tensors.transfer import with_own_move
from fabricx.distributed.activity import heartbeat
from fabricx.distributed.stop_consensus import StopRequests
from fabricx.session.accumulation import AccumulationWindow
from fabricx.session.callback_states import states_before
from fabricx.session.fault_tolerance import FaultTolerance
from fabricx.session.rank_state import RankState
from fabricx.session.status import BatchStatus, CheckpointStatus, Overridden, UserSteps
from fabricx.telemetry.recorder import NoopRecorder

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.datamodule import DataModule
    from fabricx.core.logger import Logger
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.core.trainer import TrainerProtocol
    from fabricx.data.order import Balance
    from fabricx.data.run_data import RunData
    from fabricx.distributed.world import World
    from fabricx.metrics.run_metrics import RunMetrics
    from fabricx.session.status import FailureLog, StopStatus


@final
class Session:
    """One run on one rank: built by `trainer.set_up`, used by the loop, closed when the run ends.

    Args:
        trainer: passed to hooks; the library reads the attributes below instead.
        options: the run's options.
        state: position of the run, which checkpoints save.
        world: the ranks; another object after each change of the ranks.
        strategy: method of distributed training.
        module, datamodule: of the user.
        callbacks, loggers: of the run.
        data: loaders and feeds.
        metrics: logged values, their sums, and the loggers.
        stop, failures: records of the run, which remain after it.
        balance: shares of the ranks in each global batch.
        run_dir: folder of the run.

    Attributes:
        sharding, serving, gradients: parts of the strategy's contract that few strategies implement.
        dealer: leases data to ranks that work at their own pace; does nothing for ranks in lockstep.
        gradient_factor: factor of a rank's loss: the number of data ranks if gradients are averaged over data and
            context ranks, 1 / (context ranks) if they are summed. The result is the sum over data ranks of the mean
            over context ranks.
        divided: the model is divided, so that several ranks process the same share of the data.
        staged: these are stages of a pipeline, which compute a batch in parts.
        hooks: functions to call for each hook.
        stop_requests: determine the boundary at which all ranks stop.
        precision: precision of weights and computations.
        optimizers, optimizer_handles, lr_schedulers: of the module; empty in an evaluation.
        overridden: overridden methods of the module.
        user_steps: steps and gradients of the user's code.
        undo: functions that remove hooks on the optimizers and metrics when the run ends.
        steps: functions of the module by name: "training", "validation", "test", "predict".
        training_step: `steps["training"]`, wrapped by the strategy.
        transfer: transfers (batch, loader index) to the device; None if no transfer is needed.
        window: the present accumulation window.
        batch: status of the present batch.
        checkpoints: status of the run's checkpoints.
        fault_tolerance: records for other ranks, and recovery.
        settings_check: compares settings that hooks may only change equally on all ranks.
        checks: compares what hooks have changed with the other ranks.
        recorder: records where this rank spends its time.
        running: the run has not ended.
    """

    def __init__(
        self, trainer: TrainerProtocol, options: TrainerOptions, state: RunState, world: World, strategy: Strategy,
        module: Module, datamodule: DataModule | None, callbacks: Sequence[Callback], loggers: Sequence[Logger],
        data: RunData, metrics: RunMetrics, stop: StopStatus, failures: FailureLog, balance: Balance,
        run_dir: Path | None,
    ) -> None:  # fmt: skip
        self.trainer, self.options, self.state, self.world, self.strategy = trainer, options, state, world, strategy
        self.module, self.datamodule, self.callbacks, self.loggers = module, datamodule, callbacks, loggers
        self.data, self.metrics, self.stop, self.failures = data, metrics, stop, failures
        self.balance, self.run_dir = balance, run_dir
        self.sharding, self.serving = as_part(strategy, ShardsWeights), as_part(strategy, HasServers)
        self.gradients, self.dealer = as_part(strategy, HidesGradients), as_part(strategy, DealsData).dealer
        self.gradient_factor = self._gradient_factor()
        self._note_axes()
        self.hooks = Hooks(
            trainer, module, callbacks, self.gradients.hooks_see_weights if self.gradients.divides_weights else None
        )
        self.stop_requests = StopRequests(world)
        self.precision = Precision()
        self.optimizers: list[Optimizer] = []
        self.optimizer_handles: list[OptimizerHandle] = []
        self.lr_schedulers: list[Schedule] = []
        self.overridden = Overridden()
        self.user_steps = UserSteps()
        self.undo: list[Callable[[], None]] = []
        self.steps: dict[str, Callable[..., Any]] = {}
        self.training_step: Callable[..., Any] = _no_step
        self.transfer: Callable[[Any, int], Any] | None = None
        self.window = AccumulationWindow(options, module, strategy, state, data, metrics, self.optimizers)
        self.batch = BatchStatus()
        self.checkpoints = CheckpointStatus()
        self.fault_tolerance = FaultTolerance(module, strategy, state, self.rank_state)
        self.settings_check = OwnSettings()
        self.recorder = NoopRecorder()
        self.running = True
        self._reported: set[str] = set()
        self._given = list(callbacks)
        self.checks = HookChecks(options, module, strategy, state, data, self.optimizers, self._forget_copies)

    def rank_state(
        self, buffers: dict[str, Tensor] | None = None, objects: dict[str, Any] | None = None, *, repeats: bool = False
    ) -> RankState:  # fmt: skip
        """Return what this rank needs to continue from here.

        Args:
            buffers: copies of the module's buffers at the start of a window, whose batches may change them.
            objects: result of `metric_objects`, if available.
            repeats: hooks of callbacks and the data module may run before a checkpoint that resumes here.
        """
        states = states_before(self.callbacks, self.datamodule) if repeats else None
        attributes = self.fault_tolerance.attributes
        changed = {} if attributes is None else attributes.changed()
        return RankState(self.module, self.data, self.metrics, buffers, objects, states, changed)

    def check_callbacks(self) -> None:
        """Refuse callbacks that hooks have added to `trainer.callbacks`, or removed from it, during the run.

        Raises:
            ValueError: names the callbacks.
        """
        now, before = list(self.trainer.callbacks), self._given
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return
        known = set(map(id, before)), set(map(id, now))
        added = [type(callback).__name__ for callback in now if id(callback) not in known[0]]
        removed = [type(callback).__name__ for callback in before if id(callback) not in known[1]]
        what = [f"added {', '.join(added)}"] * bool(added) + [f"removed {', '.join(removed)}"] * bool(removed)
        raise ValueError(
            f"a hook has {' and '.join(what) or 'changed the order of the callbacks'} in trainer.callbacks, which has "
            "no effect during a run: pass callbacks to Trainer(callbacks=...), or return them from "
            "configure_callbacks() of the module; a callback that should do nothing can test a flag of its own"
        )

    def wrap_steps(self, *, fits: bool) -> None:
        """Set the functions of the module's steps; called again after a change of the ranks.

        Args:
            fits: the run trains the module.
        """
        self.steps = wrap_steps(self.module, self.precision, several_loaders=self.data.several_loaders)
        if fits:
            wraps = as_part(self.strategy, WrapsStep)
            self.training_step = wraps.wrap_step(self.steps["training"])
            if "validation" in self.steps:
                self.steps["validation"] = wraps.wrap_evaluation(self.steps["validation"])

    def change_world(self, world: World) -> None:
        """Continue with other ranks.

        Args:
            world: the ranks; this rank has joined their process group.
        """
        self.world = as_part(self.strategy, ModelParallel).with_axes(world)
        self.gradient_factor = self._gradient_factor()
        self._note_axes()
        as_part(self.strategy, Elastic).world_changed(self.world)
        self.wrap_steps(fits=True)

    def _note_axes(self) -> None:
        self.divided, self.staged = self.world.divided, self.world.axis("pipeline").size > 1

    def _gradient_factor(self) -> float:
        if self.strategy.traits.averages:  # over data and context ranks
            return float(self.world.axis("data").size)
        return 1.0 / self.world.axis("context").size

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        """Make weights and buffers equal on all ranks; collective.

        Args:
            copies, ends: see `Strategy.synchronize`.
        """
        self.set_buffer_source()
        self.strategy.synchronize(copies, ends=ends)

    def set_buffer_source(self) -> None:
        """Set the rank whose buffers the strategy broadcasts; without synchronous steps, each rank keeps its own."""
        source, together = self.state.buffer_source, self.strategy.traits.synchronous
        self.strategy.buffer_source = source if together and source < self.world.axis("data").size else 0

    def withdraw_stop(self) -> None:
        """Withdraw the stop that hooks have requested, because the run returns to an earlier step; signals count."""
        self.stop.withdraw()
        self.stop_requests.callbacks.reason = None

    def renew_agreements(self) -> None:
        """Agree on stops and settings with the ranks of the present generation; a request to stop is kept."""
        self.stop_requests = self.stop_requests.renewed(self.world)
        self.share_settings()

    def _forget_copies(self) -> None:
        self.fault_tolerance.forget_copies()

    def share_settings(self) -> None:
        """Start to compare settings that hooks change, with the ranks of the present generation."""
        compares = self.world.axis("data").size > 1 and self.strategy.traits.lockstep
        self.settings_check = (
            SharedSettings(self.options, self.module, self.strategy, self.state, self.stop_requests.signals)
            if compares
            else OwnSettings()
        )

    @property
    def writes(self) -> bool:
        """Return whether the run writes files to its folder."""
        return self.trainer.writes

    def warn_once(self, subject: str, text: str, category: type[Warning] = UserWarning) -> None:
        """Warn on the main rank, once in a run.

        Args:
            subject: subject of the warning; later warnings with the same subject are omitted.
            text: text of the warning.
            category: class of the warning.
        """
        if self._is_first(subject):
            warnings.warn(text, category, stacklevel=3)

    def print_once(self, subject: str, text: str) -> None:
        """Print on the main rank, once in a run.

        Args:
            subject: subject of the text; later texts with the same subject are omitted.
            text: a line or several lines.
        """
        if self._is_first(subject):
            self.print(text)

    def _is_first(self, subject: str) -> bool:
        first = subject not in self._reported
        self._reported.add(subject)
        return first and self.world.main_rank

    def print(self, text: str) -> None:
        """Print on the main rank only, above the progress bar.

        Args:
            text: a line or several lines.
        """
        self.trainer.print(text)

    @property
    def weigh(self) -> Callable[[Any], float] | None:
        """Return the function that computes the weight of a batch; None if the weight is the number of samples."""
        return functools.partial(batch_weight, self.module) if self.overridden.batch_weight else None

    def to_device(self, batch: Any, loader: int) -> Any:
        """Transfer a batch to the device, with the transfer hooks.

        Args:
            batch: batch of a loader.
            loader: index of the loader.
        """
        heartbeat.advance()
        return with_own_move(batch) if self.transfer is None else self.transfer(batch, loader)

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients; calls the module's `backward` if the module overrides it.

        Args:
            loss: scalar, shape [].
            args, options: of `Tensor.backward`.

        Raises:
            ValueError: `create_graph=True`, and gradients are averaged over ranks.
        """
        if options.get("create_graph") and self._joint_gradient():
            raise ValueError(
                f"backward(create_graph=True) on {self.world.size} ranks: a loss of gradients would use the gradients "
                "of this rank's samples instead of the global batch's. Add a penalty of each sample to the loss of "
                "training_step (torch.autograd.grad with create_graph=True), or use devices=1"
            )
        if self.overridden.backward:
            self.strategy.backward(loss, functools.partial(self.module.backward, loss, *args, **options))
        elif args or options:
            self.strategy.backward(loss, functools.partial(loss.backward, *args, **options))
        else:
            self.strategy.backward(loss)

    def _joint_gradient(self) -> bool:
        synchronous = self.strategy.traits.synchronous
        return self.world.size > 1 if synchronous else self.strategy.step_ranks.size > 1

    def handle_of(self, optimizer: Optimizer) -> OptimizerHandle:
        """Return the handle of an optimizer.

        Args:
            optimizer: optimizer of the module.
        """
        return next(handle for handle in self.optimizer_handles if handle.optimizer is optimizer)

    def clip_gradients(self, optimizer: Optimizer, limit: float | None, algorithm: str | None) -> None:
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: the optimizer or its handle.
            limit: limit of the norm or of each element; None or 0 clips nothing.
            algorithm: "norm" or "value"; None: "norm".
        """
        if not limit:
            return
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.precision.unscale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if (algorithm or "norm") == "norm":
            self.window.norm = self.strategy.clip_norm(parameters, limit)
        else:
            self.strategy.clip_value(parameters, limit)


def _no_step(*args: Any) -> None:
    raise RuntimeError("this run has no training_step")
