"""Schedule the number of accumulated batches per weight update by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.errors import WrongArgument

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class GradientAccumulation(Callback):
    """Change the number of accumulated batches per weight update at scheduled epochs.

    >>> callback = GradientAccumulation({2: 4, 6: 8})
    >>> [callback.batches_at(epoch) for epoch in (0, 1, 2, 5, 6)]
    [1, 1, 4, 4, 8]

    Args:
        scheduling: maps the first epoch (counted from 0) of each phase to its batches per weight update. Before the
            first scheduled epoch, each batch is an update.

    Raises:
        ValueError: the schedule is empty, or has a negative epoch, fewer than 1 batch per update, or numbers that are
            not whole; or (in `fit`) the Trainer has `accumulate_grad_batches`, too.
    """

    needs_all_ranks: ClassVar[bool] = True
    former_methods: ClassVar = renamed(
        "get_accumulate_grad_batches going_to_accumulate_grad_batches", "the argument scheduling"
    )

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise WrongArgument("GradientAccumulation: the schedule is empty; pass a mapping such as {0: 1, 5: 4}")
        if not isinstance(scheduling, Mapping):
            raise WrongArgument(f"GradientAccumulation({scheduling!r}): pass a mapping such as {{0: 1, 5: 4}}")
        self.scheduling = dict(sorted((_whole(epoch), _whole(batches)) for epoch, batches in scheduling.items()))
        for epoch, batches in self.scheduling.items():
            if epoch < 0 or batches < 1:
                raise ValueError(
                    f"GradientAccumulation: {batches} batches from epoch {epoch} on; epochs must be 0 or more, "
                    "and a weight update needs at least 1 batch"
                )
        self._applies = False  # within a fit
        self._chosen = 1  # in the last epoch

    @property
    def accumulates(self) -> int:
        return max(self.scheduling.values())

    def accumulates_at(self, epoch: int) -> int:
        return self.batches_at(epoch)

    def batches_at(self, epoch: int) -> int:
        """Return the batches per weight update in an epoch.

        Args:
            epoch: epoch, counted from 0.
        """
        return next((n for start, n in reversed(self.scheduling.items()) if start <= epoch), 1)

    def check_fit(self, trainer: Any, pl_module: Module, global_batch: int | None) -> None:
        if trainer.accumulate_grad_batches not in (1, self._chosen):  # that of an earlier fit
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and GradientAccumulation("
                f"{self.scheduling}) both set the number of batches per update: remove the argument of the Trainer, "
                "or the callback"
            )

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._applies = stage == "fit"
        if self._applies:
            self._set(trainer, 1)

    def on_load_checkpoint(self, trainer: TrainerProtocol, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if self._applies:  # the data position within an epoch depends on it
            self._set(trainer, self.batches_at(checkpoint["state"]["epoch"]))

    def on_train_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._set(trainer, self.batches_at(trainer.current_epoch))

    def _set(self, trainer: TrainerProtocol, batches: int) -> None:
        trainer.accumulate_grad_batches = self._chosen = batches


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
