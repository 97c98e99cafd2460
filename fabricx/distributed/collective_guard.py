"""Raise an error for collectives that the other ranks would not join and that would therefore hang."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, final

import torch
from torch.distributed import ProcessGroup, _functional_collectives, distributed_c10d

from fabricx.errors import RanksApart

_HARMLESS: Final = {"rank", "size", "name", "group_name", "bound_device_id", "_get_backend_name"}
_PASSED_THROUGH: Final = {  # modules between a collective and its caller
    __name__, "contextlib", "torch.autograd.function", "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d", "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives", "torch._ops",
}  # fmt: skip
_QUERIES: Final = {"get_rank", "get_world_size", "get_backend", "get_backend_config"}  # nothing is sent

_c10d: Any = distributed_c10d
_members: Any = distributed_c10d.GroupMember
_funcol: Any = _functional_collectives
_is_outside: Final = _c10d._rank_not_in_group
_RESOLVER: Final = "_resolve_group" if hasattr(_funcol, "_resolve_group") else "_resolve_group_name"  # torch 2.11
_resolve: Final = getattr(_funcol, _RESOLVER)


# Collectives that bypass `torch.distributed`: methods of a group, and operators that take a group or its name.
_COLLECTIVES: Final = (
    "all", "reduce", "broadcast", "gather", "scatter", "barrier", "monitored_barrier", "send", "recv",
)  # fmt: skip
_NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_ops: Final[dict[str, Any]] = vars(torch.ops)

_refusal: RefuseCollectives | None = None  # the innermost that applies


def _install(refusal: RefuseCollectives | None) -> RefuseCollectives | None:
    """Refuse collectives in all places where torch begins them, or in none; returns the refusal before."""
    global _refusal
    before, _refusal = _refusal, refusal
    if (group := _real(_members.WORLD)) is not None:
        _members.WORLD = group if refusal is None or refusal.allows_libraries else _NoGroup(group, refusal.reason)
    original, guarded = _operators()
    _c10d._rank_not_in_group = _is_outside if refusal is None else refusal.check
    setattr(_funcol, _RESOLVER, _resolve if refusal is None else refusal.resolve)
    _ops.update(original if refusal is None else guarded)
    return before


@functools.cache
def _operators() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the namespaces of operators, and their replacements.

    The methods of groups are replaced at the first call, and remain so: to replace them at each batch would cost 25 us.
    """
    for name, method in list(vars(ProcessGroup).items()):
        if name.strip("_").startswith(_COLLECTIVES):
            setattr(ProcessGroup, name, _guarded(method))
    namespaces = {name: getattr(torch.ops, name) for name in _NAMESPACES}
    return namespaces, {name: _GuardedOperators(namespace) for name, namespace in namespaces.items()}


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(group: Any, *args: Any, **options: Any) -> Any:
        if _refusal is not None:
            _refusal.refuse(group)
        return method(group, *args, **options)

    return guarded


