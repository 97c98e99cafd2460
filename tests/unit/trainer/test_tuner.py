"""Trials find a learning rate and a batch size, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

import fabricx as fx
from fabricx.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder
from fabricx.errors import WorkerFailed
from fabricx.testing import TinyModule, tiny_data, tiny_loader
from fabricx.trainer import tuner
from fabricx.trainer.tuner import largest_fitting, out_of_memory


class Tuned(TinyModule):
    """Has a learning rate and a batch size; a batch above 12 samples does not fit."""

    def __init__(self, lr: float = 1e-3, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if len(batch[0]) > 12:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def configure_callbacks(self) -> Any:
        assert self.trainer is not None
        searches = self.trainer.max_steps > 0
        return [EarlyStopping("no such metric")] if searches else []

    def train_dataloader(self) -> Any:
        return DataLoader(tiny_data(64), batch_size=self.batch_size)


def test_a_search_for_a_rate_changes_only_the_rate(quiet: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(tiny_data(), batch_size=2, sampler=RandomSampler(tiny_data(), generator=generator))
    module, trainer = Tuned(), fx.Trainer(max_epochs=1, gradient_clip_val=9.0, **quiet)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), generator.get_state()
    options: dict[str, Any] = {"min_lr": 1e-4, "max_lr": 10.0, "num_training": 60, "early_stop_threshold": None}
    finder = fx.Tuner(trainer).lr_find(module, loader, **options)
    assert finder is not None
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert torch.equal(states[2], generator.get_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert (trainer.global_step, trainer.current_epoch, module.calls) == (0, 0, 0)
    rates, losses = finder.results["lr"], finder.results["loss"]
    assert rates[0] == pytest.approx(1e-4)
    assert len(rates) == len(losses) <= 60
    assert module.hparams.lr == finder.suggestion()
    assert 1e-4 < module.hparams.lr < 10.0
    trainer.fit(module, loader)
    assert trainer.current_epoch == 1


def test_a_diverging_loss_ends_the_search_and_accumulated_batches_count_as_a_step(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(accumulate_grad_batches=2, **quiet)
    tuner = fx.Tuner(trainer)
    short = tuner.lr_find(Tuned(), tiny_loader(), min_lr=1.0, max_lr=1e4, num_training=50, update_attr=False)
    assert len(short.results["lr"]) < 50
    whole = tuner.lr_find(Tuned(), tiny_loader(), min_lr=1e-5, max_lr=1e-3, num_training=9, early_stop_threshold=None)
    assert len(whole.results["lr"]) == 9


def test_wrong_arguments_are_refused_before_a_trial(quiet: dict[str, Any]) -> None:
    tuner = fx.Tuner(fx.Trainer(**quiet))
    with pytest.raises(ValueError, match="has no attribute rate"):
        tuner.lr_find(Tuned(), tiny_loader(), attr_name="rate")
    with pytest.raises(ValueError, match="0 < min_lr < max_lr"):
        tuner.lr_find(Tuned(), tiny_loader(), min_lr=2.0)
    with pytest.raises(ValueError, match="instead of passing loaders"):
        tuner.scale_batch_size(Tuned(), tiny_loader())
    with pytest.raises(ValueError, match="has no attribute batch_sizes"):
        tuner.scale_batch_size(Tuned(), batch_arg_name="batch_sizes")
    apart = fx.Tuner(fx.Trainer(strategy="async_sgd", devices=2, **quiet))
    with pytest.raises(ValueError, match="under AsyncSGD ranks work at their own pace"):
        apart.lr_find(Tuned(), tiny_loader())


class Positioned:
    """A loader that continues at its position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 6:
            self.at += 1
            yield [tensor + self.at for tensor in tiny_data(2).tensors]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Turns(Sampler[int]):
    """A different order in each epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter([(position + self.epochs) % 8 for position in range(8)])

    def __len__(self) -> int:
        return 8


class KeepsLoader(fx.DataModule):
    """Keeps a loader, or the sampler of its loaders, across runs."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def train_dataloader(self) -> Any:
        return self.kept if isinstance(self.kept, Positioned) else DataLoader(tiny_data(8), sampler=self.kept)


@pytest.mark.parametrize("owner", [lambda kept: kept, KeepsLoader], ids=["loader", "data module"])
@pytest.mark.parametrize("kind", [Positioned, Turns])
def test_a_search_keeps_the_position_of_loaders(owner: Any, kind: Any, quiet: dict[str, Any]) -> None:
    trainer, kept = fx.Trainer(**quiet), kind()
    data = owner(kept if owner is KeepsLoader or kind is Positioned else DataLoader(tiny_data(8), sampler=kept))
    fx.Tuner(trainer).lr_find(TinyModule(), data, num_training=3, update_attr=False)
    assert vars(kept) == vars(kind())


