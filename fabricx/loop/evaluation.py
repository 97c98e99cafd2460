"""Validation, test and prediction, in the order of the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabricx.core.hook_calls.hooks import Hook, call
from fabricx.core.module_state.rng import random_kept
from fabricx.core.state import Phase, TrainerFn
from fabricx.core.tensors.transfer import cpu
from fabricx.data import Feed, Microbatch
from fabricx.distributed.collective_guard import ALL_JOIN, along, without_sample
from fabricx.telemetry.events import Span

if TYPE_CHECKING:
    from fabricx.core.strategy_parts import ShardsWeights
    from fabricx.session.session import Session

_WORDS = {Phase.SANITY: "validation", Phase.VALIDATE: "validation", Phase.TEST: "test", Phase.PREDICT: "predict"}


def evaluate(session: Session, phase: Phase, feeds: Sequence[Feed]) -> list[dict[str, float]]:
    """Run the module's evaluation step on every batch of every loader.

    Args:
        session: the run's session.
        phase: SANITY, VALIDATE or TEST.
        feeds: data of each loader.

    Returns:
        the metrics of each loader, reduced over ranks.
    """
    session.check_callbacks()
    word = _WORDS[phase]
    before, session.state.phase = session.state.phase, phase
    is_last = session.batch.is_last  # of the training batch, which hooks read after a validation
    batches = 0
    with _no_gradients(session), session.metrics.evaluation() as logbook:
        modes = _to_eval(session, word)
        try:
            _call(session, f"on_{word}_start")
            _call(session, f"on_{word}_epoch_start")
            for number, feed in enumerate(feeds):
                logbook.begin_loader(number, several=len(feeds) > 1)
                batches += _evaluate_batches(session, word, number, feed)
            logbook.loader = None
            session.strategy.synchronize()
            session.metrics.publish_evaluated_steps()
            _call(session, f"on_{word}_epoch_end")
            if phase is Phase.VALIDATE:
                session.fault_tolerance.after_validation_steps()
            results = session.metrics.publish_evaluation(len(feeds))
            session.metrics.collect(None)
            session.state.validating = False
            session.state.evaluated += batches if phase is Phase.VALIDATE else 0
            complete = session.fault_tolerance.end_evaluation()
            if phase is Phase.VALIDATE:
                session.state.judging = complete
                _call(session, "validation_end_others")
                judge(session)
            else:
                _call(session, f"on_{word}_end")
        finally:
            _restore_modes(session, word, modes)
            session.state.phase, session.batch.is_last = before, is_last
    return results


def judge(session: Session) -> None:
    """Call the callbacks that watch the metrics of a validation; their checkpoints count it as complete.

    Args:
        session: has published the metrics.
    """
    with session.fault_tolerance.watching():
        session.state.judging = False
        _call(session, "validation_end_watching")


def validate_in_fit(session: Session) -> None:
    """Validate between two training batches.

    A run that resumes from a checkpoint of a hook during the validation repeats it and, in the middle of an
    accumulation window, also the window. After a checkpoint of a hook at its end, a resumed run calls only the
    callbacks that watch metrics.

    Args:
        session: the run's session.
    """
    if session.state.judging and not session.state.validating:
        with _no_gradients(session):
            judge(session)
        return
    several = session.data.several_loaders
    session.data.reload_validation(session.world)
    if several != session.data.several_loaders:  # steps receive the index of the loader
        session.wrap_steps(fits=True)
    session.metrics.publish_step()
    if session.fault_tolerance.resume_point is None:  # no accumulation window is incomplete
        _call(session, "on_validation_model_zero_grad")
    session.fault_tolerance.keep_point(repeats=True)
    with session.recorder.within(Span.VALIDATION):
        point = session.fault_tolerance.resume_point
        session.synchronize(None if point is None else point.buffers)
        if not session.serving.servers_step:
            with session.fault_tolerance.in_validation():
                evaluate(session, Phase.VALIDATE, session.data.val_feeds)
            return
        with session.checks.unchanged("a hook of the validation"):
            evaluate(session, Phase.VALIDATE, session.data.val_feeds)


def sanity_check(session: Session) -> None:
    """Run a few validation batches before training to detect errors early; metrics and random states are restored.

    Args:
        session: the run's session; `num_sanity_val_steps` is the number of batches.
    """
    if not session.data.validates or not session.options.num_sanity_val_steps:
        return
    with random_kept():
        session.state.phase = Phase.SANITY
        # Checkpoints of hooks must not contain the metrics of these batches.
        session.fault_tolerance.keep_point({}, repeats=True)
        call(session.hooks.on_sanity_check_start)
        evaluate(session, Phase.SANITY, session.data.sanity_feeds(session.world))
        call(session.hooks.on_sanity_check_end)
    session.fault_tolerance.resume_point = None
    session.metrics.published.clear()


def _evaluate_batches(session: Session, word: str, number: int, feed: Feed) -> int:
    """Evaluate the batches of a loader; return their number, which includes those without a sample of this rank."""
    step, passed = session.steps[word], 0
    starts, ends = getattr(session.hooks, f"on_{word}_batch_start"), getattr(session.hooks, f"on_{word}_batch_end")
    indices = (number,) if session.data.several_loaders else ()
    logbook = session.metrics.logbook
    for micro in _batches(session, feed):
        passed += 1
        if micro.empty:
            _along(session, step, micro, number)
            continue
        batch = session.to_device(micro.data, number)
        session.batch.is_last = micro.last
        logbook.begin_batch(batch, None if micro.user_batch else micro.size, logbook.batches)
        in_step, in_hook = _guards(session.sharding, word, micro)
        with in_hook:
            for hook in starts:
                hook(batch, micro.index, number)
        with in_step:
            outputs = step(batch, micro.index, *indices)
        with in_hook:
            for hook in ends:
                hook(outputs, batch, micro.index, number)
        if logbook.logs_batches:
            session.metrics.log_evaluation_batch()
        logbook.end_batch()
    return passed


def _guards(sharding: ShardsWeights, word: str, micro: Microbatch) -> tuple[AbstractContextManager[Any], ...]:
    """Return contexts for the step and for hooks of a batch, which refuse collectives that some rank does not join."""
    if not micro.idle:
        return ALL_JOIN, ALL_JOIN
    names = f"{word}_step", f"on_{word}_epoch_end"
    in_hook = without_sample(micro.idle, *names)
    return along(micro.idle, *names) if sharding.computes_together else in_hook, in_hook


def _batches(session: Session, feed: Feed) -> Iterator[Microbatch]:
    """Return this rank's batches of an epoch; also those without a sample of this rank, if it has to compute along."""
    return feed.epoch(session.state.epoch, together=session.sharding.computes_together)


