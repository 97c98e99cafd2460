"""The Trainer: the user's interface; has the parts of a run and starts it. No strategy logic, no order of hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from fabricx import plugins
from fabricx.checkpoint.rank_state import LoggedMark
from fabricx.core import manual_optimization
from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.hooks import Hooks
from fabricx.core.logger import FourMethods, Logger, Silent
from fabricx.core.module import Module, batch_weight
from fabricx.core.optimizers import OptimizerHandle, Schedule
from fabricx.core.precision import Precision, check_precision
from fabricx.core.state import Phase, RunState
from fabricx.core.strategy import Strategy
from fabricx.data import Balance, Feed
from fabricx.distributed import heartbeat
from fabricx.distributed.collective_guard import together
from fabricx.distributed.world import World
from fabricx.duration import check_count
from fabricx.errors import FabricxError
from fabricx.fault_tolerance.fault_tolerance import FaultTolerance
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
    from fabricx.telemetry.aggregator import Aggregator
    from fabricx.telemetry.logs import LogSettings
    from fabricx.trainer.session import Overridden

# Attributes that exist only during a run, in the process that trains; they are not pickled.
_RUNTIME = (
    "hooks", "logbook", "train_logbook", "mark", "fault_tolerance", "train_feed", "val_feeds",
    "optimizers", "lr_schedulers", "optimizer_handles", "training_step",
    "steps", "window", "world", "agreement", "precision_plugin", "overridden", "bring", "datamodule",
    "logger_dispatcher", "recorder", "watcher",
    "module", "writer", "train_dataloader", "val_dataloaders", "shared",
)  # fmt: skip


class Trainer(TrainerProperties):
    """Trains and evaluates a `Module`, on any number of ranks.

    Args:
        accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
        strategy: a name ("ddp"), a dotted path, or a `Strategy`; "auto" selects "single" for a single rank, and "ddp"
            for several ranks.
        devices: ranks on this machine: a number, "auto", -1 for all devices, or a list of device numbers. On a CPU,
            each rank is a process.
        num_nodes: number of machines; for more than 1, start the script on each machine with torchrun or SLURM.
        precision: "32-true", "64-true", "16-true", "bf16-true", "16-mixed" (CUDA) or "bf16-mixed".
        max_epochs, max_steps: training ends at the limit that is reached first; steps are weight updates. Without a
            limit by epochs, steps or time, training ends after 1000 epochs; -1 is no limit.
        min_epochs, min_steps: a requested stop is delayed until both are reached, unless a signal requests it.
        max_time: time limit of training: a timedelta, or text such as "2h30m".
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: number of batches for each
            rank (int), or fraction of all batches (float).
        overfit_batches: train and validate on the same few batches: their number (int) or fraction (float).
        val_check_interval: interval between validations: a fraction of an epoch (float), a number of batches (int), or
            a number of steps ("500st"). None disables validation.
        check_val_every_n_epoch: validate only in every n-th epoch; None counts the batches of `val_check_interval`
            across epochs.
        num_sanity_val_steps: validation batches before training, to detect errors early; -1 for all batches.
        log_every_n_steps: weight updates between two rows in the loggers.
        accumulate_grad_batches: batches of each rank for a weight update.
        gradient_clip_val: limit for clipping gradients; None disables clipping.
        gradient_clip_algorithm: "norm" (of all parameters together) or "value" (of each element).
        deterministic: use deterministic algorithms of torch; "warn" only warns where torch has none. "elastic"
            produces bitwise identical weights for any number of ranks, by the strategy "reproducible" instead of "ddp".
        benchmark: make cuDNN measure its algorithms and select the fastest; None does not change the setting of torch.
        inference_mode: evaluate under `torch.inference_mode` instead of `torch.no_grad`.
        use_distributed_sampler: split the data of a `DataLoader` over the ranks.
        profiler: "simple" prints a table of where the time was spent, "trace" writes `trace.json` for ui.perfetto.dev;
            the callbacks `Profiler` and `Tracing` do the same, with options. None disables both.
        detect_anomaly: enable the anomaly detection of autograd, which finds the operation that produced a NaN (slow).
        sync_batchnorm: compute the statistics of batch normalisation over the samples of all ranks; each rank then
            needs samples in each batch.
        reload_dataloaders_every_n_epochs: create the loaders again every n epochs; 0 for never.
        fast_dev_run: run 1 batch (True) or n batches (int) of each loader, without loggers and checkpoints, to find
            errors.
        logger: True for TensorBoard, False for no logger, a `Logger`, any object with the same four methods, or a list
            of them.
        callbacks: a `Callback`, a name, or a list of them.
        enable_checkpointing, enable_progress_bar, enable_model_summary: add the default callback for this purpose,
            unless `callbacks` contains such a callback.
        enable_fault_recovery: add the callback for recovery from failures, with several ranks on this machine. With
            enable_checkpointing=False it replaces lost workers in place or from memory, and writes no snapshots for
            restarts.
        enable_telemetry: record where each rank spends its time; nothing is recorded if neither a logger nor a callback
            for checkpoints writes to the run's folder.
        default_root_dir: parent of the runs' folders; None for the current folder.
        compile: compile the module's forward with `torch.compile`; a mapping contains options for it.

    Raises:
        ValueError: an argument is invalid; the message lists the valid values.
        LookupError: no strategy or callback has this name.
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
        self.arguments = arguments.non_defaults(Trainer.__init__, locals())
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
        self.configuration: dict[str, Any] | None = None  # from Hydra; in Python see `arguments`
        self.enable_checkpointing = enable_checkpointing and not fast_dev_run
        self.enable_telemetry = enable_telemetry and not fast_dev_run
        if not isinstance(fast_dev_run, bool):
            check_batches("fast_dev_run", fast_dev_run, 0)
        self.fast_dev_run = fast_dev_run
        if fast_dev_run:
            self._limit_to(int(fast_dev_run))
        reproducible = deterministic == "elastic"
        self.strategy = choose_strategy(strategy, len(self.device_ids), self.num_nodes, reproducible=reproducible)
        self.loggers = choose_loggers(None if fast_dev_run else logger)
        several = several_ranks(len(self.device_ids), self.num_nodes)
        wanted = {
            "progress_bar": enable_progress_bar,
            "model_summary": enable_model_summary,
            "model_checkpoint": self.enable_checkpointing,
            "fault_recovery": enable_fault_recovery and several and not fast_dev_run,
            "profiler": self.profiler == "simple",
            "tracing": self.profiler == "trace",
        }
        options = {"fault_recovery": {"snapshots": self.enable_checkpointing}}
        defaults = {name: options.get(name, {}) for name, on in wanted.items() if on}
        self.callbacks = choose_callbacks(callbacks, defaults, fast=bool(fast_dev_run))
        if self.max_time is not None:
            self.callbacks.append(plugins.build("callbacks", "timer", duration=self.max_time))
        self._reset()

    def _reset(self) -> None:
        self.state = RunState()
        self.world = World()
        self.interrupted = False  # a signal (Ctrl-C, SIGTERM) has stopped the run
        self.terminated = False  # the signal was SIGTERM or the notice of a scheduler
        self.is_last_batch = False
        self.several_loaders = False
        self.stop_wanted = False
        self.published = Published()
        self.failures: list[str] = []  # errors after which all workers of this run were restarted
        self.failed_at = 0.0  # time of the newest failure, in seconds since 1970
        self.step_reached = 0  # step before the newest failure, if no other process has recorded it
        self.log_settings: LogSettings | None = None  # of the process that launched this worker
        self.balance = Balance()  # shares of the ranks in each global batch
        self.apart = False  # whether this rank trains asynchronously now
        self.in_step = False  # whether weights, random state or statistics are newer than the position in the data
        self.collecting = False  # whether the content of a checkpoint is being collected
        self.taken_up: tuple[int, int, int] | None = None  # of the loaded checkpoint, see `report_global_batch`
        self.saves: tuple[Any, int] = (None, 0)  # position of the newest save, number of earlier saves there
        self.idle_ranks = 0  # number of ranks without a sample of this microbatch, which do not run its hooks
        self.followed: tuple[int, int] = (0, -1)  # generation, number of its newest hooks without idle ranks
        self.boundary = 0  # number of steps and ends of epochs that the ranks have passed in this run
        self.stopped = False  # all ranks have agreed to stop
        self.val_every: float = float("inf")
        self.num_training_batches: int | float = 0
        self.num_val_batches: list[int | float] = []
        self._no_runtime()

    def _no_runtime(self) -> None:
        self.module: Module = None  # type: ignore[assignment]
        self.datamodule: DataModule | None = None
        self.hooks: Hooks = None  # type: ignore[assignment]
        self.logbook: Logbook = None  # type: ignore[assignment]
        self.train_logbook: Logbook = None  # type: ignore[assignment]  # during a validation, `logbook` is that of the validation
        self.mark: LoggedMark | None = None  # snapshot before a batch whose gradient may be dropped
        self.own_generators: dict[str, Any] = {}  # by path: random generators of the module and the data
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
        self.writer: Writer | None = None  # writes checkpoints
        self.precision_plugin = Precision()
        self.closures = False
        self.bring: Callable[[Any, int], Any] | None = None
        self.fault_tolerance = FaultTolerance(self)
        self.logger_dispatcher = LoggerDispatcher()  # writes to the loggers, on the main rank
        self.recorder = NoopRecorder()  # records where this rank spends its time
        self.watcher: Aggregator | None = None  # reads the records of all ranks, in the process that launches them
        self.shared: SharedSettings | None = None  # compares settings that hooks may only change equally on all ranks

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _RUNTIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._no_runtime()
        self.world = World()
        self.__dict__.update(state)

    def _limit_to(self, batches: int) -> None:
        self.limit_train_batches = self.limit_val_batches = batches
        self.limit_test_batches = self.limit_predict_batches = batches
        self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1

    # -- for users ------------------------------------------------------------------------------------------------

    def fit(
        self,
        module: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train a module.

        Args:
            module: has the trained weights afterwards, also if worker processes trained it.
            train_dataloaders: a `DataLoader` or any iterable of batches; or a `DataModule`.
            val_dataloaders: a `DataLoader`, an iterable of batches, or a list of them.
            datamodule: creates the loaders of both kinds.
            ckpt_path: checkpoint to resume from: its path, "last" (starts from the beginning without a checkpoint), or
                "best".

        Raises:
            ValueError: an argument or a method of the module is invalid; raised before any process starts if possible.
            WorkerFailed: a worker process failed; the message contains its traceback.
            SystemExit: with code 143, after SIGTERM or the notice of a scheduler, when the run is stopped and saved.
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
        """Validate a module.

        Args:
            module: None for that of the previous call, with the best checkpoint of its run, if any.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            datamodule: creates the loaders.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".
            verbose: print the metrics.

        Returns:
            the metrics of each loader over the samples of all ranks, with each sample counted once.

        Raises:
            ValueError: an argument is invalid.
            WorkerFailed: a worker process failed.
        """
        return self._evaluate("validate", module, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Test a module; see `validate` for the arguments, the result and the errors.

        Args:
            module: None for that of the previous call.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            datamodule: creates the loaders.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".
            verbose: print the metrics.
        """
        return self._evaluate("test", module, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> list[Any]:
        """Run `predict_step` on all batches.

        Args:
            module: None for that of the previous call, with the best checkpoint of its run, if any.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            datamodule: creates the loaders.
            return_predictions: False discards the outputs.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".

        Returns:
            the outputs in the order of the data set; a list for each loader if there are several.

        Raises:
            ValueError: an argument is invalid.
            WorkerFailed: a worker process failed.
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
                raise ValueError(f"trainer.{stage}() has no module: pass a module, or call fit first")
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
        """Write a checkpoint; all ranks call this at the same point.

        A resumed run continues exactly as an uninterrupted run. At points where this is impossible the call raises an
        error: within a training step (where only weights can be saved), before training, or while ranks train
        asynchronously.

        Args:
            path: folder to create, or a URL that fsspec supports, such as "s3://bucket/run/a.ckpt".
            weights_only: omit the state that only training needs.
            wait: return when the checkpoint is complete; else training continues during the write, and the next call,
                or `finish_checkpoint`, waits for its end.
            after: called on the main rank, in a thread, when the checkpoint is complete.
            failed: called on every rank if the disk was full.

        Returns:
            the folder.

        Raises:
            CheckpointError: this checkpoint or the previous checkpoint was not written.
            RanksDisagree: another rank does not make this call, or has another path.
            RuntimeError: a checkpoint cannot be saved at this point; the message names the right hook.
        """
        from fabricx.checkpoint.content import save_checkpoint
        from fabricx.checkpoint.storage import as_path

        folder = as_path(path)
        with together():  # ranks without a sample of this batch take part
            save_checkpoint(self, folder, weights_only=weights_only, wait=wait, after=after, failed=failed)
            if wait or self.state.phase is Phase.IDLE:
                self.finish_checkpoint()
        return folder

    def finish_checkpoint(self) -> bool:
        """Wait until no checkpoint is being written; all ranks call this at the same point.

        Returns:
            whether the newest checkpoint is complete; False if the disk was full.

        Raises:
            CheckpointError: the checkpoint was not written for another reason.
        """
        if self.writer is None:
            return True
        try:
            with self.recorder.within(Span.CHECKPOINT):
                return self.writer.finish()
        finally:
            if self.state.phase is Phase.IDLE:  # no run is in progress that would close the writer
                self.writer.close()
                self.writer = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main rank only, above the progress bar.

        Args:
            args, kwargs: of `print`.
        """
        if self.is_global_zero:
            bar: Any = next((callback for callback in self.callbacks if hasattr(callback, "print")), None)
            (bar.print if bar is not None else print)(*args, **kwargs)

    def request_stop(self, reason: str) -> None:
        """Request that all ranks stop at the next step boundary that they agree on.

        Args:
            reason: the reason of the request, for all ranks.
        """
        self.stop_wanted = True
        if self.agreement is not None:
            self.agreement.request(reason)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors from all ranks.

        Args:
            data: a tensor, or nested collections of tensors.
            sync_grads: whether gradients flow back to the ranks.

        Returns:
            `data`, with each tensor of shape [...] replaced by a tensor of shape [world_size, ...].
        """
        from lightning_utilities.core.apply_func import apply_to_collection

        return apply_to_collection(data, Tensor, lambda item: self.world.all_gather(item, sync_grads))

    # -- for the loop ---------------------------------------------------------------------------------------------

    @property
    def outdated(self) -> bool:
        """Return whether this rank's group has lost a rank, or a new rank waits to join."""
        return self.fault_tolerance.outdated

    def to_device(self, batch: Any, loader: int) -> Any:
        """Transfer a batch to the device, with the transfer hooks.

        Args:
            batch: of a loader.
            loader: index of the loader.
        """
        heartbeat.advance()
        return batch if self.bring is None else self.bring(batch, loader)

    @property
    def weigh(self) -> Callable[[Any], float] | None:
        """Return the function that computes the weight of a batch; None if the weight is the number of samples."""
        return functools.partial(batch_weight, self.module) if self.overridden.batch_weight else None

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients; calls the module's `backward` if the module overrides it.

        Args:
            loss: scalar, shape [].
            args, options: of `Tensor.backward`.
        """
        if self.overridden.backward:
            self.strategy.backward(loss, functools.partial(self.module.backward, loss, *args, **options))
        elif args or options:
            self.strategy.backward(loss, functools.partial(loss.backward, *args, **options))
        else:
            self.strategy.backward(loss)

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients in manual optimization.

        Args:
            loss: scalar, shape [].
            args, options: of `Tensor.backward`.
        """
        manual_optimization.backward(self, loss, *args, **options)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step an optimizer for the module: in manual optimization, or in its `optimizer_step`.

        Args:
            optimizer: of the module.
            closure: computes the loss and the gradients.
        """
        self.fault_tolerance.begin_update()
        if self.module.automatic_optimization:
            used = closure if id(optimizer) in self.overridden.closures else None
            self.precision_plugin.step(optimizer, self.strategy.step, used)
            return
        manual_optimization.step(self, optimizer, closure)

    def count_manual_steps(self) -> None:
        """Count the weight updates of a manual batch: the steps of the optimizer that stepped most often."""
        steps = self.overridden.manual_steps
        if steps:
            for _ in range(max(steps.values())):
                self.state.step = self.strategy.updated(self.state.step + 1)
            steps.clear()

    def handle_of(self, optimizer: Optimizer) -> OptimizerHandle:
        """Return the handle of an optimizer.

        Args:
            optimizer: of the module.
        """
        return next(handle for handle in self.optimizer_handles if handle.optimizer is optimizer)

    def clip_gradients(self, optimizer: Optimizer, limit: float | None, algorithm: str | None) -> None:
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: the optimizer or its handle.
            limit: of the norm or of each element; None or 0 clips nothing.
            algorithm: "norm" or "value"; None: "norm".
        """
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
        """Reset the logs of the epoch, and reload the loaders if that is due."""
        if not self.state.batch:
            self.logbook.batches = 0
        self.published.open = True
        every = self.reload_dataloaders_every_n_epochs
        if every and self.state.epoch and self.state.epoch % every == 0:
            from fabricx.data.setup import reload_loaders

            reload_loaders(self)

    def restore(self, *, weights_only: bool = False) -> None:
        """Load the requested checkpoint, if any.

        Args:
            weights_only: load only the weights, for an evaluation.
        """
        if self.overridden.ckpt_path is not None:
            from fabricx.checkpoint.content import restore

            restore(self, self.overridden.ckpt_path, weights_only=weights_only)

    def attach_log(self, logbook: Logbook | None) -> None:
        """Set the destination of the module's `self.log`.

        Args:
            logbook: None outside of a run.
        """
        self.module.__dict__["_log_to"] = logbook


__all__ = ["FabricxError", "Silent", "Trainer"]
