"""Sources with a state, which a resumed run restores."""

from __future__ import annotations

from collections.abc import Iterator


class Positioned:
    """Numbers after `begin` with a position; `iter` restarts, or continues after the newest number.

    The state is a dict that the source changes in place, not a copy.

    Args:
        begin: the first number is larger by 1.
        count: number of items.
        restarts: `iter` restarts, unless a state was loaded since the last call.
    """

    def __init__(self, begin: int, count: int, *, restarts: bool) -> None:
        self.begin, self.count, self.restarts, self.loaded = begin, count, restarts, False
        self.state = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        if self.restarts and not self.loaded:
            self.state["at"] = 0
        self.loaded = False
        while self.state["at"] < self.count:
            self.state["at"] += 1
            yield self.begin + self.state["at"]
        self.state["at"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state, self.loaded = state, True


class Sized(Positioned):
    """The same with a length."""

    def __len__(self) -> int:
        return self.count
