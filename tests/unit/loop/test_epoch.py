"""The start and the end of an epoch: loaders that are created again, and stops that hooks request."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, Sampler

import fabricx as fx
from fabricx.testing import TinyModule, tiny_data, tiny_loader


class Recorder(TinyModule):
    """Records (event, epoch, update), and requests a stop in a hook."""

    def __init__(self, stops_in: str = "", at: int = 0) -> None:
        super().__init__()
        self.stops_in, self.at, self.notes = stops_in, at, []

    def _pass(self, hook: str, note: str = "") -> None:
        if note:
            self.notes.append((note, self.current_epoch, self.global_step))
        if hook == self.stops_in and self.global_step >= self.at and not self.trainer.sanity_checking:
            self.trainer.should_stop = True

    def on_train_epoch_start(self) -> None:
        self._pass("on_train_epoch_start", "starts")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._pass("training_step")
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self._pass("on_validation_start", "validates")

    def on_train_epoch_end(self) -> None:
        self._pass("on_train_epoch_end", "ends")


def notes(quiet: dict[str, Any], stops_in: str, at: int, **options: Any) -> list[Any]:
    module = Recorder(stops_in, at)
    settings: dict[str, Any] = {**quiet, "num_sanity_val_steps": 0, "max_epochs": 3, **options}
    fx.Trainer(**settings).fit(module, tiny_loader(16, 4), tiny_loader(4, 4))
    return module.notes


FIRST = [("starts", 0, 0), ("validates", 0, 4), ("ends", 0, 4)]
AT_LAST = [("validates", 3), ("validates", 4), ("ends", 4)]  # as in Lightning, also after the last batch of an epoch


@pytest.mark.parametrize(
    ("stops_in", "at", "options", "expected"),
    [
        ("training_step", 2, {}, [("starts", 0, 0), ("validates", 0, 3), ("ends", 0, 3)]),
        ("training_step", 3, {}, FIRST),  # the validation of the epoch is not repeated
        ("training_step", 3, {"val_check_interval": 3}, [("starts", 0, 0), *((v, 0, s) for v, s in AT_LAST)]),
        ("on_validation_start", 2, {"val_check_interval": 2}, [("starts", 0, 0), ("validates", 0, 2), ("ends", 0, 2)]),
        ("training_step", 1, {"check_val_every_n_epoch": 2}, [("starts", 0, 0), ("ends", 0, 2)]),
        ("training_step", 1, {"limit_val_batches": 0}, [("starts", 0, 0), ("ends", 0, 2)]),
        ("training_step", 1, {"min_epochs": 1}, FIRST),
        ("training_step", 1, {"min_steps": 5}, [*FIRST, ("starts", 1, 4), ("validates", 1, 5), ("ends", 1, 5)]),
        ("on_train_epoch_start", 4, {}, [*FIRST, ("starts", 1, 4), ("ends", 1, 4)]),
        ("on_train_epoch_start", 0, {}, [("starts", 0, 0), ("ends", 0, 0)]),
        ("on_train_epoch_end", 4, {}, FIRST),
    ],
    ids=str,
)
def test_a_run_that_a_hook_stops_is_validated_once(
    stops_in: str, at: int, options: dict[str, Any], expected: list[Any], quiet: dict[str, Any]
) -> None:
    assert notes(quiet, stops_in, at, **options) == expected


class Fewer(Sampler[int]):
    """Yields fewer samples than its length."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Any:
        return iter(range(9))


class FewerOfStream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Any:
        return iter([*tiny_data(9)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "steps"), [({}, [3, 6]), ({"val_check_interval": 0.5}, [2, 5])])
def test_an_epoch_with_fewer_batches_than_its_length_is_validated_at_its_end(
    stream: bool, options: dict[str, Any], steps: list[int], quiet: dict[str, Any]
) -> None:
    module = Recorder()
    settings: dict[str, Any] = {**quiet, "num_sanity_val_steps": 0, "max_epochs": 2, **options}
    data: Any = FewerOfStream() if stream else tiny_data(16)
    loader: DataLoader[Any] = DataLoader(data, 4, sampler=None if stream else Fewer())
    fx.Trainer(**settings).fit(module, loader, tiny_loader(4, 4))
    assert [step for note, _, step in module.notes if note == "validates"] == steps


def test_sums_of_an_epoch_that_was_stopped_and_validated_are_continued(quiet: dict[str, Any], tmp_path: Any) -> None:
    class Means(Recorder):
        def on_train_start(self) -> None:
            self.log("starts", float(self.global_step))

        def on_train_epoch_start(self) -> None:  # runs again in the resumed epoch
            super().on_train_epoch_start()
            self.log("begins", 1.0 + self.global_step, reduce_fx="sum")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("index", float(batch_idx), on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "stopped")

    data = tiny_loader(16, 4), tiny_loader(4, 4)
    fx.Trainer(max_epochs=1, **quiet).fit(Means("training_step", 1), *data)
    resumed = fx.Trainer(max_epochs=1, **quiet)
    resumed.fit(Means(at=99), *data, ckpt_path=tmp_path / "stopped")
    assert resumed.global_step == 4
    values = {name: float(resumed.callback_metrics[name]) for name in ("index_epoch", "begins", "starts")}
    assert values == {"index_epoch": 1.5, "begins": 1.0, "starts": 0.0}


