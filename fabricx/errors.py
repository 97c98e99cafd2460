"""The kinds of error that a program may want to catch, and the nearest right name for a wrong one."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import Final

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error says that a disk is full, or a quota used up."""
    return getattr(error, "errno", None) in NO_ROOM


class FabricxError(RuntimeError):
    """Anything that went wrong in a run and is not simply a wrong argument (those are `ValueError`, `LookupError`)."""


class WorkerFailed(FabricxError):
    """A worker process ended the run: with an exception of its own, or killed by a signal."""

    def __init__(self, message: str, *, rank: int, traceback: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.exit_code = exit_code


class RanksDisagree(FabricxError):
    """Ranks did different things where they have to do the same; the message lists what, by rank."""


class RanksApart(FabricxError):
    """Ranks were asked to do something together while each goes at its own pace."""


class ServerLost(FabricxError):
    """A parameter server is gone, and with it what it kept."""


class CheckpointError(FabricxError):
    """A checkpoint can't be read: it isn't complete, is damaged, or doesn't fit."""


class NotPicklable(TypeError):
    """An object that has to reach the worker processes can't be sent there; the message names the attribute."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` is most likely a misspelling of, or None.

    >>> nearest("fdsp", ["ddp", "fsdp", "single"])
    'fsdp'
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known name, to be put behind an error message, or an empty string.

    >>> did_you_mean("fdsp", ["ddp", "fsdp"])
    " Did you mean 'fsdp'?"
    """
    match = nearest(name, known)
    return f" Did you mean '{match}'?" if match else ""
