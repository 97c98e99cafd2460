"""Save checkpoints during training and keep the best."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
from torch import Tensor

from fabricx.callbacks.checkpoint_files import check_writable, step_of, warn_of_files
from fabricx.callbacks.checkpoint_name import NameParts
from fabricx.callbacks.checkpoint_paths import CheckpointPaths
from fabricx.callbacks.checkpoint_ranking import Mode, admit, worst
from fabricx.callbacks.kept_checkpoints import KeptCheckpoints
from fabricx.callbacks.metric_timing import reads_at_epoch_end
from fabricx.callbacks.save_schedule import SaveSchedule, trained
from fabricx.checkpoint import sweep
from fabricx.checkpoint.storage import as_path, is_local
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.core.options.duration import parse_duration
from fabricx.errors import did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


_AFTER_SAVE: Final = (
    "on_train_epoch_end and on_validation_end, which compare self.best_model_path before and after their super(); "
    "on_save_checkpoint(self, trainer, module, checkpoint) changes the content of a checkpoint"
)
_KEPT: Final = "on_train_epoch_end and on_validation_end, which compare self.best_k_models before and after super()"
_WHEN: Final = "the arguments every_n_epochs, save_on_train_epoch_end and save_on_exception"


def _read_after_write(name: str) -> Any:
    """Return a property for an attribute of the callback's records; reading it waits for the newest checkpoint."""
    return property(
        lambda callback: getattr(callback._written(), name),
        lambda callback, value: setattr(callback._records, name, value),
    )


class Checkpoint(Callback):
    """Base class of callbacks that save checkpoints in their own way, such as by several `ModelCheckpoint`.

    The Trainer calls them after other callbacks, and adds no `ModelCheckpoint`.
    """

    trainer_role: ClassVar = "checkpoint"
    watches_metrics: ClassVar[bool] = True
    best_model_path: str = ""

    @property
    def in_run_folder(self) -> bool:
        """Return whether the checkpoints are in the run's folder."""
        return True


