"""Seeds of a pipeline: random numbers that depend neither on the cuts nor on the order of the stages."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fabricx.core.module_state.rng import random_kept, seed_often
from fabricx.model_parallel.pipeline.block_calls import intercept

Seed = Callable[[int], None]


def seeds_of_batch() -> Seed:
    """Return a function that seeds the parts of a batch, alike on ranks that have drawn the same numbers before."""
    return _seeds(_drawn())


def seeds_of_evaluation(indices: tuple[int, ...]) -> Seed:
    """Return a function that seeds the parts of a batch of an evaluation, without an effect on later random numbers.

    Data ranks may have different numbers of such batches.

    Args:
        indices: index of the batch, and of its loader if there are several.
    """
    with random_kept():
        return _seeds(_drawn() + hash(indices))


def _drawn() -> int:
    return int(torch.empty((), dtype=torch.int64).random_())


def _seeds(base: int) -> Seed:
    return lambda number: seed_often((base + 7919 * number) % 2**32)


def seeds_of(module: nn.Module, blocks: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the numbers of the seeds before and after each block; that of the begin of the step is 0.

    They follow from the place of a block in the module, and not from the selection of the other blocks. All stages seed
    after the blocks that they compute, and after those of earlier stages: numbers that are drawn between two blocks are
    the same on all stages.

    Args:
        module: root module, with all blocks.
        blocks: names of the blocks.
    """
    order = list(module.modules())
    numbers = [order.index(module.get_submodule(name)) for name in blocks]
    return tuple((2 * number + 1, 2 * number + 2) for number in numbers)


@contextlib.contextmanager
def seeded(module: nn.Module, blocks: Sequence[str], seed: Seed) -> Iterator[None]:
    """Context in which a step in one process draws the random numbers of a pipeline with one microbatch.

    Args:
        module: root module, with all blocks.
        blocks: names of the blocks, in the order of their calls.
        seed: seeds random numbers, by the number of a seed.
    """

    def call(
        before: int, after: int, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        seed(before)
        output = compute(*args, **kwargs)
        seed(after)
        return output

    with contextlib.ExitStack() as stack:
        for name, numbers in zip(blocks, seeds_of(module, blocks), strict=True):
            stack.callback(intercept(module.get_submodule(name), functools.partial(call, *numbers)))
        seed(0)
        yield
