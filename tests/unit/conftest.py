"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fabricx.testing import QUIET


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    """Return options of a trainer that prints nothing, and that writes to the folder of the test."""
    return {**QUIET, "default_root_dir": tmp_path}
