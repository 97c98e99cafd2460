"""Process groups of the ranks."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked")
def test_a_forked_process_does_not_destroy_garbage_groups_of_its_parent() -> None:
    ended: list[int] = []

    class Group:
        def __init__(self) -> None:
            self.itself: Any = self

        def __del__(self) -> None:
            ended.append(os.getpid())

    gc.disable()
    try:
        Group()
        if (child := os.fork()) == 0:
            gc.collect()
            os._exit(len(ended))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()
    gc.collect()
    assert ended == [os.getpid()]
