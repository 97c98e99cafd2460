"""The store of a run, for tests of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fabricx.distributed.store.server import StoreServer

KEY = b"k" * 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    server = StoreServer(str(folder), KEY)
    yield server
    server.close()
