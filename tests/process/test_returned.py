"""What the script has after a run in workers: its own objects, with the attributes that the run has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.strategies import DDP, FSDP
from fabricx.testing import QUIET, TinyModule

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Net(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self._steps, self.layer.calls = [self.layer.weight], 0, []
        self.register_buffer("total", torch.zeros(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._steps += 1
        self.total += 1.0
        self.layer.calls.append(batch_idx)
        return super().training_step((batch[0], batch[0][:, :1]), batch_idx)


class Data(fx.DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.train: Any = None

    def setup(self, stage: str) -> None:
        if self.train is None:
            self.train = TensorDataset(torch.linspace(-1, 1, 32).reshape(8, 4))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=2)


class Keeps(fx.Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.module, self.trainer = module, trainer


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_the_script_has_its_own_objects_with_the_changed_attributes(strategy: Any) -> None:
    net, data, keeps = Net(), Data(), Keeps()
    trainer = fx.Trainer(strategy=strategy(), max_epochs=1, callbacks=[keeps], **QUIET | {"devices": 2})
    trainer.fit(net, datamodule=data)
    assert (net._steps, net.layer.calls, float(net.total)) == (2, [0, 1], 2.0)
    assert net.tied[0] is net.layer.weight
    assert (keeps.module, keeps.trainer) == (net, trainer)
    assert len(data.train) == 8
    if strategy is DDP:
        assert net.optimizers().param_groups[0]["params"][0] is net.layer.weight
    else:
        with pytest.raises(RuntimeError, match="the optimizers and schedules remain in the worker processes"):
            net.optimizers()


class Registers(Net):
    """Registers a buffer and a parameter during the run."""

    def on_train_start(self) -> None:
        self.layer.register_buffer("late", torch.zeros(2))
        self.layer.register_parameter("scale", torch.nn.Parameter(torch.ones(3), requires_grad=False))

    def on_train_batch_end(self, *args: Any) -> None:
        self.layer.get_buffer("late").add_(1.0)


def test_buffers_and_parameters_that_the_run_has_registered_are_in_the_script() -> None:
    module = Registers()
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 32).reshape(8, 4)), 2)
    fx.Trainer(max_epochs=1, devices=2, strategy=DDP(), **QUIET).fit(module, data)
    assert module.layer.get_buffer("late").tolist() == [2.0, 2.0]
    assert dict(module.layer.named_buffers()).keys() == {"late"}
    assert module.layer.get_parameter("scale").tolist() == [1.0, 1.0, 1.0]