def reloads(quiet: dict[str, Any], **options: Any) -> list[str]:
    events: list[str] = []

    class Data(fx.DataModule):
        def train_dataloader(self) -> Any:
            events.append("train")
            return tiny_loader(8, 4)

        def val_dataloader(self) -> Any:
            events.append("val")
            return tiny_loader(4, 4)

    class Epochs(TinyModule):
        def on_train_epoch_start(self) -> None:
            events.append(str(self.current_epoch))

        def on_validation_start(self) -> None:
            events.append("V")

    settings: dict[str, Any] = {**quiet, "max_epochs": 4, "num_sanity_val_steps": 0, **options}
    fx.Trainer(**settings).fit(Epochs(), datamodule=Data())
    return events


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "train val 0 V train 1 val V train 2 val V train 3 val V"),
        ({"reload_dataloaders_every_n_epochs": 2}, "train val 0 V 1 V train 2 val V 3 V"),
        (
            {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2, "val_check_interval": 0.5},
            "train val 0 train 1 val V V train 2 train 3 val V V",
        ),
        ({}, "train val 0 V 1 V 2 V 3 V"),
    ],
    ids=str,
)
def test_loaders_of_both_kinds_are_created_again(options: dict[str, Any], expected: str, quiet: dict[str, Any]) -> None:
    assert reloads(quiet, **options) == expected.split()


def test_a_validation_loader_that_is_created_again_may_have_another_length(quiet: dict[str, Any]) -> None:
    class Grows(TinyModule):
        indices: list[Any] = []

        def val_dataloader(self) -> Any:
            few = [tiny_loader(4 + 4 * self.current_epoch, 4)]
            return few if self.current_epoch < 2 else few * 2

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.indices.append((self.current_epoch, dataloader_idx, batch_idx))

    trainer = fx.Trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, **{**quiet, "num_sanity_val_steps": 0})
    trainer.fit(Grows(), tiny_loader(8, 4))
    second = [(2, loader, batch) for loader in (0, 1) for batch in range(3)]
    assert Grows.indices == [(0, 0, 0), (1, 0, 0), (1, 0, 1), *second]
    assert trainer.num_val_batches == [3, 3]


class _Other(fx.Callback): ...


class _Changes(fx.Callback):
    def __init__(self, hook: str, change: Any) -> None:
        setattr(self, hook, lambda trainer, *args: change(trainer))


@pytest.mark.parametrize(
    "hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_validation_start", "on_train_end"]
)
def test_a_hook_that_adds_a_callback_is_refused_since_it_would_not_be_called(hook: str, quiet: dict[str, Any]) -> None:
    changes = _Changes(hook, lambda trainer: trainer.callbacks.append(_Other()))
    trainer = fx.Trainer(max_epochs=1, callbacks=[changes], **quiet)
    if hook == "on_train_end":  # for the next run
        trainer.fit(TinyModule(), tiny_loader(8, 4))
        assert type(trainer.callbacks[-1]) is _Other
        return
    with pytest.raises(ValueError, match=r"a hook has added _Other in trainer\.callbacks, which has no effect"):
        trainer.fit(TinyModule(), tiny_loader(8, 4), tiny_loader(4, 4))


def test_a_hook_that_removes_a_callback_or_changes_their_order_is_refused(quiet: dict[str, Any]) -> None:
    def fit(change: Any) -> None:
        callbacks = [_Changes("on_fit_start", change), _Other()]
        fx.Trainer(max_epochs=1, callbacks=callbacks, **quiet).fit(TinyModule(), tiny_loader(8, 4))

    with pytest.raises(ValueError, match=r"a hook has removed _Other in trainer\.callbacks"):
        fit(lambda trainer: trainer.callbacks.pop())
    with pytest.raises(ValueError, match=r"a hook has changed the order of the callbacks in trainer\.callbacks"):
        fit(lambda trainer: trainer.callbacks.reverse())
    with pytest.raises(ValueError, match=r"a hook has added _Other in trainer\.callbacks"):
        fit(lambda trainer: setattr(trainer, "callbacks", [*trainer.callbacks, _Other()]))


@pytest.mark.parametrize(
    ("hook", "name", "value"),
    [
        ("on_fit_start", "limit_train_batches", 1), ("on_train_epoch_start", "limit_val_batches", 1),
        ("on_train_batch_end", "val_check_interval", 1), ("on_validation_end", "max_time", "00:00:01:00"),
    ],
)  # fmt: skip
def test_options_that_a_hook_sets_after_they_were_read_are_refused(
    hook: str, name: str, value: Any, quiet: dict[str, Any]
) -> None:
    changes = _Changes(hook, lambda trainer: setattr(trainer, name, value))
    trainer = fx.Trainer(max_epochs=2, callbacks=[changes], reload_dataloaders_every_n_epochs=1, **quiet)
    with pytest.raises(ValueError, match=rf"a hook has set trainer\.{name}='?{value}'?, but the run has begun with "):
        trainer.fit(TinyModule(), tiny_loader(8, 4), tiny_loader(4, 4))


def test_a_limit_set_by_a_hook_applies_to_reloaded_loaders(quiet: dict[str, Any]) -> None:
    class Creates(TinyModule):
        def train_dataloader(self) -> Any:
            return tiny_loader(8, 4)

    changes = _Changes("on_train_start", lambda trainer: setattr(trainer, "limit_train_batches", 1))
    trainer = fx.Trainer(max_epochs=2, callbacks=[changes], reload_dataloaders_every_n_epochs=1, **quiet)
    trainer.fit(Creates())
    assert trainer.global_step == 2 + 1
