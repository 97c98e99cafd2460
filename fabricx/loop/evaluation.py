"""Validation, test and prediction, from top to bottom in the order of the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabricx.checkpoint.rank_state import RankState
from fabricx.consistency.hook_effects import unchanged
from fabricx.core.hooks import Hook
from fabricx.core.rng import random_kept
from fabricx.core.state import Phase
from fabricx.core.transfer import cpu
from fabricx.data import Feed, Microbatch
from fabricx.data.setup import sanity_feeds
from fabricx.fault_tolerance.progress import record_progress
from fabricx.metrics.collector import Logbook
from fabricx.metrics.publish import publish_evaluation, publish_step
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

_WORDS = {Phase.SANITY: "validation", Phase.VALIDATE: "validation", Phase.TEST: "test", Phase.PREDICT: "predict"}


def evaluate(t: Trainer, phase: Phase, feeds: Sequence[Feed]) -> list[dict[str, float]]:
    """Run a step of the module over every batch of every loader, once.

    Returns:
        the metrics of each loader, joined over ranks.
    """
    word = _WORDS[phase]
    before, t.state.phase = t.state.phase, phase
    logbook, t.logbook = t.logbook, Logbook(t.strategy, training=False, weigh=t.weigh)
    t.logbook.step = t.state.step
    t.attach_log(t.logbook)
    modes = _to_eval(t, word)
    try:
        _call(t, f"on_{word}_start")
        _call(t, f"on_{word}_epoch_start")
        for number, feed in enumerate(feeds):
            t.logbook.loader = number if len(feeds) > 1 else None
            _evaluate_batches(t, word, number, feed)
        t.logbook.loader = None
        t.strategy.quiesce()
        _call(t, f"on_{word}_epoch_end")
        if phase is Phase.VALIDATE and t.slot is not None:
            record_progress(t, validated=True)  # its steps may have drawn random numbers
        results = publish_evaluation(t, len(feeds))
        t.state.validating = False
        if t.rank_state is not None and not t.rank_state.of_window:
            t.rank_state = None
        if phase is Phase.VALIDATE:
            t.state.judging = t.rank_state is None  # else a window begins again, and with it the validation
            _call(t, "validation_end_others")
            judge(t)
        else:
            _call(t, f"on_{word}_end")
    finally:
        _restore_modes(t, word, modes)
        t.logbook, t.state.phase = logbook, before
        t.attach_log(logbook)
    return results


def judge(t: Trainer) -> None:
    """Call the callbacks that watch the metrics of a validation; what these save has its end behind it."""
    t.state.judging = False
    _call(t, "validation_end_watching")


def validate_in_fit(t: Trainer) -> None:
    """Validate between two training batches.

    In a run that goes on from a checkpoint written meanwhile it begins again; in the middle of an accumulation window
    so does the window. From one that a hook of its end has written, only the callbacks that watch metrics are called.
    """
    if t.state.judging and not t.state.validating:
        judge(t)
        return
    publish_step(t)
    if t.rank_state is None:
        t.rank_state = RankState(t)
    with t.recorder.within(Span.VALIDATION):
        t.strategy.quiesce()
        if t.strategy.weights_brought is None:
            evaluate(t, Phase.VALIDATE, t.val_feeds)
            return
        with unchanged(t, "a hook of the validation"):
            evaluate(t, Phase.VALIDATE, t.val_feeds)


def sanity_check(t: Trainer) -> None:
    """Run a few validation batches ahead of training, so that mistakes show early; nothing of it stays."""
    if not t.val_feeds or not t.num_sanity_val_steps:
        return
    with random_kept():
        t.state.phase, t.rank_state = Phase.SANITY, RankState(t, {})  # what a hook saves has nothing of it, too
        _call(t, "on_sanity_check_start")
        evaluate(t, Phase.SANITY, sanity_feeds(t))
        _call(t, "on_sanity_check_end")
    t.rank_state = None
    t.published.clear()


def _evaluate_batches(t: Trainer, word: str, number: int, feed: Feed) -> None:
    step = t.steps[word]
    starts, ends = getattr(t.hooks, f"on_{word}_batch_start"), getattr(t.hooks, f"on_{word}_batch_end")
    indices = (number,) if t.several_loaders else ()
    with _no_gradients(t):
        for micro in _batches(t, feed):
            if micro.empty:
                _along(t, step, micro, number)
                continue
            batch = t.to_device(micro.data, number)
            t.is_last_batch = micro.last
            t.logbook.begin_batch(batch, micro.size, micro.index)
            for hook in starts:
                hook(batch, micro.index, number)
            outputs = step(batch, micro.index, *indices)
            for hook in ends:
                hook(outputs, batch, micro.index, number)
            t.logbook.end_batch()


def _batches(t: Trainer, feed: Feed) -> Iterator[Microbatch]:
    """Return an epoch's batches; a rank goes through those that it has, unless other ranks need its weights."""
    return feed.epoch(t.state.epoch, together=bool(t.strategy.sharded_parameters()))


