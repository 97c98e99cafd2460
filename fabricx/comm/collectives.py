"""Compares the order in which ranks gather and reduce the parts of a sharded module."""

from __future__ import annotations

import zlib
from typing import Final

import torch

from fabricx.comm.world import World
from fabricx.errors import RanksDisagree

FIRST_STEPS: Final = 2  # training steps of a run in which each collective is compared
COMPARE_EVERY: Final = 64  # training steps from one such step to the next, later


class Collectives:
    """Finds ranks whose training steps call different submodules, which would mix the weights of these.

    In the first training steps, and in every 64th, ranks agree on each collective before it begins. In all others they
    compare a checksum at the end of the step, so that no step with mixed weights passes.
    """

    def __init__(self) -> None:
        self._world = World()
        self._begun = 0  # training steps
        self._within = False
        self._checksum = 0
        self._calls = 0

    def begin(self, world: World) -> None:
        """Begin a training step; every rank calls it."""
        self._world = world
        self._begun += 1
        self._within, self._checksum, self._calls = True, 0, 0

    def note(self, what: str) -> None:
        """Note what is about to be communicated.

        Raises:
            RanksDisagree: other ranks are about to communicate something else.
        """
        if not self._within:
            return
        self._calls += 1
        self._checksum = zlib.crc32(what.encode(), self._checksum)
        if self._begun <= FIRST_STEPS or self._begun % COMPARE_EVERY == 0:
            self._compare(what, zlib.crc32(what.encode()))

    def end(self) -> None:
        """End a training step; every rank calls it.

        Raises:
            RanksDisagree: the ranks did not communicate the same in this step.
        """
        if self._within:
            self._compare(f"ends the step after {self._calls} collectives", self._checksum)
        self._within = False

    def stop(self) -> None:
        """End a training step that failed."""
        self._within = False

    def _compare(self, what: str, number: int) -> None:
        world = self._world
        numbers = torch.zeros(world.size, dtype=torch.int64, device=world.device)
        numbers[world.rank] = number
        found = world.all_reduce(numbers).tolist()
        if len(set(found)) == 1:
            return
        self._within = False
        several = world.gather_objects(what)
        raise RanksDisagree(
            "training_step calls different submodules on different ranks, and strategy=fsdp gathers the weights of a "
            "submodule on all ranks together: "
            + ", ".join(f"rank {rank} {done}" for rank, done in enumerate(several))
            + ". Call the same submodules in the same order on all ranks (on an empty batch, or with a loss of zero "
            "weight), or take strategy=ddp"
        )
