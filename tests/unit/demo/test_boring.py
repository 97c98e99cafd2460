from __future__ import annotations

import importlib
from typing import Any

import pytest

import fabricx as fx

theirs: Any = pytest.importorskip("lightning.pytorch.demos.boring_classes")
ours: Any = importlib.import_module("fabricx.pytorch.demos.boring_classes")  # type checkers don't find made modules


@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel"])
def test_the_models_of_reports_of_defects_run(name: str, quiet: dict[str, Any]) -> None:
    trainer, model, data = fx.Trainer(fast_dev_run=True, **quiet), getattr(ours, name)(), ours.BoringDataModule()
    before = model.layer.weight.clone()
    trainer.fit(model)
    assert not model.layer.weight.equal(before)
    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        call(model, datamodule=data)
    reference = getattr(theirs, name)()
    reference.load_state_dict(model.state_dict())
    batch = ours.RandomDataset(32, 2)[0]
    assert model.test_step(batch, 0) == reference.test_step(batch, 0)
