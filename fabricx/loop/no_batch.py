"""None in the place of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.session.session import Session


def no_batch_step(session: Session) -> Callable[..., None]:
    """Return the step for None in the place of a batch, such as from a `collate_fn` that drops all samples.

    Args:
        session: of this rank; prints a warning.
    """
    session.warn_once(
        "no batch",
        f"{type(session.data.train_dataloader).__name__} yielded None instead of a batch; training_step is not called "
        "for it",
    )
    return _no_outputs


def _no_outputs(*args: Any) -> None:
    return None
