"""Exceptions that a program may catch, suggestions for misspelt names, and short tracebacks."""

from __future__ import annotations

import contextlib
import difflib
import errno
import inspect
import os
import signal
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from fabricx.redaction import masked_values

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error means that a disk is full or a quota is exceeded.

    Args:
        error: any exception, or None.
    """
    return getattr(error, "errno", None) in NO_ROOM


@contextlib.contextmanager
def full_disk_costs(output: str) -> Iterator[None]:
    """Replace errors about a full disk in the context by a warning, for output that a run does not need.

    Args:
        output: name of the output, for the warning.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        warnings.warn(f"the disk is full, so {output} will be missing; delete files to make room", stacklevel=3)


class FabricxError(RuntimeError):
    """Base class for errors of a run; invalid arguments raise `ValueError` and `LookupError` instead."""


class WorkerFailed(FabricxError):
    """A worker process failed: it raised an exception, or was killed by a signal.

    Attributes:
        rank: rank of the worker.
        traceback: traceback of the exception.
        summary: last line of the exception, without its notes.
        exit_code: exit code of the process.
        stopping: a stop of all workers had been requested before.
        saving: path and step of a checkpoint that was being written and is not repeated, or None.
        reached: newest step of ranks with in-memory checkpoints that outlive their processes; -1 without.
        not_in_place: error of a surviving rank, in a line, because of which recovery in place has failed; "" if that
            was not tried.
        exhausted: workers were replaced as often as is allowed without a further step, and failed each time.

    Args:
        message: the message.
        rank: rank of the worker.
        traceback: traceback of the exception.
        summary: last line of the exception, without its notes; "" for the last line of `traceback`.
        exit_code: exit code of the process.
    """

    def __init__(
        self, message: str, *, rank: int, traceback: str = "", summary: str = "", exit_code: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.rank = rank
        self.traceback, self.summary = traceback, summary or "".join(traceback.rstrip().splitlines()[-1:])
        self.exit_code = exit_code
        self.stopping = False
        self.saving: tuple[str, int] | None = None
        self.reached = -1
        self.not_in_place = ""
        self.exhausted = False

    def add_remedy(self, text: str) -> None:
        """Append a line to the message.

        Args:
            text: the action that solves the problem.
        """
        self.args = (f"{self}\n{text}",)


class RanksDisagree(FabricxError):
    """Ranks behaved differently although they must behave equally; the message lists the differences by rank."""


class RanksApart(FabricxError):
    """A collective operation was called while ranks train asynchronously."""


class PeerLost(FabricxError, RuntimeError):
    """A different rank has died, or the connection to it was lost."""


class ServerLost(FabricxError):
    """A parameter server died, and its state is lost."""


class CopiesLost(FabricxError, RuntimeError):
    """Workers died, and no in-memory checkpoint has valid parts of all ranks."""


class PossibleUserWarning(UserWarning):
    """Settings or data that are valid, and rarely intended; `disable_possible_user_warnings` hides them."""


class ScheduleWarning(UserWarning, RuntimeWarning):
    """A key or a schedule of `configure_optimizers` has no effect; a RuntimeWarning in Lightning."""


class OptionWarning(UserWarning, RuntimeWarning):
    """An option has no effect with the objects of the run; a RuntimeWarning in Lightning."""


class Terminated(SystemExit):
    """SIGTERM, or the notice of a scheduler, has ended a run.

    Attributes:
        code: exit code of the program, if it does not catch the exception: 143, as shells and schedulers use it.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class CheckpointError(FabricxError):
    """A checkpoint cannot be loaded: it is incomplete, damaged, or does not match the module.

    Args:
        message: the error; for a damaged or incomplete checkpoint, a note names the commands that find others.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        if "damaged" in message or "not a complete checkpoint" in message:
            self.add_note(
                "use another checkpoint: `fabricx checkpoint ls FOLDER` lists them, `fabricx checkpoint verify FOLDER` "
                "checks them"
            )


class MissingCheckpoint(CheckpointError, FileNotFoundError, ValueError):
    """There is no checkpoint at a path."""


class MissingArguments(CheckpointError, TypeError):
    """A constructor has parameters without a default that a checkpoint does not contain."""


class Interrupted(KeyboardInterrupt, SystemExit):
    """A run ended by a KeyboardInterrupt; also a SystemExit, as in Lightning.

    Args:
        args: arguments of the KeyboardInterrupt.

    Attributes:
        code: exit code of the program, if it does not catch the exception: 130, as after Ctrl-C.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.code = 130


class WrongArgument(ValueError, TypeError):
    """An argument is not of a kind that the call accepts; a TypeError in Lightning."""


class DifferentValues(ValueError, RuntimeError):
    """Two objects have different values of one name; a RuntimeError in Lightning."""


class WrongLoss(ValueError, RuntimeError):
    """The loss of a training step has no gradient, or is not a single number; a RuntimeError in torch."""


class MissingMetric(ValueError, RuntimeError):
    """A callback monitors a metric that was not logged."""


class MissingAttribute(ValueError, AttributeError):
    """An object lacks an attribute that a call needs."""


class UnknownName(LookupError, ValueError):
    """There is no strategy, callback or logger of a name."""


class NotPicklable(TypeError):
    """An object for the worker processes cannot be pickled; the message names the attribute."""


def nearest(name: str, valid: Iterable[str], similarity: float = 0.55) -> str | None:
    """Return the valid name that is most similar to a misspelt name, or None.

    Args:
        name: the misspelt name.
        valid: valid names.
        similarity: the least that counts, at most 1 for equal names.

    >>> nearest("fdsp", ["ddp", "fsdp", "single"])
    'fsdp'
    """
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=similarity)
    return matches[0] if matches else None


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """Return the known key that is most similar to a misspelt or incomplete key, or None.

    Args:
        key: as the user wrote it.
        keys: known keys, dotted.

    >>> known = ["trainer", "trainer.max_epochs", "module", "module.lr"]
    >>> nearest_key("lr", known), nearest_key("trainer.max_epoch", known), nearest_key("max_epoch", known)
    ('module.lr', 'trainer.max_epochs', 'trainer.max_epochs')
    """
    known = [name for name in keys if not key.startswith(f"{name}.") or "." in name]
    complete = [name for name in known if name.endswith(f".{key}")]
    if complete:
        return min(complete, key=len)
    if (match := nearest(key, known)) is not None and _similar(key, match):
        return match
    last = {name.rpartition(".")[2]: name for name in reversed(known)}
    near = nearest(key.rpartition(".")[2], last)
    if near is not None and _similar(key.rpartition(".")[2], near):
        return last[near]
    return match


def _similar(key: str, name: str) -> bool:
    """Return whether two keys differ by little; the threshold of `nearest` admits keys that share only their group."""
    return nearest(key.rpartition(".")[2], [name.rpartition(".")[2]]) is not None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return a sentence that suggests a valid name, to be appended to an error message; "" without a similar name.

    Args:
        name: the misspelt name.
        valid: valid names.

    >>> did_you_mean("fdsp", ["ddp", "fsdp"])
    " Did you mean 'fsdp'?"
    """
    match = nearest(name, valid)
    return f" Did you mean '{match}'?" if match else ""


def check_choice(owner: str, option: str, value: object, known: Sequence[str | None], own: str = "") -> None:
    """Check that an option has a valid value.

    Args:
        owner: name of the object with the option, for the message.
        option: name of the option.
        value: value of the option.
        known: valid values.
        own: further valid values in words, for the message.

    Raises:
        ValueError: the value is unknown; the message suggests the nearest valid value.

    >>> check_choice("ddp", "compression", "fp61", ("bf16", "fp16", None))
    Traceback (most recent call last):
    ValueError: compression='fp61' isn't known to ddp. Did you mean 'fp16'?
      known: bf16, fp16, None
    """
    if value not in known:
        words = [str(word) for word in known]
        raise ValueError(
            f"{option}={value!r} isn't known to {owner}.{did_you_mean(str(value), words)}\n  known: {', '.join(words)}"
            + (f"\n  your own: {own}" if own else "")
        )


class NamesChecked:
    """Base class that suggests the nearest argument if `__init__` of a subclass is called with an unknown argument.

    >>> class Clip(NamesChecked):
    ...     def __init__(self, limit=1.0): ...
    >>> Clip(limits=2.0)
    Traceback (most recent call last):
    TypeError: Clip has no argument 'limits'. Did you mean 'limit'?
      known: limit
    """

    former_arguments: ClassVar[Mapping[str, str]] = {}  # arguments of other libraries, with their successors

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Check the names of keyword arguments before `__init__`.

        Args:
            *args: positional arguments of `__init__`.
            **options: keyword arguments of `__init__`.

        Raises:
            TypeError: `__init__` has no argument of that name, or has only arguments with names.
        """
        if options or args:
            parameters = dict(inspect.signature(cls.__init__).parameters)
            parameters.pop("self", None)
            if args and parameters and all(part.kind is part.KEYWORD_ONLY for part in parameters.values()):
                raise TypeError(
                    f"{cls.__name__}({args[0]!r}): write the argument with its name, such as "
                    f"{cls.__name__}({next(iter(parameters))}=...)\n  known: {', '.join(parameters)}"
                )
            accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            unknown = [name for name in options if name not in parameters and not accepts_any]
            if unknown and unknown[0] in cls.former_arguments:
                raise TypeError(f"{cls.__name__} has no argument {unknown[0]!r}: {cls.former_arguments[unknown[0]]}")
            if unknown:
                raise TypeError(
                    f"{cls.__name__} has no argument {unknown[0]!r}.{did_you_mean(unknown[0], parameters)}\n"
                    f"  known: {', '.join(parameters) or 'none'}"
                )
        return super().__new__(cls)


_FRAMEWORK: Final = (
    "fabricx", "torch", "multiprocessing", "concurrent", "threading", "importlib", "hydra", "omegaconf",
)  # fmt: skip
_NOT_FRAMEWORK: Final = ("fabricx.demo", "fabricx.testing")
ALL_FRAMES: Final = "FABRICX_TRACEBACK"  # environment variable: if set, tracebacks contain all frames


def check_share(option: str, value: float) -> None:
    """Refuse a number that is not at least 0 and less than 1, such as a momentum.

    Args:
        option: name of the option.
        value: its value.

    Raises:
        ValueError: the number is outside of this range.
    """
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{option}={value}: must be at least 0 and less than 1")


def brief_traceback(error: BaseException) -> str:
    """Format a traceback without the frames of fabricx and torch, unless `FABRICX_TRACEBACK` is set.

    The last frame is always kept, and so are all frames if none belongs to the user's code.

    Args:
        error: the exception.
    """
    report = traceback.TracebackException.from_exception(error)
    omitted = 0 if os.environ.get(ALL_FRAMES) else _omit_frames(report, error)
    note = f"({omitted} frames of fabricx and torch are omitted; {ALL_FRAMES}=1 shows them)\n" if omitted else ""
    return masked_values(note + "".join(report.format()))


def last_line(error: BaseException) -> str:
    """Return the last line of an error with its class, without notes.

    Args:
        error: the exception.
    """
    report = traceback.TracebackException.from_exception(error)
    report.__notes__ = None
    return masked_values("".join(report.format_exception_only())).rstrip().splitlines()[-1]


def _omit_frames(report: traceback.TracebackException, error: BaseException) -> int:
    """Remove frames of the framework from an error and from its causes; return their number."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    in_user_code = [is_user_module(module) for module in modules]
    omitted = 0
    if any(in_user_code) and len(in_user_code) == len(report.stack):
        kept = [frame for frame, keep in zip(report.stack[:-1], in_user_code[:-1], strict=True) if keep]
        omitted = len(report.stack) - len(kept) - 1
        report.stack[:] = [*kept, report.stack[-1]]
    for inner, cause in ((report.__cause__, error.__cause__), (report.__context__, error.__context__)):
        if inner is not None and cause is not None:
            omitted += _omit_frames(inner, cause)
    return omitted


def is_user_module(module: str) -> bool:
    """Return whether code of a module is shown in tracebacks: it does not belong to fabricx or a library below it.

    Args:
        module: its dotted name.
    """
    return module.startswith(_NOT_FRAMEWORK) or module.partition(".")[0] not in _FRAMEWORK


def missing_metric(monitor: str, logged: Iterable[str], user: str) -> str:
    """Return the error message for a monitored metric that was never logged.

    Args:
        monitor: name of the metric.
        logged: names of logged metrics.
        user: the part that monitors the metric, such as "the scheduler".
    """
    return (
        f"{user} monitors {monitor!r}, which was never logged.{did_you_mean(monitor, logged)}\n"
        f"  logged so far: {', '.join(sorted(logged)) or 'nothing'}\n  log it with self.log({monitor!r}, value)"
    )
