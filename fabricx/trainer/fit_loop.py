"""Limits and position of a fit under the names of Lightning's `trainer.fit_loop`."""

from __future__ import annotations

from typing import Any, Final

_LIMITS: Final = ("max_epochs", "min_epochs", "max_steps", "min_steps")
_STEP_LIMITS: Final = ("max_steps", "min_steps")
_LOOP: Final = (
    f"it has {', '.join(_LIMITS)}; trainer.current_epoch, trainer.global_step and trainer.state.batch are the position "
    "of the run"
)


class _Counters:
    """Counters of a run under Lightning's names; a program can read them only."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{name} of the counters of trainer.fit_loop can't be set: they are the position of the run; "
            "fit(ckpt_path=...) begins at that of a checkpoint, and a second fit continues that of the first"
        )


class Progress(_Counters):
    """Numbers of epochs or batches, as programs read them from `trainer.fit_loop.epoch_progress.current`.

    Args:
        ready, started, processed, completed: number of epochs or batches that have reached this state.
    """

    ready: int
    started: int
    processed: int
    completed: int

    def __init__(self, ready: int, started: int, processed: int, completed: int) -> None:
        self.__dict__.update(ready=ready, started=started, processed=processed, completed=completed)


class EpochProgress(_Counters):
    """The epochs of a run under Lightning's names.

    Args:
        current, total: the epochs, counted from the start of the run; both are equal.
    """

    current: Progress
    total: Progress

    def __init__(self, current: Progress, total: Progress) -> None:
        self.__dict__.update(current=current, total=total)


class BatchProgress(_Counters):
    """The training batches of a run under Lightning's names.

    Args:
        current: batches of the epoch.
        total: batches of the run.
        is_last_batch: the newest batch is the last of its epoch.
    """

    current: Progress
    total: Progress
    is_last_batch: bool

    def __init__(self, current: Progress, total: Progress, is_last_batch: bool) -> None:
        self.__dict__.update(current=current, total=total, is_last_batch=is_last_batch)


class EpochLoopSteps:
    """The part of `trainer.fit_loop.epoch_loop` that programs use: limits, number of weight updates, and of the batch.

    Args:
        limits: `trainer.fit_loop`; its limits of steps are read and set here, too.
        global_step: number of weight updates.
        batch_progress: training batches of the run.
    """

    global_step: int
    _batches_that_stepped: int
    batch_progress: BatchProgress
    batch_idx: int
    total_batch_idx: int

    def __init__(self, limits: FitLimits, global_step: int, batch_progress: BatchProgress) -> None:
        self.__dict__.update(
            _limits=limits, global_step=global_step, _batches_that_stepped=global_step, batch_progress=batch_progress,
            batch_idx=batch_progress.current.ready - 1, total_batch_idx=batch_progress.total.ready - 1,
        )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _STEP_LIMITS:
            raise AttributeError(f"trainer.fit_loop.epoch_loop.{name} can't be set: trainer.fit_loop: {_LOOP}")
        setattr(self.__dict__["_limits"], name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _STEP_LIMITS:
            return getattr(self.__dict__["_limits"], name)
        meant = "; trainer.enable_validation and trainer.num_val_batches describe the validation" * (name == "val_loop")
        raise AttributeError(f"trainer.fit_loop.epoch_loop has no attribute {name!r}: trainer.fit_loop: {_LOOP}{meant}")


class FitLimits:
    """The limits of a fit as attributes of `trainer.fit_loop`, which programs read and set between two fits.

    Args:
        trainer: has the limits.
    """

    def __init__(self, trainer: Any) -> None:
        self.__dict__["_trainer"] = trainer

    def setup_data(self) -> None:
        """Do nothing: `trainer.train_dataloader` is set before `configure_optimizers`, unlike in Lightning."""

    @property
    def epoch_loop(self) -> EpochLoopSteps:
        """Return the number of weight updates under the names of Lightning's inner loop."""
        return EpochLoopSteps(self, self.__dict__["_trainer"].global_step, self._batches())

    def _batches(self) -> BatchProgress:
        """Return the numbers of training batches; within a batch, it is started and not completed."""
        trainer = self.__dict__["_trainer"]
        session, state = trainer._sessions.fit, trainer.state
        if session is None or session.batch.index < 0:
            done = state.before + state.batch
            return BatchProgress(Progress(*[state.batch] * 4), Progress(*[done] * 4), False)
        begun, total = session.batch.index + 1, session.batch.total + 1
        within = session.metrics.training.batch is not None  # until the hooks of its end have run
        current = Progress(begun, begun, begun - within, begun - within)
        return BatchProgress(current, Progress(total, total, total - within, total - within), session.batch.is_last)

    @property
    def batch_idx(self) -> int:
        """Return the number of the newest training batch in its epoch; -1 before the first."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Return the number of the newest training batch in the run; -1 before the first."""
        return self.epoch_loop.total_batch_idx

    @property
    def max_batches(self) -> int | float:
        """Return the number of batches per epoch."""
        batches: int | float = self.__dict__["_trainer"].num_training_batches
        return batches

    @property
    def epoch_progress(self) -> EpochProgress:
        """Return the number of finished epochs under the names of Lightning's counters."""
        trainer = self.__dict__["_trainer"]
        completed = trainer.current_epoch
        begun = completed + int(trainer.training)
        progress = Progress(begun, begun, completed, completed)
        return EpochProgress(progress, progress)

    def __getattr__(self, name: str) -> Any:
        if name not in _LIMITS:
            raise AttributeError(f"trainer.fit_loop has no attribute {name!r}: {_LOOP}")
        return getattr(self.__dict__["_trainer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _LIMITS:
            raise AttributeError(f"trainer.fit_loop.{name} can't be set: {_LOOP}")
        if value is None:
            value = -1 if name.startswith("max") else 0
        setattr(self.__dict__["_trainer"], name, value)
