"""What callbacks that make trials before a fit have in common."""

from __future__ import annotations

from fabricx.core.callback import Callback


def check_tried(callback: Callback, stage: str, *, tried: bool) -> None:
    """Refuse a callback that had no chance to make its trials, because the module created it within the run.

    Args:
        callback: makes trials before a fit.
        stage: the run's stage.
        tried: its `before_fit` was called.

    Raises:
        ValueError: it was not.
    """
    if stage == "fit" and not tried:
        name = type(callback).__name__
        raise ValueError(
            f"{name} makes its trials before the run, and the module's configure_callbacks is called in the run: pass "
            f"it to the Trainer, callbacks=[{name}(...)]"
        )
