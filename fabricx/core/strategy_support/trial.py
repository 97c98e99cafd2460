"""A trial of the training step on two samples, before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn


class Validation(NamedTuple):
    """The validation step on two samples of each loader.

    Attributes:
        module: copy of the module, which shares the parameters and buffers.
        step: of the copy; called with the arguments of a loader.
        begin: calls the hooks of the copy before the first step of a validation.
        args: for each loader two samples, and their indices.
    """

    module: nn.Module
    step: Callable[..., Any]
    begin: Callable[[], None]
    args: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Trial:
    """The training step on two samples, which changes neither metrics, buffers, attributes nor random numbers.

    Attributes:
        step: step of the module; called with a batch and its index.
        batch: two samples, on the device.
        samples: samples of the batch, if the data set was read; None for a batch of the loader.
        rows: samples of a batch of the run, if the loader has a batch size.
        weight: returns the weight of a batch; None if that is the number of samples.
        validation: returns the validation step of a copy of the module, which shares its parameters, its buffers
            and the given objects; None if the run has none, or if the module can't be copied.
        half: the run computes in 16 bits.
        others: returns further batches of two samples, which may differ in the number of terms of their losses.
        undisturbed: returns a context in which values of `self.log` are discarded; buffers, attributes and random
            numbers are restored at its end.
    """

    step: Callable[..., Any]
    batch: Any
    undisturbed: Callable[[], AbstractContextManager[Any]]
    samples: int | None = None
    rows: int = 2
    weight: Callable[[Any], float] | None = None
    validation: Callable[[Iterable[object]], Validation | None] = lambda shared: None
    others: Callable[[], list[Any]] = list
    half: bool = False

    def run(self) -> Any:
        """Return the outputs of the step for the two samples."""
        with self.undisturbed():
            return self.step(self.batch, 0)
