"""Schedule the number of accumulated batches per weight update by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from fabricx.core.callback import Callback

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class GradientAccumulation(Callback):
    """Change the number of accumulated batches per weight update at scheduled epochs.

    >>> callback = GradientAccumulation({2: 4, 6: 8})
    >>> [callback.batches_at(epoch, default=1) for epoch in (0, 1, 2, 5, 6)]
    [1, 1, 4, 4, 8]

    Args:
        scheduling: maps the first epoch (counted from 0) of each phase to its batches per weight update. Before the
            first scheduled epoch, the Trainer's `accumulate_grad_batches` applies.

    Raises:
        ValueError: the schedule is empty, or has a negative epoch, fewer than 1 batch per update, or numbers that are
            not whole.
    """

    needs_all_ranks: ClassVar[bool] = True

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ValueError("GradientAccumulation: the schedule is empty; pass a mapping such as {0: 1, 5: 4}")
        self.scheduling = dict(sorted((_whole(epoch), _whole(batches)) for epoch, batches in scheduling.items()))
        for epoch, batches in self.scheduling.items():
            if epoch < 0 or batches < 1:
                raise ValueError(
                    f"GradientAccumulation: {batches} batches from epoch {epoch} on; epochs must be 0 or more, "
                    "and a weight update needs at least 1 batch"
                )
        self._default: int | None = None

    @property
    def accumulates(self) -> int:
        return max(self.scheduling.values())

    def batches_at(self, epoch: int, default: int = 1) -> int:
        """Return the batches per weight update in an epoch.

        Args:
            epoch: epoch, counted from 0.
            default: value before the first scheduled epoch.
        """
        return next((n for start, n in reversed(self.scheduling.items()) if start <= epoch), default)

    def setup(self, trainer: TrainerProtocol, module: Module, stage: str) -> None:
        if stage == "fit" and self._default is None:
            self._default = trainer.accumulate_grad_batches

    def on_load_checkpoint(self, trainer: TrainerProtocol, module: Module, checkpoint: dict[str, Any]) -> None:
        if self._default is not None:  # the data position within an epoch depends on it
            trainer.accumulate_grad_batches = self.batches_at(checkpoint["state"]["epoch"], self._default)

    def on_train_epoch_start(self, trainer: TrainerProtocol, module: Module) -> None:
        default = self._default if self._default is not None else trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self.batches_at(trainer.current_epoch, default)

    def teardown(self, trainer: TrainerProtocol, module: Module, stage: str) -> None:
        if stage == "fit" and self._default is not None:
            trainer.accumulate_grad_batches = self._default
            self._default = None


def _whole(value: Any) -> int:
    """Return a whole number; keys from a configuration file are text."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or (number != value and not isinstance(value, str)):
        raise ValueError(
            f"GradientAccumulation: {value!r} is not a whole number; pass a mapping such as {{0: 1, 5: 4}}"
        )
    return number


GradientAccumulationScheduler = GradientAccumulation
