from __future__ import annotations

import pickle
from datetime import timedelta
from types import FunctionType
from typing import Any

import lightning.pytorch.callbacks as theirs
import pytest
import torch

import fabricx as fx
import fabricx.callbacks as ours
from fabricx.lightning import adapt_callback
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Counts(theirs.Callback):
    def __init__(self) -> None:
        self.batches = 0

    @property
    def state_key(self) -> str:
        return self._generate_state_key(of="batches")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert stage == "fit"

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class ConfiguresCallbacks(TinyModule):
    def configure_callbacks(self) -> Any:
        return [Counts()]


def test_a_users_callback_is_called_saved_and_resumed(tmp_path):
    callback = Counts()
    trainer = fx.Trainer(max_epochs=1, callbacks=callback, **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    batches = callback.batches
    assert batches == trainer.global_step
    assert isinstance(callback, Counts)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = Counts()
    fx.Trainer(max_epochs=2, callbacks=[resumed], **QUIET).fit(
        TinyModule(), tiny_loader(), ckpt_path=tmp_path / "a.ckpt"
    )
    assert resumed.batches == 2 * batches
    assert pickle.loads(pickle.dumps(resumed)).batches == resumed.batches
    assert resumed.state_key == "Counts{'of': 'batches'}"


def test_callbacks_of_configure_callbacks_are_adapted():
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(ConfiguresCallbacks(), tiny_loader())
    [counts] = [callback for callback in trainer.callbacks if isinstance(callback, Counts)]
    assert counts.batches == trainer.global_step


SAME = [
    (theirs.ModelCheckpoint(monitor="a", mode="max", save_last=True, save_top_k=3, every_n_train_steps=5),
     ours.ModelCheckpoint(monitor="a", mode="max", save_last=True, save_top_k=3, every_n_train_steps=5,
                          save_on_exception=False)),
    (theirs.ModelCheckpoint(train_time_interval=timedelta(minutes=2)),
     ours.ModelCheckpoint(train_time_interval=timedelta(minutes=2), save_on_exception=False)),
    (theirs.ModelCheckpoint(every_n_epochs=0, save_last=True),
     ours.ModelCheckpoint(every_n_epochs=0, save_last=True, save_on_exception=False)),
    (theirs.ModelCheckpoint(every_n_train_steps=0),
     ours.ModelCheckpoint(every_n_train_steps=0, save_on_exception=False)),
    (theirs.EarlyStopping("a", min_delta=0.5, patience=7, check_on_train_epoch_end=True, stopping_threshold=0.1),
     ours.EarlyStopping("a", min_delta=0.5, patience=7, check_on_train_epoch_end=True, stopping_threshold=0.1)),
    (theirs.EarlyStopping("a", mode="max", min_delta=0.5, strict=False),
     ours.EarlyStopping("a", mode="max", min_delta=0.5, strict=False)),
    (theirs.LearningRateMonitor("step", log_momentum=True), ours.LearningRateMonitor("step", log_momentum=True)),
    (theirs.Timer("00:01:00:00", interval="epoch"), ours.Timer(timedelta(hours=1), interval="epoch")),
    (theirs.GradientAccumulationScheduler({0: 2, 4: 8}), ours.GradientAccumulationScheduler({0: 2, 4: 8})),
    (theirs.ModelSummary(3), ours.ModelSummary(3)),
    (theirs.ModelCheckpoint(save_last="link", enable_version_counter=False),
     ours.ModelCheckpoint(save_last="link", enable_version_counter=False, save_on_exception=False)),
    (theirs.RichModelSummary(2), ours.RichModelSummary(2)),
    (theirs.TQDMProgressBar(refresh_rate=0), ours.TQDMProgressBar(refresh_rate=0)),
    (theirs.RichProgressBar(), ours.RichProgressBar(theirs.RichProgressBar().refresh_rate)),
    (theirs.DeviceStatsMonitor(False), ours.DeviceStatsMonitor(False)),
    (theirs.OnExceptionCheckpoint("/out", "failed"), ours.OnExceptionCheckpoint("/out", "failed")),
    (theirs.BackboneFinetuning(3, backbone_initial_lr=0.1, train_bn=False),
     ours.BackboneFinetuning(3, lambda_func=theirs.finetuning.multiplicative, backbone_initial_lr=0.1, train_bn=False)),
    (theirs.StochasticWeightAveraging([0.1, 0.2], 5, annealing_strategy="linear"),
     ours.StochasticWeightAveraging([0.1, 0.2], 5, annealing_strategy="linear",
                                    avg_fn=theirs.StochasticWeightAveraging.avg_fn)),
    (theirs.WeightAveraging(use_buffers=False, avg_fn=max), ours.WeightAveraging(use_buffers=False, avg_fn=max)),
    (theirs.LearningRateFinder(max_lr=0.5), ours.LearningRateFinder(max_lr=0.5)),
    (theirs.BatchSizeFinder("binsearch", init_val=3), ours.BatchSizeFinder("binsearch", init_val=3)),
    (theirs.BasePredictionWriter("epoch"), ours.BasePredictionWriter("epoch")),
]  # fmt: skip


def comparable(callback: Any) -> dict[str, Any]:
    return {name: str(value) if hasattr(value, "__dict__") and "object at" in str(value) else value
            for name, value in vars(callback).items() if name != "_schedule"}  # fmt: skip


@pytest.mark.parametrize(("lightning_callback", "equal"), SAME, ids=lambda callback: type(callback).__name__)
def test_a_lightning_callback_is_converted_to_fabricxs_with_its_arguments(lightning_callback, equal):
    kind = type(lightning_callback)
    adapted = adapt_callback(lightning_callback)
    assert adapted is lightning_callback
    assert isinstance(adapted, (type(equal), kind))
    assert isinstance(adapted, type(equal))
    assert comparable(adapted) == comparable(equal)
    assert comparable(pickle.loads(pickle.dumps(adapted))) == comparable(equal)


def test_the_adapted_checkpoint_and_early_stopping_work(tmp_path):
    checkpoint = theirs.ModelCheckpoint(dirpath=tmp_path, monitor="loss", save_top_k=1)
    stopping = theirs.EarlyStopping("loss", patience=1, min_delta=1e9)
    trainer = fx.Trainer(max_epochs=9, callbacks=[stopping, checkpoint], **{**QUIET, "enable_checkpointing": True})
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.checkpoint_callback is checkpoint
    assert trainer.early_stopping_callback is stopping
    assert trainer.current_epoch == 2
    assert checkpoint.best_model_path.startswith(str(tmp_path))


class Saves(theirs.ModelCheckpoint):
    def _save_checkpoint(self, trainer: Any, filepath: str) -> None: ...


class Forgets(theirs.ModelCheckpoint):
    def __init__(self):
        self.epochs = []


class Longer(theirs.EarlyStopping):
    def __init__(self) -> None:
        super().__init__("loss", patience=2)
        self.ended = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        self.ended += 1


def test_a_users_subclass_of_lightnings_callback_keeps_its_hooks():
    callback = Longer()
    fx.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(TinyModule(), tiny_loader())
    assert callback.ended == 1
    assert isinstance(callback, ours.EarlyStopping)
    assert callback.patience == 2


class Unfreezes(theirs.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layer, optimizer, lr=0.1)


def test_a_users_finetuning_of_lightning_unfreezes():
    class Net(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(1, 1)

        def forward(self, inputs: Any) -> Any:
            return self.more(self.layer(inputs))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    trainer = fx.Trainer(max_epochs=2, callbacks=[Unfreezes()], **QUIET)
    trainer.fit(Net(), tiny_loader())
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [2, 2]


def test_a_lambda_callback_runs_unchanged():
    called = []
    callback = theirs.LambdaCallback(on_train_start=lambda trainer, module: called.append(type(module)))
    fx.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(TinyModule(), tiny_loader())
    assert called == [TinyModule]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Forgets, r"Forgets.__init__ does not call super\(\).__init__\(\), so ModelCheckpoint has no attribute"),
        (Saves, "Saves._save_checkpoint overrides a method of Lightning's ModelCheckpoint.*fabricx.callbacks.ModelCh"),
        (
            theirs.SpikeDetection,
            "SpikeDetection of Lightning works inside of Lightning's Trainer only: .*EarlyStopping",
        ),
    ],
)
def test_callbacks_without_a_counterpart_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        fx.Trainer(callbacks=[make()], **QUIET)


def methods(cls: type, package: str) -> set[str]:
    """Return the methods of classes of a package, except contract methods and methods of a single class (`__name`)."""
    kinds = (FunctionType, staticmethod, classmethod, property)
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith(package)]
    names = {name for owner in owners for name, value in vars(owner).items() if isinstance(value, kinds)}
    return {name for name in names if "__" not in name and not hasattr(theirs.Callback, name)}


@pytest.mark.parametrize("name", sorted(set(ours.__all__) & set(theirs.__all__) - {"Callback", "Checkpoint"}))
def test_each_method_of_lightnings_callback_exists_or_is_refused(name):
    counterpart, provided = getattr(ours, name), getattr(theirs, name)
    absent = {method for method in methods(provided, "lightning") if not hasattr(counterpart, method)}
    assert absent - {"every_n_epochs"} == set(counterpart.former_methods), name  # an attribute of instances
