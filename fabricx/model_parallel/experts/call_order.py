"""Ranks that exchange tokens call the same modules in the same order: another order is an error, and no wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from fabricx.errors import RanksDisagree

_BACKWARD: Final = -1


@final
class CallOrder:
    """Describes the next exchange of this rank as a number, and compares the numbers of all ranks of a group.

    Args:
        names: of the modules that exchange tokens, equal on all ranks.

    Attributes:
        in_step: a step of the module is running.
        calls: calls of these modules since the newest step began.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self.in_step, self.calls = False, 0

    def wrap_step(self, step: Callable[..., Any], begins: Callable[[], None]) -> Callable[..., Any]:
        """Return a step whose calls are counted from 1.

        Args:
            step: step of the module.
            begins: called before the step.
        """

        def counted(*args: Any, **options: Any) -> Any:
            begins()
            self.in_step, self.calls = True, 0
            try:
                return step(*args, **options)
            finally:
                self.in_step = False

        return counted

    def next_call(self, name: str) -> int:
        """Return the number of the next call.

        Args:
            name: of the module.
        """
        self.calls += 1
        return (self.calls * len(self._names) + self._names.index(name)) * 2 + self.in_step

    @staticmethod
    def backward() -> int:
        """Return the number of the beginning of a backward."""
        return _BACKWARD

    def check(self, numbers: Sequence[int]) -> None:
        """Compare the exchanges of all ranks.

        Args:
            numbers: of each rank of the group.

        Raises:
            RanksDisagree: on all ranks of the group; the message names the exchange of each rank.
        """
        if len(set(numbers)) == 1:
            return
        exchanges = "; ".join(f"rank {rank}: {self._described(number)}" for rank, number in enumerate(numbers))
        raise RanksDisagree(
            f"ranks that divide experts exchange tokens at different places ({exchanges}). All of these ranks have to "
            "call the experts equally often, in the same order: the calls must not depend on the data of a rank, and "
            "a hook must not call experts on some ranks only. A rank without tokens calls them with an empty tensor. "
            "Otherwise use strategy=ddp"
        )

    def _described(self, number: int) -> str:
        if number == _BACKWARD:
            return "begins the backward"
        call, index = divmod(number // 2, len(self._names))
        return f"call {call} {'in' if number % 2 else 'after'} the step, of {self._names[index]}"
