"""Notes on errors that code of the user raises in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

if TYPE_CHECKING:
    from fabricx.session.session import Session

_LIBRARIES: Final = ("fabricx", "torch")
_SHOWN: Final = 6  # entries of a batch
_SECOND_BACKWARD: Final = "backward through the graph a second time"


def notes_on(error: BaseException, session: Session) -> Iterator[str]:
    """Yield notes that explain an error of a batch.

    Args:
        error: the error of a run, with its traceback.
        session: session of the run.
    """
    batch = session.metrics.logbook.batch
    if batch is None or not isinstance(error, Exception):
        return
    if _SECOND_BACKWARD in str(error) and session.module.automatic_optimization:
        yield (
            "the loss that training_step returns has a backward of its own: remove loss.backward() from training_step, "
            "or set self.automatic_optimization = False in __init__. A tensor of an earlier batch, which is kept in an "
            "attribute, needs detach()"
        )
    if _in_code_of_user(error.__traceback__):
        yield f"the batch was {described(batch)}"


def _in_code_of_user(traceback: TracebackType | None) -> bool:
    """Return whether fabricx was calling code of the user, which has raised the error, also in a function of torch."""
    packages: list[str] = []
    while traceback is not None:
        packages.append(traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0])
        traceback = traceback.tb_next
    return bool(packages) and packages[-1] != "fabricx" and not set(packages) <= {*_LIBRARIES}


def described(value: Any, depth: int = 2) -> str:
    """Return the classes, shapes and types of a batch.

    >>> import torch
    >>> described([torch.zeros(2, 4), {"y": torch.ones(2, dtype=torch.int64), "name": "a"}])
    '[float32 (2, 4), {y: int64 (2,), name: str}]'

    Args:
        value: a batch.
        depth: levels of lists and dicts that are opened.
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    items: list[str] = []
    if depth and isinstance(value, Mapping):
        items = [f"{key}: {described(item, depth - 1)}" for key, item in list(value.items())[:_SHOWN]]
    elif depth and isinstance(value, (list, tuple)):
        items = [described(item, depth - 1) for item in value[:_SHOWN]]
    if not items:
        return type(value).__name__
    text = ", ".join(items) + (f" and {len(value) - _SHOWN} more" if len(value) > _SHOWN else "")
    return f"{{{text}}}" if isinstance(value, Mapping) else f"[{text}]"
