"""The Trainer as hooks and the library see it: options, plugins, results of runs, actions; properties are local."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fabricx import plugins
from fabricx.checkpoint.storage import as_path
from fabricx.core.options.arguments import non_defaults
from fabricx.core.options.former_arguments import FORMER_ARGUMENTS
from fabricx.core.options.trainer_options import TrainerOptions
from fabricx.core.state import Phase, RunState, TrainerStatus
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.data.order import Balance
from fabricx.data.run_data import BatchCounts, RunData
from fabricx.data.sources import as_passed
from fabricx.distributed.collective_guard import check_users_collective, together
from fabricx.distributed.world import World
from fabricx.errors import MissingAttribute, NamesChecked
from fabricx.loop import manual_optimization
from fabricx.metrics.run_metrics import Published, RunMetrics
from fabricx.session.checkpoint import finish_checkpoint
from fabricx.session.saving import save_checkpoint
from fabricx.session.session import Session
from fabricx.session.status import FailureLog, StopStatus
from fabricx.trainer.factory import choose_callbacks, choose_launcher, choose_strategy, launched, several_ranks
from fabricx.trainer.names import TrainerNames
from fabricx.trainer.run_dir import new_run_dir
from fabricx.trainer.run_records import RunRecords
from fabricx.trainer.sessions import LoaderMethods, Returned, Sessions

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricx.core.callback import Callback
    from fabricx.core.datamodule import DataModule
    from fabricx.core.module import Module
    from fabricx.core.optimizers import OptimizerHandle, Schedule
    from fabricx.core.strategy import Strategy
    from fabricx.launch.launcher import Launcher


class TrainerInterface(TrainerNames, TrainerOptions, NamesChecked):
    """The Trainer without the calls that start runs: what hooks and the library use.

    Attributes:
        launcher: starts the ranks; a name of `LAUNCHERS` if this process does, or is a rank.
        strategy: method of distributed training.
        callbacks: of the runs.
        records: records of the newest run; `state`, `run_dir` and other properties read them.
        module, datamodule: of the newest call; None before.
        configuration: configuration by Hydra; None in Python, see `arguments`.
        arguments: arguments that differ from the defaults, as plain data.
        balance: shares of the ranks in each global batch.
        failure_log: failures from which the run has recovered.
    """

    former_arguments = FORMER_ARGUMENTS

    def _create_plugins(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = non_defaults(TrainerOptions.__init__, arguments)
        self.launcher: str | Launcher = choose_launcher(arguments["launcher"])
        fast, several = bool(self.fast_dev_run), several_ranks(len(self.device_ids), self.num_nodes)
        self.strategy: Strategy = choose_strategy(
            arguments["strategy"], len(self.device_ids), self.num_nodes, reproducible=self.deterministic == "elastic"
        )
        self._sessions = Sessions()
        self.loggers = arguments["logger"]
        wanted = {
            "progress_bar": arguments["enable_progress_bar"],
            "model_summary": arguments["enable_model_summary"],
            "model_checkpoint": arguments["enable_checkpointing"],  # under fast_dev_run it is there, and saves nothing
            "fault_recovery": arguments["enable_fault_recovery"] and several and not fast,
            "profiler": self.profiler == "simple",
            "tracing": self.profiler == "trace",
        }
        options = {"fault_recovery": {"snapshots": self.enable_checkpointing}}
        defaults = {name: options.get(name, {}) for name, on in wanted.items() if on}
        self.callbacks: list[Callback] = choose_callbacks(arguments["callbacks"], defaults)
        if self.max_time is not None:
            self.callbacks.append(plugins.build("callbacks", "timer", duration=self.max_time))
        if isinstance(self.val_check_interval, timedelta):
            self.callbacks.append(plugins.build("callbacks", "validation_interval", interval=self.val_check_interval))
        self.records, self.balance, self.failure_log = RunRecords(), Balance(), FailureLog()
        self.module: Module | None = None
        self.datamodule: DataModule | None = None
        self.configuration: dict[str, Any] | None = None
        self._world = World()  # before a run, and in a server

    def serve_as(self, world: World) -> World:
        """Set the world of a process that serves workers, and runs nothing itself; returns it.

        Args:
            world: world with the rank of the server.
        """
        self._world = world
        return world

    def configure(self, configuration: dict[str, Any], run_dir: Path | None) -> None:
        """Set the configuration from which the trainer was built, which checkpoints and loggers record.

        Args:
            configuration: configuration of Hydra, as plain data.
            run_dir: folder of the run; None for a new folder.
        """
        self.configuration, self.run_dir = configuration, run_dir

    def new_session(
        self, stage: str, loaders: tuple[Any, Any], module: Module, datamodule: DataModule | None, world: World,
        strategy: Strategy, *, writes: bool,
    ) -> Session:  # fmt: skip
        """Return the parts of a run on this rank, with the options and records of this trainer.

        Args:
            stage: "fit", "validate", "test" or "predict".
            loaders: loaders that the caller passed, for training and for evaluation.
            module, datamodule: of the user.
            world: the ranks.
            strategy: method of distributed training.
            writes: the run writes metrics.
        """
        data = RunData(
            stage, loaders, module, datamodule, self, strategy, self.state, self.balance, self.batches,
            None if self._sessions.newest is None else self._sessions.newest.data.train_dataloader,
        )  # fmt: skip
        metrics = RunMetrics(module, self, strategy, self.state, self.published, writes=writes)
        return Session(
            self, self, self.state, world, strategy, module, datamodule, self.callbacks, self.loggers, data, metrics,
            self.stop, self.failure_log, self.balance, self.run_dir,
        )  # fmt: skip

    def begin_session(self, session: Session, *, fits: bool) -> None:
        """Set the run whose parts the attributes of the trainer show.

        Args:
            session: this rank's session.
            fits: the run trains the module.
        """
        self._sessions.begin(session, fits=fits)

    def attach(self, module: Module, datamodule: DataModule | None) -> None:
        """Set the objects of the newest call, whose `trainer` this is.

        Args:
            module, datamodule: of the user.
        """
        self.module, self.datamodule = module, datamodule
        module.trainer = self
        if datamodule is not None:
            datamodule.trainer = self

    def show_loaders(self, methods: LoaderMethods | None) -> None:
        """Show the loaders of a search in `train_dataloader` and `val_dataloaders`, until the next run begins.

        Args:
            methods: create the loaders; None when a run begins.
        """
        self._sessions.searched = methods

    @property
    def state(self) -> RunState:
        """Return the position of the newest run, which checkpoints save."""
        return self.records.state

    @property
    def stop(self) -> StopStatus:
        """Return the requested and agreed stops of the newest run."""
        return self.records.stop

    @property
    def batches(self) -> BatchCounts:
        """Return the numbers of batches of the newest run."""
        return self.records.batches

    @property
    def published(self) -> Published:
        """Return the newest values of everything that was logged."""
        return self.records.published

    @property
    def run_dir(self) -> Path | None:
        """Return the folder of the newest run; None before. Assign a folder for the runs that follow."""
        return self.records.run_dir

    @run_dir.setter
    def run_dir(self, folder: Path | None) -> None:
        self.records.run_dir = folder

    @property
    def session(self) -> Session:
        """Return the parts of the newest run in this process, for callbacks that need more than these properties.

        Raises:
            RuntimeError: this process has not run anything.
        """
        if self._sessions.newest is None:
            raise RuntimeError(
                "the trainer has no run in this process, so this attribute has no value: read it in a hook of a run"
            )
        return self._sessions.newest

    @property
    def world(self) -> World:
        """Return the ranks; a single rank where this process has not run anything."""
        return self._world if self._sessions.newest is None else self._sessions.newest.world

    @property
    def current_epoch(self) -> int:
        """Return the number of ended epochs; after a stop, also of the epoch that was stopped."""
        return self.records.state.ended_epochs

    @property
    def global_step(self) -> int:
        """Return the number of weight updates; steps of several optimizers in an update count once."""
        return self.records.state.step

    @property
    def should_stop(self) -> bool:
        """Return whether a stop was requested on this rank; assign True to request that all ranks stop.

        A single rank withdraws the request by False; on several ranks, that is a warning.
        """
        return self.stop.requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.stop.requested = value
        session = self._sessions.newest
        if value:
            self.request_stop("should_stop")
        elif session is not None and session.running and not session.stop_requests.withdraw():
            session.warn_once(
                "stop",
                "trainer.should_stop = False does not withdraw the requested stop, which other ranks have received: "
                "request a stop when it is certain",
            )

    def request_stop(self, reason: str) -> None:
        """Request that all ranks stop at the next step boundary that they agree on.

        Args:
            reason: the reason of the request, for all ranks.
        """
        self.stop.request(reason)
        if self._sessions.newest is not None and self._sessions.newest.running:
            self._sessions.newest.stop_requests.request(reason)

    @property
    def interrupted(self) -> bool:
        """Return whether a signal (Ctrl-C, SIGTERM) or an exception has stopped the newest run."""
        return self.stop.interrupted or self.state.status is TrainerStatus.INTERRUPTED

    @property
    def terminated(self) -> bool:
        """Return whether SIGTERM or the notice of a scheduler has stopped the newest run."""
        return self.stop.terminated

    @property
    def failures(self) -> list[str]:
        """Return a line for each failure from which the newest run has recovered."""
        return self.failure_log.errors

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is the main rank, or a replacement that takes its place."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Return the number of this rank among all ranks."""
        return self.world.planned.rank

    @property
    def local_rank(self) -> int:
        """Return the number of this rank on this machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks that train."""
        world = self.world
        if world.size > 1 or world.store is not None:  # also a single rank that is left of several
            return world.planned.size
        return len(self.device_ids) * self.num_nodes

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of each logged metric, without communication; callbacks may add values.

        Each call of `fit`, `validate`, `test` or `predict` begins with a new dict.
        """
        return self._published.metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the newest values logged with `logger=True`, by their names in the loggers, without communication."""
        return dict(self._published.logged)

    @property
    def _published(self) -> Published:
        return self.published if self._sessions.newest is None else self._sessions.newest.metrics.newest()

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Return the values of the progress bar: this rank's newest values. Reading it synchronises with the device."""
        if self._sessions.newest is None:
            return {name: float(value) for name, value in self.published.bar.items()}
        return self._sessions.newest.metrics.shown_in_bar()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the newest fit; after a fit in workers, those of the main rank.

        Raises:
            RuntimeError: they remain in the workers, because they are large or divided.
        """
        return self._sessions.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Any) -> None:
        raise AttributeError(
            "trainer.optimizers can't be replaced, since the strategy, schedules and checkpoints refer to those of "
            "configure_optimizers: change optimizer.param_groups (rates, momentum) or clear optimizer.state in a hook, "
            "return several optimizers from configure_optimizers, or train in two fits"
        )

    @property
    def optimizer_handles(self) -> list[OptimizerHandle]:
        """Return the handles of the optimizers, whose steps run through the strategy; none outside of a fit."""
        return [] if self._sessions.fit is None else self._sessions.fit.optimizer_handles

    @property
    def lr_schedulers(self) -> list[Schedule]:
        """Return the learning rate schedules of the newest fit; after a fit in workers, those of the main rank.

        Raises:
            RuntimeError: they remain in the workers, because the optimizers are large or divided.
        """
        return self._sessions.schedules

    def adopt_optimizers(self, returned: Returned) -> None:
        """Adopt the optimizers and schedules of a fit in workers.

        Args:
            returned: of the main rank.
        """
        self._sessions.returned = returned

    @property
    def train_dataloader(self) -> Any:
        """Return the training loader or loaders of the newest fit, or search for a batch size, in this process."""
        searched = self._sessions.searched
        if searched is not None and searched.stage == "fit":
            return searched.create("train_dataloader")
        return None if self._sessions.newest is None else as_passed(self._sessions.newest.data.train_dataloader)

    @property
    def num_training_batches(self) -> int | float:
        """Return the number of batches per epoch of the rank with the most batches; infinity while it is unknown."""
        return self.batches.training

    @property
    def is_last_batch(self) -> bool:
        """Return whether the present batch is the last batch of its epoch or loader."""
        return self._sessions.newest is not None and self._sessions.newest.batch.is_last

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Return the number of steps of a schedule, a step for each global batch; infinity for a run without limit.

        In a hook that precedes the data, such as `setup`, it creates the training loader.
        """
        by_epochs = 0 if self.max_epochs == 0 else float("inf")
        if self.max_epochs not in (-1, 0, None):
            scheduled = [callback for callback in self.callbacks if callback.accumulates > 1]
            counts = {self.accumulate_grad_batches: self.max_epochs}  # epochs by batches of an update
            if scheduled:
                by_epoch = (
                    max(callback.accumulates_at(epoch) for callback in scheduled) for epoch in range(self.max_epochs)
                )
                counts = Counter(batches or self.accumulate_grad_batches for batches in by_epoch)
            by_epochs = sum(self._windows(accumulate) * epochs for accumulate, epochs in counts.items())
        updates = as_part(self.strategy, HasServers).updates_per_batch
        by_steps = float("inf") if self.max_steps == -1 else self.max_steps // updates
        limit = min(by_epochs, by_steps)
        return limit if limit == float("inf") else int(limit)

    def _windows(self, accumulate: int) -> int | float:
        """Return the number of global batches of an epoch, with a number of batches per update."""
        if self._sessions.newest is not None and self._sessions.newest.running:
            self._sessions.newest.data.count_early(self._sessions.newest.world)
        if self.num_training_batches == float("inf"):
            return float("inf")
        windows = -(-self.num_training_batches // accumulate)
        if self._sessions.fit is None:
            return windows
        feeds = self._sessions.fit.data.feeds  # a rank may compute its part of a global batch in several microbatches
        return (feeds[0].global_batches(accumulate) if feeds else None) or windows

    @property
    def writes(self) -> bool:
        """Return whether a fit writes files to its folder.

        A single rank without loggers, whose checkpoints are in a folder of the user, writes nothing else unless a
        callback needs telemetry.
        """
        records = several_ranks(len(self.device_ids), self.num_nodes) or any(c.needs_telemetry for c in self.callbacks)
        saves = any(records or getattr(callback, "in_run_folder", True) for callback in self.checkpoint_callbacks)
        return not self.fast_dev_run and (bool(self.loggers) or saves)

    @property
    def log_dir(self) -> str | None:
        """Return the folder that the first logger writes to, or the run's folder, also before the run.

        Before the run it is None under a launcher, whose main rank chooses the folder, and for a logger without folder.
        """
        folder = self.logger.log_dir if self.logger is not None else None
        folder = folder or self.run_dir
        if folder is None and not launched():
            folder = self.records.next_run_dir = self.records.next_run_dir or new_run_dir(Path(self.default_root_dir))
        return None if folder is None else str(folder)

    @property
    def checkpoint_callback(self) -> Any:
        """Return the first callback that writes checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callback(self) -> Any:
        """Return the first callback for early stopping, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    # -- actions ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        storage_options: None = None,
        *,
        wait: bool = True,
        after: Callable[[], None] | None = None,
        failed: Callable[[], None] | None = None,
        single_file: bool | None = None,
    ) -> Path:
        """Write a checkpoint; all ranks call this at the same point.

        A resumed run continues exactly as an uninterrupted run, unless another hook changes weights before or after the
        call: `docs/guides/checkpoints.md` has the order. At points where this is impossible the call raises an error:
        within a training step (where only weights can be saved), before training, or while ranks train
        asynchronously. After a fit in worker processes, which have ended, it has the weights only, with a warning.

        Args:
            filepath: folder or file to create, or a URL that fsspec supports, such as "s3://bucket/run/a.ckpt".
            weights_only: omit the state that only training needs.
            storage_options: must be None, as in Lightning without a `CheckpointIO` of its own.
            wait: return when the checkpoint is complete; else training continues during the write, and the next call,
                or `finish_checkpoint`, waits for its end.
            after: called on the main rank, in a thread, when the checkpoint is complete.
            failed: called on every rank if the disk was full.
            single_file: write a file for `torch.load` and Lightning instead of a folder; the default is the module's
                `single_file_checkpoints`, which is True for a `LightningModule`.

        Returns:
            the path.

        Raises:
            CheckpointError: this checkpoint or the previous checkpoint was not written.
            RanksDisagree: another rank does not make this call, or has another path.
            RuntimeError: a checkpoint cannot be saved at this point; the message names the right hook.
            TypeError: `storage_options` are passed.
        """
        if storage_options is not None:
            raise TypeError(
                "save_checkpoint(storage_options=...) is not supported: options of a storage belong to the "
                "configuration of fsspec, such as ~/.config/fsspec/conf.json"
            )
        session, target = self._session_to_save(weights_only=weights_only), as_path(filepath)
        weights_only = weights_only or (session is not self._sessions.newest and session is not self._sessions.fit)
        with together():  # ranks without a sample of this batch take part
            chosen: dict[str, Any] = {"weights_only": weights_only, "wait": wait, "single_file": single_file}
            save_checkpoint(session, target, after=after, failed=failed, **chosen)
            if wait or self.state.phase is Phase.IDLE:
                finish_checkpoint(session)
        return target

    def _session_to_save(self, *, weights_only: bool) -> Session:
        """Return the run to save: the present run, or after it the newest fit of this process."""
        if self._sessions.newest is not None and self._sessions.newest.running:
            return self._sessions.newest
        if self._sessions.fit is not None:
            return self._sessions.fit
        if self.module is None:
            raise MissingAttribute(
                "save_checkpoint: this trainer has not run yet, so there is nothing to save; call it after fit, or "
                "in a hook"
            )
        if not weights_only:
            warnings.warn(
                "save_checkpoint: the worker processes that trained have ended, so this checkpoint has the weights "
                "only, and a fit from it begins with new optimizers. Pass weights_only=True to confirm this. To save "
                "the whole state, use ModelCheckpoint(save_last=True), or save in a hook such as on_train_end",
                stacklevel=3,
            )
        return self._session_of_weights(self.module)

    def _session_of_weights(self, module: Module) -> Session:
        """Return a session without a run, whose module has the weights of the newest run."""
        strategy = choose_strategy("single", 1, 1)
        session = self.new_session("validate", (None, None), module, self.datamodule, World(), strategy, writes=False)
        session.running = False
        return session

    def finish_checkpoint(self) -> bool:
        """Wait until no checkpoint is being written; all ranks call this at the same point.

        Returns:
            whether the newest checkpoint is complete; False if the disk was full.

        Raises:
            CheckpointError: the checkpoint was not written for another reason.
        """
        session = self._sessions.fit
        return session is None or finish_checkpoint(session)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main rank only, above the progress bar.

        Args:
            args, kwargs: of `print`.
        """
        if self.world.main_rank:
            bar: Any = self.progress_bar_callback
            with contextlib.suppress(BrokenPipeError):  # the reader of the pipe has ended; the run goes on
                (bar.print if bar is not None else print)(*args, **kwargs)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors from all ranks that train different shares of the data.

        Args:
            data: a tensor, a number or an array of numpy, or nested collections of them.
            sync_grads: whether gradients flow back to the ranks.

        Returns:
            `data`, with each tensor of shape [...] replaced by a tensor of shape [data ranks, ...]; under a strategy
            for a single rank, of shape [...].

        Raises:
            RanksApart: some ranks have no sample of this batch.
        """
        from lightning_utilities.core.apply_func import apply_to_collection

        # A bool is an int.
        data = apply_to_collection(
            data, (int, float, np.ndarray), lambda number: torch.as_tensor(number, device=self.world.device)
        )
        if self.strategy.traits.max_ranks == 1:
            return data
        check_users_collective()
        data_ranks = self.world.axis("data")  # of a pipeline, only the last stage ends the training step
        return apply_to_collection(data, Tensor, lambda item: data_ranks.all_gather(item, sync_grads))

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Compute gradients in manual optimization.

        Args:
            loss: scalar, shape [].
            args, options: of `Tensor.backward`.
        """
        manual_optimization.backward(self.session, loss, *args, **options)

    def clip_gradients(self, optimizer: Optimizer, limit: float | None, algorithm: str | None) -> None:
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: the optimizer or its handle.
            limit: limit of the norm or of each element; None or 0 clips nothing.
            algorithm: "norm" or "value"; None: "norm".
        """
        self.session.clip_gradients(optimizer, limit, algorithm)
