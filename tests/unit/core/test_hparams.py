"""Arguments of a constructor, as a checkpoint has them."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from torch import nn

from fabricx.core.hparams import HyperParameters, is_plain, plain


class Small(HyperParameters):
    def __init__(self, size: int = 3, net: Any = None, **options: Any) -> None:
        later = "no argument"  # noqa: F841
        self.save_hyperparameters(ignore="net")


class Large(Small):
    def __init__(self, depth: int, size: int = 5) -> None:
        super().__init__(2 * size, nn.Linear(1, 1), rate=0.5)


def test_arguments_of_each_constructor_are_saved_and_those_of_the_outermost_count() -> None:
    assert Small(4).hparams == {"size": 4}
    assert Large(7).hparams == {"depth": 7, "size": 5, "rate": 0.5}


def test_changes_are_kept_apart_from_what_was_given() -> None:
    module = Large(7)
    module.hparams.depth = 8
    module.hparams["new"] = 1
    assert module.hparams_initial == {"depth": 7, "size": 5, "rate": 0.5}
    module.hparams_initial["depth"] = 9
    assert module.hparams_initial.depth == 7


class Chosen(HyperParameters):
    def __init__(self, a: int = 1, b: int = 2, names: tuple[Any, ...] = ()) -> None:
        self.save_hyperparameters(*names)


@pytest.mark.parametrize(
    ("names", "saved"),
    [(("a",), {"a": 1}), (({"x": 3},), {"x": 3}), ((Namespace(y=4),), {"y": 4}), (("b", "a"), {"a": 1, "b": 2})],
)
def test_arguments_are_chosen_by_name_or_given(names: tuple[Any, ...], saved: dict[str, Any]) -> None:
    assert Chosen(names=names).hparams == saved


def test_a_name_that_is_no_argument_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'c'.*no such argument.\n  known: \['a', 'b', 'names'\]"):
        Chosen(names=("c",))
    with pytest.raises(AttributeError, match=r"no hyperparameter 'dept'.\n  known: \['depth', 'rate', 'size'\]"):
        Large(7).hparams.dept  # noqa: B018


def test_plain_data_is_what_json_has_and_other_values_become_text() -> None:
    given = {"sizes": (1, 2), "nested": {"net": nn.ReLU()}, 3: None}
    assert not is_plain(given)
    assert plain(given) == {"sizes": [1, 2], "nested": {"net": "ReLU()"}, "3": None}
    assert is_plain(plain(given))
