from __future__ import annotations

import importlib
from typing import Any

import pytest

import fabricx as fx

theirs: Any = pytest.importorskip("lightning.pytorch.demos.boring_classes")
ours: Any = importlib.import_module("fabricx.pytorch.demos.boring_classes")  # not visible to type checkers


@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel"])
def test_models_for_bug_reports_run(name: str, quiet: dict[str, Any]) -> None:
    trainer, model, data = fx.Trainer(fast_dev_run=True, **quiet), getattr(ours, name)(), ours.BoringDataModule()
    before = model.layer.weight.clone()
    trainer.fit(model)
    assert not model.layer.weight.equal(before)
    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        call(model, datamodule=data)
    assert str(ours.BoringDataModule()).count("dataloader: None") == 4  # before setup
    reference = getattr(theirs, name)()
    reference.load_state_dict(model.state_dict())
    batch = ours.RandomDataset(32, 2)[0]
    assert model.test_step(batch, 0) == reference.test_step(batch, 0)


def test_streams_and_dicts_of_random_vectors_have_lightning_s_shapes() -> None:
    for name in ("RandomIterableDataset", "RandomIterableDatasetWithLen"):
        dataset, reference = getattr(ours, name)(32, 3), getattr(theirs, name)(32, 3)
        assert [item.shape for item in dataset] == [item.shape for item in reference]
        assert hasattr(dataset, "__len__") == hasattr(reference, "__len__")
    pair, other = ours.RandomDictDataset(4, 2)[1], theirs.RandomDictDataset(4, 2)[1]
    assert {name: value.shape for name, value in pair.items()} == {name: value.shape for name, value in other.items()}
    assert pair["b"].equal(pair["a"] + 2)
