"""Options of the Trainer: their only definition, validated before any process starts. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricx.core.options.checks import (
    check_accelerator,
    check_accumulation,
    check_batches,
    check_clipping,
    check_compile,
    check_deterministic,
    check_devices,
    check_limit,
    check_max_time,
    check_profiler,
    check_root,
    check_switches,
    check_validation_interval,
)
from fabricx.core.options.duration import check_count
from fabricx.core.options.former_arguments import lightnings

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.checkpoint_io import TorchCheckpointIO
    from fabricx.core.logger import FourMethods, Logger
    from fabricx.core.strategy import Strategy


DEFAULT_EPOCHS: Final = 1000
LAUNCHERS: Final = ("auto", "local", "environment")  # start no ranks on other machines


class ProfilerName(str):
    """The name of a profiler, with the methods that modules of Lightning call; these measure nothing.

    Times of a run are in its telemetry. The name is empty without a profiler.
    """

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        """Return a context for an action.

        Args:
            action_name: of the action.
        """
        return nullcontext()

    def start(self, action_name: str) -> None:
        """Begin an action.

        Args:
            action_name: of the action.
        """

    def stop(self, action_name: str) -> None:
        """End an action.

        Args:
            action_name: of the action.
        """


class TrainerOptions:
    """Validated options of a run; the Trainer inherits them, and Hydra's schema is derived from the signature.

    Hooks may change options during a run, on all ranks in the same way: `trainer.max_steps = 100`.
    """

    checkpoint_io: TorchCheckpointIO | None = None  # among the plugins

    @lightnings
    def __init__(
        self,
        *,
        accelerator: str | None = "auto",
        strategy: str | Strategy | None = "auto",
        devices: int | str | Sequence[int] | None = "auto",
        num_nodes: int | None = 1,
        launcher: Any = "auto",
        precision: str | int | None = "32-true",
        max_epochs: int | str | None = None,
        min_epochs: int | str | None = None,
        max_steps: int | str | None = -1,
        min_steps: int | str | None = None,
        max_time: str | timedelta | Mapping[str, int] | None = None,
        limit_train_batches: int | float | None = 1.0,
        limit_val_batches: int | float | None = 1.0,
        limit_test_batches: int | float | None = 1.0,
        limit_predict_batches: int | float | None = 1.0,
        overfit_batches: int | float | None = 0,
        val_check_interval: int | float | str | timedelta | Mapping[str, int] | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 2,
        log_every_n_steps: int | None = 50,
        accumulate_grad_batches: int | None = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = False,
        benchmark: bool | None = None,
        inference_mode: bool | None = True,
        use_distributed_sampler: bool | None = True,
        profiler: Any = None,
        detect_anomaly: bool | None = False,
        barebones: bool | None = False,
        plugins: Any = None,
        sync_batchnorm: bool | None = False,
        reload_dataloaders_every_n_epochs: int | None = 0,
        fast_dev_run: bool | int | None = False,
        logger: bool | Logger | FourMethods | Sequence[Logger | FourMethods] | None = True,
        callbacks: Callback | str | Sequence[Callback | str] | None = None,
        enable_checkpointing: bool | None = True,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = True,
        enable_fault_recovery: bool | None = True,
        enable_telemetry: bool | None = True,
        enable_autolog_hparams: bool | None = True,
        default_root_dir: str | Path | None = None,
        compile: bool | Mapping[str, Any] | None = False,
    ) -> None:
        """Validate all arguments; None is the default of an argument, if it has no other meaning.

        Args:
            accelerator: "auto", "cpu", "gpu", "cuda" or "mps".
            strategy: a name ("ddp"), a dotted path, or a `Strategy`; "auto" selects "single" for a single rank, and
                "ddp" for several ranks.
            devices: ranks on this machine: a number, "auto", -1 for all devices, or a list of device numbers. On a CPU,
                each rank is a process.
            num_nodes: number of machines; for more than 1, a launcher starts the script on each machine:
                torchrun, mpirun or srun.
            launcher: "auto": this process is a rank if torchrun, mpirun, srun or SageMaker has started it, and starts
                its ranks otherwise; "environment" and "local" require one of the two. "ray", a dotted path or a
                `Launcher` start the ranks on `num_nodes` machines of a cluster.
            precision: "32-true", "64-true", "16-true", "bf16-true", "16-mixed" (CUDA) or "bf16-mixed".
            max_epochs: number of epochs; -1 for no limit. Training ends at the first limit of epochs, steps and time
                that is reached; if none is set, after 1000 epochs. It is None until a fit sets its default.
            min_epochs: a requested stop (early stopping, `trainer.should_stop`) is delayed until `min_epochs` and
                `min_steps` are reached; a signal is not delayed.
            max_steps: number of weight updates after which training ends; -1 for no limit.
            min_steps: number of weight updates before which no requested stop takes effect, as `min_epochs`.
            max_time: time limit of training: a timedelta, or text such as "2h30m".
            limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: number of batches for
                each rank (int), or fraction of all batches (float).
            overfit_batches: train, and validate, on the first few batches of each loader, without shuffling: their
                number (int) or fraction (float).
            val_check_interval: interval between validations: a fraction of an epoch (float), a number of batches (int;
                of the ranks with which the run began), a number of steps ("500st"), or a duration ("30m",
                "DD:HH:MM:SS", a timedelta).
            check_val_every_n_epoch: validate only in every n-th epoch; None counts the batches of `val_check_interval`
                across epochs (for streams, not if ranks work at their own pace: these count anew in each epoch).
            num_sanity_val_steps: validation batches before training, to detect errors early; -1 for all batches.
            log_every_n_steps: weight updates between two rows in the loggers.
            accumulate_grad_batches: batches of each rank for a weight update.
            gradient_clip_val: limit for clipping gradients; None disables clipping.
            gradient_clip_algorithm: "norm" (of all parameters together; the default) or "value" (of each element).
            deterministic: use deterministic algorithms of torch; "warn" only warns where torch has none. "elastic"
                produces bitwise identical weights for any number of ranks, by the strategy "reproducible" instead of
                "ddp".
            benchmark: make cuDNN measure its algorithms and select the fastest; None does not change the setting of
                torch.
            inference_mode: `validate`, `test` and `predict` evaluate under `torch.inference_mode` instead of
                `torch.no_grad`. Validations of `fit` use `torch.no_grad`: training may use the tensors that they make.
            use_distributed_sampler: split the data of a `DataLoader` over the ranks.
            profiler: "simple" prints a table of where the time was spent, "trace" writes `trace.json` for
                ui.perfetto.dev; the callbacks `Profiler` and `Tracing` do the same, with options. None disables both.
            detect_anomaly: enable the anomaly detection of autograd, which finds the operation that produced a NaN
                (slow).
            barebones: measure training without all that costs time: checkpoints, loggers, `self.log`, progress bar,
                summary, sanity check, telemetry and fault recovery are off.
            plugins: a `TorchCheckpointIO` that reads checkpoints in its own way; for other plugins of Lightning, an
                error names the argument that replaces it.
            sync_batchnorm: compute the statistics of batch normalisation over the samples of all ranks; each rank then
                needs samples in each batch.
            reload_dataloaders_every_n_epochs: create the loaders again every n epochs; 0 for never.
            fast_dev_run: run 1 batch (True) or n batches (int) of each loader, without loggers and checkpoints, to find
                errors.
            logger: True for TensorBoard, False for no logger, a `Logger`, any object with the same four methods, or a
                list of them.
            callbacks: a `Callback`, a name, or a list of them.
            enable_checkpointing: add a `ModelCheckpoint` that keeps the newest checkpoint, unless `callbacks` has one.
            enable_progress_bar: add a `ProgressBar`, unless `callbacks` has one.
            enable_model_summary: print layers and parameters at the start (`ModelSummary`), unless `callbacks` has one.
            enable_fault_recovery: add the callback for recovery from failures, with several ranks on this machine. With
                enable_checkpointing=False it replaces lost workers in place or from memory, and writes no snapshots for
                restarts.
            enable_telemetry: record where each rank spends its time; nothing is recorded if neither a logger nor a
                callback for checkpoints writes to the run's folder.
            enable_autolog_hparams: pass hyperparameters to the loggers when training begins.
            default_root_dir: parent of the runs' folders; None for the current folder.
            compile: compile the module's forward with `torch.compile`; a mapping contains options for it.

        Raises:
            ValueError: an argument is invalid; the message lists the valid values.
            LookupError: no strategy or callback has this name.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        check_switches(arguments)
        self._set_ranks(accelerator, devices, num_nodes, precision, elsewhere=launcher not in LAUNCHERS)
        self._set_length(max_epochs, min_epochs, max_steps, min_steps, max_time)
        self._set_batches(limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches)
        self._overfit(overfit_batches)
        self._set_validation(val_check_interval, check_val_every_n_epoch, num_sanity_val_steps, inference_mode)
        self._set_updates(log_every_n_steps, accumulate_grad_batches, gradient_clip_val, gradient_clip_algorithm)
        self._set_computation(deterministic, benchmark, detect_anomaly, sync_batchnorm, compile)
        self._set_loading(use_distributed_sampler, reload_dataloaders_every_n_epochs)
        self._set_records(profiler, default_root_dir, barebones, enable_autolog_hparams)
        self._set_writers(fast_dev_run, enable_checkpointing, enable_telemetry)
        if fast_dev_run:
            self._limit_to(int(fast_dev_run))
        self._create_plugins(arguments)

    def _set_ranks(
        self, accelerator: Any, devices: Any, num_nodes: Any, precision: Any, *, elsewhere: bool
    ) -> None:  # fmt: skip
        from fabricx.core.precision import check_precision  # imports torch

        self.accelerator = check_accelerator(accelerator, elsewhere=elsewhere)
        self.accelerator_given = accelerator != "auto"
        self.device_ids = check_devices(devices, self.accelerator, elsewhere=elsewhere)
        self.devices_given = devices != "auto"
        self.num_nodes = check_count("num_nodes", num_nodes, "node", 1) or 1
        self.precision = check_precision(precision)

    def _set_length(self, max_epochs: Any, min_epochs: Any, max_steps: Any, min_steps: Any, max_time: Any) -> None:
        self.max_epochs = -1 if max_epochs == -1 else check_count("max_epochs", max_epochs, "epoch")
        self.min_epochs = check_count("min_epochs", min_epochs, "epoch")
        self.max_steps = -1 if max_steps in (-1, None) else check_count("max_steps", max_steps, "step") or 0
        self.min_steps = check_count("min_steps", min_steps, "step")
        self.max_time = check_max_time(max_time)
        self.length_given = self.max_epochs is not None or self.max_steps != -1 or bool(self.max_time)

    def _set_batches(self, train: Any, val: Any, test: Any, predict: Any) -> None:
        self.limit_train_batches = check_limit("limit_train_batches", train)
        self.limit_val_batches = check_limit("limit_val_batches", val)
        self.limit_test_batches = check_limit("limit_test_batches", test)
        self.limit_predict_batches = check_limit("limit_predict_batches", predict)

    def _overfit(self, batches: Any) -> None:
        self.overfit_batches = batches
        if batches:
            self.limit_train_batches = self.limit_val_batches = check_limit("overfit_batches", batches)

    def _set_validation(self, interval: Any, every_n_epoch: Any, sanity_steps: Any, inference_mode: Any) -> None:
        self.val_check_interval = check_validation_interval(interval)
        self.check_val_every_n_epoch = check_count("check_val_every_n_epoch", every_n_epoch, "epoch", 1)
        if every_n_epoch is None and isinstance(self.val_check_interval, float) and self.val_check_interval != 1.0:
            raise ValueError(
                f"check_val_every_n_epoch=None counts batches across epochs, and val_check_interval={interval} is a "
                "fraction of an epoch: set a number of batches (100), weight updates ('500st') or a duration ('30m')"
            )
        few = check_batches("num_sanity_val_steps", sanity_steps, -1)
        self.num_sanity_val_steps: int | float = float("inf") if few == -1 else few
        self.inference_mode = inference_mode

    def _set_updates(self, log_every: Any, accumulate: Any, clip_val: Any, clip_algorithm: Any) -> None:
        self.log_every_n_steps = check_count("log_every_n_steps", log_every, "step") or 0
        self.accumulate_grad_batches = check_accumulation(accumulate)
        self.gradient_clip_val, self.gradient_clip_algorithm = check_clipping(clip_val, clip_algorithm)

    def _set_computation(
        self, deterministic: Any, benchmark: Any, detect_anomaly: Any, sync_batchnorm: Any, options: Any
    ) -> None:
        self.deterministic = check_deterministic(deterministic)
        self.benchmark = benchmark
        self.detect_anomaly = detect_anomaly
        self.sync_batchnorm = sync_batchnorm
        self.compile = check_compile(options)

    def _set_loading(self, use_distributed_sampler: Any, reload_every: Any) -> None:
        self.use_distributed_sampler = use_distributed_sampler
        self.reload_dataloaders_every_n_epochs = (
            check_count("reload_dataloaders_every_n_epochs", reload_every, "epoch") or 0
        )

    def _set_records(self, profiler: Any, root_dir: Any, barebones: Any, autolog_hparams: Any) -> None:
        self.profiler = ProfilerName(check_profiler(profiler) or "")
        self.default_root_dir = check_root(root_dir)
        self.barebones = barebones
        self.enable_autolog_hparams = autolog_hparams

    def _set_writers(self, fast_dev_run: Any, checkpointing: Any, telemetry: Any) -> None:
        if not isinstance(fast_dev_run, bool):
            check_batches("fast_dev_run", fast_dev_run, 0)
        self.fast_dev_run: bool | int = fast_dev_run == 1 or fast_dev_run
        self.enable_checkpointing = checkpointing and not fast_dev_run
        self.enable_telemetry = telemetry and not fast_dev_run

    def _limit_to(self, batches: int) -> None:
        self.limit_train_batches = self.limit_val_batches = batches
        self.limit_test_batches = self.limit_predict_batches = batches
        self.max_epochs, self.max_steps, self.num_sanity_val_steps = 1, batches, 0
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1

    def _create_plugins(self, arguments: Mapping[str, Any]) -> None:
        """Create the objects that the other arguments name; options on their own have none.

        Args:
            arguments: all arguments as the caller passed them, by name.
        """
