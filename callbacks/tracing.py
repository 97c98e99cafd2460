"""Every span of every rank in one file, and torch's operators of a few steps with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from fabricx.callback import Callback

if TYPE_CHECKING:
    from fabricx.module import Module
    from fabricx.trainer import Trainer


@final
class Tracing(Callback):
    """Write `trace.json` into the run's folder, for ui.perfetto.dev: a row for each rank, with all it did.

    Args:
        operators: (first, last) weight updates of which torch's profiler notes each operator; None for none. That makes
            those steps slow, and the file large.

    Raises:
        ValueError: operators aren't two numbers in order.
    """

    traces: bool = True

    def __init__(self, operators: Sequence[int] | None = None) -> None:
        if operators is not None and (len(operators) != 2 or not 0 <= operators[0] <= operators[1]):
            raise ValueError(f"Tracing(operators={operators}): the first and the last weight update, such as [10, 12]")
        self.operators = None if operators is None else (int(operators[0]), int(operators[1]))
        self._profiler: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_profiler": None}

    def check_fit(self, trainer: Trainer, module: Module, global_batch: int | None) -> None:
        if not trainer.enable_telemetry or not trainer.writes:
            raise ValueError(
                "Tracing: nothing is recorded in this run; it takes enable_telemetry=True, and a logger or checkpoints"
            )

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        trainer.recorder.every_lap = True

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        # Update n is made of the batches that begin when n - 1 are done.
        if self.operators is None or self._profiler is not None or trainer.global_step + 1 != max(1, self.operators[0]):
            return
        from torch import profiler

        self._profiler = profiler.profile(activities=list(profiler.supported_activities()))
        self._profiler.start()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._profiler is not None and self.operators is not None and trainer.global_step >= self.operators[1]:
            self._end(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._end(trainer)

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None or trainer.run_dir is None:
            return
        profiler.stop()
        profiler.export_chrome_trace(str(trainer.run_dir / "telemetry" / f"operators-rank{trainer.global_rank}.json"))
        self.operators = None  # once in a run
