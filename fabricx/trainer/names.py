"""Names of Lightning's Trainer for hooks and scripts, and the successors of former names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricx.core.logger import DummyLogger
from fabricx.core.precision import stored_dtype
from fabricx.core.state import Phase
from fabricx.core.strategy_parts import ModelParallel, as_part
from fabricx.data.sources import as_passed
from fabricx.errors import did_you_mean
from fabricx.trainer.factory import choose_loggers
from fabricx.trainer.fit_loop import FitLimits

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.logger import Logger
    from fabricx.core.module import Module
    from fabricx.core.optimizers import Schedule
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.data.run_data import BatchCounts
    from fabricx.distributed.world import World
    from fabricx.session.status import StopStatus
    from fabricx.trainer.run_records import RunRecords
    from fabricx.trainer.sessions import Sessions

_ARGPARSE: Final = "add the arguments to your parser, and pass them: Trainer(max_epochs=args.max_epochs, ...)"

# Attributes of Trainers that fabricx doesn't have, with their successors.
_SUCCESSORS: Final[Mapping[str, str]] = {
    "validate_loop": "trainer.num_val_batches and trainer.val_dataloaders describe a validation",
    "test_loop": "trainer.num_test_batches and trainer.test_dataloaders describe a test",
    "predict_loop": "predict returns the outputs; trainer.num_predict_batches is their number",
    "tune": "fabricx.Tuner(trainer).lr_find(module) and scale_batch_size(module) find the values",
    "lr_find": "fabricx.Tuner(trainer).lr_find(module)",
    "tuner": "fabricx.Tuner(trainer)",
    "scale_batch_size": "fabricx.Tuner(trainer).scale_batch_size(module)",
    "precision_plugin": "trainer.precision is the name of the precision",
    "gpus": "trainer.num_devices", "num_gpus": "trainer.num_devices", "data_parallel_device_ids": "trainer.device_ids",
    "tpu_cores": "trainer.num_devices", "num_processes": "trainer.num_devices", "ipus": "trainer.num_devices",
    "root_gpu": "trainer.strategy.root_device", "on_gpu": "trainer.strategy.root_device.type == 'cuda'",
    "use_amp": "trainer.precision", "amp_backend": "trainer.precision",
    "training_type_plugin": "trainer.strategy", "accelerator_connector": "trainer.strategy",
    "distributed_backend": "trainer.strategy", "use_ddp": "trainer.strategy",
    "train_loop": "trainer.current_epoch and trainer.global_step are the position of the run",
    "evaluation_loop": "trainer.num_val_batches and trainer.val_dataloaders describe a validation",
    "weights_save_path": "trainer.checkpoint_callback.dirpath", "resume_from_checkpoint": "trainer.ckpt_path",
    "checkpoint_connector": "trainer.save_checkpoint and fit(ckpt_path=...)",
    "logger_connector": "trainer.callback_metrics, trainer.logged_metrics and trainer.progress_bar_metrics",
    "run_evaluation": "trainer.validate", "running_sanity_check": "trainer.sanity_checking",
    "disable_validation": "not trainer.enable_validation", "proc_rank": "trainer.global_rank",
    "batch_idx": "the argument batch_idx of hooks; trainer.state.batch is the number of finished batches",
    "total_batch_idx": "trainer.global_step", "lightning_optimizers": "trainer.optimizer_handles",
    "optimizer_frequencies": "step the optimizers in turn in training_step, with automatic_optimization = False",
    "log_metrics": "self.log in the module, or trainer.logger.log_metrics(metrics, step)",
    "add_argparse_args": _ARGPARSE, "from_argparse_args": _ARGPARSE, "parse_argparser": _ARGPARSE,
    "model_connector": "trainer.lightning_module", "get_model": "trainer.lightning_module",
}  # fmt: skip


class _Former:
    """A class method that Trainers no longer have: its access is an error with the successor."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: {_ARGPARSE}")


