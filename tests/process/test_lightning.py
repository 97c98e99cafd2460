"""Lightning's modules, data modules and callbacks train as the same code does in fabricx, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer, Reproducible
from fabricx.testing import QUIET
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

GLOBAL_BATCH = 8


class Body:
    """The methods of a module, combined with the base class of fabricx or Lightning."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        for parameter in self.net.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch[0])
        self.accuracy(output, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(output, batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class FabricxNet(Body, fx.Module):
    pass


class LightningNet(Body, L.LightningModule):
    pass


class Data(L.LightningDataModule):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        inputs = torch.randn(43, 4, generator=torch.Generator().manual_seed(4))
        self.data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, GLOBAL_BATCH // self.hparams.ranks, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, 5)

    predict_dataloader = val_dataloader


class RecordsLosses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert isinstance(pl_module, Body)
        self.losses.append(float(trainer.callback_metrics["loss"]))


def train(module: Any, strategy: Any, ranks: int, *callbacks: Any, ckpt_path: Path | None = None) -> fx.Trainer:
    torch.manual_seed(5)
    trainer = fx.Trainer(max_epochs=2, devices=ranks, strategy=strategy, callbacks=list(callbacks), **QUIET)
    trainer.fit(module, datamodule=Data(ranks), ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


SAME_AS_ONE = {
    "ddp": DDP,
    "fsdp": FSDP,
    "reproducible": Reproducible,
    "parameter_server": lambda: ParameterServer(servers=1),
    "parameter_server, optimizer on servers": lambda: ParameterServer(servers=1, optimizer="server"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, dict[str, Tensor], list[float]]:
    module, losses_recorder = FabricxNet(), RecordsLosses()
    with pytest.MonkeyPatch.context() as patch:  # `own_folder` has function scope
        patch.chdir(tmp_path_factory.mktemp("alone"))
        trainer = train(module, "single", 1, losses_recorder)
    return weights(module), trainer.callback_metrics, losses_recorder.losses


@pytest.mark.parametrize("make", SAME_AS_ONE.values(), ids=SAME_AS_ONE)
def test_a_lightning_module_on_two_ranks_trains_as_a_fabricx_module_in_a_single_process(make: Callable[[], Any], alone):
    expected, metrics, losses = alone
    module, losses_recorder = LightningNet(), RecordsLosses()
    trainer = train(module, make(), 2, losses_recorder)
    assert isinstance(module, LightningNet)
    torch.testing.assert_close(weights(module), expected, rtol=1e-5, atol=1e-6)  # float32 sums in a different order
    for name in ("loss", "val_loss", "accuracy"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    assert losses_recorder.losses == pytest.approx(losses, rel=1e-5)


def test_an_evaluation_on_two_ranks_counts_each_sample_once():
    module = LightningNet()
    several, single = (fx.Trainer(devices=ranks, **QUIET) for ranks in (2, 1))
    [actual], [expected] = (trainer.validate(module, Data(1), verbose=False) for trainer in (several, single))
    assert actual == pytest.approx(expected)
    predicted = torch.cat(several.predict(module, Data(1)))
    torch.testing.assert_close(predicted, torch.cat(single.predict(module, Data(1))))
    assert len(predicted) == 43


def test_local_steps_of_a_lightning_module_equal_those_of_a_fabricx_module():
    ours, theirs = FabricxNet(), LightningNet()
    for module in (ours, theirs):
        train(module, LocalSGD(every=2), 2)
    assert weights(theirs).equal(weights(ours))  # bit for bit: the same operations in the same order


class Ones(L.LightningModule):
    """Each update subtracts 1 in total over all shards of the gradient, in any order of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.count * 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_asynchronous_ranks_apply_every_update_once():
    module = Ones()
    trainer = train(module, AsyncSGD(damp=False), 2)
    assert trainer.global_step > 0
    assert module.count.item() == -trainer.global_step  # no update is lost or counted twice


class Generators(L.LightningModule):
    """Two optimizers in manual optimization, with the methods of Lightning's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = (nn.Linear(4, 1, bias=False) for _ in range(2))
        for layer in (self.first, self.second):
            nn.init.constant_(layer.weight, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for layer, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = layer(batch[0]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        seen = self.all_gather(loss.detach())
        assert seen.numel() == self.trainer.world_size

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.first.parameters(), lr=0.2), torch.optim.SGD(self.second.parameters(), lr=0.4)


@pytest.mark.parametrize("strategy", params(["ddp"], ["fsdp"]))
def test_manual_optimization_with_two_optimizers(strategy):
    several, single = Generators(), Generators()
    train(several, strategy, 2)
    train(single, "single", 1)
    # float32 sums in a different order.
    torch.testing.assert_close(weights(several), weights(single), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A checkpoint of Lightning with other weights, and the weights that a single process trains from it."""
    module = FabricxNet()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(-1.5)
    path = tmp_path_factory.mktemp("imported") / "a.ckpt"
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": {"lr": 0.1}, "epoch": 3, "global_step": 9}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        train(module, "single", 1)
    return path, weights(module)


@pytest.mark.parametrize(
    "name", params(["fsdp", "parameter_server, optimizer on servers"], ["ddp", "reproducible", "parameter_server"])
)
def test_training_begins_with_the_weights_of_a_lightning_checkpoint_on_each_rank(name: str, imported):
    path, expected = imported
    module = LightningNet()
    trainer = train(module, SAME_AS_ONE[name](), 2, ckpt_path=path)
    assert (trainer.current_epoch, trainer.global_step) == (2, 12)
    torch.testing.assert_close(weights(module), expected, rtol=1e-5, atol=1e-6)  # float32 sums in a different order


class BuildsInWorker(Body, L.LightningModule):
    """Creates its layers in the worker; under fsdp on the meta device until they are sharded."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def test_weights_are_loaded_into_layers_that_are_sharded_when_they_are_created(imported):
    path, expected = imported
    module = BuildsInWorker()
    trainer = train(module, "fsdp", 2, ckpt_path=path)
    torch.testing.assert_close(weights(module), expected, rtol=1e-5, atol=1e-6)  # float32 sums in a different order
    trainer.validate(module, Data(2), ckpt_path=path, verbose=False)  # on two ranks


def test_local_steps_begin_with_imported_weights(imported):
    path, _ = imported
    loaded, constructed = LightningNet(), FabricxNet.load_from_checkpoint(path)
    train(loaded, LocalSGD(every=2), 2, ckpt_path=path)
    train(constructed, LocalSGD(every=2), 2)
    assert weights(loaded).equal(weights(constructed))  # bit for bit: the same operations in the same order


def test_ranks_evaluate_the_weights_of_a_lightning_checkpoint(imported):
    path, _ = imported
    module = FabricxNet.load_from_checkpoint(path)
    [expected] = fx.Trainer(**QUIET).validate(module, Data(1), verbose=False)
    [actual] = fx.Trainer(devices=2, **QUIET).validate(LightningNet(), Data(2), ckpt_path=path, verbose=False)
    assert actual == pytest.approx(expected)


class Writes(LightningNet):
    def on_train_epoch_end(self) -> None:
        self.logger.experiment.log_metrics({"own": 1.0}, step=self.current_epoch)  # on every rank


def test_a_logger_of_lightning_writes_on_one_rank(tmp_path):
    logger = CSVLogger(tmp_path, name="here")
    options = {**QUIET, "logger": logger}
    fx.Trainer(max_epochs=1, devices=2, log_every_n_steps=1, **options).fit(Writes(), datamodule=Data(2))
    [folder] = (tmp_path / "here").iterdir()
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert "own" in rows[0]
    assert len(rows) > 1


class ImportSwapped(fx.pytorch.LightningModule):
    """A module of a Lightning user after the import swap."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.once = self.not_once = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, True, on_epoch=True, sync_dist=True, reduce_fx="avg")
        return loss

    def on_train_start(self) -> None:
        rank, strategy = self.global_rank, self.trainer.strategy
        total = float(strategy.reduce(torch.tensor(float(rank + 1)), reduce_op="sum"))
        mean = float(strategy.reduce(torch.tensor(rank), reduce_op="mean"))
        strategy.barrier("a name")
        decided = [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)]
        assert (decided, strategy.reduce_boolean_decision(True)) == ([False, True], True)
        assert (total, mean, strategy.broadcast(f"of {rank}")) == (3.0, 0.5, "of 0")
        assert (strategy.world_size, strategy.is_global_zero) == (2, rank == 0)
        assert (self.trainer.num_devices, self.trainer.node_rank) == (2, 0)
        fx.pytorch.utilities.rank_zero_only(self._count)()
        ran = torch.tensor([self.once])
        assert int(self.all_gather(ran).sum()) == 1  # on the main rank only

    def _count(self) -> None:
        self.once += 1

    def on_train_batch_end(self) -> None:  # type: ignore[override]
        self.not_once += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_an_import_swap_trains_on_two_ranks_and_its_checkpoint_is_a_file(tmp_path):
    module, data = ImportSwapped(), TensorDataset(torch.randn(16, 4))
    saver = fx.pytorch.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "callbacks": [saver]}
    trainer = fx.pytorch.Trainer(max_epochs=1, devices=2, strategy="ddp_find_unused_parameters_true", **options)
    trainer.fit(model=module, datamodule=fx.pytorch.LightningDataModule.from_datasets(data, batch_size=4))
    assert (module.once, module.not_once, trainer.global_step) == (1, 2, 2)
    assert (trainer.state.fn, trainer.state.finished) == ("fit", True)
    assert {"loss", "loss_step", "loss_epoch"} <= set(trainer.callback_metrics)
    saved = torch.load(tmp_path / "last.ckpt")  # ranks write parts, which the main rank combines
    assert torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)
    assert [len(states) for states in (saved["fabricx"]["ranks"], saved["fabricx"]["strategy"]["optimizers"])] == [2, 1]
    trainer = fx.pytorch.Trainer(max_epochs=2, devices=2, strategy="fsdp", **QUIET)
    trainer.fit(ImportSwapped(), DataLoader(data, 4), ckpt_path=tmp_path / "last.ckpt")  # each rank reads its shards
    assert trainer.global_step == 4
