"""A program behaves the same in its hooks with the import of Lightning and with that of fabricx."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx.pytorch

FRAMEWORKS: list[Any] = [lightning.pytorch, fabricx.pytorch]
PLAIN: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "accelerator": "cpu", "devices": 1, "max_epochs": 2,
}  # fmt: skip


def loader(offset: float = 0.0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64 + offset), 4)


def module_of(pl: Any, **methods: Callable[..., Any]) -> Any:
    """Return a module of a framework; `methods` are added to its class."""

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.body = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
            self.head = nn.Linear(3, 2)
            self.unused = nn.Identity()
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.body(inputs))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.head(self.body[0](batch[0])).square().mean()
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self(batch[0]).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adagrad(self.parameters(), lr=0.1)

    for name, method in methods.items():
        setattr(Net, name, method)
    return Net()


def fit(pl: Any, module: Any, **options: Any) -> tuple[Any, list[str]]:
    """Train; return the trainer and the texts of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(**{**PLAIN, **options})
        trainer.fit(module, loader(), loader(1.0))
    return trainer, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("pl", FRAMEWORKS, ids=["lightning", "fabricx"])
def test_two_settings_of_gradient_accumulation_are_refused(pl):
    scheduler = pl.callbacks.GradientAccumulationScheduler({1: 2})
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        fit(pl, module_of(pl), accumulate_grad_batches=2, callbacks=[scheduler])
    trainer, _ = fit(pl, module_of(pl), callbacks=[scheduler])
    assert trainer.global_step == 4 + 2  # in the first epoch each batch is an update


@pytest.mark.parametrize("pl", FRAMEWORKS, ids=["lightning", "fabricx"])
def test_a_momentum_that_an_optimizer_lacks_is_zero_with_a_warning(pl, tmp_path):
    monitor = pl.callbacks.LearningRateMonitor(log_momentum=True)
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer, warned = fit(pl, module_of(pl), logger=logger, log_every_n_steps=1, callbacks=[monitor])
    assert float(trainer.callback_metrics["lr-Adagrad-momentum"]) == 0
    assert sum("log_momentum=True" in text for text in warned) == 1


def shown_in_bar(pl: Any, folder: Path, version: int | str | None) -> list[Any]:
    shown: list[Any] = []

    class Bar(pl.callbacks.TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            items = super().get_metrics(trainer, pl_module)
            shown.append((sorted(items), items.get("v_num")))
            return items

    logger = pl.loggers.CSVLogger(folder, version=version) if version != "none" else False
    fit(pl, module_of(pl), logger=logger, enable_progress_bar=True, callbacks=[Bar()])
    return shown[-1]


@pytest.mark.parametrize("version", [None, 7, "a-long-version", "none"])
def test_the_progress_bar_shows_the_version_of_the_logger(version, tmp_path):
    of_lightning, of_fabricx = (shown_in_bar(pl, tmp_path / pl.__name__, version) for pl in FRAMEWORKS)
    assert of_fabricx == of_lightning
    assert ("v_num" in of_fabricx[0]) is (version != "none")


def sizes(pl: Any, depth: int, example: Any) -> dict[str, Any]:
    module = module_of(pl)
    module.example_input_array = example
    module.head.eval()
    before = torch.random.get_rng_state()
    summary = pl.utilities.model_summary.summarize(module, max_depth=depth)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert module.body.training
    assert not module.head.training
    names = ("layer_names", "in_sizes", "out_sizes", "training_modes", "total_training_modes", "total_layer_params")
    return {name: getattr(summary, name) for name in names}


@pytest.mark.parametrize("depth", [0, 1, -1])
@pytest.mark.parametrize("example", [None, torch.zeros(5, 4), {"inputs": torch.zeros(5, 4)}, (torch.zeros(5, 4),)])
def test_a_summary_has_the_sizes_of_inputs_and_outputs(depth, example):
    of_lightning, of_fabricx = (sizes(pl, depth, example) for pl in FRAMEWORKS)
    assert of_fabricx == of_lightning
    if depth == 1 and example is not None:
        assert of_fabricx["out_sizes"] == [[5, 3], [5, 2], "?"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_fit_prints_the_sizes_of_inputs_and_outputs(precision, capsys):
    module = module_of(fabricx.pytorch)
    module.example_input_array = torch.zeros(5, 4)
    fit(fabricx.pytorch, module, precision=precision, enable_model_summary=True)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "| head" in line]
    assert line.endswith("| [5, 3]   | [5, 2]")


def counted(pl: Any) -> list[Any]:
    def setup(self: Any, stage: str) -> None:
        self.seen.append((str(getattr(stage, "value", stage)), self.trainer.num_training_batches))

    module = module_of(pl, setup=setup, test_step=lambda self, batch, batch_idx: None)
    trainer, _ = fit(pl, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, which uses deprecated names of torch
        trainer.test(module, loader(), verbose=False)
        other = pl.Trainer(**PLAIN)
        other.test(module, loader(), verbose=False)
    return [*module.seen, trainer.num_training_batches, other.num_training_batches]


def test_the_number_of_training_batches_is_infinite_until_it_is_known():
    of_lightning, of_fabricx = map(counted, FRAMEWORKS)
    assert of_fabricx == of_lightning
    assert of_fabricx[0] == ("fit", float("inf"))


def metrics_of_validations(pl: Any) -> list[Any]:
    def on_validation_epoch_end(self: Any) -> None:
        trainer = self.trainer
        for metrics in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            self.seen.append((trainer.sanity_checking, {name: float(value) for name, value in metrics.items()}))

    module = module_of(pl, on_validation_epoch_end=on_validation_epoch_end)
    fit(pl, module, num_sanity_val_steps=1)
    return module.seen


def test_hooks_at_the_end_of_validations_read_the_same_metrics():
    of_lightning, of_fabricx = map(metrics_of_validations, FRAMEWORKS)
    assert of_fabricx == of_lightning  # bit for bit: the same operations in the same order


@pytest.mark.parametrize("pl", FRAMEWORKS, ids=["lightning", "fabricx"])
def test_barebones_warns_of_values_that_are_not_logged(pl):
    nothing = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
    trainer, warned = fit(pl, module_of(pl), barebones=True, **nothing)
    assert not trainer.callback_metrics
    assert [text for text in warned if "barebones" in text and "self.log" in text]
