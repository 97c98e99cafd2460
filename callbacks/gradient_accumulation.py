"""How many batches make one weight update, changed as training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from fabricx.core.callback import Callback

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


@final
class GradientAccumulation(Callback):
    """Accumulate another number of batches from a given epoch on.

    >>> callback = GradientAccumulation({2: 4, 6: 8})
    >>> [callback.batches_at(epoch, default=1) for epoch in (0, 1, 2, 5, 6)]
    [1, 1, 4, 4, 8]

    Args:
        scheduling: from which epoch on (the first is 0) how many batches. Before the first one given, the Trainer's
            `accumulate_grad_batches` holds.

    Raises:
        ValueError: the schedule is empty, or has an epoch below 0 or fewer than one batch.
    """

    needs_all_ranks: ClassVar[bool] = True

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ValueError("GradientAccumulation has an empty schedule; give it e.g. {0: 1, 5: 4}")
        # Keys come as text from a configuration file.
        self.scheduling = {int(epoch): int(batches) for epoch, batches in sorted(scheduling.items(), key=_epoch)}
        for epoch, batches in self.scheduling.items():
            if epoch < 0 or batches < 1:
                raise ValueError(
                    f"GradientAccumulation: {batches} batches from epoch {epoch} on; epochs begin with 0, "
                    "and a weight update takes at least one batch"
                )
        self._default: int | None = None

    def batches_at(self, epoch: int, default: int = 1) -> int:
        """Return how many batches make one weight update in an epoch; `default` before the first one scheduled."""
        return next((n for start, n in reversed(self.scheduling.items()) if start <= epoch), default)

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit" and self._default is None:
            self._default = trainer.accumulate_grad_batches

    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        if self._default is not None:  # the place within an epoch depends on it
            trainer.accumulate_grad_batches = self.batches_at(checkpoint["state"]["epoch"], self._default)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        default = self._default if self._default is not None else trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self.batches_at(trainer.current_epoch, default)

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit" and self._default is not None:
            trainer.accumulate_grad_batches = self._default
            self._default = None


def _epoch(entry: tuple[Any, Any]) -> int:
    return int(entry[0])


GradientAccumulationScheduler = GradientAccumulation
