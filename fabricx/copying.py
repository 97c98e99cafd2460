"""Going on in place where each rank holds something that no other has: all go back to the newest copies in memory.

Each rank copies its part, with its random numbers and sums, every so many steps; all at the same ones. What makes the
copies of one moment a state is that those of all ranks are there.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch

from fabricx.checkpoint import memory, tree
from fabricx.comm.generations import membership
from fabricx.comm.world import World
from fabricx.restart_point import RestartPoint, of_word
from fabricx.standing import progress, standing, take_over

if TYPE_CHECKING:
    from fabricx.trainer import Trainer

COST: Final = 0.01  # the part of the time that copies may take
LOOK: Final = 20  # steps after which that is reckoned again, at least


@final
class Copier:
    """Copies what this rank holds, when it is time to.

    Args:
        every: weight updates between two copies; None for so many that copies take a hundredth of the time.

    Attributes:
        seconds: how long all copies took.
    """

    def __init__(self, every: int | None = None) -> None:
        own = membership()
        self.copies = memory.Copies(own.folder, own.worker)
        self._members: Sequence[int] = ()
        self._every = every
        self._steps = every or 1
        self._next = self._look_at = 0  # steps
        self._began = (0, 0.0)  # step and time from which it is reckoned
        self._took = 0.0  # seconds of copies by then
        self.seconds = 0.0

    def begin(self, t: Trainer, members: Sequence[int]) -> None:
        """Copy now; these are the members from now on."""
        self._members = members
        self._copy(t)
        step = t.state.step
        self._steps = self._every or 1
        # Until optimizers have stepped, and both places have room for that, none says how long one takes.
        self._next, self._look_at = step + self._steps, step + 3
        self._began, self._took = (step, time.monotonic()), self.seconds

    def after_step(self, t: Trainer) -> None:
        """Copy if it is due; all ranks do at the same steps."""
        step = t.state.step
        if step < self._next:
            return
        took = self._copy(t)
        if self._every is None and step >= self._look_at:
            before, since = self._began
            each = (time.monotonic() - since - self.seconds + self._took) / max(1, step - before)
            steps = torch.tensor(max(1, math.ceil(took / (COST * max(each, 1e-6)))), device=t.world.device)
            self._steps = int(t.world.broadcast(steps))
            self._look_at = step + max(LOOK, self._steps)
            self._began, self._took = (step, time.monotonic()), self.seconds
        self._next = step + self._steps

    def before_change(self, t: Trainer) -> None:
        """Copy what the newest step has left, in the middle of the next; all members are there, and can do the same."""
        if t.torn or t.world.silent:  # what is there may not be what that step has left
            return
        if self.copies.newest != (progress(t), t.world.generation):
            with contextlib.suppress(RuntimeError):  # of a collective that was under way when the links were shut
                self._copy(t, t.restart_point)

    def _copy(self, t: Trainer, point: RestartPoint | None = None) -> float:
        began = time.monotonic()
        if point is None:
            t.world.settle()
        point = point or RestartPoint(t)
        state = {
            "strategy": t.strategy.own_state(t.module, t.optimizers), "word": pickle.dumps(point.word()), **standing(t)
        }  # fmt: skip
        state["strategy"]["module"].update(point.buffers)
        self.copies.make((progress(t), t.world.generation), self._members, state)
        took = time.monotonic() - began
        self.seconds += took
        return took


def go_back(t: Trainer, *, came: bool) -> int:
    """Bring all members to the newest state of which all parts are there; returns how many failures were known then.

    Args:
        t: the trainer; its world has the members.
        came: this rank wasn't there before.

    Raises:
        RuntimeError: there is no such state.
    """
    assert t.copier is not None
    copies = _newest(t.world, memory.read(membership().folder))
    place = t.world.rank if len(copies) == t.world.size else None
    room = tree.like(t.strategy.sharded_parameters(), t.world.device)
    parts = [place] if place is not None else range(1 if t.strategy.traits.sharded else len(copies))
    states = [memory.join(copies, part, room) for part in parts]
    t.strategy.load_own_states([state["strategy"] for state in states], t.module, t.optimizers)
    state = states[0]
    state["ranks"] = [of_word(pickle.loads(copy.rest["word"])) for copy in copies]
    take_over(t, state, place, came=came)
    t.copier.copies.keep(copies[0].key)
    known: int = state["failures"]
    return known


def _newest(world: World, states: dict[Any, list[memory.Copy]]) -> list[memory.Copy]:
    """Return the copies that all ranks choose; each looks whether those of some are what they were."""
    told = world.gather_objects({
        key: all(copy.whole() for copy in copies[world.rank :: world.size]) for key, copies in states.items()
    })  # fmt: skip
    whole = [key for key in states if all(one.get(key) for one in told)]
    if not whole:
        raise RuntimeError("there is no state in memory of which each rank's part is whole")
    return states[max(whole)]