def _along(t: Trainer, step: Callable[..., Any], micro: Microbatch, number: int) -> None:
    """Run a step for the others' sake, where they need this rank's weights: on any batch, to no effect."""
    if not t.strategy.sharded_parameters():
        return
    if micro.data is None:
        raise ValueError(
            f"rank {t.world.rank} has no sample to evaluate, and sharded weights need all ranks to compute; give each "
            "rank at least one sample, or take fewer devices"
        )
    with t.logbook.muted():
        step(t.to_device(micro.data, number), micro.index, *((number,) if t.several_loaders else ()))


def predict(t: Trainer, feeds: Sequence[Feed], *, keep: bool) -> list[Any]:
    """Run `predict_step` over every batch of every loader.

    Returns:
        for each loader the outputs of this rank with their place: (batch, outputs).
    """
    before, t.state.phase = t.state.phase, Phase.PREDICT
    t.attach_log(None)
    modes = _to_eval(t, "predict")
    step = t.steps["predict"]
    results: list[Any] = []
    try:
        _call(t, "on_predict_start")
        _call(t, "on_predict_epoch_start")
        for number, feed in enumerate(feeds):
            outputs_here: list[Any] = []
            indices = (number,) if t.several_loaders else ()
            with _no_gradients(t):
                for micro in _batches(t, feed):
                    if micro.empty:
                        _along(t, step, micro, number)
                        continue
                    batch = t.to_device(micro.data, number)
                    t.is_last_batch = micro.last
                    for hook in t.hooks.on_predict_batch_start:
                        hook(batch, micro.index, number)
                    outputs = step(batch, micro.index, *indices)
                    for hook in t.hooks.on_predict_batch_end:
                        hook(outputs, batch, micro.index, number)
                    if keep:
                        outputs_here.append((micro.index, cpu(outputs)))
            results.append(outputs_here)
        t.strategy.quiesce()
        _call(t, "on_predict_epoch_end")
        _call(t, "on_predict_end")
    finally:
        _restore_modes(t, "predict", modes)
        t.state.phase = before
    return results


def in_dataset_order(by_rank: Sequence[list[tuple[int, Any]]]) -> list[Any]:
    """Put the outputs of all ranks into the order of the data set: batch by batch, in each by rank.

    >>> in_dataset_order([[(0, "a"), (1, "c")], [(0, "b")]])
    ['a', 'b', 'c']
    """
    placed = [(index, rank, output) for rank, outputs in enumerate(by_rank) for index, output in outputs]
    return [output for _, _, output in sorted(placed, key=lambda item: item[:2])]


def _call(t: Trainer, name: str) -> None:
    hook: Hook = getattr(t.hooks, name)
    for function in hook:
        function()


def _no_gradients(t: Trainer) -> AbstractContextManager[Any]:
    # Tensors made in inference mode can't be used outside of it, and sharded weights are gathered into kept ones.
    return torch.inference_mode() if t.inference_mode and not t.strategy.traits.sharded else torch.no_grad()


def _to_eval(t: Trainer, word: str) -> list[tuple[nn.Module, bool]]:
    modes = [(module, module.training) for module in t.module.modules()]
    own: Hook = getattr(t.hooks, f"on_{word}_model_eval")
    for function in own:
        function()
    if not own:
        t.module.eval()
    return modes


def _restore_modes(t: Trainer, word: str, modes: list[tuple[nn.Module, bool]]) -> None:
    own: Hook = getattr(t.hooks, f"on_{word}_model_train")
    for function in own:
        function()
    if not own:
        for module, training in modes:
            module.training = training
