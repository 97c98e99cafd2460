"""Save checkpoints while training goes on, and keep the best ones."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from fabricx.callbacks.checkpoint_files import link_to, may_be_looked_at, remove_own, step_of, versioned
from fabricx.callbacks.checkpoint_name import DEFAULT_TEMPLATE, format_name
from fabricx.callbacks.metric_timing import has_validation, looks_at_epoch_end
from fabricx.callbacks.time_interval import TimeInterval
from fabricx.checkpoint import sweep
from fabricx.checkpoint.storage import as_path, is_local
from fabricx.core.callback import Callback
from fabricx.duration import parse_duration
from fabricx.errors import did_you_mean

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer

Mode = Literal["min", "max"]


def goodness(score: float, mode: Mode) -> float:
    """Return a number that is larger for better scores; NaN is as bad as can be."""
    if math.isnan(score):
        return -math.inf
    return score if mode == "max" else -score


def admit(kept: Mapping[str, float], score: float, k: int, mode: Mode) -> tuple[bool, str | None]:
    """Decide whether a checkpoint is among the best.

    >>> admit({"a": 0.3, "b": 0.2}, 0.1, k=2, mode="min")
    (True, 'a')
    >>> admit({"a": 0.3, "b": 0.2}, 0.3, k=2, mode="min")
    (False, None)

    Args:
        kept: scores of those kept so far, by path.
        score: the new one's.
        k: how many are kept; -1 for all.
        mode: whether smaller or larger is better.

    Returns:
        whether the new one is kept, and the path of the one that it displaces.
    """
    if k == 0:
        return False, None
    if k < 0 or len(kept) < k:
        return True, None
    worst = min(kept, key=lambda path: goodness(kept[path], mode))
    if goodness(score, mode) > goodness(kept[worst], mode):
        return True, worst
    return False, None


@final
class ModelCheckpoint(Callback):
    """Save checkpoints by epochs, steps or time, and keep the best by a metric, or the newest.

    Nothing is deleted before the checkpoint that replaces it is complete, and nothing outside of `dirpath` at all.
    A value that is NaN never becomes the best.

    With a monitor that comes from validation, `every_n_train_steps` and `train_time_interval` save at the next end of
    a validation, so that weights are never ranked by the score of older ones (`save_last` doesn't wait for it).
    With several ranks, the main rank's clock decides about `train_time_interval`, for all ranks at the same step.

    Attributes:
        best_model_path: the best checkpoint; without a monitor the newest. Empty if there is none.
        best_model_score: its score, or None.
        best_k_models: the scores of all that are kept, by path.
        current_score: the score of the newest save.
        last_model_path: the link that `save_last` keeps.
        dirpath: the folder, once a run has begun.

    Args:
        dirpath: where to save; by default the folder `checkpoints` in the run's folder. A URL that fsspec knows
            ("s3://bucket/run") will do.
        filename: a template such as "{epoch}-{val_loss:.2f}"; "{epoch}-{step}" by default.
        monitor: the logged metric to rank by; None keeps the newest.
        mode: "min" if smaller is better, "max" if larger is.
        save_top_k: how many of the best, or without a monitor of the newest, to keep; -1 all, 0 none.
        keep_every_n_steps: what was saved after a multiple of so many weight updates is never deleted.
        save_last: also keep the newest, under the link "last.ckpt" (behind a URL there are no links: by its own name).
        every_n_train_steps: save every so many weight updates.
        every_n_epochs: save every so many epochs; 1 if no other moment is given.
        train_time_interval: save every so often: a `timedelta` or text such as "10m".
        save_on_train_epoch_end: save when training epochs end, rather than when validation ends. By default that is
            so where validation runs once, at the end of every epoch, or not at all.
        save_weights_only: leave out what is needed to go on training.
        save_on_exception: save when a run is interrupted, and, with one rank, when an error ends it.
        asynchronous: train on while a checkpoint is written. A full disk is a warning then, and
            the earlier checkpoints stay.
        auto_insert_metric_name: "epoch=3" rather than "3" for "{epoch}".
        verbose: say where each checkpoint is.

    Raises:
        ValueError: an argument is out of its range, or several can't go together.
    """

    watches_metrics: ClassVar[bool] = True
    needs_all_ranks: ClassVar[bool] = True
    CHECKPOINT_NAME_LAST: ClassVar[str] = "last"
    FILE_EXTENSION: ClassVar[str] = ".ckpt"

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        mode: Mode = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        keep_every_n_steps: int = 0,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | str | None = None,
        save_on_train_epoch_end: bool | None = None,
        save_weights_only: bool = False,
        save_on_exception: bool = True,
        asynchronous: bool = True,
        auto_insert_metric_name: bool = True,
        verbose: bool = False,
    ) -> None:
        self._chosen_dirpath = None if dirpath is None else str(as_path(dirpath).expanduser().absolute())
        self.dirpath: str | None = self._chosen_dirpath
        self.filename = filename
        self.monitor = monitor
        self.mode: Mode = mode
        self.save_top_k = save_top_k
        self.save_last = bool(save_last)
        self.keep_every_n_steps = keep_every_n_steps
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = None if train_time_interval is None else parse_duration(train_time_interval)
        if every_n_epochs is None:
            every_n_epochs = 0 if self.every_n_train_steps or self.train_time_interval else 1
        self.every_n_epochs = every_n_epochs
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.save_weights_only = save_weights_only
        self.save_on_exception = save_on_exception
        self.asynchronous = asynchronous
        self.auto_insert_metric_name = auto_insert_metric_name
        self.verbose = verbose
        self._check_arguments()

        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.current_score: Tensor | None = None
        self.last_model_path = ""
        self._last_target = ""  # what the link points to
        self._for_ever: set[str] = set()
        self._clock = TimeInterval(self.train_time_interval) if self.train_time_interval else None
        self._fitting = False
        self._goes_on = False  # from a checkpoint, after which a save may be due that isn't made yet
        self._step_seen = 0
        self._step_saved = 0  # the newest that there is a checkpoint of
        self._step_ranked = 0  # the newest that was compared with the best ones
        self._waiting = False  # a save is due, and the monitored metric isn't there yet
        self._validated_step = -1
        self._from_validation = False  # does validation log the monitored metric?
        self._before_validation: tuple[Tensor | None] | None = None  # the metric, from a validation's start to its end
        self._pending: dict[str, Any] | None = None  # the newest, and what was kept before, until it is there

    def _check_arguments(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'ModelCheckpoint(mode={self.mode!r}): it can be "min" or "max"')
        if self.save_top_k < -1:
            raise ValueError(f"ModelCheckpoint(save_top_k={self.save_top_k}): it can be -1 (all), 0 (none), 1, 2, ...")
        for name in ("every_n_train_steps", "every_n_epochs", "keep_every_n_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"ModelCheckpoint({name}={getattr(self, name)}): it can't be negative")

    @property
    def state_key(self) -> str:
        """Return a name that tells apart several of this class in one run."""
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, every_n_train_steps="
            f"{self.every_n_train_steps}, every_n_epochs={self.every_n_epochs}, "
            f"train_time_interval={self.train_time_interval})"
        )

    # -- when ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._fitting, self._goes_on = stage == "fit", False
        if self._fitting:
            folder = trainer.run_dir or trainer.default_root_dir
            self.dirpath = self._chosen_dirpath or str((Path(folder) / "checkpoints").absolute())

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if not self._goes_on:
            self._step_seen = self._step_saved = self._step_ranked = trainer.global_step
            self._waiting, self._validated_step = False, -1
        self._goes_on, self._pending = False, None
        if trainer.is_global_zero and trainer.state.attempt:  # this run goes on where another one has ended
            sweep(self._folder)
        if self._clock is not None:
            self._clock.start(trainer.global_step)
        if self.best_k_models:  # from an earlier run, whose files may be gone by now
            there = trainer.world.broadcast_object([path for path in self.best_k_models if as_path(path).exists()])
            self._keep({path: self.best_k_models[path] for path in there})
        if self._step_seen != trainer.global_step:  # somebody saved in the step's end before this callback had it
            self._see_step(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._step_seen:  # else in the middle of an accumulation window
            self._see_step(trainer)

    def _see_step(self, trainer: Trainer) -> None:
        step = trainer.global_step
        due = self.every_n_train_steps > 0 and step % self.every_n_train_steps == 0
        if self._clock is not None:
            due = self._clock.due(step, trainer.world) or due
        if due:
            self._save_or_wait(trainer)
        self._step_seen = step

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self._fitting and self.monitor is not None:
            self._before_validation = (trainer.callback_metrics.get(self.monitor),)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validated_step = trainer.global_step
        if self.monitor is not None and self._before_validation is not None:  # else an earlier run has validated
            now = trainer.callback_metrics.get(self.monitor)
            self._from_validation = now is not None and now is not self._before_validation[0]
            self._before_validation = None
        at_epoch_end = looks_at_epoch_end(trainer, self.save_on_train_epoch_end)
        if self._waiting or (not at_epoch_end and self._epoch_is_due(trainer)) or self._time_is_up(trainer):
            # A metric of the training epoch isn't there before the epoch's end, should there be one.
            self._save_or_wait(trainer, complain=trainer.num_training_batches == math.inf)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        at_epoch_end = looks_at_epoch_end(trainer, self.save_on_train_epoch_end)
        if self._waiting or (at_epoch_end and self._epoch_is_due(trainer)) or self._time_is_up(trainer):
            complete = trainer.state.closing  # else the run stops in the middle of the epoch
            validated = self._validated_step >= 0 or not has_validation(trainer)
            self._save_or_wait(trainer, complain=complete and validated)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if trainer.fast_dev_run:
            return
        lost = self._finish(trainer)
        if trainer.failures and trainer.is_global_zero:  # a disk that hung may have kept a writer from doing so
            sweep(self._folder)
        if trainer.global_step == self._step_saved:
            if lost:  # a worker died while these weights were written, and no later checkpoint comes
                self._save(trainer)
            return
        if trainer.interrupted and self.save_on_exception and (self.save_top_k or self.save_last):
            path = self._save_aside(trainer, "interrupted")
            trainer.print(f"interrupted after {trainer.global_step} steps; saved {path}")
        elif self.save_last:
            self._save_last_alone(trainer)

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        # Saving takes all ranks, and an error is usually one rank's alone.
        saves = self.save_on_exception and (self.save_top_k or self.save_last) and self._fitting
        if not saves or trainer.world.size > 1 or trainer.fast_dev_run or trainer.global_step == self._step_saved:
            return
        try:
            path = self._save_aside(trainer, "exception")
            trainer.print(f"an error ends the run after {trainer.global_step} steps; saved {path}")
        except Exception as error:  # the first error is the one to tell about
            warnings.warn(f"no checkpoint could be saved after the error: {error}", stacklevel=2)

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._fitting = False
        self._before_validation = None

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        return self.every_n_epochs > 0 and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _time_is_up(self, trainer: Trainer) -> bool:
        return self._clock is not None and self._clock.due(trainer.global_step, trainer.world, ask=True)

    def _save_or_wait(self, trainer: Trainer, *, complain: bool = False) -> None:
        """Save now, or when the metric of these weights is known; `complain` if that will never be."""
        if trainer.fast_dev_run or trainer.global_step == self._step_ranked:
            self._waiting = False
            return
        logged = trainer.callback_metrics if self.monitor is not None else {}
        missing = self.monitor is not None and self.monitor not in logged
        if missing and complain:
            raise ValueError(
                f"ModelCheckpoint(monitor={self.monitor!r}): no metric of that name was logged."
                f"{did_you_mean(str(self.monitor), logged)}\n  logged: {', '.join(sorted(logged)) or 'nothing'}\n"
                "  log it with self.log(...), or leave monitor out to keep the newest checkpoint"
            )
        stale = missing or (self._from_validation and self._validated_step != trainer.global_step)
        self._waiting = stale and self.save_top_k != -1
        if not self._waiting:
            self._save(trainer)
        elif self.save_last:
            self._save_last_alone(trainer)

    # -- what ---------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer) -> None:
        """Save if the checkpoint is among the best; every rank calls this at the same step."""
        self._finish(trainer)  # whether the one before is there decides what is kept now
        ranked, self._step_ranked = self._step_ranked, trainer.global_step
        try:
            self._save_if_good(trainer)
        except Exception:  # it may be tried again, without a rank that died
            self._step_ranked = ranked
            raise

    def _save_if_good(self, trainer: Trainer) -> None:
        metrics = self._metrics(trainer)
        score = metrics.get(self.monitor, math.nan) if self.monitor is not None else math.nan
        self.current_score = torch.tensor(score) if self.monitor is not None else None
        kept = {path: float(value) for path, value in self.best_k_models.items()}
        if self.monitor is None and self.save_top_k >= 1:  # the newest takes the place of the oldest
            admitted, displaced = True, next(iter(kept), None) if len(kept) >= self.save_top_k else None
        else:
            admitted, displaced = admit(kept, score, self.save_top_k, self.mode)
        if not admitted:
            if self.save_last:
                self._save_last_alone(trainer)
            return
        name = format_name(self._template, metrics, self.auto_insert_metric_name)
        path = self._free_path(trainer, name, displaced)
        before = self._kept()
        # The checkpoint holds this callback's state: it has to know of itself already.
        self._keep({p: s for p, s in self.best_k_models.items() if p != displaced} | {path: torch.tensor(score)})
        self._write(trainer, path, before, displaced)

    def _save_last_alone(self, trainer: Trainer) -> None:
        """Save for the link only, without a place among the best."""
        if trainer.global_step == self._step_saved:
            return
        self._finish(trainer)
        name = format_name(self._template, self._metrics(trainer), self.auto_insert_metric_name)
        self._write(trainer, self._free_path(trainer, name), self._kept())

    def _save_aside(self, trainer: Trainer, why: str) -> str:
        self._finish(trainer)
        name = format_name(DEFAULT_TEMPLATE, self._metrics(trainer))
        path = self._write(trainer, self._free_path(trainer, f"{why}-{name}"), self._kept())
        trainer.finish_checkpoint()
        return path

    def _write(self, trainer: Trainer, path: str, before: dict[str, Any], displaced: str | None = None) -> str:
        """Save, let the link follow, and only then delete what is superseded; `before` is kept if it can't be saved."""
        saved = self._step_saved
        superseded = {displaced} if displaced else set()
        self._step_saved = trainer.global_step
        if self.save_last:
            if self._last_target and self._last_target not in self.best_k_models:
                superseded.add(self._last_target)
            self.last_model_path = self._link_path(trainer) if is_local(self._folder) else path
            self._last_target = path
        if self.keep_every_n_steps and trainer.global_step % self.keep_every_n_steps == 0:
            self._for_ever.add(path)
        superseded -= {*self._for_ever, path}
        pending: dict[str, Any] = {
            "path": path,
            "step": trainer.global_step,
            "superseded": sorted(superseded),
            "before": before,
        }
        after = functools.partial(self._supersede, path, pending["superseded"])
        self._pending = pending
        try:
            trainer.save_checkpoint(
                path, weights_only=self.save_weights_only, wait=not self.asynchronous, after=after, failed=self._undo
            )
        except Exception:
            self._step_saved = saved
            self._undo()
            raise
        if self.verbose:
            trainer.print(f"saved {path}")
        return path

    def _supersede(self, path: str, superseded: Sequence[str]) -> None:
        """Let the link point to a checkpoint that is there, and delete those whose place it has taken (main rank)."""
        if self._last_target == path and is_local(self._folder):
            link_to(Path(self.last_model_path), Path(path))
        for old in superseded:
            remove_own(self.dirpath, old)

    def _kept(self) -> dict[str, Any]:
        return {"models": dict(self.best_k_models), "last": self.last_model_path, "target": self._last_target}

    def _undo(self) -> None:
        """Forget the newest checkpoint: it isn't there."""
        pending, self._pending = self._pending, None
        if pending is not None:
            before = pending["before"]
            self.last_model_path, self._last_target = before["last"], before["target"]
            self._keep(before["models"])

    def _finish(self, trainer: Trainer) -> bool:
        """Wait for the newest checkpoint, and forget it if it isn't there; all ranks call this.

        Returns:
            whether it was lost: a worker died while it was written.
        """
        trainer.finish_checkpoint()
        if self._pending is None:
            return False
        path, step, superseded = (self._pending[name] for name in ("path", "step", "superseded"))
        if not trainer.world.broadcast_object(step_of(path) == step):
            trainer.logger_dispatcher.event("checkpoint", f"{path} was lost: a worker died while it was written", step)
            self._undo()
            return True
        self._pending = None
        if trainer.is_global_zero:  # who did this may have died in the midst of it
            self._supersede(path, [old for old in superseded if as_path(old).exists()])
        return False

    def _keep(self, models: dict[str, Tensor]) -> None:
        self.best_k_models = models
        if self.monitor is None:
            self.best_model_path = next(reversed(models), "")
            return
        ranked = {path: float(score) for path, score in models.items() if not math.isnan(float(score))}
        self.best_model_path = max(ranked, key=lambda path: goodness(ranked[path], self.mode), default="")
        self.best_model_score = models.get(self.best_model_path)

    @property
    def kth_best_model_path(self) -> str:
        """Return the worst of the checkpoints that are kept, or an empty string."""
        scores = {path: goodness(float(score), self.mode) for path, score in self.best_k_models.items()}
        return min(scores, key=lambda path: scores[path], default="")

    # -- files --------------------------------------------------------------------------------------------------

    @property
    def _template(self) -> str:
        return self.filename or DEFAULT_TEMPLATE

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {**logged, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def _free_path(self, trainer: Trainer, name: str, displaced: str | None = None) -> str:
        """Return a path with nothing at it but what is about to be superseded.

        The main rank looks, since it may write there before another has looked.
        """
        mine = {displaced, None if self._last_target in self.best_k_models else self._last_target}
        found = versioned(self._folder, name, self.FILE_EXTENSION, lambda path: str(path) in mine)
        return str(trainer.world.broadcast_object(found))

    def _link_path(self, trainer: Trainer) -> str:
        found = versioned(self._folder, self.CHECKPOINT_NAME_LAST, self.FILE_EXTENSION, Path.is_symlink)
        return str(trainer.world.broadcast_object(found))

    @property
    def _folder(self) -> Path:
        assert self.dirpath is not None, "setup has not been called"
        return as_path(self.dirpath)

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": self.dirpath,
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "best_k_models": dict(self.best_k_models),
            "current_score": self.current_score,
            "last_model_path": self.last_model_path,
            "last_target": self._last_target,
            "for_ever": sorted(self._for_ever),
            "steps": [self._step_seen, self._step_saved, self._step_ranked, self._validated_step],
            "waiting": [self._waiting, self._from_validation],
            "pending": self._pending,
            "clock": None if self._clock is None else self._clock.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = {name: state_dict[name] for name in ("best_model_path", "last_model_path", "last_target")}
        known = {name: path if may_be_looked_at(self.dirpath, path) else "" for name, path in kept.items()}
        best = state_dict["best_k_models"]
        self.best_model_path = known["best_model_path"]
        self.best_model_score = _on_cpu(state_dict["best_model_score"])
        self.best_k_models = {path: score.cpu() for path, score in best.items() if may_be_looked_at(self.dirpath, path)}
        self.current_score = _on_cpu(state_dict["current_score"])
        self.last_model_path, self._last_target = known["last_model_path"], known["last_target"]
        self._for_ever = set(state_dict["for_ever"])
        self._goes_on = True
        # What follows decides when all ranks save.
        steps = state_dict.get("steps", [0, 0, 0, -1])
        self._step_seen, self._step_saved, self._step_ranked, self._validated_step = steps
        self._waiting, self._from_validation = state_dict.get("waiting", [False, False])
        self._pending = state_dict.get("pending")
        if self._clock is not None and state_dict.get("clock") is not None:
            self._clock.set_state(state_dict["clock"])


def _on_cpu(score: Tensor | None) -> Tensor | None:
    return None if score is None else score.cpu()
