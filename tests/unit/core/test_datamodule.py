"""A data module: its loaders and hooks in a run."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.testing import TinyModule, tiny_loader


class Data(fx.DataModule):
    def __init__(self, samples: int = 8) -> None:
        self.save_hyperparameters()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup " + stage)

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown " + stage)

    def train_dataloader(self) -> Any:
        return tiny_loader(self.hparams.samples, 4)

    def val_dataloader(self) -> Any:
        return [tiny_loader(4, 4), tiny_loader(4, 4)]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(f"transfer {dataloader_idx}")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 100 * (1 + dataloader_idx), *batch[1:]]

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(f"failed: {exception}")


class Records(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.offsets: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.offsets.append(round(float(batch[0].mean()) / 100))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.offsets.append(round(float(batch[0].mean()) / 100))

    def teardown(self, stage: str) -> None:
        data: Any = self.trainer.datamodule
        data.calls.append("teardown of the module")


def test_its_loaders_are_read_and_its_hooks_called_around_each_batch(quiet: dict[str, Any]) -> None:
    data, module = Data(), Records()
    fx.Trainer(max_epochs=1, num_sanity_val_steps=0, **quiet).fit(module, datamodule=data)
    assert module.offsets == [1, 1, 1, 2]
    assert data.calls == [
        "prepare_data", "setup fit", "transfer 0", "transfer 0", "transfer 0", "transfer 1", "teardown fit",
        "teardown of the module",
    ]  # fmt: skip


def test_an_error_of_a_run_calls_its_exception_hook(quiet: dict[str, Any]) -> None:
    class Fails(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyError("broken")

    data = Data()
    try:
        fx.Trainer(max_epochs=1, **quiet).fit(Fails(), data)
    except KeyError:
        data.calls.append("raised")
    assert data.calls[-2:] == ["failed: 'broken'", "raised"]


def test_it_is_sent_to_workers_without_its_trainer() -> None:
    data = Data(samples=12)
    data.trainer = open  # type: ignore[assignment]
    sent = pickle.loads(pickle.dumps(data))
    assert sent.trainer is None
    assert sent.hparams == {"samples": 12}


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


def test_an_attribute_that_only_prepare_data_assigns_is_an_error_that_names_setup() -> None:
    class Prepares(fx.DataModule):
        def prepare_data(self) -> None:
            self.rows = [1]

    with pytest.raises(AttributeError, match=r"no attribute 'rows'.*assign it in setup"):
        _ = Prepares().rows  # as on a rank that has not prepared the data
    with pytest.raises(AttributeError, match=r"no attribute 'columns'$"):
        _ = Prepares().columns  # type: ignore[attr-defined]


def test_from_datasets_creates_loaders() -> None:
    data = fx.DataModule.from_datasets(Numbers(), [Numbers(), Numbers()], predict_dataset=Numbers(), batch_size=3)
    assert sorted(int(number) for batch in data.train_dataloader() for number in batch) == list(range(6))
    assert [batch.tolist() for batch in data.val_dataloader()[1]] == [[0, 1, 2], [3, 4, 5]]
    assert [loader.batch_size for loader in data.val_dataloader()] == [3, 3]
    assert data.test_dataloader() is None
    assert type(data.train_dataloader().sampler).__name__ == "RandomSampler"
    assert pickle.loads(pickle.dumps(data)).predict_dataloader().batch_size == 3


def test_its_constructor_receives_only_declared_sizes() -> None:
    class Sized(fx.DataModule):
        def __init__(self, name: str, batch_size: int) -> None:
            self.save_hyperparameters()

    assert Sized.from_datasets(train_dataset={"a": Numbers()}, batch_size=2, name="x").hparams == {
        "name": "x", "batch_size": 2,
    }  # fmt: skip


def test_its_hyperparameters_are_loaded_from_a_checkpoint(quiet: dict[str, Any], tmp_path: Any) -> None:
    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(Records(), datamodule=Data(samples=12))
    path = trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert Data.load_from_checkpoint(path).hparams == {"samples": 12}
    assert Data.load_from_checkpoint(path, samples=4).hparams == {"samples": 4}
    torch.save({"state_dict": {}, "datamodule_hyper_parameters": {"samples": 20}}, tmp_path / "theirs.ckpt")
    assert Data.load_from_checkpoint(tmp_path / "theirs.ckpt").hparams == {"samples": 20}
    assert Data.load_from_checkpoint(path, weights_only=False).hparams == {"samples": 12}


class Encoder:
    """A hyperparameter of a user's class."""

    size = 3


def test_objects_among_its_hyperparameters_are_loaded_with_permission(quiet: dict[str, Any], tmp_path: Any) -> None:
    class Encoded(Data):
        def __init__(self, samples: int = 8, encoder: Any = None) -> None:
            super().__init__(samples)
            self.save_hyperparameters()

    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(Records(), datamodule=Encoded(12, Encoder()))
    path = trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=r"(?s)Encoder, which was not read.*now encoder has the default"):
        assert Encoded.load_from_checkpoint(path).hparams == {"samples": 12, "encoder": None}
    with torch.serialization.safe_globals([Encoder]):
        assert Encoded.load_from_checkpoint(path).hparams.encoder.size == 3
    assert type(Encoded.load_from_checkpoint(path, weights_only=False).hparams.encoder) is Encoder


def test_its_string_has_the_number_of_samples_of_each_loader() -> None:
    class Later(fx.DataModule):
        def setup(self, stage: str) -> None:
            self.data = tiny_loader(8, 4)

        def train_dataloader(self) -> Any:
            return self.data

        def val_dataloader(self) -> Any:
            return [self.data, self.data]

        def predict_dataloader(self) -> Any:
            return {"a": self.data, "b": [1, 2]}

    data = Later()
    words = ("Train", "Validation", "Test", "Predict")
    assert str(data) == "\n".join(f"{{{word} dataloader: None}}" for word in words)
    data.setup("fit")
    sizes = ("size=8", "1. size=8 ; 2. size=8", "None", "a. size=8 ; b. size=NA")
    assert str(data) == "\n".join(f"{{{word} dataloader: {size}}}" for word, size in zip(words, sizes, strict=True))


class _Counts(Data):
    seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_its_state_is_loaded_from_a_checkpoint(quiet: dict[str, Any], tmp_path: Any) -> None:
    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(Records(), datamodule=_Counts(samples=12))
    for single in (True, False):
        path = trainer.save_checkpoint(tmp_path / f"{single}.ckpt", single_file=single)
        loaded = _Counts.load_from_checkpoint(path, samples=4)
        assert (loaded.seen, loaded.hparams) == (7, {"samples": 4})
    content = {"state_dict": {}, "datamodule_hyper_parameters": {"samples": 20}, "_Counts": {"seen": 3}}
    torch.save(content, tmp_path / "theirs.ckpt")
    assert _Counts.load_from_checkpoint(tmp_path / "theirs.ckpt").seen == 3
