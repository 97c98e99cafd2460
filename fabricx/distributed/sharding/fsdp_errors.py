"""Errors of torch about shards of weights, with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NOT_GATHERED = (
    "{step} computes with weights that aren't gathered: strategy=fsdp gathers them during the forward of their "
    "submodule, and keeps a shard of them otherwise. Call the submodule instead of reading its parameters (for a "
    "penalty on weights, use the optimizer's weight_decay), or use strategy=ddp"
)
_OF_SHARDS = ("mixed torch.Tensor and DTensor", "Sharding propagation failed")  # in messages of torch
_RELEASED = "out of bounds for storage of size 0"  # in a message of torch
_DIFFERENTIATED_AGAIN = (
    "{step} uses the weights of a block after they were released: torch's FSDP computes no second derivative, such as "
    "that of a gradient penalty, through blocks that are gathered separately: use strategy=ddp"
)


@contextmanager
def explained(step: str) -> Iterator[None]:
    """Context of a step, in which torch's errors about shards of weights name the remedy.

    Args:
        step: name of the step, for messages.

    Raises:
        ValueError: the step uses weights of which this rank has a shard.
    """
    try:
        yield
    except RuntimeError as error:
        if any(text in str(error) for text in _OF_SHARDS):
            raise ValueError(_NOT_GATHERED.format(step=step)) from error
        if _RELEASED in str(error):
            raise ValueError(_DIFFERENTIATED_AGAIN.format(step=step)) from error
        raise
