"""Validation, test and prediction, in the order of the hooks."""

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
from fabricx.metrics.collector import Logbook
from fabricx.metrics.publish import publish_evaluation, publish_step
from fabricx.telemetry.recorder import Span

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

_WORDS = {Phase.SANITY: "validation", Phase.VALIDATE: "validation", Phase.TEST: "test", Phase.PREDICT: "predict"}


def evaluate(trainer: Trainer, phase: Phase, feeds: Sequence[Feed]) -> list[dict[str, float]]:
    """Run the module's evaluation step on every batch of every loader.

    Args:
        trainer: of the run.
        phase: SANITY, VALIDATE or TEST.
        feeds: data of each loader.

    Returns:
        the metrics of each loader, reduced over ranks.
    """
    word = _WORDS[phase]
    before, trainer.state.phase = trainer.state.phase, phase
    logbook, trainer.logbook = trainer.logbook, Logbook(trainer.strategy, training=False, weigh=trainer.weigh)
    trainer.logbook.step = trainer.state.step
    trainer.attach_log(trainer.logbook)
    modes = _to_eval(trainer, word)
    try:
        _call(trainer, f"on_{word}_start")
        _call(trainer, f"on_{word}_epoch_start")
        for number, feed in enumerate(feeds):
            trainer.logbook.loader = number if len(feeds) > 1 else None
            _evaluate_batches(trainer, word, number, feed)
        trainer.logbook.loader = None
        trainer.strategy.quiesce()
        _call(trainer, f"on_{word}_epoch_end")
        if phase is Phase.VALIDATE:
            trainer.fault_tolerance.after_validation_steps()
        results = publish_evaluation(trainer, len(feeds))
        trainer.state.validating = False
        point = trainer.fault_tolerance.resume_point
        if point is not None and not point.of_window:
            point = trainer.fault_tolerance.resume_point = None
        if phase is Phase.VALIDATE:
            # Otherwise the accumulation window, and with it the validation, is repeated after a resume.
            trainer.state.judging = point is None
            _call(trainer, "validation_end_others")
            judge(trainer)
        else:
            _call(trainer, f"on_{word}_end")
    finally:
        _restore_modes(trainer, word, modes)
        trainer.logbook, trainer.state.phase = logbook, before
        trainer.attach_log(logbook)
    return results


def judge(trainer: Trainer) -> None:
    """Call the callbacks that watch the metrics of a validation; their checkpoints count it as complete.

    Args:
        trainer: has published the metrics.
    """
    trainer.state.judging = False
    _call(trainer, "validation_end_watching")


def validate_in_fit(trainer: Trainer) -> None:
    """Validate between two training batches.

    A run that resumes from a checkpoint of a hook during the validation repeats it and, in the middle of an
    accumulation window, also the window. After a checkpoint of a hook at its end, a resumed run calls only the
    callbacks that watch metrics.

    Args:
        trainer: of the run.
    """
    if trainer.state.judging and not trainer.state.validating:
        judge(trainer)
        return
    publish_step(trainer)
    if trainer.fault_tolerance.resume_point is None:
        trainer.fault_tolerance.resume_point = RankState(trainer)
    with trainer.recorder.within(Span.VALIDATION):
        trainer.strategy.quiesce()
        if trainer.strategy.weights_brought is None:
            evaluate(trainer, Phase.VALIDATE, trainer.val_feeds)
            return
        with unchanged(trainer, "a hook of the validation"):
            evaluate(trainer, Phase.VALIDATE, trainer.val_feeds)


def sanity_check(trainer: Trainer) -> None:
    """Run a few validation batches before training to detect errors early; metrics and random states are restored.

    Args:
        trainer: of the run; `num_sanity_val_steps` is the number of batches.
    """
    if not trainer.val_feeds or not trainer.num_sanity_val_steps:
        return
    with random_kept():
        trainer.state.phase = Phase.SANITY
        # Checkpoints of hooks must not contain the metrics of these batches.
        trainer.fault_tolerance.resume_point = RankState(trainer, {})
        _call(trainer, "on_sanity_check_start")
        evaluate(trainer, Phase.SANITY, sanity_feeds(trainer))
        _call(trainer, "on_sanity_check_end")
    trainer.fault_tolerance.resume_point = None
    trainer.published.clear()


