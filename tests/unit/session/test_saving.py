"""Content of a checkpoint, and the parts that hooks may read and replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import EarlyStopping
from fabricx.session.callback_states import by_key
from fabricx.session.saving import weights_as_state_dict
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Keyed(fx.Callback):
    def __init__(self, key: str) -> None:
        self.key = key

    @property
    def state_key(self) -> str:
        return self.key


def test_states_of_callbacks_with_the_same_key_are_numbered_in_their_order() -> None:
    callbacks = [Keyed(key) for key in ("a", "b", "a", "a/2", "a")]
    assert by_key(callbacks) == dict(zip(("a", "b", "a/2", "a/2/2", "a/3"), callbacks, strict=True))


@pytest.mark.parametrize("trains", [True, False])
def test_hooks_read_weights_and_position_by_lightnings_names_and_only_new_weights_are_kept(trains: bool) -> None:
    state: dict[str, Any] = {"strategy": {"module": {"weight": 1}}}
    if trains:
        state["state"] = {"epoch": 3, "step": 40}
    position = {"epoch": 3, "global_step": 40} if trains else {}
    before = {**state, "strategy": {**state["strategy"]}}
    with weights_as_state_dict(state):
        assert state == {**before, "state_dict": {"weight": 1}, **position}
        state["state_dict"]["weight"] = 2  # the same dict
        state["mine"] = "kept"
    assert state == {**before, "strategy": {"module": {"weight": 2}}, "mine": "kept"}
    with weights_as_state_dict(state):
        state["state_dict"] = {"other": 5}
    assert state["strategy"]["module"] == {"other": 5}
    with weights_as_state_dict(state):
        del state["state_dict"]  # by a hook that doesn't want Lightning's entry
    assert state["strategy"]["module"] == {"other": 5}


class _Counts:
    """Counts calls of a hook in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"count": 0}

    def counts(self, *args: Any) -> None:
        self.calls["count"] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.calls

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict


@pytest.mark.parametrize(
    ("hook", "call", "accumulate"),
    [
        ("on_train_batch_end", 6, 4), ("on_validation_end", 2, 4), ("on_validation_batch_end", 2, 1),
        ("on_train_batch_start", 3, 1), ("on_train_epoch_start", 2, 1),
        ("on_train_epoch_end", 1, 1),
    ],
)  # fmt: skip
def test_callback_states_exclude_work_that_a_resumed_run_repeats(
    hook: str, call: int, accumulate: int, own_folder: Path
) -> None:
    def fit(ckpt: Path | None) -> tuple[int, ...]:
        counting, data, saver = (
            type("Counting", (_Counts, fx.Callback), {hook: _Counts.counts})(),
            Data(),
            fx.Callback(),
        )
        saved: list[Any] = []

        def save(trainer: fx.Trainer, *args: Any) -> None:
            saved.append(None)
            if ckpt is None and len(saved) == call:
                trainer.save_checkpoint(own_folder / "within.ckpt")

        setattr(saver, hook, save)
        early = EarlyStopping("loss", patience=50)
        options: dict[str, Any] = {**QUIET, "num_sanity_val_steps": 0, "accumulate_grad_batches": accumulate}
        trainer = fx.Trainer(max_epochs=2, val_check_interval=3, callbacks=[counting, early, saver], **options)
        trainer.fit(Validates(), datamodule=data, ckpt_path=ckpt)
        return counting.calls["count"], early.wait_count, data.calls["count"]

    class Validates(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", 1.0)

    class Data(_Counts, fx.DataModule):
        def train_dataloader(self) -> Any:
            return tiny_loader(32, 4)

        def val_dataloader(self) -> Any:
            return tiny_loader(4, 4)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.counts()
            return batch

    assert fit(None) == fit(own_folder / "within.ckpt")


@pytest.mark.parametrize(("name", "noted"), [("loops", True), ("other", False)])
def test_a_hook_that_reads_counters_of_lightnings_loops_gets_an_error_with_the_remedy(name: str, noted: bool) -> None:
    class Skips(TinyModule):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.skipped = checkpoint[name]["fit_loop"]["epoch_progress"]

    trainer = fx.Trainer(max_steps=1, **QUIET)
    trainer.fit(Skips(), tiny_loader())
    with pytest.raises(KeyError) as failed:
        trainer.save_checkpoint("saved.ckpt")
    assert (
        any("code that skips batches would skip them twice" in note for note in getattr(failed.value, "__notes__", []))
        is noted
    )
