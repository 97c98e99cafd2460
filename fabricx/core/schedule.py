"""Decisions between two batches: limits, stops that all ranks agree on, validations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricx.duration import check_count

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.trainer.trainer import Trainer


def limit_reached(trainer: Trainer) -> bool:
    """Return whether training is complete.

    Args:
        trainer: trains, or has just loaded a checkpoint.
    """
    state = trainer.state
    if trainer.max_steps != -1 and state.step >= trainer.max_steps:
        return True
    if trainer.max_epochs != -1 and state.epoch >= (trainer.max_epochs or 0):
        return True
    return trainer.stopped or trainer.num_training_batches == 0


def finished(trainer: Trainer) -> str:
    """Return why a resumed run has nothing to train, as a sentence for the user.

    Args:
        trainer: has loaded a checkpoint.
    """
    state = trainer.state
    limits = [
        f"max_steps={trainer.max_steps}" if trainer.max_steps != -1 and state.step >= trainer.max_steps else "",
        f"max_epochs={trainer.max_epochs}"
        if trainer.max_epochs != -1 and state.epoch >= (trainer.max_epochs or 0)
        else "",
        "a callback requested a stop" if trainer.stopped else "",
    ]
    why = ", ".join(limit for limit in limits if limit) or "there are no batches"
    return f"training is already complete, after {state.step} steps and {state.epoch} epochs: {why}"


def epoch_pending(trainer: Trainer) -> bool:
    """Return whether all batches of the epoch are trained and the epoch has not ended; a checkpoint may be saved then.

    Args:
        trainer: has loaded a checkpoint.
    """
    return 0 < trainer.num_training_batches <= trainer.state.batch


def agree_at_boundary(trainer: Trainer) -> bool:
    """Return whether all ranks stop at this boundary; every rank calls it at the same boundaries, in the same order.

    Args:
        trainer: between two batches.
    """
    agreement = trainer.agreement
    if agreement is None:
        return False
    trainer.boundary += 1
    interrupted = agreement.reason in ("interrupted", "terminated")
    early = trainer.state.epoch < trainer.min_epochs or trainer.state.step < trainer.min_steps
    if early and not interrupted:
        return False
    if (trainer.world.size > 1 or agreement.reason is not None) and agreement.at_boundary(trainer.boundary):
        trainer.stopped = trainer.stop_wanted = True
        trainer.terminated = agreement.reason == "terminated"
        trainer.interrupted = trainer.terminated or agreement.reason == "interrupted"
    return trainer.stopped


def check_any_batch(trainer: Trainer) -> None:
    """Refuse an epoch without a batch: a limit by steps would never be reached.

    Args:
        trainer: at the end of an epoch.

    Raises:
        ValueError: no rank had a batch.
    """
    if not trainer.state.batch:
        raise ValueError(
            f"{type(trainer.train_dataloader).__name__} yielded no batch in epoch {trainer.state.epoch}, on any rank. "
            "A generator can be iterated only once; use a list, a DataLoader, or an object whose __iter__ restarts"
        )


def next_section(trainer: Trainer, done: int, left: int | float) -> int:
    """Return the number of leases until ranks at their own pace have to synchronise: for a limit, validation or save.

    Args:
        trainer: all its ranks are synchronised.
        done: leases of the epoch that are trained.
        left: leases of the epoch that are not trained; may be infinite.

    Raises:
        ValueError: a validation is due in the middle of an update.
    """
    state, dealer = trainer.state, trainer.strategy.dealer
    limits: list[float] = [left]
    if trainer.max_steps != -1:
        limits.append((trainer.max_steps - state.step) * dealer.leases_per_update)
    if trainer.val_every != float("inf") and isinstance(trainer.val_check_interval, str):
        limits.append((trainer.val_every - state.step % trainer.val_every) * dealer.leases_per_update)
    elif trainer.val_every < trainer.num_training_batches or (
        trainer.check_val_every_n_epoch is None and trainer.val_every != float("inf")
    ):
        limits.append(_leases_to_validation(trainer, done))
    for callback in trainer.callbacks:
        if every := getattr(callback, "every_n_train_steps", 0):
            limits.append((every - state.step % every) * dealer.leases_per_update)
    least = min(limits)
    return 10**9 if least == float("inf") else max(1, int(least))


def validation_due(trainer: Trainer, micro: Microbatch) -> bool:
    """Return whether a validation follows a batch.

    Args:
        trainer: has trained the batch.
        micro: the batch.
    """
    every = trainer.val_every
    if every == float("inf") or micro.part:
        return False
    if isinstance(trainer.val_check_interval, str):
        return micro.closes and trainer.state.step % every == 0 and _epoch_validates(trainer)
    done: float = micro.index + 1
    if micro.meets and not micro.last:  # this may be in the middle of a batch of each rank
        done = micro.done / _leases_per_batch(trainer)
    return (done + _batches_before(trainer)) % every == 0 and _epoch_validates(trainer)


def _leases_to_validation(trainer: Trainer, done: int) -> float:
    """Return the number of leases until the next validation between two batches of the epoch."""
    accumulate, before = trainer.accumulate_grad_batches, _batches_before(trainer)
    if trainer.strategy.dealer.leases_per_update > 1 and (trainer.val_every % accumulate or before % accumulate):
        raise ValueError(
            f"val_check_interval={trainer.val_check_interval} is in the middle of an update of {accumulate} batches of "
            "each rank, and ranks at their own pace synchronise only between updates; set a multiple of "
            "accumulate_grad_batches (with check_val_every_n_epoch=None, the batches of an epoch must also be a "
            "multiple of it)"
        )
    every = trainer.val_every * _leases_per_batch(trainer)
    return every - (done + before * _leases_per_batch(trainer)) % every


def _batches_before(trainer: Trainer) -> int:
    """Return the number of batches of earlier epochs, if validations are counted across epochs; otherwise 0."""
    if trainer.check_val_every_n_epoch is None and trainer.num_training_batches != float("inf"):
        return trainer.state.epoch * int(trainer.num_training_batches)
    return 0


def _leases_per_batch(trainer: Trainer) -> float:
    """Return the number of leases that make up a batch of each rank."""
    workers: int = trainer.strategy.dealer.planned
    return workers / trainer.accumulate_grad_batches


def validation_due_at_end(trainer: Trainer, complete: bool) -> bool:
    """Return whether a validation follows the end of an epoch whose length was unknown.

    Args:
        trainer: at the end of the epoch.
        complete: whether all batches of the epoch were trained.
    """
    at_end = trainer.val_every == float("inf") and trainer.val_check_interval == 1.0
    return complete and at_end and _epoch_validates(trainer)


def validation_due_of_end(trainer: Trainer, trained: int, before: int | float) -> bool:
    """Return whether a validation follows the end of an epoch that has become shorter than its trained batches.

    Args:
        trainer: at the end of the epoch.
        trained: batches of the epoch that were trained.
        before: batches that the epoch had when its last batch was trained.
    """
    if (
        not _epoch_validates(trainer)
        or isinstance(trainer.val_check_interval, str)
        or trainer.val_every == float("inf")
    ):
        return False  # by steps, or at the end of an epoch of unknown length
    every = trainer.val_check_interval
    earlier = max(1, int(before * every)) if isinstance(every, float) and before != float("inf") else trainer.val_every
    within = trainer.check_val_every_n_epoch is not None
    return within and trained % earlier != 0 and trainer.num_training_batches % trainer.val_every == 0


def _epoch_validates(trainer: Trainer) -> bool:
    every = trainer.check_val_every_n_epoch
    return bool(trainer.val_feeds) and (every is None or (trainer.state.epoch + 1) % every == 0)


def validation_interval(trainer: Trainer) -> float:
    """Return the number of batches (or steps, if so configured) between validations; infinity for epoch ends only.

    Args:
        trainer: has its data.

    Raises:
        ValueError: the interval is longer than an epoch, or a fraction of an epoch of unknown length.
    """
    every, total = trainer.val_check_interval, trainer.num_training_batches
    if not trainer.val_feeds or every is None:
        return float("inf")
    if isinstance(every, str):
        return float(check_count("val_check_interval", every, "step", 1) or 1)
    if isinstance(every, int) and not isinstance(every, bool):
        if every > total and trainer.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={every} is more than the {total} batches of an epoch; set a smaller interval, or "
                "check_val_every_n_epoch=None to count across epochs"
            )
        return float(every)
    if total == float("inf"):
        if every != 1.0:
            raise ValueError(
                f"val_check_interval={every} is a fraction of an epoch, and needs a loader with a length; set a number "
                "of batches"
            )
        return float("inf")
    return float(max(1, int(total * every)))
