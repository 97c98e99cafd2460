"""Export the recorded spans of all ranks as a single trace file, optionally with torch's operators for a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

from fabricx.core.callback import Callback

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class Tracing(Callback):
    """Write `trace.json`, for ui.perfetto.dev, into the run's folder: a row per rank with all of its spans.

    Args:
        steps: (first, last) weight update to trace, counted from 1; None traces all. A step adds about 500 bytes per
            rank.
        operators: (first, last) weight update in which torch's profiler records every operator, counted from 1; None
            records no operators. Recorded steps are slow, and the file is large.

    Raises:
        ValueError: `steps` or `operators` is not a pair of ascending numbers, or (when training starts) the run
            records no telemetry.
    """

    needs_telemetry: ClassVar[bool] = True
    traces: bool = True

    def __init__(self, steps: Sequence[int] | None = None, operators: Sequence[int] | None = None) -> None:
        self.steps, self.operators = _window("steps", steps), _window("operators", operators)
        self._profiler: Any = None
        self._profiled = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_profiler": None}

    def check_fit(self, trainer: TrainerProtocol, pl_module: Module, global_batch: int | None) -> None:
        if not trainer.enable_telemetry or not trainer.writes:
            raise ValueError(
                "Tracing: nothing is recorded in this run; set enable_telemetry=True and enable a logger or checkpoints"
            )

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        trainer.session.recorder.trace_laps(on=self.steps is None)

    def on_train_batch_start(self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1  # the weight update that this batch contributes to
        if self.steps is not None:
            trainer.session.recorder.trace_laps(on=self.steps[0] <= step <= self.steps[1])
        if self.operators is None or self._profiled or step < self.operators[0]:
            return
        from torch import profiler

        self._profiled = True
        self._profiler = profiler.profile(activities=list(profiler.supported_activities()))
        self._profiler.start()

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profiler is not None and self.operators is not None and trainer.global_step >= self.operators[1]:
            self._end(trainer)

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._end(trainer)
        self._profiled = False

    def on_exception(self, trainer: TrainerProtocol, pl_module: Module, exception: BaseException) -> None:
        self._end(trainer)

    def _end(self, trainer: TrainerProtocol) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None and trainer.run_dir is not None:
            profiler.stop()
            file = trainer.run_dir / "telemetry" / f"operators-rank{trainer.global_rank}.json"
            profiler.export_chrome_trace(str(file))


def _window(name: str, steps: Sequence[int] | None) -> tuple[int, int] | None:
    if steps is None:
        return None
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        raise ValueError(
            f"Tracing({name}={steps}): pass the first and the last weight update, counted from 1, such as [10, 12]"
        )
    return int(steps[0]), int(steps[1])
