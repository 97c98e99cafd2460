"""Print a table of the time per span and rank at the end of training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, final

from fabricx.core.callback import Callback
from fabricx.telemetry.diagnosis import SPAN_LABELS

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class Profiler(Callback):
    """Print the milliseconds per step that each rank spends in each span, when training ends.

    A run that records no times, without a logger and checkpoints, has no table, and a warning says so.
    """

    needs_all_ranks: ClassVar[bool] = True
    needs_telemetry: ClassVar[bool] = True

    def check_fit(self, trainer: TrainerProtocol, pl_module: Module, global_batch: int | None) -> None:
        if not trainer.enable_telemetry or not trainer.writes:
            warnings.warn(
                "Profiler: nothing is recorded in this run, so no table is printed; set enable_telemetry=True, and a "
                "logger or checkpoints",
                stacklevel=2,
            )

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not trainer.enable_telemetry or not trainer.writes:
            return
        by_rank = trainer.world.gather_objects(trainer.session.recorder.totals())
        trainer.print(table(by_rank))


def table(by_rank: Sequence[tuple[Mapping[str, float], int]]) -> str:
    """Return milliseconds per step by span and rank, and each span's fraction of the time of all ranks.

    Args:
        by_rank: for each rank, seconds by span and the number of steps in which they were spent.

    >>> print(table([({"forward": 0.3, "data": 0.1}, 100), ({"forward": 0.4}, 100)]))
    ms of a step               rank 0    rank 1      part
    data wait                   1.000     0.000    12.5 %
    forward                     3.000     4.000    87.5 %
    all                         4.000     4.000   100.0 %
    """
    total_s = sum(sum(seconds.values()) for seconds, _ in by_rank) or 1.0
    heads = "".join(f"{f'rank {rank}':>10}" for rank in range(len(by_rank)))
    lines = [f"{'ms of a step':<23}{heads}{'part':>10}"]
    for span, label in SPAN_LABELS.items():
        if any(span in seconds for seconds, _ in by_rank):
            lines.append(_line(label, [(seconds.get(span, 0.0), steps) for seconds, steps in by_rank], total_s))
    return "\n".join([*lines, _line("all", [(sum(seconds.values()), steps) for seconds, steps in by_rank], total_s)])


def _line(label: str, by_rank: Sequence[tuple[float, int]], total_s: float) -> str:
    cells = "".join(f"{1e3 * seconds / max(1, steps):>10.3f}" for seconds, steps in by_rank)
    return f"{label:<23}{cells}{100 * sum(seconds for seconds, _ in by_rank) / total_s:>8.1f} %"
