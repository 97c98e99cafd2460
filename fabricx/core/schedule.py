"""Decisions between two batches: limits, agreed stops, validations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricx.duration import check_count

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.trainer.trainer import Trainer


def limit_reached(t: Trainer) -> bool:
    """Return whether training is over."""
    state = t.state
    if t.max_steps != -1 and state.step >= t.max_steps:
        return True
    if t.max_epochs != -1 and state.epoch >= (t.max_epochs or 0):
        return True
    return t.stopped or t.num_training_batches == 0


def finished(t: Trainer) -> str:
    """Return why nothing is left to train, in a run that goes on."""
    state = t.state
    limits = [
        f"max_steps={t.max_steps}" if t.max_steps != -1 and state.step >= t.max_steps else "",
        f"max_epochs={t.max_epochs}" if t.max_epochs != -1 and state.epoch >= (t.max_epochs or 0) else "",
        "a callback has asked to stop" if t.stopped else "",
    ]
    why = ", ".join(limit for limit in limits if limit) or "there are no batches"
    return f"nothing is left to train after {state.step} steps and {state.epoch} epochs: {why}"


def epoch_pending(t: Trainer) -> bool:
    """Return whether all batches of the epoch are trained, and the epoch isn't ended: a checkpoint may be of there."""
    return 0 < t.num_training_batches <= t.state.batch


def agree_at_boundary(t: Trainer) -> bool:
    """Return whether all ranks stop here; they are asked at the same boundaries, in the same order."""
    agreement = t.agreement
    if agreement is None:
        return False
    t.boundary += 1
    interrupted = agreement.reason in ("interrupted", "terminated")
    early = t.state.epoch < t.min_epochs or t.state.step < t.min_steps
    if early and not interrupted:
        return False
    if (t.world.size > 1 or agreement.reason is not None) and agreement.at_boundary(t.boundary):
        t.stopped = t.stop_wanted = True
        t.terminated = agreement.reason == "terminated"
        t.interrupted = t.terminated or agreement.reason == "interrupted"
    return t.stopped


def check_any_batch(t: Trainer) -> None:
    """Refuse an epoch without a batch: a limit by steps would never be reached.

    Raises:
        ValueError: no rank had one.
    """
    if not t.state.batch:
        raise ValueError(
            f"{type(t.train_dataloader).__name__} gave no batch in epoch {t.state.epoch}, on any rank. A generator "
            "can be read only once: give a list, a DataLoader, or an object whose __iter__ begins anew"
        )


def next_section(t: Trainer, done: int, left: int | float) -> int:
    """Return after how many leases ranks that go at their own pace have to meet: for a limit, or to look or to save.

    Args:
        t: the trainer; all its ranks are together.
        done, left: leases of the epoch.

    Raises:
        ValueError: a validation is asked for in the middle of an update.
    """
    state, dealer = t.state, t.strategy.dealer
    limits: list[float] = [left]
    if t.max_steps != -1:
        limits.append((t.max_steps - state.step) * dealer.leases_per_update)
    if t.val_every != float("inf") and isinstance(t.val_check_interval, str):
        limits.append((t.val_every - state.step % t.val_every) * dealer.leases_per_update)
    elif t.val_every < t.num_training_batches or (t.check_val_every_n_epoch is None and t.val_every != float("inf")):
        limits.append(_leases_to_validation(t, done))
    for callback in t.callbacks:
        if every := getattr(callback, "every_n_train_steps", 0):
            limits.append((every - state.step % every) * dealer.leases_per_update)
    least = min(limits)
    return 10**9 if least == float("inf") else max(1, int(least))


def validation_due(t: Trainer, micro: Microbatch) -> bool:
    """Return whether a validation comes after this batch."""
    every = t.val_every
    if every == float("inf") or micro.part:
        return False
    if isinstance(t.val_check_interval, str):
        return micro.closes and t.state.step % every == 0 and _epoch_validates(t)
    done: float = micro.index + 1
    if micro.meets and not micro.last:  # it may be in the middle of what is one batch for each rank
        done = micro.done / _leases_per_batch(t)
    return (done + _batches_before(t)) % every == 0 and _epoch_validates(t)


def _leases_to_validation(t: Trainer, done: int) -> float:
    """Return how many leases are trained until the next validation between two batches of the epoch."""
    accumulate, before = t.accumulate_grad_batches, _batches_before(t)
    if t.strategy.dealer.leases_per_update > 1 and (t.val_every % accumulate or before % accumulate):
        raise ValueError(
            f"val_check_interval={t.val_check_interval} is in the middle of an update of {accumulate} batches of each "
            "rank, and ranks that go at their own pace meet between updates only: give a multiple of "
            "accumulate_grad_batches (of which an epoch has a multiple, with check_val_every_n_epoch=None)"
        )
    every = t.val_every * _leases_per_batch(t)
    return every - (done + before * _leases_per_batch(t)) % every


def _batches_before(t: Trainer) -> int:
    """Return the batches of earlier epochs, where those count too."""
    if t.check_val_every_n_epoch is None and t.num_training_batches != float("inf"):
        return t.state.epoch * int(t.num_training_batches)
    return 0


def _leases_per_batch(t: Trainer) -> float:
    """Return how many leases are one batch of each rank."""
    workers: int = t.strategy.dealer.planned
    return workers / t.accumulate_grad_batches


def validation_due_at_end(t: Trainer, complete: bool) -> bool:
    """Return whether a validation comes at the end of an epoch whose length wasn't known."""
    at_end = t.val_every == float("inf") and t.val_check_interval == 1.0
    return complete and at_end and _epoch_validates(t)


def validation_due_of_end(t: Trainer, trained: int, before: int | float) -> bool:
    """Return whether a validation comes at the end of an epoch of which more is trained already than is left of it.

    Args:
        t: the trainer.
        trained: batches of the epoch.
        before: those that it had when the last one was trained.
    """
    if not _epoch_validates(t) or isinstance(t.val_check_interval, str) or t.val_every == float("inf"):
        return False  # by steps, or at the end of an epoch of unknown length
    every = t.val_check_interval
    earlier = max(1, int(before * every)) if isinstance(every, float) and before != float("inf") else t.val_every
    within = t.check_val_every_n_epoch is not None
    return within and trained % earlier != 0 and t.num_training_batches % t.val_every == 0


def _epoch_validates(t: Trainer) -> bool:
    every = t.check_val_every_n_epoch
    return bool(t.val_feeds) and (every is None or (t.state.epoch + 1) % every == 0)


def validation_interval(t: Trainer) -> float:
    """Return every how many batches (steps, if that was asked for) a validation comes; infinity for epoch ends only."""
    every, total = t.val_check_interval, t.num_training_batches
    if not t.val_feeds or every is None:
        return float("inf")
    if isinstance(every, str):
        return float(check_count("val_check_interval", every, "step", 1) or 1)
    if isinstance(every, int) and not isinstance(every, bool):
        if every > total and t.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={every} is more than the {total} batches of an epoch; take a smaller one, or "
                "check_val_every_n_epoch=None to count across epochs"
            )
        return float(every)
    if total == float("inf"):
        if every != 1.0:
            raise ValueError(
                "val_check_interval as a part of an epoch needs a loader with a length; give a number of batches"
            )
        return float("inf")
    return float(max(1, int(total * every)))
