"""Values of a configuration are compared with annotations where a mismatch is certain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import pytest
from torch import nn

from fabricx.core.options.annotations import accepts, check_value

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]


class Net:
    def __init__(
        self,
        lr: float = 0.1,
        hidden: int | None = None,
        sloppy: int = 0.5,  # type: ignore[assignment]
        later: Unknown = None,
        bare=0.1,  # type: ignore[no-untyped-def]
    ) -> None: ...


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (float, [0.1, 1], ["fast", None, [0.1]]),
        (int, [1, True], [0.5, "1"]),
        (bool, [True], [1, "yes"]),
        (str, ["fast"], [3, None]),
        (float | None, [None, 1], ["fast"]),
        (Optional[int], [None, 1], [0.5]),  # noqa: UP045
        (tuple[float, float], [[0.9, 0.99]], [0.9, "0.9"]),
        (dict[str, Any], [{"a": 1}], [3]),
        (bool | Literal["auto"], [True, "auto"], [3]),
        (Annotated[int, "width"], [3], ["wide"]),
        (nn.Module, ["relu", 3, {}], []),  # the class may convert it
        (Any, ["fast", 3, None], []),
    ],
)
def test_values_of_plain_types_are_compared(annotation: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not accepts(annotation, value)] == []
    assert [value for value in wrong if accepts(annotation, value)] == []


def test_a_mismatch_names_key_value_and_annotation() -> None:
    with pytest.raises(ValueError, match=r"module\.lr='fast' is of type str, and Net is annotated with lr: float; set"):
        check_value("module.lr", "fast", Net, "lr")
    with pytest.raises(ValueError, match=r"module\.hidden=0\.5 is of type float.*hidden: int \| None"):
        check_value("module.hidden", 0.5, Net, "hidden")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sloppy", 0.25),  # of the default's type
        ("later", "text"),  # an annotation that only type checkers can evaluate
        ("bare", "text"),
        ("other", "text"),  # no such parameter
        ("lr", {"_target_": "my.Schedule"}),  # an object by the time that the class is called
        ("lr", object()),
    ],
)
def test_a_value_that_cannot_be_checked_is_accepted(name: str, value: Any) -> None:
    check_value(f"module.{name}", value, Net, name)
