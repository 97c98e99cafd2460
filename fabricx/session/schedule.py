"""Decisions between two batches: limits, stops that all ranks agree on, validations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

FEWEST_WITHOUT_UPDATE: Final = 100  # batches in a row without an update, before a run counts as endless
FEWEST_WITHOUT_STEP: Final = 10_000  # the same with manual optimization, which may accumulate over many batches

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.session.session import Session


def limit_reached(session: Session) -> bool:
    """Return whether training is complete; `reached_limits` names the reasons.

    Args:
        session: trains, or has just loaded a checkpoint.
    """
    state, options = session.state, session.options
    if options.max_steps != -1 and state.step >= options.max_steps:
        return True
    if options.max_epochs != -1 and state.epoch >= (options.max_epochs or 0):
        return True
    return session.stop.agreed or session.data.batches.training == 0


def already_complete(session: Session) -> str:
    """Return why a resumed run has nothing to train, as a sentence for the user.

    Args:
        session: has loaded a checkpoint.
    """
    state, reached = session.state, reached_limits(session)
    return f"training is already complete, after {state.step} steps and {state.epoch} epochs: {reached}"


def reached_limits(session: Session) -> str:
    """Return which limits leave nothing to train, as a text for the user.

    Args:
        session: has nothing to train.
    """
    state, options, limits = session.state, session.options, []
    if options.max_steps != -1 and state.step >= options.max_steps:
        limits.append(f"max_steps={options.max_steps}")
    if options.max_epochs != -1 and state.epoch >= (options.max_epochs or 0):
        limits.append(f"max_epochs={options.max_epochs}")
    if session.stop.agreed:
        limits.append("a callback requested a stop")
    return ", ".join(limits) or "there are no batches"


def count_update(session: Session) -> None:
    """Complete a weight update in the strategy, and count it.

    Args:
        session: its optimizers have stepped.

    Raises:
        TypeError: the strategy returns no number of updates.
    """
    step: object = session.strategy.after_update(session.state.step + 1)
    if not isinstance(step, int):
        raise TypeError(
            f"{type(session.strategy).__name__}.after_update returned {step!r}, and has to return the number of weight "
            "updates of the model: its argument, unless other ranks make updates of their own"
        )
    session.state.step = step


def epoch_pending(session: Session) -> bool:
    """Return whether all batches of the epoch are trained and the epoch has not ended; a checkpoint may be saved then.

    Args:
        session: has loaded a checkpoint.
    """
    trained, batches = session.state.batch, session.data.batches.training
    return trained > 0 and session.state.last if batches == float("inf") else 0 < batches <= trained


def end_pending(session: Session) -> bool:
    """Return whether an epoch that a limit has stopped before its last batch has not ended; see `epoch_pending`.

    Args:
        session: has reached a limit.
    """
    state = session.state
    stopped = state.batch > 0 and not state.ended_early and not session.stop.interrupted
    return state.validating or state.judging or (stopped and session.data.batches.training > 0)


def delays_stop(session: Session) -> bool:
    """Return whether `min_epochs` or `min_steps` delays a stop that is not requested by a signal.

    Args:
        session: between two batches.
    """
    options = session.options
    return session.state.epoch < (options.min_epochs or 0) or session.state.step < (options.min_steps or 0)


def agree_at_boundary(session: Session) -> bool:
    """Return whether all ranks stop at this boundary; every rank calls it at the same boundaries, in the same order.

    Args:
        session: between two batches.
    """
    requests, options = session.stop_requests, session.options
    session.stop.boundary += 1
    if session.world.size == 1 and requests.signals.reason is requests.callbacks.reason is None:
        return session.stop.agreed
    delayed = delays_stop(session)
    reason = requests.at_boundary(session.stop.boundary, delayed=delayed)
    if reason is not None:
        session.stop.agree(reason)
    elif delayed and requests.callbacks.reason is not None:
        limits = [f"{name}={getattr(options, name)}" for name in ("min_epochs", "min_steps") if getattr(options, name)]
        session.print_once(
            "delayed",
            f"a stop was requested after {session.state.step} steps, and training continues until "
            f"{' and '.join(limits)} {'are' if limits[1:] else 'is'} reached",
        )
    return session.stop.agreed


def check_any_batch(session: Session) -> None:
    """Refuse an epoch without a batch: a limit by steps would never be reached.

    Args:
        session: session at the end of an epoch.

    Raises:
        ValueError: no rank had a batch.
    """
    if not session.state.batch:
        raise ValueError(
            f"{type(session.data.train_dataloader).__name__} yielded no batch in epoch {session.state.epoch}, on any "
            "rank. A generator can be iterated only once; use a list, a DataLoader, or an object whose __iter__ "
            "restarts"
        )


def count_without_update(session: Session) -> None:
    """Count a batch without a weight update, and refuse a run that only a number of updates would end.

    Args:
        session: this rank's session.

    Raises:
        ValueError: many batches in a row made no update.
    """
    options = session.options
    session.batch.without_update += 1
    endless = options.max_steps != -1 and options.max_epochs == -1 and options.max_time is None
    automatic = session.module.automatic_optimization
    fewest = FEWEST_WITHOUT_UPDATE if automatic else FEWEST_WITHOUT_STEP
    if endless and session.batch.without_update >= max(fewest, min(options.max_steps, 10_000)):
        what = "training_step returned no loss" if automatic else "no optimizer made a step"
        remedy = "Return a loss" if automatic else "Step an optimizer"
        raise ValueError(
            f"{what} in {session.batch.without_update} batches in a row, and max_steps={options.max_steps} counts "
            f"weight updates: the run would never end. {remedy}, or also set max_epochs"
        )


def next_section(session: Session, done: int, left: int | float) -> int:
    """Return the number of leases until ranks at their own pace have to synchronise: for a limit, validation or save.

    Args:
        session: all its ranks are synchronised.
        done: leases of the epoch that are trained.
        left: leases of the epoch that are not trained; may be infinite.

    Raises:
        ValueError: a validation is due in the middle of an update.
    """
    state, dealer = session.state, session.dealer
    limits: list[float] = [left]
    if session.options.max_steps != -1:
        limits.append((session.options.max_steps - state.step) * dealer.leases_per_update)
    if session.data.val_every != float("inf") and isinstance(session.options.val_check_interval, str):
        limits.append((session.data.val_every - state.step % session.data.val_every) * dealer.leases_per_update)
    elif session.data.val_every < session.data.batches.training or (
        session.options.check_val_every_n_epoch is None and session.data.val_every != float("inf")
    ):
        limits.append(_leases_to_validation(session, done))
    for callback in session.callbacks:
        if every := callback.meeting_interval:
            limits.append((every - state.step % every) * dealer.leases_per_update)
    least = min(limits)
    return 10**9 if least == float("inf") else max(1, int(least))


def validation_due(session: Session, micro: Microbatch) -> bool:
    """Return whether a validation follows a batch.

    Args:
        session: has trained the batch.
        micro: the batch.
    """
    every = session.data.val_every
    if every == float("inf") or micro.incomplete:
        return False
    if isinstance(session.options.val_check_interval, str):
        if not micro.closes or session.batch.without_update:
            return False
        return session.state.step % every < session.batch.updates and _epoch_validates(session)
    if micro.completes is not None:  # the number of ranks has changed: what counts is batches of the first ones
        before = _batches_before(session) + 1
        return any((before + number) % every == 0 for number in micro.completes) and _epoch_validates(session)
    done: float = micro.index + 1
    if micro.synchronises and not micro.last:  # this may be in the middle of a batch of each rank
        done = micro.done / _leases_per_batch(session)
    elif micro.synchronises and micro.window_begin is None:  # streams: each rank has trained another number of batches
        done = session.data.batches.training
    return (done + _batches_before(session)) % every == 0 and _epoch_validates(session)


def _leases_to_validation(session: Session, done: int) -> float:
    """Return the number of leases until the next validation between two batches of the epoch."""
    accumulate, before = session.options.accumulate_grad_batches, _batches_before(session)
    if session.dealer.leases_per_update > 1 and (session.data.val_every % accumulate or before % accumulate):
        raise ValueError(
            f"val_check_interval={session.options.val_check_interval} is in the middle of an update of {accumulate} "
            "batches of each rank, and ranks at their own pace synchronise only between updates; set a multiple of "
            "accumulate_grad_batches (with check_val_every_n_epoch=None, the batches of an epoch must also be a "
            "multiple of it)"
        )
    every = session.data.val_every * _leases_per_batch(session)
    return every - (done + before * _leases_per_batch(session)) % every


def _batches_before(session: Session) -> int:
    """Return the number of batches of earlier epochs, if validations are counted across epochs; otherwise 0."""
    if session.options.check_val_every_n_epoch is not None:
        return 0
    if session.strategy.traits.lockstep:
        return session.state.before
    planned = session.data.batches.planned  # what a rank has trained differs from rank to rank
    return 0 if planned == float("inf") else session.state.epoch * int(planned)


def batches_of_epoch(session: Session) -> int:
    """Return the number of trained batches of the epoch that ends, as counted by the ranks with which the run began.

    Args:
        session: session at the end of the epoch.
    """
    batches, trained = session.data.batches, session.state.batch
    if not session.strategy.traits.lockstep or batches.training in (0, float("inf")):
        return trained
    return int(trained * batches.planned // batches.training)


def _leases_per_batch(session: Session) -> float:
    """Return the number of leases that make up a batch of each rank."""
    workers: int = session.dealer.planned
    return workers / session.options.accumulate_grad_batches


def validation_due_at_end(session: Session, complete: bool) -> bool:
    """Return whether a validation follows the end of an epoch.

    That is an epoch of unknown length, an epoch with fewer batches than its length, or the point at which a hook has
    stopped the run.

    Args:
        session: session at the end of the epoch.
        complete: whether all batches of the epoch were trained.
    """
    stopped = session.stop.agreed and not session.stop.interrupted and session.state.batch
    if stopped and not session.state.validated and session.options.val_check_interval is not None:
        return _epoch_validates(session)
    early = session.state.last and session.state.batch < session.data.batches.training and not session.state.validated
    return complete and early and session.options.val_check_interval == 1.0 and _epoch_validates(session)


def validation_due_after_shortening(session: Session, trained: int, before: int | float) -> bool:
    """Return whether a validation follows the end of an epoch that has become shorter than its trained batches.

    Args:
        session: session at the end of the epoch.
        trained: batches of the epoch that were trained.
        before: batches that the epoch had when its last batch was trained.
    """
    if (
        not _epoch_validates(session)
        or isinstance(session.options.val_check_interval, str)
        or session.data.val_every == float("inf")
    ):
        return False  # by steps, or at the end of an epoch of unknown length
    every = session.options.val_check_interval
    earlier = (
        max(1, int(before * every)) if isinstance(every, float) and before != float("inf") else session.data.val_every
    )
    within = session.options.check_val_every_n_epoch is not None
    return within and trained % earlier != 0 and session.data.batches.planned % session.data.val_every == 0


def _epoch_validates(session: Session) -> bool:
    every = session.options.check_val_every_n_epoch
    return session.data.validates and (every is None or (session.state.epoch + 1) % every == 0)
