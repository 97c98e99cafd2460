"""Where the time goes, as a table at the end of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, final

from fabricx.core.callback import Callback
from fabricx.telemetry.diagnosis import WORDS

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


@final
class Profiler(Callback):
    """Print what a step of each rank spends its time on, when training ends."""

    needs_all_ranks: ClassVar[bool] = True

    def check_fit(self, trainer: Trainer, module: Module, global_batch: int | None) -> None:
        if not trainer.enable_telemetry or not trainer.writes:
            raise ValueError(
                "Profiler: nothing is recorded in this run; it takes enable_telemetry=True, and a logger or checkpoints"
            )

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        by_rank = trainer.world.gather_objects(trainer.recorder.totals())
        trainer.print(table(by_rank))


def table(by_rank: Sequence[tuple[Mapping[str, float], int]]) -> str:
    """Return milliseconds of a step by span and rank, and what part of all ranks' time each span takes.

    Args:
        by_rank: the seconds by span, and the steps in which they were spent.

    >>> print(table([({"forward": 0.3, "data": 0.1}, 100), ({"forward": 0.4}, 100)]))
    ms of a step               rank 0    rank 1      part
    data wait                   1.000     0.000    12.5 %
    forward                     3.000     4.000    87.5 %
    all                         4.000     4.000   100.0 %
    """
    whole = sum(sum(seconds.values()) for seconds, _ in by_rank) or 1.0
    heads = "".join(f"{f'rank {rank}':>10}" for rank in range(len(by_rank)))
    lines = [f"{'ms of a step':<23}{heads}{'part':>10}"]
    for span, word in WORDS.items():
        if any(span in seconds for seconds, _ in by_rank):
            lines.append(_line(word, [(seconds.get(span, 0.0), steps) for seconds, steps in by_rank], whole))
    return "\n".join([*lines, _line("all", [(sum(seconds.values()), steps) for seconds, steps in by_rank], whole)])


def _line(word: str, found: Sequence[tuple[float, int]], whole: float) -> str:
    cells = "".join(f"{1e3 * seconds / max(1, steps):>10.3f}" for seconds, steps in found)
    return f"{word:<23}{cells}{100 * sum(seconds for seconds, _ in found) / whole:>8.1f} %"
