from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.callbacks import EMA, BackboneFinetuning, StochasticWeightAveraging
from fabricx.testing import TinyModule, tiny_loader


class Recorded(TinyModule):
    """Records its weights at the ends of epochs and the learning rate of each step; a schedule changes the rate."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[Tensor] = []
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(self.layer.weight.detach().clone())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step(optimizer_closure)


def train(quiet: dict[str, Any], **options: Any) -> Recorded:
    torch.manual_seed(0)
    module, callback = Recorded(), StochasticWeightAveraging(0.1, 0.5, annealing_epochs=1)
    trainer = fx.Trainer(callbacks=callback, **quiet, **options)
    trainer.fit(module, tiny_loader())
    return module


def test_the_module_ends_with_the_mean_of_the_beginnings_of_the_last_epochs(quiet: dict[str, Any]) -> None:
    module = train(quiet, max_epochs=6)
    per_epoch = len(module.ends) // 6
    expected = torch.stack([module.ends[epoch * per_epoch - 1] for epoch in (2, 3, 4, 5)]).mean(0)
    assert torch.allclose(module.layer.weight, expected)
    assert module.rates[:3] == [0.4, 0.2, 0.1]
    assert module.rates[3 * per_epoch :] == [0.1] * (3 * per_epoch)


def test_the_average_of_a_function_that_returns_the_weights_is_a_copy(quiet: dict[str, Any], tmp_path: Path) -> None:
    module, callback = Recorded(), StochasticWeightAveraging(0.1, 2, avg_fn=lambda average, weights, count: weights)
    trainer = fx.Trainer(max_epochs=3, callbacks=callback, **quiet)
    trainer.fit(module, tiny_loader())
    assert torch.equal(module.layer.weight, module.ends[2 * len(module.ends) // 3 - 1])
    path = trainer.save_checkpoint(tmp_path / "averages.ckpt")
    with warnings.catch_warnings(action="error"):  # of a fit that continues with the averages
        trainer.test(module, tiny_loader(), ckpt_path=path, verbose=False)


# Rates of the epochs and sum of the weights of Lightning 2.6.6.
LIGHTNING = [
    (None, (0.5, 3, "cos"), [0.4, 0.4, 0.4, 0.325, 0.175, 0.1], -0.560087568512),
    ("epoch", (2, 3, "linear"), [0.4, 0.2, 0.5 / 3, 0.4 / 3, 0.1, 0.1], 0.123585457382),
    ("step", (0.5, 0, "cos"), [0.4, 0.05, 0.1, 0.1, 0.1, 0.1], -0.080978010549),
]


@pytest.mark.parametrize(("interval", "arguments", "rates", "weights"), LIGHTNING)
def test_weights_and_rates_are_equal_to_lightnings(
    interval: str | None, arguments: Any, rates: list[float], weights: float, quiet: dict[str, Any]
) -> None:
    class Net(fx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rates = nn.Linear(4, 1), list[float]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not batch_idx:
                self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return self.layer(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": decay, "interval": interval}] if interval else []

    torch.manual_seed(0)
    module, draws = Net().double(), torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4, generator=draws, dtype=torch.float64))
    trainer = fx.Trainer(max_epochs=6, callbacks=StochasticWeightAveraging(0.1, *arguments), **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    assert module.rates == pytest.approx(rates)
    assert module.layer.weight.sum().item() == pytest.approx(weights, rel=1e-10)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_end", "on_validation_end"])
def test_a_resumed_run_has_the_average_and_the_rates_of_a_whole_run(
    hook: str, quiet: dict[str, Any], tmp_path: Path
) -> None:
    class Saves(fx.Callback):
        saved = -1

    def save(self: Any, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 3:  # the first call, and the last: after it, no step sets the rate
            self.saved += 1
            trainer.save_checkpoint(tmp_path / f"{self.saved}.ckpt")

    setattr(Saves, hook, save)

    def run(ckpt: Path | None, *callbacks: fx.Callback) -> tuple[Tensor, float]:
        torch.manual_seed(0)
        swa = StochasticWeightAveraging(0.1, 0.5, annealing_epochs=1)
        trainer = fx.Trainer(max_epochs=4, callbacks=[*callbacks, swa], **{**quiet, "num_sanity_val_steps": 0})
        module = Recorded()
        trainer.fit(module, tiny_loader(), tiny_loader(), ckpt_path=ckpt)
        return module.layer.weight.detach(), trainer.optimizers[0].param_groups[0]["lr"]

    saves = Saves()
    weight, rate = run(None, saves)
    for number in {0, saves.saved}:
        resumed, resumed_rate = run(tmp_path / f"{number}.ckpt")
        assert torch.equal(resumed, weight)
        assert resumed_rate == rate == 0.05


@pytest.mark.parametrize("step", [9, 10, 12])
def test_a_run_that_stops_early_keeps_its_weights_and_resumes_as_a_whole_run(
    step: int, quiet: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stops(fx.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == step

    def run(path: Path | None, *callbacks: fx.Callback) -> tuple[fx.Trainer, Recorded]:
        torch.manual_seed(0)
        callback, module = StochasticWeightAveraging(0.1, 0.5, annealing_epochs=1), Recorded()
        trainer = fx.Trainer(max_epochs=4, callbacks=[*callbacks, callback], **quiet)
        trainer.fit(module, tiny_loader(), ckpt_path=path)
        return trainer, module

    _, whole = run(None)
    trainer, stopped = run(None, Stops())
    assert torch.equal(stopped.layer.weight, whole.ends[step - 1])  # as in Lightning
    assert "of 4 epochs, so the module keeps the trained weights; the mean of 2 epochs" in capsys.readouterr().out
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    trainer, resumed = run(tmp_path / "stopped.ckpt")
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    with pytest.warns(UserWarning, match="only the averages of StochasticWeightAveraging"):
        run(tmp_path / "whole.ckpt")


def test_wrong_arguments_and_unsupported_runs_are_refused(quiet: dict[str, Any]) -> None:
    for arguments in (
        {"swa_lrs": 0.0}, {"swa_lrs": []}, {"swa_epoch_start": 1.5}, {"swa_epoch_start": 0},
        {"annealing_strategy": "log"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="StochasticWeightAveraging"):
            StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})  # type: ignore[arg-type]

    def refused(module: Any, message: str, rates: Any = 0.1, **options: Any) -> None:
        trainer = fx.Trainer(callbacks=StochasticWeightAveraging(rates, 2), **{**quiet, "max_epochs": 2, **options})
        with pytest.raises(ValueError, match=message):
            trainer.fit(module, tiny_loader())

    others = fx.Trainer(max_epochs=2, callbacks=[EMA(), StochasticWeightAveraging(0.1, 2)], **quiet)
    with pytest.raises(ValueError, match="StochasticWeightAveraging and EMA both set the module's weights"):
        others.fit(TinyModule(), tiny_loader())

    normed = TinyModule()
    normed.norm = nn.BatchNorm1d(4)
    refused(normed, "batch normalisation")
    refused(TinyModule(), "set max_epochs", max_epochs=-1)
    refused(TinyModule(), "LocalSGD has them elsewhere", strategy="local_sgd")
    refused(TinyModule(), "1 parameter groups need as many rates", rates=[0.1, 0.2])


def test_an_average_with_the_weights_before_training_is_a_warning(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(callbacks=StochasticWeightAveraging(0.1), max_epochs=1, **quiet)
    with pytest.warns(UserWarning, match="the average has the weights before training; set swa_epoch_start"):
        trainer.fit(TinyModule(), tiny_loader())


def test_small_differences_are_not_lost_in_a_bfloat16_average(quiet: dict[str, Any]) -> None:
    class Moves(TinyModule):
        def on_train_epoch_start(self) -> None:
            with torch.no_grad():
                self.layer.weight.fill_(1.0 if self.current_epoch < 2 else 1.0078125)  # the next number of bfloat16

    module, callback = Moves(lr=0.0), StochasticWeightAveraging(1e-9, 2, annealing_epochs=0)
    fx.Trainer(max_epochs=9, precision="bf16-true", callbacks=callback, **quiet).fit(module, tiny_loader())
    mean = float(callback.averages["layer.weight"][0, 0])
    assert mean == pytest.approx(1 + 0.0078125 * 6 / 8, rel=1e-6)  # float32


def test_groups_that_another_callback_adds_are_averaged_too(quiet: dict[str, Any]) -> None:
    class Tuned(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(self.backbone(inputs))  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)

    callbacks = [StochasticWeightAveraging(0.2, 2, annealing_epochs=0), BackboneFinetuning(2)]
    trainer = fx.Trainer(max_epochs=4, callbacks=callbacks, **quiet)
    trainer.fit(Tuned(), tiny_loader())
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.2, 0.2]


@torch.no_grad()
def test_the_average_of_a_parameter_added_later_covers_its_epochs() -> None:
    module, callback = nn.Module(), StochasticWeightAveraging(0.1)
    module.first = nn.Parameter(torch.zeros(()))
    for epoch in range(5):
        if epoch == 2:
            module.second = nn.Parameter(torch.zeros(()))
        for parameter in module.parameters():
            parameter.fill_(epoch)
        callback._add(module)
        resumed = StochasticWeightAveraging(0.1)
        resumed.load_state_dict(callback.state_dict())
        callback = resumed
    assert {name: average.item() for name, average in callback.averages.items()} == {"first": 2.0, "second": 3.0}


def test_a_later_fit_that_trains_nothing_keeps_the_average(quiet: dict[str, Any]) -> None:
    callback, module = StochasticWeightAveraging(0.1, 2, annealing_epochs=0), TinyModule()
    trainer = fx.Trainer(max_epochs=4, callbacks=callback, **quiet)
    for _ in range(2):
        trainer.fit(module, tiny_loader())
        assert callback.n_averaged == 3
        assert torch.equal(callback.averages["layer.weight"], module.layer.weight)
