from __future__ import annotations

import math
from typing import Any

import pytest

from fabricx.pytorch.modules import lookup

pytest.importorskip("tqdm")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1"),
        (1.0, "1.000"),
        ("0.1", "0.100"),
        (1e-5, "1e-5"),
        (12.3456, "12.30"),
        (math.nan, "nan"),
        ("v1.2", "v1.2"),
    ],
)
def test_numbers_have_a_constant_width(number: Any, text: str) -> None:
    assert lookup("callbacks.progress.tqdm_progress", "Tqdm").format_num(number) == text
