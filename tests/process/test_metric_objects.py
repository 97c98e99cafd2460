"""Metric objects and values have the same states and names after a run, for any distribution of its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.utilities import dim_zero_cat

import fabricx as fx
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, Mesh, ParameterServer, Single
from fabricx.testing import QUIET, TinyModule
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

GLOBAL_BATCH = 4


class Count(torchmetrics.Metric):
    """A user's metric with the defaults of torchmetrics (`full_state_update=None`)."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.seen += values.numel()

    def compute(self) -> Any:
        return self.seen


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.confmat = torchmetrics.ConfusionMatrix("multiclass", num_classes=3)


class Net(fx.Module):
    """Updates metric objects from the data only, so that the strategy has no influence on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.inner = Inner()
        self.inner.confmat(torch.tensor([0, 1]), torch.tensor([0, 0]))  # before the run: counted once
        self.values = torchmetrics.CatMetric()
        self.values.update(-1.0)
        self.group = torchmetrics.MetricCollection([  # the metrics share their states
            MulticlassAccuracy(3, average="micro"), MulticlassF1Score(3, average="micro"),
        ])  # fmt: skip
        self.correlation = torchmetrics.PearsonCorrCoef()
        self.logged = torchmetrics.MeanMetric()
        self.best = torchmetrics.MinMaxMetric(torchmetrics.MaxMetric())
        self.counts = [Count()]

    def setup(self, stage: str) -> None:
        if not hasattr(self, "late"):
            self.late = torchmetrics.MetricTracker(torchmetrics.SumMetric(), maximize=True)
            self.late.increment()

    def step(self, batch: Any) -> Tensor:
        inputs, labels, guesses = batch
        self.inner.confmat.update(guesses, labels)
        self.values.update(inputs[:, 0])
        self.group.update(guesses, labels)
        self.correlation.update(inputs[:, 0], inputs[:, 1])
        self.logged(inputs[:, 0])
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        self.best.update(inputs[:, 0].max())
        self.counts[0].update(labels)
        self.late.update(inputs[:, 1].sum())
        return nn.functional.cross_entropy(self.layer(inputs), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)

    def on_train_end(self) -> None:
        self.best.compute()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CountsSamples(fx.Callback):
    def __init__(self) -> None:
        self.seen = Count()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.update(batch[1])


def loader(samples: int, ranks: int) -> Any:
    random = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(samples, 2, generator=random), torch.randint(3, (samples,), generator=random),
        torch.randint(3, (samples,), generator=random),
    )  # fmt: skip
    return DataLoader(data, GLOBAL_BATCH // ranks)


def states(module: Any, watch: CountsSamples) -> dict[str, Any]:
    metrics = {
        "confmat": module.inner.confmat, "values": module.values, "correlation": module.correlation,
        "counts": module.counts[0], "best": module.best._base_metric, "late": module.late, "watch": watch.seen,
    }  # fmt: skip
    values = {name: metric.compute().flatten().sort().values.tolist() for name, metric in metrics.items()}
    values["extremes"] = [float(module.best.min_val), float(module.best.max_val)]  # not states of torchmetrics
    values["updates"] = [
        float(metric.update_called) for metric in (module.values, module.best._base_metric, watch.seen)
    ]
    group = {name: float(value) for name, value in module.group.compute().items()}
    return {**values, **group, "logged": module.logged.update_count}


def run(strategy: Any, devices: int, folder: Path) -> list[dict[str, Any]]:
    """Return the states after each of several calls; each call continues the states of the previous call."""
    module, watch = Net(), CountsSamples()
    trainer = fx.Trainer(
        devices=devices, strategy=strategy, default_root_dir=folder, callbacks=[watch], **{**QUIET, "max_epochs": 1}
    )  # fmt: skip
    results, ranks = [], 1 if isinstance(strategy, Mesh) else devices
    for call, samples in ((trainer.fit, 11), (trainer.validate, 7), (trainer.test, 5)):  # the last batches are uneven
        module.correlation.reset()  # it has a row per rank
        call(module, loader(samples, ranks))
        results += [states(module, watch)]
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(Single(), 1, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "strategy", params([DDP(), Mesh(tensor=2), ParameterServer(), AsyncSGD()], [FSDP(), LocalSGD()]),
    ids=lambda strategy: type(strategy).__name__,
)  # fmt: skip
def test_states_after_a_run_equal_those_of_a_single_process(
    strategy: Any, alone: list[dict[str, Any]], tmp_path: Path
) -> None:  # fmt: skip
    for actual, expected in zip(run(strategy, 2, tmp_path), alone, strict=True):
        assert actual == {name: pytest.approx(value, rel=1e-5) for name, value in expected.items()}  # float32


class ListState(torchmetrics.Metric):
    """Has a list of tensors as its state, like curves and correlations."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Any:
        return dim_zero_cat(self.values).square().mean()


