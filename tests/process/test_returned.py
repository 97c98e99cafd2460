"""After a run in workers, the script's own objects have the attributes that the run has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, Single, TensorMesh
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.soak import params

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


class KeepsReferences(fx.Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.module, self.trainer = module, trainer
        trainer.fit_loop.max_steps = 3


@pytest.mark.parametrize("strategy", params([DDP], [FSDP]))
def test_the_scripts_own_objects_have_the_changed_attributes_after_a_run(strategy: Any) -> None:
    net, data, keeps = Net(), Data(), KeepsReferences()
    accumulates = fx.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    trainer = fx.Trainer(strategy=strategy(), max_epochs=2, callbacks=[keeps, accumulates], **QUIET | {"devices": 2})
    trainer.fit(net, datamodule=data)
    assert (trainer.accumulate_grad_batches, trainer.max_steps) == (2, 3)  # set by hooks
    assert (net._steps, net.layer.calls, float(net.total)) == (4, [0, 1, 0, 1], 4.0)
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


def test_buffers_and_parameters_registered_in_the_run_are_returned_to_the_script() -> None:
    module = Registers()
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 32).reshape(8, 4)), 2)
    fx.Trainer(max_epochs=1, devices=2, strategy=DDP(), **QUIET).fit(module, data)
    assert module.layer.get_buffer("late").tolist() == [2.0, 2.0]
    assert dict(module.layer.named_buffers()).keys() == {"late"}
    assert module.layer.get_parameter("scale").tolist() == [1.0, 1.0, 1.0]


class Resized(TinyModule):
    """Sets a buffer and a parameter of other shapes in `setup`, like a mean and a number of classes of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(1))])

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.mean, self.biases[0] = torch.tensor(3.0), nn.Parameter(torch.zeros(2, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + (self.biases[0] - self.mean).square().sum()


def test_tensors_with_shapes_changed_by_setup_are_returned_to_the_script_and_used_by_the_next_run() -> None:
    module = Resized()
    trainer = fx.Trainer(max_epochs=1, devices=2, strategy=DDP(), **QUIET)
    trainer.fit(module, tiny_loader())
    assert module.mean.shape == ()
    assert float(module.mean) == 3.0
    assert module.biases[0].shape == (2, 2)
    assert (module.biases[0] > 0).all()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer.validate(module, tiny_loader(), verbose=False)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Built(fx.Module):
    """Builds layers in `setup`, like a module whose sizes depend on the data.

    Args:
        kind: "tied" shares a weight with a layer of `__init__`; "lazy" materializes a lazy layer.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.kind, self.first = kind, nn.Linear(4, 4)
        self.head: Any = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1)) if kind == "lazy" else None
        self.gain: Any = None

    def setup(self, stage: str) -> None:
        if self.gain is not None:
            return
        torch.manual_seed(4)
        self.head = self.head or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.gain = nn.Parameter(torch.ones(1))
        if self.kind == "tied":
            self.head[0].weight = self.first.weight
        self.head.register_buffer("scale", torch.tensor(0.5), persistent=False)
        with torch.no_grad():
            self.head(torch.ones(1, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.head(self.first(batch[0])) * self.head.scale * self.gain).square().mean()

    test_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    params([(DDP, "lazy"), (FSDP, "layers"), (TensorMesh, "tied")], [(DDP, "layers"), (FSDP, "tied")]),
)
def test_layers_built_by_setup_are_returned_to_the_script_and_trained_further(strategy: Any, kind: str) -> None:
    batch = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    trained = []
    for devices, makes in ((1, Single), (2, strategy)):
        net = Built(kind)
        for _ in range(2):
            trainer = fx.Trainer(strategy=makes(), max_epochs=1, **QUIET | {"devices": devices})
            trainer.fit(net, DataLoader(batch, 4 if makes is DDP or makes is FSDP else 8))
        trained.append(net)
    alone, net = trained
    assert net.state_dict().keys() == alone.state_dict().keys()
    for name, weight in alone.state_dict().items():
        assert torch.allclose(net.state_dict()[name], weight, atol=1e-6)  # float32 sums in a different order
    assert float(net.head.scale) == 0.5
    assert (net.head[0].weight is net.first.weight) == (kind == "tied")


class Lazy(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(1)


def test_lazy_layers_train_in_one_process_after_a_validation_and_are_refused_on_several_ranks() -> None:
    net = Lazy()
    fx.Trainer(max_epochs=1, **QUIET).fit(net, tiny_loader(), tiny_loader())
    assert tuple(net.layer.weight.shape) == (1, 4)
    for strategy in (DDP(), TensorMesh()):
        with pytest.raises(WorkerFailed, match=r"layer\.weight has no shape .* call the lazy layer with an example in"):
            fx.Trainer(strategy=strategy, max_epochs=1, **QUIET | {"devices": 2}).fit(Lazy(), tiny_loader())
    with pytest.raises(WorkerFailed, match=r"layer\.weight has no shape before the first forward"):
        fx.Trainer(strategy=DDP(), **QUIET | {"devices": 2}).validate(Lazy(), tiny_loader())


class Records(TinyModule):
    """Registers a hook in the first forward only, guarded by an attribute, like models of transformers 5."""

    def record(self) -> int:
        kept: list[Any] = []
        if not getattr(self.layer, "_hooked", False):
            self.layer.register_forward_hook(lambda module, arguments, output: module.kept.append(output.detach()))
            self.layer._hooked = True
        self.layer.kept = kept
        self.layer(torch.ones(1, 4))
        self.layer.kept = []
        return len(kept)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.record() == 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.record() == 1


@pytest.mark.parametrize("strategy", params([DDP], [FSDP]))
def test_a_hook_registered_by_the_first_forward_is_kept_in_the_script_and_the_next_run(strategy: Any) -> None:
    module, trainer = Records(), fx.Trainer(strategy=strategy(), max_epochs=1, **QUIET | {"devices": 2})
    trainer.fit(module, tiny_loader())
    assert module.record() == 1
    trainer.validate(module, tiny_loader(), verbose=False)
    assert module.record() == 1
