"""Activation checkpointing in a step with intercepted functions: recomputations are intercepted, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils import checkpoint


@contextmanager
def recomputing(again: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context in which `torch.utils.checkpoint` (use_reentrant=False) recomputes within other contexts.

    Args:
        again: called in the forward of each checkpointed part; returns the context of the recomputation, which
            happens outside of the step.
    """
    original = checkpoint._checkpoint_without_reentrant_generator

    def contexts(context_fn: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        forward, recomputation = context_fn()
        return forward, _both(again(), recomputation)

    def generator(
        fn: Any, preserve_rng_state: bool = True, context_fn: Any = checkpoint.noop_context_fn, *args: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        return original(fn, preserve_rng_state, functools.partial(contexts, context_fn), *args, **options)

    checkpoint._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