def _evaluate_batches(trainer: Trainer, word: str, number: int, feed: Feed) -> None:
    step = trainer.steps[word]
    starts, ends = getattr(trainer.hooks, f"on_{word}_batch_start"), getattr(trainer.hooks, f"on_{word}_batch_end")
    indices = (number,) if trainer.several_loaders else ()
    with _no_gradients(trainer):
        for micro in _batches(trainer, feed):
            if micro.empty:
                _along(trainer, step, micro, number)
                continue
            batch = trainer.to_device(micro.data, number)
            trainer.is_last_batch = micro.last
            trainer.logbook.begin_batch(batch, micro.size, micro.index)
            for hook in starts:
                hook(batch, micro.index, number)
            outputs = step(batch, micro.index, *indices)
            for hook in ends:
                hook(outputs, batch, micro.index, number)
            trainer.logbook.end_batch()


def _batches(trainer: Trainer, feed: Feed) -> Iterator[Microbatch]:
    """Return this rank's batches of an epoch; with sharded weights also batches without a sample of this rank."""
    return feed.epoch(trainer.state.epoch, together=bool(trainer.strategy.sharded_parameters()))


def _along(trainer: Trainer, step: Callable[..., Any], micro: Microbatch, number: int) -> None:
    """Run a step without effect on any batch, if other ranks need this rank's shards of the weights."""
    if not trainer.strategy.sharded_parameters():
        return
    if micro.data is None:
        raise ValueError(
            f"rank {trainer.world.rank} has no sample to evaluate, and sharded weights need all ranks to compute; "
            "provide at least one sample per rank, or use fewer devices"
        )
    with trainer.logbook.muted():
        step(trainer.to_device(micro.data, number), micro.index, *((number,) if trainer.several_loaders else ()))


def predict(trainer: Trainer, feeds: Sequence[Feed], *, keep: bool) -> list[Any]:
    """Run `predict_step` on every batch of every loader.

    Args:
        trainer: of the run.
        feeds: data of each loader.
        keep: whether to return the outputs.

    Returns:
        for each loader, pairs (batch index, outputs) of this rank.
    """
    before, trainer.state.phase = trainer.state.phase, Phase.PREDICT
    trainer.attach_log(None)
    modes = _to_eval(trainer, "predict")
    step = trainer.steps["predict"]
    results: list[Any] = []
    try:
        _call(trainer, "on_predict_start")
        _call(trainer, "on_predict_epoch_start")
        for number, feed in enumerate(feeds):
            loader_outputs: list[Any] = []
            indices = (number,) if trainer.several_loaders else ()
            with _no_gradients(trainer):
                for micro in _batches(trainer, feed):
                    if micro.empty:
                        _along(trainer, step, micro, number)
                        continue
                    batch = trainer.to_device(micro.data, number)
                    trainer.is_last_batch = micro.last
                    for hook in trainer.hooks.on_predict_batch_start:
                        hook(batch, micro.index, number)
                    outputs = step(batch, micro.index, *indices)
                    for hook in trainer.hooks.on_predict_batch_end:
                        hook(outputs, batch, micro.index, number)
                    if keep:
                        loader_outputs.append((micro.index, cpu(outputs)))
            results.append(loader_outputs)
        trainer.strategy.quiesce()
        _call(trainer, "on_predict_epoch_end")
        _call(trainer, "on_predict_end")
    finally:
        _restore_modes(trainer, "predict", modes)
        trainer.state.phase = before
    return results


def in_dataset_order(by_rank: Sequence[list[tuple[int, Any]]]) -> list[Any]:
    """Merge the outputs of all ranks in the order of the data set: by batch, then by rank.

    Args:
        by_rank: (batch index, output) of each rank.

    >>> in_dataset_order([[(0, "a"), (1, "c")], [(0, "b")]])
    ['a', 'b', 'c']
    """
    placed = [(index, rank, output) for rank, outputs in enumerate(by_rank) for index, output in outputs]
    return [output for _, _, output in sorted(placed, key=lambda item: item[:2])]


def _call(trainer: Trainer, name: str) -> None:
    hook: Hook = getattr(trainer.hooks, name)
    for function in hook:
        function()


def _no_gradients(trainer: Trainer) -> AbstractContextManager[Any]:
    # Inference tensors can't be used outside of inference mode, and FSDP reuses the tensors of gathered weights.
    return torch.inference_mode() if trainer.inference_mode and not trainer.strategy.traits.sharded else torch.no_grad()


def _to_eval(trainer: Trainer, word: str) -> list[tuple[nn.Module, bool]]:
    modes = [(module, module.training) for module in trainer.module.modules()]
    hook: Hook = getattr(trainer.hooks, f"on_{word}_model_eval")
    for function in hook:
        function()
    if not hook:
        trainer.module.eval()
    return modes


def _restore_modes(trainer: Trainer, word: str, modes: list[tuple[nn.Module, bool]]) -> None:
    hook: Hook = getattr(trainer.hooks, f"on_{word}_model_train")
    for function in hook:
        function()
    if not hook:
        for module, training in modes:
            module.training = training
