from __future__ import annotations

from typing import Any

import fabricx.pytorch.demos.boring_classes as ours
import pytest

import fabricx as fx


@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel"])
def test_the_models_of_reports_of_defects_run(name: str, quiet: dict[str, Any]) -> None:
    theirs = pytest.importorskip("lightning.pytorch.demos.boring_classes")
    trainer, model, data = fx.Trainer(fast_dev_run=True, **quiet), getattr(ours, name)(), ours.BoringDataModule()
    before = model.layer.weight.clone()
    trainer.fit(model)
    assert not model.layer.weight.equal(before)
    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        call(model, datamodule=data)
    reference = getattr(theirs, name)()
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in reference.state_dict().items()
    }
    reference.load_state_dict(model.state_dict())
    batch = ours.RandomDataset(32, 2)[0]
    assert model.training_step(batch, 0) == reference.training_step(batch, 0) if name == "BoringModel" else True
