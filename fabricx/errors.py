"""Exceptions that a program may catch, and suggestions for misspelt names."""

from __future__ import annotations

import contextlib
import difflib
import errno
import inspect
import os
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fabricx.redaction import masked_values

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error says that a disk is full, or a quota used up."""
    return getattr(error, "errno", None) in NO_ROOM


@contextlib.contextmanager
def full_disk_costs(what: str) -> Iterator[None]:
    """Let a disk that is full cost something that a run can do without, and say so."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        warnings.warn(f"the disk is full: {what} will be missing", stacklevel=3)


class FabricxError(RuntimeError):
    """Anything that went wrong in a run and is not simply a wrong argument (those are `ValueError`, `LookupError`)."""


class WorkerFailed(FabricxError):
    """A worker process ended the run: with an exception of its own, or killed by a signal.

    Attributes:
        rank: whose.
        traceback: of its exception.
        exit_code: of its process.
        stopping: all had been asked to stop by then.
        saving: path and step of a checkpoint that was being written, if one was that nothing writes again.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.exit_code = exit_code
        self.stopping = False
        self.saving: tuple[str, int] | None = None


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


_LOST_LINK: Final = ("Connection closed by peer", "Connection reset by peer")


def lost_a_link(traceback: str) -> bool:
    """Return whether an error is that the connection to another process was lost."""
    return any(sign in traceback for sign in _LOST_LINK)


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


class NamesChecked:
    """Names the nearest argument where a subclass is made with one that its `__init__` doesn't have.

    >>> class Clip(NamesChecked):
    ...     def __init__(self, limit=1.0): ...
    >>> Clip(limits=2.0)
    Traceback (most recent call last):
    TypeError: Clip has no argument 'limits'. Did you mean 'limit'?
      known: limit
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Check the names; `__init__` gets the arguments.

        Raises:
            TypeError: one of them isn't known.
        """
        if options:
            known = dict(inspect.signature(cls.__init__).parameters)
            known.pop("self", None)
            anything = any(one.kind is one.VAR_KEYWORD for one in known.values())
            unknown = [name for name in options if name not in known and not anything]
            if unknown:
                raise TypeError(
                    f"{cls.__name__} has no argument {unknown[0]!r}.{did_you_mean(unknown[0], known)}\n"
                    f"  known: {', '.join(known) or 'none'}"
                )
        return super().__new__(cls)


_FRAMEWORK: Final = ("fabricx", "torch", "multiprocessing", "concurrent", "threading")
_NOT_FRAMEWORK: Final = ("fabricx.demo", "fabricx.testing")
ALL_FRAMES: Final = "FABRICX_TRACEBACK"  # in the environment: leave nothing out


def brief_traceback(error: BaseException) -> str:
    """Return a traceback without the frames of fabricx and torch, unless the environment asks for them.

    The last frame stays whoever it is of, and so does everything where no frame is the user's.
    """
    found = traceback.TracebackException.from_exception(error)
    left_out = 0 if os.environ.get(ALL_FRAMES) else _leave_out(found, error)
    note = f"({left_out} frames of fabricx and torch are left out; {ALL_FRAMES}=1 shows them)\n" if left_out else ""
    return masked_values(note + "".join(found.format()))


def _leave_out(found: traceback.TracebackException, error: BaseException) -> int:
    """Take frames of the framework out of an error and those that led to it; returns how many."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [_is_users(module) for module in modules]
    left_out = 0
    if any(own) and len(own) == len(found.stack):
        kept = [frame for frame, mine in zip(found.stack[:-1], own[:-1], strict=True) if mine]
        left_out = len(found.stack) - len(kept) - 1
        found.stack[:] = [*kept, found.stack[-1]]
    for inner, cause in ((found.__cause__, error.__cause__), (found.__context__, error.__context__)):
        if inner is not None and cause is not None:
            left_out += _leave_out(inner, cause)
    return left_out


def _is_users(module: str) -> bool:
    return module.startswith(_NOT_FRAMEWORK) or module.partition(".")[0] not in _FRAMEWORK


def missing_metric(monitor: str, known: Iterable[str], who: str) -> str:
    """Return what to say when a metric is wanted that was never logged."""
    return (
        f"{who} looks at {monitor!r}, which was never logged.{did_you_mean(monitor, known)}\n"
        f"  logged so far: {', '.join(sorted(known)) or 'nothing'}\n  log it with self.log({monitor!r}, value)"
    )
