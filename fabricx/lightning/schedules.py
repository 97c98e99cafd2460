"""Types of `lightning.pytorch.cli`, for annotations of modules whose optimizers a command line sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler


class ReduceLROnPlateau(lr_scheduler.ReduceLROnPlateau):
    """Torch's schedule, with the name of the metric that it reads.

    Args:
        optimizer: the optimizer.
        monitor: name of the metric.
        *args: further arguments of torch's class.
        **kwargs: further arguments of torch's class.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


LRSchedulerTypeTuple: Final = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
LRSchedulerType = type[LRScheduler] | type[ReduceLROnPlateau]
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRSchedulerTypeUnion]
