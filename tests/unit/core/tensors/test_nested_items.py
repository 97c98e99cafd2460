"""Collections of users are searched, even if their classes raise errors in common methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.core.tensors.nested_items import items_of
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Term(tuple[Any, ...]):
    """Like the tuples of e3nn."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("collection", "items"),
    [
        (Term((4, 5)), [(0, 4), (1, 5)]),
        ([6], [(0, 6)]),
        ({"a": 7}, [("a", 7)]),
        ([1, 2, 3], []),
        ((), []),
        (torch.Size([2]), [(0, 2)]),
    ],
)
def test_items_of_small_collections(collection: Any, items: list[tuple[Any, Any]]) -> None:
    assert list(items_of(collection, most=2)) == items


class Holds(fx.Callback):
    def __init__(self, term: Term) -> None:
        self.term = term


@pytest.mark.parametrize("where", ["module", "submodule", "hyperparameter", "callback", "dataset"])
def test_a_run_accepts_nested_objects_anywhere(where: str) -> None:
    term, module, loader = Term((1, (2, 3))), TinyModule(), tiny_loader(4, 4)
    owner: Any = {"submodule": module.layer, "dataset": loader.dataset}.get(where, module)
    if where == "hyperparameter":
        module.save_hyperparameters({"term": term})
    owner.term = [term]
    callbacks = [Holds(term)] if where == "callback" else []
    trainer = fx.Trainer(max_steps=1, callbacks=callbacks, **QUIET)
    trainer.fit(module, loader)
    assert trainer.global_step == 1
