from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fabricx as fx
from fabricx.session.callback_states import as_saved, by_key, constructed, restore_changed, states_before
from fabricx.testing import TinyModule, tiny_loader


class Counts(fx.Callback):
    def __init__(self, metric: str) -> None:
        self.of = metric
        self.seen: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen, self.of]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def saved(*callbacks: fx.Callback) -> dict[str, str]:
    fx.Trainer(callbacks=callbacks)
    return {name: constructed(callback) for name, callback in by_key(callbacks).items()}


def test_callbacks_of_a_class_are_distinguished_by_their_values_in_any_order() -> None:
    first, second = Counts("a"), Counts("b")
    before = saved(Counts("a"), Counts("b"))
    saved(second, first)
    assert as_saved([second, first], before) == {"Counts": first, "Counts/2": second}


def test_equal_and_changed_values_keep_the_order() -> None:
    first, second = Counts("a"), Counts("c")
    saved(first, second)
    assert as_saved([second, first], saved(Counts("a"), Counts("b"))) == {"Counts": second, "Counts/2": first}
    assert as_saved([second, first], {}) == {"Counts": second, "Counts/2": first}
    same = Counts("c")
    saved(same)
    assert as_saved([same, second], saved(Counts("c"), Counts("c"))) == {"Counts": same, "Counts/2": second}


def test_a_resumed_run_with_another_order_gives_each_callback_its_own_state(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    trainer = fx.Trainer(max_epochs=1, callbacks=[Counts("a"), Counts("b")], **quiet)
    trainer.fit(TinyModule(), tiny_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    swapped = [Counts("b"), Counts("a")]
    fx.Trainer(max_epochs=2, callbacks=swapped, **quiet).fit(TinyModule(), tiny_loader(), ckpt_path=tmp_path / "a.ckpt")
    assert [callback.seen for callback in swapped] == [["b"], ["a"]]


class Large(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"weights": [torch.zeros(int(self.of) // 4)]}


class Empty(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {}


def test_states_of_repeated_work_are_copies_up_to_a_size() -> None:
    small, large, empty = Counts("a"), Large(str((1 << 24) + 4)), Empty("b")
    assert states_before([small, large, empty], None) == {"callbacks": {"Counts": {"seen": ["a"]}, "Empty": {}}}
    assert states_before([], fx.DataModule()) == {"callbacks": {}, "datamodule": {}}
    large.of = "4"
    assert states_before([small, large], None)["callbacks"]["Large"]["weights"][0].tolist() == [0.0]


class CountsStarts(fx.Callback):
    def __init__(self) -> None:
        self.starts = 0

    def state_dict(self) -> dict[str, Any]:
        return {"starts": self.starts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.starts = state_dict["starts"]


def test_only_changed_states_of_users_are_restored_after_a_repeated_hook() -> None:
    counts, timer, data = CountsStarts(), fx.callbacks.Timer(), fx.DataModule()
    before = states_before([counts, timer], data)
    counts.starts = 2
    timer.load_state_dict = None  # type: ignore[assignment, method-assign]
    restore_changed([counts, timer], data, before)
    assert counts.starts == 0
