"""Activation checkpointing in a step with intercepted functions: recomputations are intercepted, too."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch.utils import checkpoint

_FORMER: Final = checkpoint._checkpoint_without_reentrant_generator.__name__
_GENERATOR: Final = f"{_FORMER}_impl" if hasattr(checkpoint, f"{_FORMER}_impl") else _FORMER  # from torch 2.14 on
_SIGNATURE: Final = inspect.signature(getattr(checkpoint, _GENERATOR))


def is_checkpointed() -> bool:
    """Return whether the present code is within a function that activation checkpointing computes again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]


@contextmanager
def recomputing(again: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context in which `torch.utils.checkpoint` (use_reentrant=False) recomputes within other contexts.

    Args:
        again: called in the forward of each checkpointed part; returns the context of the recomputation, which
            happens outside of the step.
    """
    original = getattr(checkpoint, _GENERATOR)

    def contexts(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        forward, recomputation = context_fn()
        return forward, _both(again(), recomputation)

    def generator(*args: Any, **options: Any) -> Any:
        bound = _SIGNATURE.bind(*args, **options)
        context_fn = bound.arguments.get("context_fn", checkpoint.noop_context_fn)
        bound.arguments["context_fn"] = functools.partial(contexts, context_fn)
        bound.apply_defaults()  # so that positional arguments after it keep their places
        return original(*bound.args, **bound.kwargs)

    setattr(checkpoint, _GENERATOR, generator)
    try:
        yield
    finally:
        setattr(checkpoint, _GENERATOR, original)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
