"""Placeholders for objects that were not read: each use is an error with the remedies."""

from __future__ import annotations

import copy
import operator
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fabricx.checkpoint.unread import Unread, is_unread, name_of, names_in
from fabricx.errors import CheckpointError


def assign(value: Any) -> None:
    nn.Linear(1, 1).loss = value


@pytest.mark.parametrize(
    "use",
    [
        lambda obj: obj.scale, lambda obj: obj(1), iter, len, bool, float, lambda obj: obj[0], lambda obj: 1 in obj,
        lambda obj: obj == 1, lambda obj: isinstance(obj, dict), copy.deepcopy, pickle.dumps, assign,
        lambda obj: setattr(obj, "a", 1), operator.neg, lambda obj: obj + 1, lambda obj: 1 + obj,
        lambda obj: hasattr(obj, "a"), lambda obj: dict([obj]), lambda obj: [*obj], os.fspath,
    ],
)  # fmt: skip
def test_each_use_is_an_error_that_names_class_and_remedies(use: Callable[[Any], Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        use(Unread("pkg.Loss", "a.ckpt"))
    for part in ("a.ckpt", "pkg.Loss", "weights_only=False", "torch.serialization.add_safe_globals([pkg.Loss])"):
        assert part in str(caught.value)


def test_an_unread_object_is_printed_and_found_in_containers() -> None:
    unread = Unread("pkg.Loss", "a.ckpt")
    assert repr([unread]) == "[<pkg.Loss, not read>]"
    assert is_unread(unread)
    assert not is_unread(None)
    assert name_of(unread) == "pkg.Loss"
    assert list(names_in({"a": [1, (unread,)], "b": {unread}})) == ["pkg.Loss"]
