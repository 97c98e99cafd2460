"""The Trainer: holds the parts of a run, starts it, and closes everything. No strategy logic, no order of hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from fabricx import plugins
from fabricx.checkpoint.rank_state import BufferCopies, LoggedMark, RankState
from fabricx.core import manual_optimization
from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.hooks import Hooks
from fabricx.core.logger import FourMethods, Logger, Silent
from fabricx.core.module import Module, batch_weight
from fabricx.core.optimizers import OptimizerHandle, Schedule
from fabricx.core.precision import Precision, check_precision
from fabricx.core.state import Phase, RunState, Stage
from fabricx.core.strategy import Strategy
from fabricx.data import Balance, Feed
from fabricx.distributed import heartbeat
from fabricx.distributed.collective_guard import together
from fabricx.distributed.generations import Membership
from fabricx.distributed.world import World
from fabricx.duration import check_count
from fabricx.errors import FabricxError
from fabricx.fault_tolerance.rank_record import Slot
from fabricx.loop.accumulation import AccumulationWindow
from fabricx.metrics.collector import Logbook
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.metrics.publish import Published
from fabricx.telemetry.recorder import NoopRecorder, Span
from fabricx.trainer import arguments
from fabricx.trainer.dispatch import dispatch
from fabricx.trainer.factory import choose_callbacks, choose_loggers, choose_strategy, several_ranks
from fabricx.trainer.options import (
    check_accelerator,
    check_batches,
    check_clipping,
    check_deterministic,
    check_devices,
    check_limit,
    check_max_time,
    check_profiler,
    check_root,
    check_validation_interval,
)
from fabricx.trainer.properties import TrainerProperties
from fabricx.trainer.run_request import Job

if TYPE_CHECKING:
    from datetime import timedelta

    from fabricx.checkpoint import Writer
    from fabricx.consistency.shared_settings import SharedSettings
    from fabricx.distributed.stop_consensus import Agreement
    from fabricx.fault_tolerance.rollback import MemoryCheckpointer
    from fabricx.telemetry.aggregator import Aggregator
    from fabricx.telemetry.logs import LogSettings
    from fabricx.trainer.session import Overridden

# What exists only while a run is going on, in the process that trains.
_RUNTIME = (
    "hooks", "logbook", "train_logbook", "rank_state", "epoch_end", "mark", "train_feed", "val_feeds",
    "optimizers", "lr_schedulers", "optimizer_handles", "training_step",
    "steps", "window", "world", "agreement", "precision_plugin", "overridden", "bring", "datamodule",
    "logger_dispatcher", "recorder", "watcher",
    "module", "writer", "train_dataloader", "val_dataloaders", "slot", "members", "metric_objects",
    "memory_checkpointer", "buffers", "shared",
)  # fmt: skip


class Trainer(TrainerProperties):
    """Runs a `Module` through a strategy.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        strategy: a name ("ddp"), a dotted path, or a `Strategy`; "auto" is single for one rank and ddp for more.
        devices: ranks on this machine: a number, "auto", -1 for all, or a list of device numbers. On a CPU a rank is a
            process.
        num_nodes: machines; more than one are started by torchrun or SLURM.
        precision: "32-true", "64-true", "16-true", "bf16-true", "16-mixed" (CUDA) or "bf16-mixed".
        max_epochs, min_epochs, max_steps, min_steps: limits; steps are weight updates. 1000 epochs if none is given.
        max_time: limit, a timedelta or text such as "2h30m".
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: a number of batches for each
            rank (int), or a part of all (float).
        overfit_batches: train and validate on so many batches (int) or such a part (float), always the same.
        val_check_interval: validate after such a part of an epoch (float), so many batches (int), or steps ("500st").
        check_val_every_n_epoch: validate only in each n-th epoch; None counts `val_check_interval` across epochs.
        num_sanity_val_steps: validation batches that are run ahead of training; -1 for all.
        log_every_n_steps: weight updates between two rows in the loggers.
        accumulate_grad_batches: batches of one weight update.
        gradient_clip_val: limit of the gradient; None clips nothing.
        gradient_clip_algorithm: "norm" (of all parameters together) or "value" (of each element).
        deterministic: ask torch for deterministic algorithms; "warn" only warns where there are none; "elastic" gives
            the same weights to the bit for any number of ranks, with `strategy="reproducible"` in the place of ddp.
        benchmark: let cuDNN try out algorithms.
        inference_mode: evaluate under `torch.inference_mode` rather than `no_grad`.
        use_distributed_sampler: cut the data of a `DataLoader` over the ranks.
        profiler: "simple" prints where the time went, "trace" writes `trace.json` for ui.perfetto.dev; the callbacks
            `Profiler` and `Tracing` are the same, with options. None for neither.
        detect_anomaly: let autograd look for NaN and say where they come from (slow).
        sync_batchnorm: batch normalisation over all ranks' samples, of which each rank needs some in each batch.
        reload_dataloaders_every_n_epochs: ask for the loaders anew each n epochs.
        fast_dev_run: run one batch (True) or n of everything, without loggers and checkpoints, to find mistakes.
        logger: True for TensorBoard, False for none, a `Logger`, any object with its four methods, or a list of them.
        callbacks: a `Callback`, a name, or a list of them.
        enable_checkpointing, enable_progress_bar, enable_model_summary: have the callback of that kind by default.
        enable_fault_recovery: the same, where there is more than one rank on this machine and checkpointing is enabled.
        enable_telemetry: record where each rank's time goes, if the run writes anything at all into its folder.
        default_root_dir: where runs' folders are made; the current folder if not given.
        compile: compile the module's forward with `torch.compile`; a dict gives its options.

    Raises:
        ValueError: an argument is wrong; the message says what is possible.
        LookupError: there is no strategy or callback of that name.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        precision: str | int = "32-true",
        max_epochs: int | str | None = None,
        min_epochs: int | str | None = None,
        max_steps: int | str = -1,
        min_steps: int | str | None = None,
        max_time: str | timedelta | Mapping[str, int] | None = None,
        limit_train_batches: int | float | None = 1.0,
        limit_val_batches: int | float | None = 1.0,
        limit_test_batches: int | float | None = 1.0,
        limit_predict_batches: int | float | None = 1.0,
        overfit_batches: int | float = 0,
        val_check_interval: int | float | str | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = "norm",
        deterministic: bool | str = False,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        fast_dev_run: bool | int = False,
        logger: bool | Logger | FourMethods | Sequence[Logger | FourMethods] | None = True,
        callbacks: Callback | str | Sequence[Callback | str] | None = None,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        enable_fault_recovery: bool = True,
        enable_telemetry: bool = True,
        default_root_dir: str | Path | None = None,
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        self.arguments = arguments.given(Trainer.__init__, locals())
        self.accelerator = check_accelerator(accelerator)
        self.device_ids = check_devices(devices, self.accelerator)
        self.devices_given = devices != "auto"
        self.num_nodes = check_count("num_nodes", num_nodes, "node", 1) or 1
        self.precision = check_precision(precision)
        self.max_epochs = -1 if max_epochs == -1 else check_count("max_epochs", max_epochs, "epoch")
        self.min_epochs = check_count("min_epochs", min_epochs, "epoch") or 0
        self.max_steps = -1 if max_steps in (-1, None) else check_count("max_steps", max_steps, "step") or 0
        self.min_steps = check_count("min_steps", min_steps, "step") or 0
        self.max_time = check_max_time(max_time)
        if self.max_epochs is None:
            self.max_epochs = -1 if self.max_steps != -1 or self.max_time else 1000
        self.limit_train_batches = check_limit("limit_train_batches", limit_train_batches)
        self.limit_val_batches = check_limit("limit_val_batches", limit_val_batches)
        self.limit_test_batches = check_limit("limit_test_batches", limit_test_batches)
        self.limit_predict_batches = check_limit("limit_predict_batches", limit_predict_batches)
        self.overfit_batches = overfit_batches
        if overfit_batches:
            self.limit_train_batches = self.limit_val_batches = check_limit("overfit_batches", overfit_batches)
        self.val_check_interval = check_validation_interval(val_check_interval)
        self.check_val_every_n_epoch = check_count("check_val_every_n_epoch", check_val_every_n_epoch, "epoch", 1)
        self.num_sanity_val_steps = check_batches("num_sanity_val_steps", num_sanity_val_steps, -1)
        self.log_every_n_steps = check_count("log_every_n_steps", log_every_n_steps, "step") or 0
        self.accumulate_grad_batches = check_count("accumulate_grad_batches", accumulate_grad_batches, "batch", 1) or 1
        self.gradient_clip_val, self.gradient_clip_algorithm = check_clipping(
            gradient_clip_val, gradient_clip_algorithm
        )
        self.deterministic = check_deterministic(deterministic)
        self.benchmark = benchmark
        self.inference_mode = inference_mode
        self.use_distributed_sampler = use_distributed_sampler
        self.profiler = check_profiler(profiler)
        self.detect_anomaly = detect_anomaly
        self.sync_batchnorm = sync_batchnorm
        self.reload_dataloaders_every_n_epochs = (
            check_count("reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs, "epoch") or 0
        )
        self.compile = compile
        self.default_root_dir = check_root(default_root_dir)
        self.run_dir: Path | None = None
        self.configuration: dict[str, Any] | None = None  # what it was made from; in Python that is `arguments`
        self.enable_checkpointing = enable_checkpointing and not fast_dev_run
        self.enable_telemetry = enable_telemetry and not fast_dev_run
        self.fast_dev_run = check_batches("fast_dev_run", fast_dev_run, 0)
        if fast_dev_run:
            self._only_try(int(fast_dev_run))
        reproducible = deterministic == "elastic"
        self.strategy = choose_strategy(strategy, len(self.device_ids), self.num_nodes, reproducible=reproducible)
        self.loggers = choose_loggers(None if fast_dev_run else logger)
        several = several_ranks(len(self.device_ids), self.num_nodes)
        defaults = {
            "progress_bar": enable_progress_bar,
            "model_summary": enable_model_summary,
            "model_checkpoint": self.enable_checkpointing,
            "fault_recovery": enable_fault_recovery and self.enable_checkpointing and several,
            "profiler": self.profiler == "simple",
            "tracing": self.profiler == "trace",
        }
        self.callbacks = choose_callbacks(callbacks, defaults, fast=bool(fast_dev_run))
        if self.max_time is not None:
            self.callbacks.append(plugins.build("callbacks", "timer", duration=self.max_time))
        self._reset()

    def _reset(self) -> None:
        self.state = RunState()
        self.world = World()
        self.interrupted = False  # Ctrl-C, SIGTERM: somebody outside has stopped the run
        self.terminated = False  # SIGTERM, in particular
        self.is_last_batch = False
        self.several_loaders = False
        self.stop_wanted = False
        self.published = Published()
        self.failures: list[str] = []  # after which this run was started again
        self.failed_at = 0.0  # when that was last, in seconds since 1970
        self.step_reached = 0  # by then, where no other process knows it
        self.log_settings: LogSettings | None = None  # of the process that launches, where that isn't this one
        self.balance = Balance()  # who gets how much of each global batch
        self.meeting: Any = None  # of ranks that were apart, begun and not done
        self.stage = Stage.BETWEEN
        self.torn = False  # in the middle of an update, after which this batch can't be begun again
        self.apart = False  # does this rank go at its own pace now?
        self.in_step = False  # are weights, random numbers or statistics newer than the position in the data?
        self.collecting = False  # is the content of a checkpoint being collected?
        self.taken_up: tuple[int, int, int] | None = None  # see `say_change`; once a checkpoint was taken up
        self.saves: tuple[Any, int] = (None, 0)  # where checkpoints were written last, and how many before the newest
        self.idle_ranks = 0  # that have no sample of this microbatch, and so no hooks of it
        self.followed: tuple[int, int] = (0, -1)  # generation, number of the latest place where ranks follow hooks
        self.told_ahead = False  # has this rank left word of the batch whose update it makes?
        self.boundary = 0  # steps and epochs' ends that the ranks have passed in this run
        self.stopped = False  # all ranks have agreed to
        self.val_every: float = float("inf")
        self.num_training_batches: int | float = 0
        self.num_val_batches: list[int | float] = []
        self._no_runtime()

    def _no_runtime(self) -> None:
        self.module: Module = None  # type: ignore[assignment]
        self.datamodule: DataModule | None = None
        self.hooks: Hooks = None  # type: ignore[assignment]
        self.logbook: Logbook = None  # type: ignore[assignment]
        self.train_logbook: Logbook = None  # type: ignore[assignment]  # the same, but while a validation has its own
        self.mark: LoggedMark | None = None  # before a batch whose gradient may be dropped
        self.own_generators: dict[str, Any] = {}  # of the module and of the data, by path; not the global ones
        self.epoch_end: RankState | None = None  # where making an epoch's end known began, for going on with others
        self.rank_state: RankState | None = None  # where what isn't done yet began; None between two steps
        self.overridden: Overridden = None  # type: ignore[assignment]
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self.train_feed: Feed = None  # type: ignore[assignment]
        self.val_feeds: list[Feed] = []
        self.optimizers: list[Optimizer] = []
        self.optimizer_handles: list[OptimizerHandle] = []
        self.lr_schedulers: list[Schedule] = []
        self.training_step: Callable[..., Any] = None  # type: ignore[assignment]
        self.steps: dict[str, Callable[..., Any]] = {}
        self.window = AccumulationWindow()
        self.agreement: Agreement | None = None
        self.writer: Writer | None = None  # of checkpoints
        self.precision_plugin = Precision()
        self.closures = False
        self.bring: Callable[[Any, int], Any] | None = None
        self.logger_dispatcher = LoggerDispatcher()  # writes to the loggers, on the main rank
        self.recorder = NoopRecorder()  # of where this rank's time goes
        self.watcher: Aggregator | None = None  # who reads what all ranks record, in the process that launches them
        self.members: Membership | None = None  # of this rank's group, where they may change
        self.metric_objects: dict[str, Any] | None = None  # of the module, as they were when the epoch began
        self.buffers: BufferCopies | None = None  # as they were when a window began
        self.shared: SharedSettings | None = None  # what hooks may change on all ranks together only
        self.slot: Slot | None = None  # for what only this rank knows, where others may go on without it
        self.memory_checkpointer: MemoryCheckpointer | None = None  # the same for what only this rank holds

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._no_runtime()
        self.world = World()
        self.__dict__.update(state)

    def _only_try(self, batches: int) -> None:
        self.limit_train_batches = self.limit_val_batches = batches
        self.limit_test_batches = self.limit_predict_batches = batches
        self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1

    # -- what users call ----------------------------------------------------------------------------------------

    def fit(
        self,
        module: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train.

        Args:
            module: what to train; has the trained weights afterwards, wherever the training ran.
            train_dataloaders: a `DataLoader` or any iterable of batches; or a `DataModule`.
            val_dataloaders: one of those, or a list of them.
            datamodule: gives both.
            ckpt_path: go on from a checkpoint: its path, "last" (start fresh where there is none), or "best".

        Raises:
            ValueError: something doesn't fit, found before any process starts where that is possible.
            WorkerFailed: a worker process failed; the message has its traceback.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        dispatch(self, Job("fit", module, train_dataloaders, val_dataloaders, datamodule, ckpt_path))

    def validate(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run the validation; returns the metrics of each loader, over all ranks, each sample counted once."""
        return self._evaluate("validate", module, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run the test; returns the metrics of each loader, over all ranks, each sample counted once."""
        return self._evaluate("test", module, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> list[Any]:
        """Run `predict_step` over all batches.

        Returns:
            the outputs in the data set's order; with several loaders a list for each.
        """
        return self._evaluate("predict", module, dataloaders, datamodule, ckpt_path, return_predictions)

    def _evaluate(
        self, stage: str, module: Module | None, loaders: Any, data: DataModule | None, path: Any, flag: bool
    ) -> list[Any]:
        if isinstance(loaders, DataModule):
            loaders, data = None, loaders
        if module is None:
            module = self.module
            if module is None:
                raise ValueError(f"trainer.{stage}() has no module: give one, or call fit first")
            saved = self.checkpoint_callback
            if path is None and saved is not None and saved.best_model_path:
                path = "best"
            data = data or self.datamodule
        results: list[Any] = dispatch(self, Job(stage, module, None, loaders, data, path, flag))
        return results

    def save_checkpoint(
        self,
        path: str | Path,
        weights_only: bool = False,
        *,
        wait: bool = True,
        after: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
    ) -> Path:
        """Write a checkpoint; every rank calls it at the same moment.

        A run goes on from it as if nothing had happened. Where that can't be, this raises: within a training step (only
        the weights can be saved there), before training has begun, or while each rank goes at its own pace.

        Args:
            path: the folder to be; a URL that fsspec knows, such as "s3://bucket/run/a.ckpt", is as good.
            weights_only: leave out what only training needs.
            wait: until it is complete; else training goes on while it is written, and the next call, or
                `finish_checkpoint`, waits for it.
            after: called on the main rank, in a thread, once it is complete.
            failed: called on every rank when it turns out that the disk was full.

        Returns:
            the folder.

        Raises:
            CheckpointError: it, or the one before, couldn't be written.
            RanksDisagree: another rank doesn't call it, or with another path.
            RuntimeError: this is no moment to save; the message names the hook to do it in.
        """
        from fabricx.checkpoint.content import save_checkpoint
        from fabricx.checkpoint.storage import as_path

        where = as_path(path)
        with together():  # ranks without a sample follow
            save_checkpoint(self, where, weights_only=weights_only, wait=wait, after=after, failed=failed)
            if wait or self.state.phase is Phase.IDLE:
                self.finish_checkpoint()
        return where

    def finish_checkpoint(self) -> bool:
        """Wait until no checkpoint is being written; every rank calls it at the same moment.

        Returns:
            whether the latest is there; False where the disk was full.

        Raises:
            CheckpointError: it couldn't be written for another reason.
        """
        if self.writer is None:
            return True
        try:
            with self.recorder.within(Span.CHECKPOINT):
                return self.writer.finish()
        finally:
            if self.state.phase is Phase.IDLE:  # no run will close it
                self.writer.close()
                self.writer = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main rank only, above the progress bar."""
        if self.is_global_zero:
            bar: Any = next((callback for callback in self.callbacks if hasattr(callback, "print")), None)
            (bar.print if bar is not None else print)(*args, **kwargs)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to stop at the next step boundary that they agree upon."""
        self.stop_wanted = True
        if self.agreement is not None:
            self.agreement.request(reason)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Bring tensors of all ranks together, shape [world_size, ...]."""
        from lightning_utilities.core.apply_func import apply_to_collection

        return apply_to_collection(data, Tensor, lambda item: self.world.all_gather(item, sync_grads))

    # -- what the loop needs ------------------------------------------------------------------------------------

    @property
    def outdated(self) -> bool:
        """Return whether somebody has left this rank's group, or wants to come."""
        return self.members is not None and self.members.outdated(self.world.generation)

    def check_members(self) -> None:
        """Raise an error between two batches that ends this rank's part in its group, if that is outdated."""
        if self.members is not None:
            self.members.stay(self.world.generation)

    def to_device(self, batch: Any, loader: int) -> Any:
        """Bring a batch to the device, with the transfer hooks."""
        heartbeat.advance()
        return batch if self.bring is None else self.bring(batch, loader)

    @property
    def weigh(self) -> Callable[[Any], float] | None:
        """Return what gives a batch's weight; None where that is its number of samples."""
        return functools.partial(batch_weight, self.module) if self.overridden.batch_weight else None

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients, through the module's own `backward` if it has one."""
        if self.overridden.backward:
            self.strategy.backward(loss, functools.partial(self.module.backward, loss, *args, **options))
        elif args or options:
            self.strategy.backward(loss, functools.partial(loss.backward, *args, **options))
        else:
            self.strategy.backward(loss)

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients in a manual loop; further arguments are those of `Tensor.backward`."""
        manual_optimization.backward(self, loss, *args, **options)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step one optimizer on behalf of the module: in a manual loop, or in its own `optimizer_step`."""
        if self.slot is not None:
            self.world.settle()
        self.torn = self.strategy.dealer is None
        if self.module.automatic_optimization:
            passed = closure if id(optimizer) in self.overridden.closures else None
            self.precision_plugin.step(optimizer, self.strategy.step, passed)
            return
        manual_optimization.step(self, optimizer, closure)

    def count_manual_steps(self) -> None:
        """Count the weight updates of a manual batch: those of the optimizer that stepped most often."""
        steps = self.overridden.manual_steps
        if steps:
            for _ in range(max(steps.values())):
                self.state.step = self.strategy.updated(self.state.step + 1)
            steps.clear()

    def handle_of(self, optimizer: Optimizer) -> OptimizerHandle:
        """Return the handle of an optimizer."""
        return next(handle for handle in self.optimizer_handles if handle.optimizer is optimizer)

    def clip_gradients(self, optimizer: Optimizer, limit: float | None, algorithm: str | None) -> None:
        """Clip the gradients of an optimizer's parameters."""
        if not limit:
            return
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self.precision_plugin.unscale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if (algorithm or "norm") == "norm":
            self.window.norm = self.strategy.clip_norm(parameters, limit)
        else:
            self.strategy.clip_value(parameters, limit)

    def begin_epoch(self) -> None:
        """Ask for new loaders if that is wanted, and start with empty sums."""
        if not self.state.batch:
            self.logbook.batches = 0
        self.published.open = True
        every = self.reload_dataloaders_every_n_epochs
        if every and self.state.epoch and self.state.epoch % every == 0:
            from fabricx.data.setup import reload_loaders

            reload_loaders(self)

    def restore(self, *, weights_only: bool = False) -> None:
        """Take up the checkpoint that was asked for, if one was: all of it to train on, or the weights alone."""
        if self.overridden.ckpt_path is not None:
            from fabricx.checkpoint.content import restore

            restore(self, self.overridden.ckpt_path, weights_only=weights_only)

    def attach_log(self, logbook: Logbook | None) -> None:
        """Say where `self.log` goes from now on."""
        self.module.__dict__["_log_to"] = logbook


__all__ = ["FabricxError", "Silent", "Trainer"]