class LogsPerStep(fx.Module):
    """Logs a metric object at each step, and in validation a metric object with a list as its state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.kept = ListState()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.layers(batch[0].double())
        self.accuracy(outputs, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(outputs, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.update(self.layers(batch[0].double()))
        self.log("kept", self.kept)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("strategy", params([FSDP(), Mesh(pipeline=2)], [DDP()]))
def test_values_of_steps_are_means_over_samples_and_a_rank_may_have_no_update(strategy: Any) -> None:
    """Regression: the last batches have 3 samples and 1 sample; gloo aborted a process without a sample."""
    generator = torch.Generator().manual_seed(5)
    inputs, labels = torch.randn(11, 2, generator=generator), torch.randint(3, (11,), generator=generator)
    metrics = []
    for used, devices, batch in ((Single(), 1, 4), (strategy, 2, 4 if isinstance(strategy, Mesh) else 2)):
        trainer = fx.Trainer(devices=devices, strategy=used, max_epochs=1, **QUIET)
        validation = DataLoader(TensorDataset(inputs[:1], labels[:1]), batch)
        trainer.fit(LogsPerStep(), DataLoader(TensorDataset(inputs, labels), batch), validation)
        metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-6)
    assert set(metrics[0]) == {"accuracy", "accuracy_step", "accuracy_epoch", "kept"}


class Totals(TinyModule):
    """Sums over the samples of an evaluation: a logged metric, and a metric computed in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.logged, self.computed, self.kept = (torchmetrics.SumMetric() for _ in range(3))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        for metric in (self.logged, self.computed, self.kept):
            metric.update(batch[0][:, 0].double())
        self.log("logged", self.logged)

    def on_test_epoch_end(self) -> None:
        self.log("computed", self.computed.compute())


def test_an_evaluation_before_training_counts_each_sample_once_on_the_stages_of_a_pipeline() -> None:
    data = TensorDataset(torch.arange(28.0).reshape(7, 4))
    for strategy, devices in ((Mesh(pipeline=2), 2), (Mesh(pipeline=2), 4)):
        net = Totals()
        trainer = fx.Trainer(strategy=strategy, **QUIET | {"devices": devices})
        [results] = trainer.test(net, DataLoader(data, 2), verbose=False)
        assert results == {"logged": 84.0, "computed": 84.0}
        assert float(net.kept.compute()) == 84.0


class LogsOneOfTwo(TinyModule):
    """Logs one of two metric objects, depending on the batch: the first batch differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.ones, self.twos = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        name, metric = ("ones", self.ones) if batch[0].item() == 1 else ("twos", self.twos)
        metric.update(1.0 if name == "ones" else 200.0)
        self.log(name, metric)


def test_ranks_compute_metric_objects_in_the_same_order() -> None:
    values = torch.tensor([2.0, 1.0, 1.0, 2.0, 1.0, 1.0])[:, None]
    module = LogsOneOfTwo()
    [logged] = fx.Trainer(devices=2, **QUIET).validate(module, DataLoader(TensorDataset(values), 1))
    assert logged == {"ones": 4.0, "twos": 400.0}


class LogsTwoLoaders(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.maxima = nn.ModuleList(torchmetrics.MaxMetric() for _ in range(2))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        value = self(batch).mean()
        self.maxima[dataloader_idx](value)
        self.log_dict({"mean": value, "highest": self.maxima[dataloader_idx]}, batch_size=len(batch))


@pytest.mark.parametrize("strategy", [DDP(), Mesh(tensor=2, data="ddp")])
def test_a_rank_may_have_batches_of_one_of_two_loaders_only(strategy: Any) -> None:
    torch.manual_seed(0)
    module = LogsTwoLoaders()
    loaders = [DataLoader(torch.randn(samples, 4), 1) for samples in (1, 3)]
    expected, values = (
        fx.Trainer(devices=ranks, strategy=way, **QUIET).validate(module, loaders, verbose=False)
        for ranks, way in ((1, "single"), (4 if isinstance(strategy, Mesh) else 2, strategy))
    )
    assert [pytest.approx(row) for row in expected] == values
