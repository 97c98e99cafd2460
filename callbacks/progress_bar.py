"""Show progress: a bar on a terminal, periodic lines in log files."""

from __future__ import annotations

import builtins
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fabricx.callbacks.progress_screen import Lines, Screen, Speed, Terminal, View, open_screen
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.core.state import TrainerFn

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

_TERMINAL_S = 0.1  # seconds between two updates of a bar
_LINES_S = 5.0  # seconds between two lines
_HOOKS: Final = (
    'get_metrics for other values, or a fabricx.Callback with trainer_role = "progress_bar" that draws the whole bar'
)


@dataclass
class Stage:
    """A phase with a separate bar. Stages nest: a validation interrupts the stage of the training epoch.

    Attributes:
        label: text before the bar.
        total: number of batches; infinity if unknown.
        begun: time at which it began, in seconds.
        speed: speed of the newest batches.
    """

    label: str
    total: float
    begun: float
    speed: Speed


class ProgressBar(Callback):
    """Show epoch, batches, speed and the metrics logged with `prog_bar=True`, on the main rank.

    On a terminal this is a bar; in a log file, a line every few seconds and at the end of each epoch. Metrics are read
    only for an update of the display, because reading them waits for the device. A subclass may override `get_metrics`
    to show other values.

    Args:
        refresh_rate: seconds between two updates; 0 disables the display. Default: 0.1 on a terminal, 5 in a file.

    Raises:
        ValueError: the rate is negative.
    """

    trainer_role: ClassVar = "progress_bar"
    former_methods: ClassVar = renamed("has_dataloader_changed reset_dataloader_idx_tracker", _HOOKS)

    def __init__(self, refresh_rate: float | None = None) -> None:
        if refresh_rate is not None and refresh_rate < 0:
            raise ValueError(
                f"ProgressBar(refresh_rate={refresh_rate}): must be seconds between two updates, or 0 (off)"
            )
        self._chosen_s = refresh_rate
        self._screen: Screen | None = None
        self._stages: list[Stage] = []
        self._every_s = 0.0
        self._next = math.inf  # time of the next update on the monotonic clock; infinity on ranks without a display
        self._enabled = True
        self._trainer: TrainerProtocol | None = None
        self._loader = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_screen": None, "_stages": [], "_next": math.inf, "_trainer": None}

    # -- for subclasses -----------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        """Return the trainer of the run.

        Raises:
            RuntimeError: there was no run yet.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a trainer; read `trainer` in hooks of a run")
        return self._trainer

    sanity_check_description = "sanity check"
    train_description = "epoch"
    validation_description = "validation"
    test_description = "test"
    predict_description = "prediction"

    @property
    def total_train_batches(self) -> int | float:
        """Return the number of training batches of an epoch; infinity if it is unknown."""
        total: int | float = self.trainer.num_training_batches
        return total

    @property
    def total_val_batches(self) -> int | float:
        """Return the number of validation batches of all loaders; 0 in an epoch of a fit that does not validate."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch if trainer.state.fn is TrainerFn.FITTING else 1
        if every and (trainer.current_epoch + 1) % every:
            return 0
        total: int | float = sum(trainer.num_val_batches)
        return total

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Return the number of validation batches of the loader that is being read."""
        return _of_loader(_lengths(self.trainer, "validate"), self._loader)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Return the number of test batches of the loader that is being read."""
        return _of_loader(_lengths(self.trainer, "test"), self._loader)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Return the number of batches to predict of the loader that is being read."""
        return _of_loader(_lengths(self.trainer, "predict"), self._loader)

    @property
    def refresh_rate(self) -> float | None:
        """Return the seconds between two updates; a subclass may have a rate of another kind, of which 0 is off."""
        return self._chosen_s

    @refresh_rate.setter
    def refresh_rate(self, seconds: float | None) -> None:
        self._chosen_s = seconds

    @property
    def is_enabled(self) -> bool:
        """Return whether the main rank shows progress."""
        return self._enabled and self.refresh_rate != 0

    @property
    def is_disabled(self) -> bool:
        """Return whether nothing is shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show progress again, from the next epoch or evaluation."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing until `enable`."""
        self._enabled = False
        self._close()

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return the values to show; called on the main rank when the display is updated.

        The first value, `v_num`, is the version of the logger (of a text, the last 4 characters), if it has one.

        Args:
            trainer: the run's trainer.
            pl_module: module that is trained.
        """
        return {**_version(trainer.loggers), **trainer.progress_bar_metrics}

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar.

        Args:
            *args: as for the built-in `print`.
            **kwargs: as for the built-in `print`.
        """
        # A live bar redirects sys.stdout if that is the same terminal.
        builtins.print(*args, **kwargs)

    # -- stages -------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._close()
        self._trainer = trainer
        self._open(trainer)

    def _open(self, trainer: TrainerProtocol) -> None:
        if trainer.world.main_rank and self.is_enabled:
            self._screen = open_screen()
            usual = _LINES_S if isinstance(self._screen, Lines) else _TERMINAL_S
            self._every_s = usual if self._chosen_s is None else self._chosen_s

    def teardown(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: TrainerProtocol, pl_module: Module, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        screen, self._screen = self._screen, None
        self._stages.clear()
        self._next = math.inf
        if screen is not None:
            screen.close()

    def _begin(self, label: str, total: float, done: int = 0) -> None:
        if self._screen is None:
            return
        now = time.monotonic()
        self._stages.append(Stage(label, total, now, Speed(done, now)))
        self._next = now if isinstance(self._screen, Terminal) else now + self._every_s

    def _draw(self, done: int, metrics: Mapping[str, Any]) -> None:
        stage, now = self._stages[-1], time.monotonic()
        if self._screen is not None:
            self._screen.draw(View(stage.label, done, stage.total, stage.speed.update(done, now), metrics))
        self._next = time.monotonic() + self._every_s

    def _end(self, done: int | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """End a stage; if `done` is not None, write a permanent line."""
        if self._screen is None or not self._stages:
            return
        stage, now = self._stages.pop(), time.monotonic()
        if done is not None:
            view = View(stage.label, done, stage.total, stage.speed.overall(done, now), metrics or {})
            self._screen.close()
            self._screen.keep(view)
        for outer in self._stages:
            outer.speed.pause(now - stage.begun)
        self._next = now + self._every_s if self._stages else math.inf

    # -- training -----------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._screen is None:  # this rank may have become the main rank after the death of a worker
            self._open(trainer)
        self._stages.clear()  # remove stages that a failure interrupted
        epoch, epochs = trainer.current_epoch, trainer.max_epochs  # from 0, as in the names of checkpoints
        label = f"{self.train_description} {epoch}"
        label += f"/{epochs - 1}" if epochs is not None and epochs > 0 else ""
        self._begin(label, trainer.num_training_batches, trainer.state.batch)

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._next:
            self._draw(batch_idx + 1, self.get_metrics(trainer, pl_module))

    def on_train_epoch_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._screen is not None:
            self._end(trainer.state.batch, self.get_metrics(trainer, pl_module))

    # -- evaluation ---------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._begin_evaluation(
            trainer, self.sanity_check_description if trainer.sanity_checking else self.validation_description
        )

    def on_test_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._begin_evaluation(trainer, self.test_description)

    def on_predict_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._begin_evaluation(trainer, self.predict_description)

    def _begin_evaluation(self, trainer: TrainerProtocol, label: str) -> None:
        self._loader = 0
        if self._screen is None:
            self._open(trainer)
        self._begin(label, sum(_lengths(trainer)))

    def _evaluated(self, trainer: TrainerProtocol, batch_idx: int, dataloader_idx: int) -> None:
        self._loader = dataloader_idx
        if time.monotonic() >= self._next:
            before = sum(_lengths(trainer)[:dataloader_idx])
            self._draw((int(before) if before < math.inf else 0) + batch_idx + 1, {})

    def on_validation_batch_end(
        self,
        trainer: TrainerProtocol,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self,
        trainer: TrainerProtocol,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_predict_batch_end(
        self,
        trainer: TrainerProtocol,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluated(trainer, batch_idx, dataloader_idx)

    def on_validation_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end_evaluation(trainer)

    def on_test_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end_evaluation(trainer)

    def on_predict_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end_evaluation(trainer)

    def _end_evaluation(self, trainer: TrainerProtocol) -> None:
        total = sum(_lengths(trainer))
        alone = len(self._stages) == 1 and not trainer.sanity_checking
        self._end(int(total) if alone and total < math.inf else None)


class _CountsBatches(ProgressBar):
    """A bar with the arguments of Lightning, whose `refresh_rate` is a number of batches; only 0 has an effect.

    Args:
        refresh_rate: see the subclasses.

    Raises:
        ValueError: the rate is negative.
    """

    def __init__(self, refresh_rate: int) -> None:
        super().__init__(0 if refresh_rate == 0 else None if refresh_rate > 0 else refresh_rate)
        self._refresh_batches: float | None = refresh_rate

    @property
    def refresh_rate(self) -> float | None:
        """Return the number of batches that was passed, or assigned later; 0 is off."""
        return self._refresh_batches

    @refresh_rate.setter
    def refresh_rate(self, batches: float | None) -> None:
        self._refresh_batches = batches


class TQDMProgressBar(_CountsBatches):
    """The progress bar with the arguments of Lightning's `TQDMProgressBar`; it shows the same as `ProgressBar`.

    Args:
        refresh_rate: 0 disables the display; the time between two updates does not depend on other values, which count
            batches in Lightning.
        process_position, leave: without effect; the lines of complete epochs always remain.

    Raises:
        ValueError: the rate is negative.
    """

    former_methods: ClassVar = {
        **ProgressBar.former_methods,
        **renamed("init_train_tqdm init_validation_tqdm init_test_tqdm init_predict_tqdm init_sanity_tqdm", _HOOKS),
        **renamed("train_progress_bar val_progress_bar test_progress_bar predict_progress_bar", _HOOKS),
        **renamed("process_position _resolve_refresh_rate _should_update", _HOOKS),
    }

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate)


class RichProgressBarTheme:
    """Styles of Lightning's `RichProgressBar`.

    Args:
        styles: without effect: the bar has its own styles.
    """

    def __init__(self, **styles: Any) -> None:
        self.styles = styles


class RichProgressBar(_CountsBatches):
    """The progress bar with the arguments of Lightning's `RichProgressBar`; it shows the same as `ProgressBar`.

    Args:
        refresh_rate: 0 disables the display; the time between two updates does not depend on other values, which count
            batches in Lightning.
        leave, theme, console_kwargs: without effect; the lines of complete epochs always remain.

    Raises:
        ValueError: the rate is negative.
    """

    former_methods: ClassVar = {
        **ProgressBar.former_methods,
        **renamed("configure_columns refresh _add_task _get_train_description _init_progress _stop_progress", _HOOKS),
        **renamed("train_progress_bar val_progress_bar test_progress_bar val_sanity_check_bar _update", _HOOKS),
        **renamed("_initialize_train_progress_bar_id _reset_progress_bar_ids _update_metrics", _HOOKS),
    }

    def __init__(
        self, refresh_rate: int = 1, leave: bool = False, theme: Any = None,
        console_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(refresh_rate)


def _version(loggers: Sequence[Any]) -> dict[str, int | str]:
    """Return the version of the loggers as `v_num`; {} without a version."""
    versions = [version for logger in loggers if (version := getattr(logger, "version", None)) not in ("", None)]
    if not versions:
        return {}
    version = versions[0] if len(versions) == 1 else "_".join(dict.fromkeys(map(str, versions)))
    return {"v_num": version[-4:] if isinstance(version, str) else version}


def _lengths(trainer: TrainerProtocol, stage: str = "") -> list[float]:
    """Return the number of batches of each loader of an evaluation; by default of the running evaluation."""
    of_stage = {"test": trainer.num_test_batches, "predict": trainer.num_predict_batches}
    lengths = [float(length) for length in of_stage.get(stage or trainer.state.phase, trainer.num_val_batches)]
    if trainer.sanity_checking and trainer.num_sanity_val_steps >= 0:
        return [min(length, trainer.num_sanity_val_steps) for length in lengths]
    return lengths


def _of_loader(lengths: Sequence[float], loader: int) -> int | float:
    length = lengths[loader] if loader < len(lengths) else 0
    return length if length == math.inf else int(length)
