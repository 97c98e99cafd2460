"""Axes of the ranks."""

from __future__ import annotations

import pytest

from fabricx.distributed.world import World


def test_a_single_axis_has_all_ranks() -> None:
    world = World(rank=1, size=3)
    assert world.axis("data") is world
    with pytest.raises(ValueError, match=r"axis='dat' isn't known to World\. Did you mean 'data'"):
        world.axis("dat")
