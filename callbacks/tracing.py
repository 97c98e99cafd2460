"""Every span of every rank in one file, and torch's operators of a few steps with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from fabricx.core.callback import Callback

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


@final
class Tracing(Callback):
    """Write `trace.json` into the run's folder, for ui.perfetto.dev: a row for each rank, with all it did.

    Args:
        steps: (first, last) weight updates that are traced; None for all. A step takes some 500 bytes of each rank.
        operators: (first, last) weight updates of which torch's profiler notes each operator; None for none. That makes
            those steps slow, and the file large.

    Raises:
        ValueError: steps or operators aren't two numbers in order.
    """

    traces: bool = True

    def __init__(self, steps: Sequence[int] | None = None, operators: Sequence[int] | None = None) -> None:
        self.steps, self.operators = _window("steps", steps), _window("operators", operators)
        self._profiler: Any = None
        self._profiled = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_profiler": None}

    def check_fit(self, trainer: Trainer, module: Module, global_batch: int | None) -> None:
        if not trainer.enable_telemetry or not trainer.writes:
            raise ValueError(
                "Tracing: nothing is recorded in this run; it takes enable_telemetry=True, and a logger or checkpoints"
            )

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        trainer.recorder.every_lap = self.steps is None

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1  # that this batch is a part of
        if self.steps is not None:
            trainer.recorder.every_lap = self.steps[0] <= step <= self.steps[1]
        if self.operators is None or self._profiled or step < self.operators[0]:
            return
        from torch import profiler

        self._profiled = True
        self._profiler = profiler.profile(activities=list(profiler.supported_activities()))
        self._profiler.start()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._profiler is not None and self.operators is not None and trainer.global_step >= self.operators[1]:
            self._end(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._end(trainer)
        self._profiled = False

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None and trainer.run_dir is not None:
            profiler.stop()
            file = trainer.run_dir / "telemetry" / f"operators-rank{trainer.global_rank}.json"
            profiler.export_chrome_trace(str(file))


def _window(name: str, given: Sequence[int] | None) -> tuple[int, int] | None:
    if given is None:
        return None
    if len(given) != 2 or not 1 <= given[0] <= given[1]:
        raise ValueError(
            f"Tracing({name}={given}): the first and the last weight update, counted from 1, as in [10, 12]"
        )
    return int(given[0]), int(given[1])