class ModelCheckpoint(Checkpoint, NameParts):
    """Save checkpoints by epochs, steps or time; keep the best by a metric, or the newest.

    A checkpoint is deleted only after its replacement is complete, and no file outside `dirpath` is deleted. A NaN
    value never becomes the best. An epoch without a weight update is saved, too: its batches may have changed buffers.

    If the monitored metric is logged in validation, `every_n_train_steps` and `train_time_interval` delay the save to
    the end of the next validation, so that weights are never ranked by the score of older weights (`save_last` saves
    without the delay). With several ranks, the main rank's clock determines `train_time_interval`, and all ranks save
    at the same step.

    Attributes:
        best_model_path: path of the best checkpoint, or of the newest without a monitor. Empty if no checkpoint exists.
            On the main rank, reading it (and `last_model_path`) waits until the checkpoint is complete.
        best_model_score: score of the best checkpoint, or None.
        best_k_models: scores of the kept checkpoints, by path; empty without a monitor.
        current_score: score of the newest checkpoint that was kept.
        last_model_path: path of "last.ckpt", which `save_last` maintains.
        dirpath: the folder; without the `dirpath` argument it is None until a run begins.

    Args:
        dirpath: folder for checkpoints; default: `checkpoints` in the run's folder. URLs that fsspec supports
            ("s3://bucket/run") are accepted.
        filename: template of the names, such as "{epoch}-{val_loss:.2f}"; default: "{epoch}-{step}".
        monitor: logged metric that ranks checkpoints, or "step" or "epoch"; None keeps the newest checkpoints.
        mode: "min" if smaller is better, "max" if larger is better.
        save_top_k: number of best (without a monitor: newest) checkpoints to keep; -1 keeps all, 0 none.
        keep_every_n_steps: never delete a checkpoint of a step that is a multiple of this number; 0 disables this.
        save_last: also keep the newest checkpoint: "last.ckpt" is a link to it, or the file itself if it is not among
            the best (URLs have no links, and folders are not replaced: such a checkpoint has a regular name). "link" is
            the same as True.
        every_n_train_steps: weight updates between two saves; 0: none, also at the ends of epochs.
        every_n_epochs: epochs between two saves; default: 1 if neither steps nor time are set.
        train_time_interval: time between two saves: a `timedelta` or text such as "10m".
        save_on_train_epoch_end: save when training epochs end, rather than when validation ends. The default is True
            if validation runs once at the end of every epoch, or never.
        save_weights_only: omit the state that is needed to resume training.
        save_on_exception: save when a run is interrupted and, with a single rank, when an error ends it.
        asynchronous: continue training while a checkpoint is written. A full disk then causes a warning, and the
            earlier checkpoints are kept.
        auto_insert_metric_name: format "{epoch}" as "epoch=3" rather than "3".
        enable_version_counter: append "-v1", "-v2", ... to a name that exists; False overwrites that checkpoint, unless
            another `ModelCheckpoint` of the run keeps it.
        verbose: print the path of each checkpoint.
        single_file: True writes a file that `torch.load` and Lightning read, with the same content, instead of a
            folder that all ranks write; the default is the module's `single_file_checkpoints`, which is True for a
            `LightningModule`.

    Raises:
        ValueError: an argument is out of range, or (during training) `monitor` was not logged.
    """

    former_arguments: ClassVar = {  # of Lightning 1
        "filepath": "set dirpath=... and filename=...",
        "period": "set every_n_epochs=...",
        "every_n_val_epochs": "set every_n_epochs=...",
        "prefix": "put it at the start of filename=...",
        "save_best_only": "set save_top_k=1",
    }
    former_methods: ClassVar = {
        **renamed("_save_checkpoint _save_topk_checkpoint _save_last_checkpoint _update_best_and_save", _AFTER_SAVE),
        **renamed("_save_monitor_checkpoint _save_none_monitor_checkpoint _link_checkpoint", _AFTER_SAVE),
        **renamed("_remove_checkpoint _should_remove_checkpoint", _KEPT),
        **renamed("_should_skip_saving_checkpoint _should_save_on_train_epoch_end _should_save_on_exception", _WHEN),
        **renamed("_monitor_candidates check_monitor_top_k", "self.log of the monitored metric, in the module"),
        **renamed("_format_checkpoint_name _get_metric_interpolated_filepath_name", "format_checkpoint_name"),
        **renamed("_find_last_checkpoints", "save_last=True, and fit(ckpt_path='last')"),
        **renamed("file_exists", "the argument enable_version_counter"),
    }
    needs_all_ranks: ClassVar[bool] = True

    best_model_path: str = _read_after_write("best_path")
    best_model_score: Tensor | None = _read_after_write("best_score")
    last_model_path: str = _read_after_write("link")

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, monitor: str | None = None,
        verbose: bool = False, save_last: bool | Literal["link"] | None = False, save_top_k: int = 1,
        save_on_exception: bool = True, save_weights_only: bool = False, mode: Mode = "min",
        auto_insert_metric_name: bool = True, every_n_train_steps: int | None = None,
        train_time_interval: timedelta | str | None = None, every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None, enable_version_counter: bool = True, *,
        keep_every_n_steps: int = 0, asynchronous: bool = True, single_file: bool | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("dirpath", dirpath), ("filename", filename), ("monitor", monitor)):
            if not isinstance(value, (str, os.PathLike, NoneType) if name == "dirpath" else (str, NoneType)):
                raise ValueError(f"ModelCheckpoint({name}={value!r}): must be a string or None")
        self._chosen_dirpath = None if dirpath is None else str(as_path(os.path.expanduser(dirpath)).absolute())
        self.dirpath: str | None = self._chosen_dirpath
        self.filename, self.monitor = filename, monitor
        self.mode: Mode = mode
        if save_last not in (True, False, None, "link"):
            raise ValueError(f'ModelCheckpoint(save_last={save_last!r}): must be True, False or "link"')
        self.save_top_k, self.save_last = save_top_k, bool(save_last)
        self.keep_every_n_steps = keep_every_n_steps
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = None if train_time_interval is None else parse_duration(train_time_interval)
        if every_n_epochs is None:
            every_n_epochs = int(every_n_train_steps is None and train_time_interval is None)
        self.every_n_epochs = every_n_epochs
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.save_weights_only, self.save_on_exception = save_weights_only, save_on_exception
        self.asynchronous, self.auto_insert_metric_name = asynchronous, auto_insert_metric_name
        self.enable_version_counter, self.single_file, self.verbose = enable_version_counter, single_file, verbose
        self._check_arguments()

        self.current_score: Tensor | None = None
        self._records = KeptCheckpoints()
        self._schedule = SaveSchedule(self.train_time_interval)
        self._fitting = False
        self._resumed = False  # state was loaded from a checkpoint; a save of the same step may still be due

    def _check_arguments(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'ModelCheckpoint(mode={self.mode!r}): must be "min" or "max"')
        if not isinstance(self.save_top_k, int) or self.save_top_k < -1:
            raise ValueError(f"ModelCheckpoint(save_top_k={self.save_top_k!r}): must be -1 (all), 0 (none), 1, 2, ...")
        for name in ("every_n_train_steps", "every_n_epochs", "keep_every_n_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"ModelCheckpoint({name}={value!r}): must be a whole number, 0 or more")

    @property
    def meeting_interval(self) -> int:
        return self.every_n_train_steps

    @property
    def in_run_folder(self) -> bool:
        return self._chosen_dirpath is None

    @property
    def state_key(self) -> str:
        """Return a key that distinguishes several `ModelCheckpoint` callbacks of the same run."""
        named = ("monitor", "mode", "every_n_train_steps", "every_n_epochs", "train_time_interval")
        values = {name: getattr(self, name) for name in named}
        return f"ModelCheckpoint{values}"

    # -- schedule -----------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._fitting, self._resumed = stage == "fit", False
        if self._fitting:
            folder = trainer.run_dir or trainer.default_root_dir
            self.dirpath = self._chosen_dirpath or str((Path(folder) / "checkpoints").absolute())
            saves = (self.save_top_k or self.save_last) and not trainer.fast_dev_run
            if saves and trainer.world.main_rank and is_local(self._folder):
                check_writable(self._folder)

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if trainer.world.main_rank and self.save_top_k and not trainer.fast_dev_run and is_local(self._folder):
            resumes = trainer.global_step or trainer.state.attempt or self._resumed
            if not resumes and self._chosen_dirpath is not None:
                warn_of_files(self._folder)
        self._schedule.start(trainer, resumed=self._resumed)
        self._resumed, self._records.pending = False, None
        if trainer.world.main_rank and trainer.state.attempt:  # resumed: delete incomplete checkpoints of that run
            sweep(self._folder)
        if models := self._records.models:  # the files of the resumed run may have been deleted since
            existing = trainer.world.broadcast_object([path for path in models if as_path(path).exists()])
            self._records.keep({path: models[path] for path in existing}, self._mode)
        if self._schedule.handled != trainer.global_step:  # it was saved before this callback handled the step
            self._on_step(trainer)

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._schedule.handled:  # else within an accumulation window
            self._on_step(trainer)

    def _on_step(self, trainer: TrainerProtocol) -> None:
        schedule = self._schedule
        if schedule.step_due(trainer, self.every_n_train_steps):
            # A metric of an epoch exists after the first epoch of this fit, and after its first validation.
            self._save_or_wait(trainer, complain=schedule.epochs_trained(trainer) and schedule.validated(trainer))
        schedule.handled = trainer.global_step

    def on_validation_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._fitting and self.monitor is not None:
            self._schedule.metric.validation_starts(trainer.callback_metrics.get(self.monitor))

    def on_validation_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        value = trainer.callback_metrics.get(self.monitor or "")
        self._schedule.metric.validation_ends(value, trainer.global_step)
        at_epoch_end = reads_at_epoch_end(trainer, self.save_on_train_epoch_end)
        due = not at_epoch_end and self._epoch_due(trainer)
        if self._schedule.waiting or due or self._schedule.time_due(trainer):
            # Metrics of a training epoch exist only after its end. An epoch of unknown length may never end: complain.
            self._save_or_wait(trainer, complain=trainer.num_training_batches == math.inf)

    def on_train_epoch_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        at_epoch_end = reads_at_epoch_end(trainer, self.save_on_train_epoch_end)
        due = at_epoch_end and self._epoch_due(trainer)
        if self._schedule.waiting or due or self._schedule.time_due(trainer):
            complete = trainer.state.closing  # False: the run stops in the middle of the epoch
            self._save_or_wait(trainer, complain=complete and self._schedule.validated(trainer))

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if trainer.fast_dev_run:
            return
        lost = self._finish(trainer)
        if trainer.failures and trainer.is_global_zero:  # a writer on a hung disk may not have cleaned up
            sweep(self._folder)
        if self._schedule.is_saved(trainer):
            if lost:  # a worker died during this write, and no later checkpoint is due
                self._save(trainer)
            return
        if trainer.interrupted and self.save_on_exception and (self.save_top_k or self.save_last):
            path = self._save_aside(trainer, "interrupted")
            trainer.print(f"interrupted after {trainer.global_step} steps; saved {path}")
        elif self._schedule.waiting and self._by_step and self._metric_age(trainer)[0]:
            path = self._save_aside(trainer, "unranked")
            trainer.session.warn_once(
                f"checkpoint {self.monitor}",
                f"ModelCheckpoint(monitor={self.monitor!r}): no metric of that name was logged in the run, so "
                f"no checkpoint could be ranked; saved {path}",
            )
        elif self.save_last:
            self._save_last_alone(trainer)

    def on_exception(self, trainer: TrainerProtocol, pl_module: Module, exception: BaseException) -> None:
        # Saving is collective, whereas an error usually occurs on a single rank.
        saves = self.save_on_exception and (self.save_top_k or self.save_last) and self._fitting
        if not saves or trainer.world.size > 1 or trainer.fast_dev_run or self._schedule.is_saved(trainer):
            return
        try:
            path = self._save_aside(trainer, "exception")
            trainer.print(f"the run failed after {trainer.global_step} steps; saved {path}")
        except Exception as error:  # warn only, so that the user sees the first error
            warnings.warn(f"could not save a checkpoint after the error: {error}", stacklevel=2)

    def teardown(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._fitting = False
        self._schedule.metric.forget_validation()

    @property
    def _by_step(self) -> bool:
        return self.every_n_train_steps > 0 or self.train_time_interval is not None

    def _epoch_due(self, trainer: TrainerProtocol) -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _save_or_wait(self, trainer: TrainerProtocol, *, complain: bool = False) -> None:
        """Save now, or once the metric of these weights is logged; if `complain`, raise if it is missing."""
        if trainer.fast_dev_run or self._schedule.is_ranked(trainer):
            self._schedule.waiting = False
            return
        missing, stale = self._metric_age(trainer)
        if missing and complain:
            logged = trainer.callback_metrics
            raise ValueError(
                f"ModelCheckpoint(monitor={self.monitor!r}): no metric of that name was logged."
                f"{did_you_mean(str(self.monitor), logged)}\n  logged: {', '.join(sorted(logged)) or 'nothing'}\n"
                "  log it with self.log(...), or omit `monitor` to keep the newest checkpoint"
            )
        # All are kept: wait only if a validation of these weights follows at once.
        self._schedule.waiting = stale and (self.save_top_k != -1 or trainer.state.validating)
        if not self._schedule.waiting:
            self._save(trainer)
        elif self.save_last:
            self._save_last_alone(trainer)

    def _metric_age(self, trainer: TrainerProtocol) -> tuple[bool, bool]:
        """Return whether the metric was not logged, and whether it is stale; without ranks, no metric is needed."""
        if self.monitor is None or not self.save_top_k:
            return False, False
        return self._schedule.metric_age(trainer, self.monitor)

    # -- saving -------------------------------------------------------------------------------------------------

    def _save(self, trainer: TrainerProtocol) -> None:
        """Save if the checkpoint is among the best. Collective: every rank calls this at the same step."""
        self._finish(trainer)  # the ranking depends on whether the former checkpoint was completed
        ranked, self._schedule.ranked = self._schedule.ranked, trained(trainer)
        try:
            self._save_if_good(trainer)
        except Exception:  # the surviving ranks may repeat this save after the death of a rank
            self._schedule.ranked = ranked
            raise

    def _save_if_good(self, trainer: TrainerProtocol) -> None:
        metrics = self._metrics(trainer)
        score = metrics.get(self.monitor, math.nan) if self.monitor is not None else math.nan
        if self.monitor is not None:  # ranks may have other values: with sync_dist=False, and of a rank without data
            score = trainer.world.broadcast_object(score)
        kept = self._records.scores
        if self.monitor is None and self.save_top_k >= 1:  # the newest replaces the oldest
            admitted, displaced = True, next(iter(kept), None) if len(kept) >= self.save_top_k else None
        else:
            admitted, displaced = admit(kept, score, self.save_top_k, self.mode)
        if not admitted:
            if self.save_last:
                self._save_last_alone(trainer)
            return
        self.current_score = torch.tensor(score) if self.monitor is not None else None
        self._names.warn_of_absent(metrics)
        # Without a monitor, a name that stays the same is the newest checkpoint, also if all are kept.
        replaced = self._records.best_path if self.monitor is None else displaced
        path = self._paths(trainer).free(trainer, self._ranked_name(metrics), replaced)
        before = self._records.copy()
        # The checkpoint contains this callback's state, which must already list the new checkpoint.
        others = {other: value for other, value in self._records.models.items() if other != displaced}
        self._records.keep(others | {path: torch.tensor(score)}, self._mode)
        self._write(trainer, path, before, displaced)

    def _save_last_alone(self, trainer: TrainerProtocol) -> None:
        """Save the newest checkpoint, which is not ranked, as "last.ckpt" or for a link of this name."""
        if self._schedule.is_saved(trainer):
            return
        self._finish(trainer)
        if is_local(self._folder) and self._writes_files(trainer):
            path = self._link_path(trainer)
        else:
            path = self._paths(trainer).free(trainer, self._ranked_name(self._metrics(trainer)))
        self._write(trainer, path, self._records.copy())

    def _writes_files(self, trainer: TrainerProtocol) -> bool:
        """Return whether checkpoints are single files, which replace a link or another file in one operation."""
        by_module = trainer.session.module.single_file_checkpoints
        return bool(by_module if self.single_file is None else self.single_file)

    def _save_aside(self, trainer: TrainerProtocol, reason: str) -> str:
        """Save an unranked checkpoint, with the reason in its name, and wait until it is complete."""
        self._finish(trainer)
        name = self._names.unranked(reason, self._metrics(trainer))
        within_step = trainer.session.batch.in_step  # the position in the data doesn't belong to the weights
        path = self._paths(trainer).free(trainer, name)
        self._write(trainer, path, self._records.copy(), weights_only=within_step)
        trainer.finish_checkpoint()
        return f"{path} (weights only)" if within_step and not self.save_weights_only else path

    def _write(
        self, trainer: TrainerProtocol, path: str, before: dict[str, Any], displaced: str | None = None, *,
        weights_only: bool = False,
    ) -> None:  # fmt: skip
        """Save; after completion, update the link and delete superseded checkpoints. On failure, restore `before`."""
        saved, self._schedule.saved = self._schedule.saved, trained(trainer)
        links, link = is_local(self._folder), None
        if self.save_last:
            link = self._link_path(trainer) if links else path
        permanent = bool(self.keep_every_n_steps) and trainer.global_step % self.keep_every_n_steps == 0
        pending = self._records.begin(path, trainer.global_step, before, displaced, link, permanent=permanent)
        after = functools.partial(self._records.supersede, pending, self.dirpath, links=links)
        try:
            trainer.save_checkpoint(
                path, weights_only=self.save_weights_only or weights_only, wait=not self.asynchronous, after=after,
                failed=self._undo, single_file=self.single_file,
            )  # fmt: skip
        except Exception:
            self._schedule.saved = saved
            self._undo()
            raise
        if self.verbose:
            trainer.print(f"saved {path}")

    @property
    def _mode(self) -> Mode | None:
        return None if self.monitor is None else self.mode

    def _undo(self) -> None:
        """Restore the records before the newest checkpoint, which could not be written."""
        self._records.undo(self._mode)

    def _finish(self, trainer: TrainerProtocol) -> bool:
        """Wait for the newest checkpoint; undo its registration if it is missing. Collective.

        Returns:
            whether the checkpoint was lost because the workers changed during the write.
        """
        trainer.finish_checkpoint()
        pending = self._records.pending
        if pending is None:
            return False
        if not trainer.world.broadcast_object(step_of(pending.path) == pending.step):
            text = f"{pending.path} was lost: it was being written when a worker died, or when its replacement joined"
            trainer.session.metrics.loggers.event("checkpoint", text, pending.step)
            trainer.print(text)
            self._undo()
            return True
        self._records.pending = None
        kept = self._records.paths
        trainer.session.metrics.loggers.each(lambda logger: logger.checkpoints_saved(kept))
        trainer.session.metrics.loggers.each(lambda logger: logger.after_save_checkpoint(self))
        if trainer.is_global_zero:  # repeat this: the rank that began it may have died halfway
            remaining = replace(pending, superseded=[path for path in pending.superseded if as_path(path).exists()])
            self._records.supersede(remaining, self.dirpath, links=is_local(self._folder))
        return False

    def _written(self) -> KeptCheckpoints:
        """Return the records, when this rank has written its part of the newest checkpoint: users open these paths."""
        module = self._attached_module()
        if self._records.pending is not None and module is not None:
            module.trainer.session.checkpoints.settle()
        return self._records

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """Return the scores of the kept checkpoints, by path; empty without a monitor."""
        return {} if self.monitor is None else self._records.models

    @property
    def kth_best_model_path(self) -> str:
        """Return the path of the worst of `save_top_k` kept checkpoints; an empty string while there are fewer."""
        complete = self.save_top_k == -1 or 0 < self.save_top_k <= len(self.best_k_models)
        return worst(self._records.scores, self.mode) if complete and self.best_k_models else ""

    @property
    def kth_value(self) -> Tensor:
        """Return the score at `kth_best_model_path`; infinitely bad while there are fewer checkpoints."""
        nothing = torch.tensor(math.inf if self.mode == "min" else -math.inf)
        return self.best_k_models.get(self.kth_best_model_path, nothing)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the scores of the kept checkpoints, by path.

        Args:
            filepath: default: `best_k_models.yaml` in the folder of the checkpoints.
        """
        import yaml  # type: ignore[import-untyped]

        scores = {path: float(score) for path, score in self.best_k_models.items()}
        path = self._folder / "best_k_models.yaml" if filepath is None else as_path(filepath)
        path.write_text(yaml.safe_dump(scores))

    # -- files --------------------------------------------------------------------------------------------------

    def _metrics(self, trainer: TrainerProtocol) -> dict[str, float]:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {**logged, "epoch": trainer.state.epoch, "step": trainer.global_step}

    def _ranked_name(self, metrics: Mapping[str, float]) -> str:
        """Return the name of a checkpoint without the extension, also of a subclass with names of its own."""
        if type(self).format_checkpoint_name is NameParts.format_checkpoint_name:
            return self._names.ranked(metrics)
        path = as_path(self.format_checkpoint_name({name: torch.tensor(value) for name, value in metrics.items()}))
        inside = path.relative_to(self._folder) if path.is_relative_to(self._folder) else path
        return str(inside).removesuffix(self.FILE_EXTENSION)

    def _paths(self, trainer: TrainerProtocol) -> CheckpointPaths:
        others = [other for other in trainer.callbacks if isinstance(other, ModelCheckpoint) and other is not self]
        records = [other._records for other in others]
        return CheckpointPaths(self._folder, self._suffixes, self.enable_version_counter, self._records, records)

    def _link_path(self, trainer: TrainerProtocol) -> str:
        return self._paths(trainer).link(trainer, self._names.link(self._metrics(trainer)))

    @property
    def _folder(self) -> Path:
        assert self.dirpath is not None, "setup has not been called"
        return as_path(self.dirpath)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._records.state(),
            "monitor": self.monitor,
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "dirpath": self.dirpath,
            "current_score": self.current_score,
            **self._schedule.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._records.load(state_dict, self.dirpath)
        score: Tensor | None = state_dict["current_score"]
        self.current_score = None if score is None else score.cpu()
        self._resumed = True
        self._schedule.load(state_dict)