class TrainerNames:
    """Further properties of Lightning's Trainer, beside the properties of `TrainerInterface`."""

    add_argparse_args, from_argparse_args, parse_argparser = _Former(), _Former(), _Former()

    if TYPE_CHECKING:
        callbacks: list[Callback]
        records: RunRecords
        module: Module | None
        device_ids: list[int]
        num_sanity_val_steps: int | float
        limit_val_batches: int | float
        precision: str
        strategy: Strategy
        fast_dev_run: bool | int
        _loggers: list[Logger]
        _sessions: Sessions

        @property
        def lr_schedulers(self) -> list[Schedule]: ...

        @property
        def world(self) -> World: ...

        @property
        def state(self) -> RunState: ...

        @property
        def stop(self) -> StopStatus: ...

        @property
        def batches(self) -> BatchCounts: ...

    _chosen_ckpt_path: str | Path | None = None  # assigned by the user

    @property
    def fit_loop(self) -> FitLimits:
        """Return `max_epochs`, `min_epochs`, `max_steps` and `min_steps` under Lightning's name."""
        return FitLimits(self)

    @property
    def model(self) -> Module | None:
        """Return the module of the newest run; no strategy wraps it."""
        return self.module

    @property
    def lightning_module(self) -> Module | None:
        """Return the module of the newest run; None before."""
        return self.module

    @property
    def ckpt_path(self) -> str | Path | None:
        """Return the checkpoint that the newest run has loaded; assign a path for all following runs, or None."""
        return self.records.ckpt_path if self._chosen_ckpt_path is None else self._chosen_ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | Path | None) -> None:
        self._chosen_ckpt_path = self.records.ckpt_path = path

    @property
    def loggers(self) -> list[Logger]:
        """Return the loggers; assign new loggers between two runs, as for the argument `logger` of the Trainer."""
        return self._loggers

    @loggers.setter
    def loggers(self, logger: Any) -> None:
        session = self._sessions.newest
        if session is not None and session.running:
            raise RuntimeError("the loggers of a run are open: assign trainer.logger before or after the run")
        self._loggers = choose_loggers(logger)
        if self.fast_dev_run and self._loggers:
            self._loggers = [DummyLogger()]

    @property
    def logger(self) -> Logger | None:
        """Return the first logger, or None; assign a logger between two runs."""
        return self._loggers[0] if self._loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = logger

    @property
    def sanity_checking(self) -> bool:
        """Return whether the validation batches before training are running."""
        return self.state.phase is Phase.SANITY

    def _is_in(self, phase: Phase, stage: str) -> bool:
        """Return whether a phase is in progress, or the set-up or the end of the call of this phase."""
        if self.state.phase is not Phase.IDLE:
            return self.state.phase is phase
        session = self._sessions.newest
        return session is not None and session.running and session.data.stage == stage

    @property
    def training(self) -> bool:
        """Return whether `fit` is in progress, and neither a validation nor the sanity check."""
        return self._is_in(Phase.TRAIN, "fit")

    @property
    def validating(self) -> bool:
        """Return whether a validation is in progress."""
        return self._is_in(Phase.VALIDATE, "validate")

    @property
    def testing(self) -> bool:
        """Return whether `test` is in progress."""
        return self._is_in(Phase.TEST, "test")

    @property
    def predicting(self) -> bool:
        """Return whether `predict` is in progress."""
        return self._is_in(Phase.PREDICT, "predict")

    @property
    def num_devices(self) -> int:
        """Return the number of ranks on this machine."""
        return len(self.device_ids)

    @property
    def node_rank(self) -> int:
        """Return the number of this machine among all machines."""
        return self.world.rank // max(1, self.world.local_size)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Return the number of batches of each validation loader before training."""
        return [min(self.num_sanity_val_steps, batches) for batches in self.batches.of("val")]

    @property
    def num_val_batches(self) -> list[int | float]:
        """Return the number of batches of each validation loader, in the newest fit or validation."""
        return self.batches.of("val")

    @property
    def val_check_batch(self) -> int | float | None:
        """Return the number of batches between two validations of the newest fit in this process; None without it."""
        data = None if self._sessions.newest is None else self._sessions.newest.data
        if data is None or data.stage != "fit":
            return None
        return data.val_every if data.val_every == float("inf") else int(data.val_every)

    @property
    def num_test_batches(self) -> list[int | float]:
        """Return the number of batches of each loader of the newest test."""
        return self.batches.of("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Return the number of batches of each loader of the newest prediction."""
        return self.batches.of("predict")

    @property
    def val_dataloaders(self) -> Any:
        """Return the validation loader or loaders of the newest fit or validation in this process."""
        return self._loaders("val_dataloader", "fit", "validate")

    @property
    def test_dataloaders(self) -> Any:
        """Return the loader or loaders of the newest run in this process, if it is a test."""
        return self._loaders("test_dataloader", "test")

    @property
    def predict_dataloaders(self) -> Any:
        """Return the loader or loaders of the newest run in this process, if it is a prediction."""
        return self._loaders("predict_dataloader", "predict")

    def _loaders(self, method: str, *stages: str) -> Any:
        if (searched := self._sessions.searched) is not None and searched.stage in stages:
            return searched.create(method)
        data = None if self._sessions.newest is None else self._sessions.newest.data
        return as_passed(data.val_dataloaders) if data is not None and data.stage in stages else None

    @property
    def enable_validation(self) -> bool:
        """Return whether a fit validates: the module has the step, and the loader has batches."""
        has_step = callable(getattr(self.module, "validation_step", None))
        return has_step and self.limit_val_batches != 0 and bool(self.batches.of("val"))

    @property
    def lr_scheduler_configs(self) -> list[Schedule]:
        """Return the learning rate schedules of the newest fit in this process."""
        return self.lr_schedulers

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """Return the callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if callback.trainer_role == "checkpoint"]

    @property
    def early_stopping_callbacks(self) -> list[Callback]:
        """Return the callbacks for early stopping."""
        return [callback for callback in self.callbacks if callback.trainer_role == "early_stopping"]

    @property
    def progress_bar_callback(self) -> Callback | None:
        """Return the progress bar, or None."""
        return next((callback for callback in self.callbacks if callback.trainer_role == "progress_bar"), None)

    @property
    def received_sigterm(self) -> bool:
        """Return whether SIGTERM, or the notice of a scheduler, has requested a stop."""
        return self.stop.terminated

    @property
    def evaluating(self) -> bool:
        """Return whether a validation, also before training, or a test is running."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the scaler of the loss with precision="16-mixed"; None with others."""
        return None if self._sessions.newest is None else self._sessions.newest.precision.scaler

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Return the arguments with which a `DistributedSampler` of the user splits the data as the ranks need."""
        if (world := self.world).newcomer:  # its data is divided before it joins; consecutive ranks compute together
            ranks, planned = world.local_size, world.planned
            count = as_part(self.strategy, ModelParallel).data_ranks_of(ranks)
            return {"num_replicas": count, "rank": planned.rank * count // ranks}
        world = world.axis("data")
        return {"num_replicas": world.size, "rank": world.rank}

    @contextlib.contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context in which new tensors have the dtype of the weights, and are on the device of this process.

        Args:
            empty_init: without an effect: weights are initialised, also before a checkpoint is loaded.
        """
        before = torch.get_default_dtype()
        torch.set_default_dtype(stored_dtype(self.precision))
        try:
            with self.world.device:
                yield
        finally:
            torch.set_default_dtype(before)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Raise an error with the successor of an attribute; Python calls this for missing attributes only."""
            owner = type(self).__name__
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # the error within a property
            if name in _SUCCESSORS:
                raise AttributeError(f"{owner} has no attribute {name!r}: {_SUCCESSORS[name]}")
            if name in _PRIVATE:
                raise AttributeError(
                    f"{owner} has no attribute {name!r}, which is private to Lightning: {_PRIVATE[name]}"
                )
            raise AttributeError(f"{owner} has no attribute {name!r}.{_hint(type(self), name)}")


@functools.cache  # `hasattr(trainer, name)` needs it, too
def _hint(owner: type, name: str) -> str:
    return "" if name.startswith("_") else did_you_mean(name, [n for n in dir(owner) if n[0] != "_"])


_PRIVATE: Final[Mapping[str, str]] = {
    "_data_connector": "trainer.train_dataloader, trainer.val_dataloaders and trainer.datamodule have the data",
    "_logger_connector": _SUCCESSORS["logger_connector"],
    "_checkpoint_connector": _SUCCESSORS["checkpoint_connector"],
    "_accelerator_connector": "trainer.strategy, trainer.precision and trainer.device_ids",
    "_signal_connector": "trainer.received_sigterm",
    "_callback_connector": "trainer.callbacks",
    "_results": "trainer.callback_metrics",
    "_active_loop": "trainer.state",
    "_evaluation_loop": _SUCCESSORS["evaluation_loop"],
}
