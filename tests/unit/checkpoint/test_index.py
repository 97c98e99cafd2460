"""An index with wrong sizes is refused before memory is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.hostile import SHARD, is_refused, replace, saved

HUGE = 1 << 50


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more than the file has": lambda e: e.update(
        size=[HUGE], chunks=[{"offsets": [0], "sizes": [HUGE], "file": SHARD, "name": "strategy/module/w"}]
    ),
    "negative": lambda e: e.update(size=[-6]),
    "a fraction": lambda e: e.update(size=[6.0]),
    "another shape": lambda e: e["chunks"][0].update(sizes=[3]) or e.update(size=[3]),
    "broadcast": lambda e: e["chunks"][0].update(sizes=[1]) or e.update(size=[1]),
    "a gap": lambda e: e["chunks"][0].update(sizes=[5]),
    "beside the tensor": lambda e: e["chunks"][0].update(offsets=[1]),
    "an overlap": lambda e: e.update(
        chunks=[{**e["chunks"][0], "sizes": [3], "offsets": [0]}, {**e["chunks"][0], "sizes": [3], "offsets": [1]}]
    ),
    "other dimensions": lambda e: e.update(size=[6, 1]),
    "another type": lambda e: e.update(dtype="int32"),
    "a function of torch": lambda e: e.update(dtype="load"),
    "another tensor": lambda e: e["chunks"][0].update(name="nowhere"),
    "nothing": lambda e: e.clear(),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_index_is_refused_before_memory_is_allocated(tmp_path: Path, lie: str) -> None:
    path = saved(tmp_path)
    index = json.loads((path / "index.json").read_text())
    LIES[lie](index["strategy/module/w"])
    replace(path, "index.json", json.dumps(index).encode())
    is_refused(path, "damaged")
