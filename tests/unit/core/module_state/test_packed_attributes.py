"""Attributes are plain data for another process, and later attributes replace earlier ones."""

from __future__ import annotations

from typing import Any

from torch import nn

from fabricx.core.module_state.packed_attributes import differing, joined, packed
from fabricx.core.module_state.tracked_attributes import TrackedAttributes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.rate = 0, 0.5
        self.best: Any = None


def test_later_attributes_replace_earlier_ones() -> None:
    net = Net()
    attributes = TrackedAttributes({"": net}, observed=[""])
    net.steps = 1
    earlier = packed(attributes.changed())
    net.best, net.rate = 2, float("nan")
    later = packed(attributes.changed())
    assert [name for _, name, _ in differing(later, earlier)] == ["rate", "best"]
    joint, changed = joined(earlier, earlier, later)
    assert sorted(map(repr, joint)) == sorted(map(repr, later))
    assert changed
    assert all(changed.values())
    own = [["", "steps", 9]]  # a value that differs between ranks
    joint, changed = joined(own, earlier, [["", "steps", 2], ["", "best", 2]])
    assert joint == [["", "steps", 9], ["", "best", 2]]
    assert changed == {"steps": False, "best": True}