def _along(session: Session, step: Callable[..., Any], micro: Microbatch, number: int) -> None:
    """Run a step without effect on any batch, if other ranks need this rank's shards of the weights, or its experts."""
    if not session.sharding.computes_together:
        return
    if micro.data is None:
        raise ValueError(
            f"rank {session.world.rank} has no sample to evaluate, but the model is divided over ranks, so all of them "
            "have to compute each batch; provide at least one sample per rank, or use fewer devices"
        )
    with session.metrics.logbook.muted():
        step(session.to_device(micro.data, number), micro.index, *((number,) if session.data.several_loaders else ()))


def predict(session: Session, feeds: Sequence[Feed], *, keep: bool) -> list[Any]:
    """Run `predict_step` on every batch of every loader.

    Args:
        session: the run's session.
        feeds: data of each loader.
        keep: whether to return the outputs.

    Returns:
        for each loader, pairs (batch index, outputs) of this rank; none on ranks that compute the outputs of others.
    """
    with _no_gradients(session):
        return _predict(session, feeds, keep=keep)


def _predict(session: Session, feeds: Sequence[Feed], *, keep: bool) -> list[Any]:
    session.check_callbacks()
    before, session.state.phase = session.state.phase, Phase.PREDICT
    session.metrics.collect(None)
    modes = _to_eval(session, "predict")
    step = session.steps["predict"]
    results: list[Any] = []
    try:
        _call(session, "on_predict_start")
        _call(session, "on_predict_epoch_start")
        for number, feed in enumerate(feeds):
            loader_outputs: list[Any] = []
            indices = (number,) if session.data.several_loaders else ()
            for micro in _batches(session, feed):
                if micro.empty:
                    _along(session, step, micro, number)
                    continue
                batch = session.to_device(micro.data, number)
                session.batch.is_last = micro.last
                session.batch.indices = feed.indices(micro)
                in_step, in_hook = _guards(session.sharding, "predict", micro)
                with in_hook:
                    for hook in session.hooks.on_predict_batch_start:
                        hook(batch, micro.index, number)
                with in_step:
                    outputs = step(batch, micro.index, *indices)
                with in_hook:
                    for hook in session.hooks.on_predict_batch_end:
                        hook(outputs, batch, micro.index, number)
                if keep and session.world.reports:
                    loader_outputs.append((micro.index, cpu(outputs)))
            results.append(loader_outputs)
        session.strategy.synchronize()
        returned = [output for of_loader in results for _, output in of_loader]
        if lost := sum(output is None for output in returned):
            session.warn_once(
                "predictions",
                f"{type(session.module).__name__}.predict_step returned None for {lost} of {len(returned)} batches, so "
                "predict returns no predictions of them: add a return, or pass return_predictions=False if hooks write "
                "them",
            )
        _call(session, "on_predict_epoch_end")
        _call(session, "on_predict_end")
    finally:
        _restore_modes(session, "predict", modes)
        session.state.phase = before
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


def _call(session: Session, name: str) -> bool:
    """Call a hook; returns whether it is overridden."""
    hook: Hook = getattr(session.hooks, name)
    if hook:
        call(hook)
    return bool(hook)


def _no_gradients(session: Session) -> AbstractContextManager[Any]:
    """Return the context of a whole evaluation; its hooks may call `torch.set_grad_enabled(True)` for the steps."""
    # Inference tensors can't be used outside of inference mode: training reads what a validation has cached or assigned
    # (masks, tables of positions, centroids), and FSDP reuses the tensors of gathered weights; a model-parallel forward
    # moves views of activations between ranks. A first forward creates lazy parameters.
    reuses = (
        session.state.fn is TrainerFn.FITTING
        or session.strategy.traits.sharded
        or session.divided
        or session.overridden.lazy
    )
    return torch.inference_mode() if session.options.inference_mode and not reuses else torch.no_grad()


def _to_eval(session: Session, word: str) -> list[tuple[nn.Module, bool]]:
    modes = [(module, module.training) for module in session.module.modules()]
    if not _call(session, f"on_{word}_model_eval"):
        session.module.eval()
    return modes


def _restore_modes(session: Session, word: str, modes: list[tuple[nn.Module, bool]]) -> None:
    if not _call(session, f"on_{word}_model_train"):
        for module, training in modes:
            module.training = training
