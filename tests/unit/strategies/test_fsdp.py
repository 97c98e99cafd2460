"""Options of fsdp; the process tests train with it."""

from __future__ import annotations

import pytest

from fabricx.strategies import FSDP


@pytest.mark.parametrize(
    ("options", "message"), [({"param_dtype": "float16"}, "known: bf16"), ({"replicas": 0}, "replicas=0")]
)
def test_wrong_options_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP(**options)  # type: ignore[arg-type]
