"""Intercepted calls of single modules, before their hooks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

Seed = Callable[[int], None]
Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def intercept(module: nn.Module, call: Call) -> Callable[[], None]:
    """Pass the calls of a module through a function.

    The class of the module is replaced by a subclass with the same name. Hooks and a replaced `forward` would run
    inside of the hooks of `fully_shard`, which an early end of the step would skip, and inside of the checkpointing of
    transformers' layers.

    Args:
        module: any.
        call: called with the module's own call, and its arguments.

    Returns:
        function that restores the class.
    """
    before: Any = type(module)

    def intercepted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(before.__call__, self), args, kwargs)

    names = {"__module__": before.__module__, "__qualname__": before.__qualname__, "__call__": intercepted}
    after: Any = type(before.__name__, (before,), names)
    module.__class__ = after

    def restore() -> None:
        assert type(module) is after, f"the class of {before.__name__} was replaced again"
        module.__class__ = before

    return restore


def seeds_of(module: nn.Module, blocks: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return the numbers of the seeds before and after each block; that of the begin of the step is 0.

    They follow from the place of a block in the module, and not from the selection of the other blocks. All stages seed
    after the blocks that they compute, and after those of earlier stages: numbers that are drawn between two blocks are
    the same on all stages.

    Args:
        module: root module, with all blocks.
        blocks: names of the blocks.
    """
    places = {part: place for place, part in enumerate(module.modules())}
    numbers = [places[module.get_submodule(name)] for name in blocks]
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