@final
class _GuardedOperators:
    """Replacement for a namespace of `torch.ops`, or for an operator in it, that refuses calls with a group."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._operators, name)
        return _GuardedOperators(target) if callable(target) else target

    def __call__(self, *args: Any, **options: Any) -> Any:
        for value in (*args, *options.values()):
            if _refusal is not None and (group := _group_of(value)) is not None:
                _refusal.refuse(group)
        return self._operators(*args, **options)


def _group_of(value: Any) -> ProcessGroup | None:
    """Return the group that an argument of an operator is, or names; None if it is neither."""
    if isinstance(value, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):  # an object of another class
            unboxed: ProcessGroup = ProcessGroup.unbox(value)
            return unboxed
    elif isinstance(value, str):
        with contextlib.suppress(RuntimeError):  # another text, such as the kind of a reduction
            named: ProcessGroup = _c10d._resolve_process_group(value)
            return named
    return value if isinstance(value, ProcessGroup) else None


@final
class _NoGroup:
    """Replacement for the default process group that raises `RanksApart` when a collective uses it."""

    def __init__(self, group: Any, why: str) -> None:
        self._group, self._why = group, why

    def __eq__(self, other: object) -> bool:
        return other is self._group  # torch compares groups while it formats its error message

    def __hash__(self) -> int:
        return hash(self._group)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # torch warns of groups that are no `ProcessGroup`
        return type(self._group)

    def __getattr__(self, name: str) -> Any:
        if name in _HARMLESS:
            return getattr(self._group, name)
        raise RanksApart(self._why)


def _real(group: Any) -> Any:
    """Return the process group for which a `_NoGroup` stands, or the group itself."""
    return group._group if isinstance(group, _NoGroup) else group


@final
class RefuseCollectives:
    """Reentrant context in which a collective with ranks that would not join it raises `RanksApart`.

    It applies to the default group and to groups of `torch.distributed.new_group`, in each place where Python code
    begins a collective: a function of `torch.distributed` first looks whether this rank is outside of its group, a
    functional collective resolves its group, methods of groups and operators of `torch.ops` are replaced. Operators
    that the program has looked up before, compiled code and backends of a group are not refused.

    Args:
        reason: message of the error.
        absent: ranks that do not join; None for all other ranks.
        allows_libraries: collectives that torch or fabricx calls are not refused, such as those of FSDP in a forward.
    """

    def __init__(
        self, reason: str, absent: Collection[int] | None = None, *, allows_libraries: bool = False
    ) -> None:  # fmt: skip
        self.reason, self._absent, self.allows_libraries = reason, absent, allows_libraries
        self._before: list[RefuseCollectives | None] = []

    def __enter__(self) -> None:
        self._before.append(_install(self))

    def __exit__(self, *_: object) -> None:
        _install(self._before.pop())

    def check(self, group: Any) -> bool:
        """Return whether this rank is outside of a group, as torch's function does.

        Args:
            group: process group; None for all ranks.

        Raises:
            RanksApart: a rank of the group would not join, and the caller is a collective.
        """
        outside: bool = _is_outside(group)
        if group is None and self.allows_libraries:
            group = _members.WORLD
        if group is None or outside or isinstance(group, _NoGroup):
            return outside
        if sys._getframe(1).f_code.co_name not in _QUERIES:
            self.refuse(group)
        return outside

    def resolve(self, group: Any, *tag: Any, **named: Any) -> Any:
        """Return the group of a functional collective, as torch's function does.

        Args:
            group, tag, named: of that function.

        Raises:
            RanksApart: a rank of the group would not join.
        """
        if isinstance(group, _NoGroup):
            raise RanksApart(self.reason)
        resolved = _resolve(group, *tag, **named)
        target = _c10d._resolve_process_group(resolved) if isinstance(resolved, str) else resolved
        if isinstance(target, ProcessGroup):
            self.refuse(target)
        return resolved

    def refuse(self, group: Any) -> None:
        """Refuse a collective of a group.

        Args:
            group: process group of the collective.

        Raises:
            RanksApart: a rank of the group would not join.
        """
        if group.size() == 1 or (self.allows_libraries and _called_by_library()):
            return
        if self._absent is None or not set(self._absent).isdisjoint(_c10d.get_process_group_ranks(group)):
            raise RanksApart(self.reason)


def check_joined(group: ProcessGroup | None) -> None:
    """Raise an error if some rank of a group does not run this code, before a wait for it.

    Args:
        group: group of a collective that follows; None for all ranks.

    Raises:
        RanksApart: a rank of the group would not join.
    """
    if _refusal is not None:
        real = group if group is not None else _real(_members.WORLD)
        if _refusal._absent is None or not set(_refusal._absent).isdisjoint(_c10d.get_process_group_ranks(real)):
            raise RanksApart(_refusal.reason)


def _called_by_library() -> bool:
    """Return whether torch or fabricx has called the collective, and not the user's program."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "") in _PASSED_THROUGH:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "fabricx")


ALL_JOIN: Final = threading.RLock()  # context that allows collectives; entered without a Python call
ASYNCHRONOUS: Final = RefuseCollectives(
    "a collective in training_step, or in a hook of a batch: each rank takes its batches at its own pace, so the "
    "other ranks would not join it. self.log needs no collective (values are reduced over ranks at the epoch's end); "
    "compute other values in on_train_epoch_end, or use strategy=ddp"
)

FIXED_PARTS: Final = RefuseCollectives(
    "a collective in training_step with deterministic='elastic': a rank computes one part of the global batch at a "
    "time, and which parts are computed at the same time depends on the number of ranks, so the weights would too. "
    "self.log needs no collective; compute other values in on_train_epoch_end, or use strategy=ddp"
)


def without_sample(
    ranks: Collection[int], step: str = "training_step", hooks: str = "on_before_optimizer_step or on_train_epoch_end"
) -> RefuseCollectives:
    """Return a context for a step and hooks of a batch that some ranks do not call.

    Args:
        ranks: ranks without a sample of the batch; collectives of groups without these ranks are allowed.
        step: name of the step.
        hooks: names of hooks that all ranks call.
    """
    return RefuseCollectives(
        "a collective at a batch of which some ranks have no sample: ranks "
        f"{', '.join(map(str, ranks))} don't call {step} and the hooks of this batch, so they would not join "
        f"it. Call it in {hooks}, which all ranks call, or let each global "
        "batch be whole (drop_last=True). self.log needs no collective",
        ranks,
    )


def check_users_collective() -> None:
    """Refuse a collective over all ranks that the user calls through fabricx, inside of `along`.

    Raises:
        RanksApart: some ranks compute another sample.
    """
    if _refusal is not None and _refusal.allows_libraries:
        raise RanksApart(_refusal.reason)


def along(
    ranks: Collection[int], step: str = "training_step", hooks: str = "on_before_optimizer_step or on_train_epoch_end"
) -> RefuseCollectives:
    """Return a context for a step that ranks without a sample call with another sample, which has no weight.

    Collectives of the strategy need these ranks; collectives of the user would receive a sample too much.

    Args:
        ranks: ranks without a sample of the batch.
        step: name of the step.
        hooks: names of hooks that all ranks call.
    """
    return RefuseCollectives(
        f"a collective in {step} at a batch of which some ranks have no sample: ranks {', '.join(map(str, ranks))} "
        "compute another sample, which has no weight in gradients and in self.log, but the collective would count it. "
        f"Call it in {hooks}, or let each global batch be whole (drop_last=True). self.log needs no collective",
        ranks,
        allows_libraries=True,
    )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Allow collectives over all ranks inside `RefuseCollectives`; only for code that all ranks run."""
    before = _install(None)
    try:
        yield
    finally:
        _install(before)