class Counting(fx.DataModule):
    """Counts its loaders and batches, after which a schedule of the data could go."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.batch_size = {"loaders": 0, "batches": 0}, 2

    def train_dataloader(self) -> Any:
        self.state["loaders"] += 1
        return DataLoader(tiny_data(8), self.batch_size)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.state["batches"] += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_a_search_restores_the_state_of_a_data_module(quiet: dict[str, Any]) -> None:
    data, tuner = Counting(), fx.Tuner(fx.Trainer(**quiet))
    tuner.lr_find(TinyModule(), datamodule=data, num_training=3, update_attr=False)
    assert tuner.scale_batch_size(TinyModule(), datamodule=data, steps_per_trial=1) == data.batch_size == 8
    assert data.state == {"loaders": 0, "batches": 0}


def test_a_search_refuses_data_that_can_be_read_only_once(quiet: dict[str, Any]) -> None:
    batches = iter([*tiny_loader()])
    with pytest.raises(ValueError, match="can be read only once: pass a DataLoader"):
        fx.Tuner(fx.Trainer(**quiet)).lr_find(TinyModule(), batches, num_training=3, update_attr=False)
    assert len([*batches]) == 4


@pytest.mark.parametrize(("mode", "size"), [("power", 8), ("binsearch", 11)])
def test_the_largest_batch_that_fits_is_found(quiet: dict[str, Any], mode: Any, size: int) -> None:
    module = Tuned()
    tuner = fx.Tuner(fx.Trainer(**quiet))
    assert tuner.scale_batch_size(module, mode=mode, steps_per_trial=1) == size
    assert module.batch_size == module.hparams.batch_size == size


def test_after_a_search_the_trainer_has_module_and_loaders(
    quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(tuner._LOG, "info", lambda text, *values: logged.append(values))

    class Validated(Tuned):
        created = 0

        def train_dataloader(self) -> Any:
            self.created += 1
            return super().train_dataloader()

        def val_dataloader(self) -> Any:
            return DataLoader(tiny_data(32), batch_size=self.batch_size)

    module, data = Validated(), fx.DataModule()
    trainer = fx.Trainer(max_epochs=1, **quiet)
    assert fx.Tuner(trainer).scale_batch_size(module, datamodule=data, steps_per_trial=1, max_trials=3) == 8
    assert logged == [(4,), (8,)]
    assert (trainer.model, trainer.datamodule, module.trainer) == (module, data, trainer)
    loaders = [trainer.train_dataloader, trainer.val_dataloaders, trainer.train_dataloader]
    assert [loader.batch_size for loader in loaders] == [8, 8, 8]
    assert module.created == 1
    trainer.fit(module)
    assert trainer.train_dataloader is not loaders[0]
    fx.Tuner(trainer).lr_find(other := Tuned(), num_training=3)
    assert other.trainer is trainer
    assert fx.Tuner(trainer).scale_batch_size(module, max_trials=0, init_val=5) == 5


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_the_largest_batch_of_an_evaluation_that_fits_is_found(quiet: dict[str, Any], method: Any) -> None:
    class Evaluated(Tuned):
        def val_dataloader(self) -> Any:
            return DataLoader(tiny_data(32), batch_size=self.batch_size)

        test_dataloader = predict_dataloader = val_dataloader

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if len(batch[0]) > 12:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

        test_step = predict_step = validation_step

    assert fx.Tuner(fx.Trainer(**quiet)).scale_batch_size(Evaluated(), method=method, steps_per_trial=1) == 8


def test_the_batch_size_is_at_most_the_data_set(quiet: dict[str, Any]) -> None:
    class Small(Tuned):
        def train_dataloader(self) -> Any:
            return DataLoader(tiny_data(8), batch_size=self.batch_size)

    assert fx.Tuner(fx.Trainer(**quiet)).scale_batch_size(Small(), steps_per_trial=1) == 8


def test_a_batch_size_search_respects_limits_and_reports_that_no_size_fits() -> None:
    with pytest.raises(ValueError, match="not even a batch of 1"):
        largest_fitting(lambda size: (False, True), "power", 4, 25, 99)
    assert largest_fitting(lambda size: (True, True), "power", 3, 25, 20) == 20
    assert largest_fitting(lambda size: (True, True), "binsearch", 3, 2, 99) == 6
    assert largest_fitting(lambda size: (size < 3, True), "power", 8, 25, 99) == 2


def test_out_of_memory_errors_are_recognised() -> None:
    assert out_of_memory(MemoryError())
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert out_of_memory(WorkerFailed("rank 1", rank=1, exit_code=-9))
    assert out_of_memory(WorkerFailed("rank 1", rank=1, traceback="torch.OutOfMemoryError: CUDA out of memory"))
    assert not out_of_memory(RuntimeError("shapes differ"))
    assert not out_of_memory(ValueError("out of memory"))


def test_callbacks_search_before_a_fit_and_not_before_a_resumed_fit(quiet: dict[str, Any], tmp_path: Any) -> None:
    rate, size = LearningRateFinder(num_training_steps=40), BatchSizeFinder(steps_per_trial=1)
    module, trainer = Tuned(), fx.Trainer(max_epochs=1, callbacks=[size, rate], **quiet)
    trainer.fit(module)
    assert size.optimal_batch_size == module.batch_size == 8
    assert rate.optimal_lr.suggestion() == module.hparams.lr == trainer.optimizers[0].param_groups[0]["lr"]
    assert trainer.global_step == 8
    path = trainer.save_checkpoint(tmp_path / "end.ckpt")
    module.batch_size = 4
    fx.Trainer(max_epochs=2, callbacks=[BatchSizeFinder()], **quiet).fit(module, ckpt_path=path)
    assert module.batch_size == 4


def test_a_finder_of_the_module_is_refused(quiet: dict[str, Any]) -> None:
    class ConfiguresCallbacks(Tuned):
        def configure_callbacks(self) -> Any:
            return [LearningRateFinder()]

    with pytest.raises(ValueError, match="pass it to the Trainer"):
        fx.Trainer(max_epochs=1, **quiet).fit(ConfiguresCallbacks())
    with pytest.raises(ValueError, match="search within a run"):
        LearningRateFinder().lr_find(None, None)


def test_fast_dev_run_starts_no_search(quiet: dict[str, Any]) -> None:
    rate, size = LearningRateFinder(), BatchSizeFinder()
    module, trainer = Tuned(), fx.Trainer(fast_dev_run=True, callbacks=[size, rate], **quiet)
    with pytest.warns(UserWarning, match="lr_find: no search, because fast_dev_run=True; lr is unchanged"):
        assert fx.Tuner(trainer).lr_find(module, tiny_loader()) is None
    with pytest.warns(UserWarning, match="scale_batch_size: no search"):
        assert fx.Tuner(trainer).scale_batch_size(module) is None
    with pytest.warns(UserWarning, match="no search"):
        trainer.fit(module)
    assert (module.calls, module.hparams.lr, module.batch_size) == (1, 1e-3, 4)
    assert rate.optimal_lr is None
    assert size.optimal_batch_size is None


def test_schedules_of_the_module_do_not_change_the_rates_of_a_search(quiet: dict[str, Any]) -> None:
    used: list[float] = []

    class Scheduled(Tuned):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [warm, {"scheduler": plateau, "monitor": "val_loss"}]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            used.append(optimizer.param_groups[0]["lr"])

    trainer = fx.Trainer(max_epochs=1, **quiet)
    finder = fx.Tuner(trainer).lr_find(Scheduled(), tiny_loader(), max_lr=1e-3, num_training=10)  # in several epochs
    assert finder is not None
    assert used == pytest.approx(finder.results["lr"])


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        ({"val_check_interval": 8}, [4, 8]),
        ({"val_check_interval": "8st"}, [4, 8]),
        ({"check_val_every_n_epoch": 2}, [4, 8]),
        ({"limit_val_batches": 0}, []),
    ],
    ids=str,
)
def test_a_trial_of_a_batch_size_validates_after_its_batches(
    options: dict[str, Any], validated: list[int], quiet: dict[str, Any]
) -> None:
    sizes: dict[int, None] = {}

    class Validated(Tuned):
        def val_dataloader(self) -> Any:
            return DataLoader(tiny_data(32), batch_size=self.batch_size)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            sizes[len(batch[0])] = None

    trainer = fx.Trainer(**options, **quiet)
    assert fx.Tuner(trainer).scale_batch_size(Validated(), steps_per_trial=1, init_val=4, max_val=8) == 8
    assert [*sizes] == validated


def test_a_finder_searches_in_a_fit_from_the_last_checkpoint_if_there_is_none(quiet: dict[str, Any]) -> None:
    def searched(epochs: int) -> bool:
        finder = LearningRateFinder(num_training_steps=20)
        trainer = fx.Trainer(max_epochs=epochs, callbacks=[finder], **{**quiet, "enable_checkpointing": True})
        trainer.fit(Tuned(), tiny_loader(8, 4), ckpt_path="last")
        return finder.optimal_lr is not None

    assert [searched(1), searched(2)] == [True, False]


def test_an_error_in_a_trial_leaves_the_batch_size(quiet: dict[str, Any]) -> None:
    class Fails(TinyModule):
        batch_size = 7

        def train_dataloader(self) -> Any:
            if self.batch_size == 4:
                raise ValueError("in a loader")
            return tiny_loader()

    module = Fails()
    with pytest.raises(ValueError, match="in a loader"):
        fx.Tuner(fx.Trainer(**quiet)).scale_batch_size(module)
    assert module.batch_size == 7
