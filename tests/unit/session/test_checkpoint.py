"""A resumed run continues exactly, reports differences, or is refused."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

import fabricx as fx
from fabricx.callbacks import EMA, EarlyStopping, FaultRecovery, ModelCheckpoint, StochasticWeightAveraging
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.distributed.world import World
from fabricx.errors import CheckpointError
from fabricx.session.checkpoint import _print_global_batch, _report_lost_position, _report_reading
from fabricx.strategies import DDP, AsyncSGD, ParameterServer
from fabricx.testing import QUIET, TinyModule, tiny_data, tiny_loader
from fabricx.testing.modules import SavesAtStep

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


class Optimized(TinyModule):
    """Has the parametrized optimizer and schedule; each parameter has a different weight decay."""

    def __init__(
        self, make: type[torch.optim.Optimizer] = SGD, order: str = "weight bias more", schedule: str = ""
    ) -> None:  # fmt: skip
        super().__init__()
        self.make, self.order, self.schedule = make, order, schedule
        self.more = nn.Parameter(torch.ones(()))

    def configure_optimizers(self) -> Any:
        decays = {"weight": (self.layer.weight, 0.5), "bias": (self.layer.bias, 0.0), "more": (self.more, 0.1)}
        groups: list[dict[str, Any]] = []
        for names in self.order.split():
            chosen = [decays[name] for name in names.split("+")]
            groups.append({"params": [parameter for parameter, _ in chosen], "weight_decay": chosen[0][1]})
        optimizer: Any = self.make(groups, lr=0.1)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer if not self.schedule else ([optimizer], [{"scheduler": steps, "interval": self.schedule}])


def resumed(folder: Path, first: fx.Module, second: fx.Module) -> fx.Trainer:
    trainer = fx.Trainer(max_steps=2, **QUIET)
    trainer.fit(first, tiny_loader())
    trainer.save_checkpoint(folder / "two.ckpt")
    again = fx.Trainer(max_steps=3, **QUIET)
    again.fit(second, tiny_loader(), ckpt_path=folder / "two.ckpt")
    return again


def test_parameter_groups_in_another_order_keep_their_options(own_folder: Path) -> None:
    trainer = resumed(own_folder, Optimized(), Optimized(order="bias weight more"))
    assert [group["weight_decay"] for group in trainer.optimizers[0].param_groups] == [0.0, 0.5, 0.1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Optimized(Adam), Optimized(AdamW), "checkpoint is Adam, and the module's is AdamW"),
        (Optimized(), Optimized(order="weight+bias more"), "other parameter groups"),
        (Optimized(order="weight+bias more"), Optimized(order="weight bias+more"), "other parameter groups"),
        (Optimized(schedule="step"), Optimized(schedule="epoch"), "StepLR by step; the module's are: StepLR by epoch"),
        (Optimized(schedule="step"), Optimized(), "StepLR by step; the module's are: none"),
    ],
    ids=["class", "fewer groups", "another division", "interval", "no schedule"],
)  # fmt: skip
def test_an_optimizer_whose_state_would_mean_something_else_is_refused(
    own_folder: Path, first: fx.Module, second: fx.Module, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        resumed(own_folder, first, second)
    assert "load_from_checkpoint" in str(raised.value)


class TrainsMore(TinyModule):
    """Adds a group of parameters to its optimizer in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 1).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.more.requires_grad_().parameters(), "lr": 0.2})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + self.more(inputs)

    def configure_optimizers(self) -> Any:
        return SGD(self.layer.parameters(), lr=0.1, momentum=0.9)


def test_a_resumed_run_has_the_groups_that_hooks_have_added(own_folder: Path) -> None:
    whole, rest = (copy.deepcopy(module) for module in [TrainsMore()] * 2)
    saved = own_folder / "six.ckpt"  # of 8 batches in two epochs
    fx.Trainer(max_epochs=3, callbacks=SavesAtStep(saved, 6), **QUIET).fit(whole, tiny_loader())
    fx.Trainer(max_epochs=3, **QUIET).fit(rest, tiny_loader(), ckpt_path=saved)
    assert torch.equal(rest.more.weight, whole.more.weight)
    assert torch.equal(rest.layer.weight, whole.layer.weight)


class SavesIn(fx.Callback):
    """Saves in a hook, to files named after the step.

    Args:
        hook: name of the hook.
        folder: of the files.
    """

    def __init__(self, hook: str, folder: Path) -> None:
        self.folder = folder
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


@pytest.mark.parametrize("moment", ["before", "after", "on_validation_end", "on_validation_start"])
def test_each_check_of_early_stopping_is_counted_for_any_save_point(
    own_folder: Path, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(ckpt: Path | None) -> fx.Trainer:
        stop = EarlyStopping("val_loss", patience=3, min_delta=9.0)
        every: Any = {"save_top_k": -1, "save_on_train_epoch_end": False, "filename": "{step}"}
        saves: Any = ModelCheckpoint(own_folder, **every)
        if moment.startswith("on_"):
            saves = SavesIn(moment, own_folder)
        callbacks = [saves, stop] if moment == "before" else [stop, saves]
        options: Any = {**QUIET, "num_sanity_val_steps": 0, "val_check_interval": 2}
        trainer = fx.Trainer(max_epochs=4, callbacks=callbacks, **options)
        trainer.fit(TinyModule(), tiny_loader(20, 4), tiny_loader(8, 4), ckpt_path=ckpt)
        assert stop.wait_count == 3
        return trainer

    assert train(None).global_step == 9  # checks after batches 2 and 4 of an epoch of 5
    saved = sorted(own_folder.glob("step=*.ckpt"))
    assert [path.stem for path in saved] == ["step=2", "step=4", "step=7", "step=9"]
    for path in saved:
        capsys.readouterr()
        assert train(path).global_step == 9
        assert ("training is already complete" in capsys.readouterr().out) is (path.stem == "step=9")


class LogsOnce(TinyModule):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.log("first", 3.0)


def test_values_of_an_earlier_run_are_the_newest_values_until_they_are_logged_again(own_folder: Path) -> None:
    def train(ckpt: Path | None) -> fx.Trainer:
        saves = SavesIn("on_train_batch_end", own_folder)
        trainer = fx.Trainer(max_epochs=2, callbacks=[saves], **QUIET)
        trainer.fit(LogsOnce(), tiny_loader(), ckpt_path=ckpt)
        return trainer

    whole = train(None)
    assert {"first", "loss"} <= whole.logged_metrics.keys()
    for step in (6, 8):
        resumed = train(own_folder / f"step={step}.ckpt")
        assert resumed.callback_metrics["loss"] == whole.callback_metrics["loss"]
        assert resumed.logged_metrics == whole.logged_metrics


class Counts(fx.Callback):
    def __init__(self, increment: int) -> None:
        self.each, self.count = increment, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.count += self.each

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def test_each_of_several_callbacks_of_a_class_has_its_state_restored(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int, ckpt: Path | None, *increments: int) -> list[int]:
        counts = [Counts(increment) for increment in increments]
        trainer = fx.Trainer(max_steps=steps, callbacks=[*counts], **QUIET)
        trainer.fit(TinyModule(), tiny_loader(), ckpt_path=ckpt)
        trainer.save_checkpoint(own_folder / f"{steps}.ckpt")
        return [increment.count for increment in counts]

    assert train(2, None, 1, 10, 100) == [2, 20, 200]
    assert train(3, own_folder / "2.ckpt", 1, 10, 100) == [3, 30, 300]
    assert "no callback" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"states of 3 callbacks with state_key='Counts', and this run has 1 such"):
        train(4, own_folder / "3.ckpt", 1)
    warned = "the checkpoint has the state of Counts, Counts/2, Counts/3, and this run has no such callback"
    with pytest.warns(UserWarning, match=warned):
        train(4, own_folder / "3.ckpt")


def test_a_single_rank_does_not_require_the_recovery_of_several_ranks(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fx.Trainer(max_steps=2, callbacks=[FaultRecovery()], **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    assert FaultRecovery().state_dict()  # so that the checkpoint has it
    trainer.save_checkpoint(own_folder / "2.ckpt")
    fx.Trainer(max_steps=3, **QUIET).fit(TinyModule(), tiny_loader(), ckpt_path=own_folder / "2.ckpt")
    assert "no such callback" not in capsys.readouterr().out


def test_a_single_average_of_the_weights_can_be_saved() -> None:
    with pytest.raises(ValueError, match="all callbacks but one"):
        fx.Trainer(max_steps=1, callbacks=[EMA(0.9), EMA(0.5)], **QUIET).fit(TinyModule(), tiny_loader())


class Shuffled(IterableDataset[Any]):
    """A stream in an order that each epoch draws."""

    def __iter__(self) -> Any:
        data = tiny_data()
        return iter([data[int(position)] for position in torch.randperm(len(data))])


class Dropped(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(nn.functional.dropout(batch[0])), batch[1])


def test_a_stream_that_draws_its_order_is_read_again_in_the_same_order(own_folder: Path) -> None:
    def train(steps: int, ckpt: Path | None) -> tuple[fx.Trainer, Dropped]:
        torch.manual_seed(5)
        trainer, module = fx.Trainer(max_epochs=2, max_steps=steps, **QUIET), Dropped()
        trainer.fit(module, DataLoader(Shuffled(), 4), ckpt_path=ckpt)
        return trainer, module

    _, whole = train(-1, None)
    for steps in (2, 4, 5):
        train(steps, None)[0].save_checkpoint(own_folder / f"{steps}.ckpt")
        _, resumed = train(-1, own_folder / f"{steps}.ckpt")
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_finished_run_prints_a_message_and_does_not_train(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {**QUIET, "max_epochs": 1, "enable_checkpointing": True, "default_root_dir": own_folder}
    trainer, module = fx.Trainer(**options), TinyModule()
    trainer.fit(module, tiny_loader())
    again, resumed = fx.Trainer(**options), TinyModule()
    again.fit(resumed, tiny_loader(), ckpt_path="last")
    assert "training is already complete, after 4 steps and 1 epochs: max_epochs=1" in capsys.readouterr().out
    assert again.global_step == 4
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), resumed.parameters(), strict=True))
    module.on_train_start = module.on_train_end = pytest.fail  # type: ignore[method-assign,assignment]
    trainer.fit(module, tiny_loader())  # a second fit, as in Lightning
    printed = capsys.readouterr().out
    assert "training is already complete, after 4 steps and 1 epochs: max_epochs=1" in printed
    assert "this run continues" not in printed
    del module.on_train_start, module.on_train_end
    trainer.max_epochs = 2
    trainer.fit(module, tiny_loader())
    assert "after 4 steps of an earlier fit with its weights, and with new optimizers" in capsys.readouterr().out


class Drawn(Sampler[int]):
    """Shuffles with python's generator, which fabricx seeds, or with the system's, which has no state."""

    def __init__(self, generator: Any) -> None:
        self.generator_of_its_own = generator

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator_of_its_own.sample(range(16), 16))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("seeded", ""), ("its own", "by Drawn"), ("longer", "20 shuffled with seed"),
        ("not shuffled", "16 in the order of the data"), ("batches", "another kind of loader than list"),
    ],
)  # fmt: skip
def test_an_epoch_that_continues_in_a_different_order_is_reported(
    own_folder: Path, kind: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def loader() -> DataLoader[Any]:
        if kind in ("seeded", "its own"):
            return tiny_loader(sampler=Drawn(random if kind == "seeded" else random.SystemRandom()))
        return tiny_loader(shuffle=True)

    def train(steps: int, data: Any, ckpt: Path | None = None) -> fx.Trainer:
        torch.manual_seed(3)
        trainer = fx.Trainer(max_steps=steps, **QUIET)
        trainer.fit(TinyModule(), data, ckpt_path=ckpt)
        return trainer

    train(6, loader()).save_checkpoint(own_folder / "six.ckpt")
    others = {"longer": tiny_loader(20, shuffle=True), "not shuffled": tiny_loader(), "batches": list(tiny_loader())}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(7, others.get(kind) or loader(), own_folder / "six.ckpt")
    shown = capsys.readouterr().out + "".join(str(warning.message) for warning in caught)
    assert message in shown
    assert ("some of its samples are trained twice" in shown) is bool(message)


def train(steps: int, batch_size: int, accumulate: int, ckpt: Path | None) -> fx.Trainer:
    trainer = fx.Trainer(max_steps=steps, accumulate_grad_batches=accumulate, **QUIET)
    trainer.fit(TinyModule(), DataLoader(tiny_loader().dataset, batch_size=batch_size), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "message"),
    [(4, 1, ""), (2, 2, ""), (8, 1, "each update now has 8 samples, and had 4"), (2, 1, "now has 2 samples")],
)
def test_a_different_global_batch_is_reported_and_an_equal_product_is_not(
    own_folder: Path, batch_size: int, accumulate: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(2, 4, 1, None).save_checkpoint(own_folder / "one.ckpt")
    capsys.readouterr()
    resumed = train(4, batch_size, accumulate, own_folder / "one.ckpt")
    shown = capsys.readouterr().out
    assert (message in shown) if message else ("each update has" not in shown)
    assert resumed.state.samples % len(tiny_loader().dataset) == (2 * 4 + 2 * batch_size * accumulate) % len(
        tiny_loader().dataset
    )


def data_of(global_batch: int) -> Any:
    return SimpleNamespace(train_feed=SimpleNamespace(global_batch=global_batch), train_dataloader=None)


@pytest.mark.parametrize(("batch", "reported"), [(8, False), (16, True)])
def test_batch_size_and_ranks_changed_together(batch: int, reported: bool) -> None:
    lines: list[str] = []
    session: Any = SimpleNamespace(
        data=data_of(batch),  # batch_size of each rank x the 2 ranks that it began with
        options=SimpleNamespace(accumulate_grad_batches=1), state=SimpleNamespace(ranks=2), print=lines.append,
        serving=HasServers(),
    )  # fmt: skip
    _print_global_batch(session, 8)
    assert bool(lines) is reported
    assert not reported or ("16 samples, and had 8" in lines[0] and "the 2 ranks" in lines[0])


@pytest.mark.parametrize(
    ("strategy", "samples"),
    [
        (DDP(), 16), (ParameterServer(mode="bounded"), 16), (ParameterServer(mode="async"), 8), (AsyncSGD(), 8),
        (ParameterServer(backup_workers=1), 16), (ParameterServer(mode="bounded", apply="arrival"), 8),
    ],
)  # fmt: skip
def test_an_update_of_one_worker_has_its_batch(strategy: Any, samples: int) -> None:
    lines: list[str] = []
    session: Any = SimpleNamespace(
        data=data_of(16), options=SimpleNamespace(accumulate_grad_batches=1), state=SimpleNamespace(ranks=2),
        print=lines.append, serving=as_part(strategy, HasServers),
    )  # fmt: skip
    _print_global_batch(session, samples)
    assert lines == []
    _print_global_batch(session, 4)
    assert f"each update now has {samples} samples, and had 4" in lines[0]
    assert ("of a single worker" in lines[0]) is (samples == 8)


def test_weights_that_a_module_omits_are_no_error_where_loading_is_not_strict(own_folder: Path) -> None:
    class Frozen(TinyModule):
        strict_loading = False

        def state_dict(self, *args: Any, **options: Any) -> Any:
            return {name: value for name, value in super().state_dict(*args, **options).items() if "bias" not in name}

    first = fx.Trainer(max_epochs=1, **QUIET)
    first.fit(Frozen(), tiny_loader())
    first.save_checkpoint(own_folder / "a.ckpt")
    resumed = fx.Trainer(max_epochs=2, **QUIET)
    resumed.fit(Frozen(), tiny_loader(), ckpt_path=own_folder / "a.ckpt")
    assert resumed.current_epoch == 2
    with pytest.warns(UserWarning, match="are not all those of the module"):
        fx.Trainer(**QUIET).test(Frozen(), tiny_loader(), ckpt_path=own_folder / "a.ckpt", verbose=False)


def test_the_strategy_of_a_single_rank_gathers_nothing() -> None:
    class Gathers(TinyModule):
        def on_train_start(self) -> None:
            gathered = self.all_gather({"a": torch.ones(2), "b": 3})
            assert (gathered["a"].shape, gathered["b"].shape, gathered["b"].item()) == ((2,), (), 3)

    fx.Trainer(max_epochs=1, **QUIET).fit(Gathers(), tiny_loader())


def test_resuming_from_averaged_weights_without_their_callback_is_a_warning(own_folder: Path) -> None:
    first = fx.Trainer(max_epochs=1, callbacks=[EMA()], **QUIET)
    first.fit(TinyModule(), tiny_loader())
    first.save_checkpoint(own_folder / "a.ckpt")
    with pytest.warns(UserWarning, match="are the averages of EMA, and training continues from these"):
        fx.Trainer(max_epochs=2, **QUIET).fit(TinyModule(), tiny_loader(), ckpt_path=own_folder / "a.ckpt")


def test_averages_beside_the_trained_weights_are_no_reason_for_a_warning(
    own_folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Saves(fx.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(own_folder / "a.ckpt")

    averaging = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    fx.Trainer(max_epochs=2, callbacks=[averaging, Saves()], **QUIET).fit(TinyModule(), tiny_loader())
    recwarn.clear()
    fx.Trainer(max_epochs=3, **QUIET).fit(TinyModule(), tiny_loader(), ckpt_path=own_folder / "a.ckpt")
    assert [str(warning.message) for warning in recwarn if "averages" in str(warning.message)] == []


@pytest.mark.parametrize(
    ("epoch", "batch", "persistent", "reports"), [(0, 1, True, 0), (0, 2, False, 0), (0, 0, True, 1), (2, 1, True, 1)]
)
def test_lost_state_of_persistent_loader_processes_is_reported_after_their_first_epoch(
    epoch: int, batch: int, persistent: bool, reports: int
) -> None:
    lines: list[str] = []
    loader = SimpleNamespace(persistent_workers=persistent)
    session: Any = SimpleNamespace(
        data=SimpleNamespace(train_dataloader=loader), print=lines.append,
        state=SimpleNamespace(step=2 * epoch + 2, epoch=epoch, batch=batch),
    )  # fmt: skip
    _report_reading(session)
    assert sum("Set persistent_workers=False" in line for line in lines) == reports


def split(seed: int) -> DataLoader[Any]:
    return DataLoader(Subset(tiny_data(24), np.random.default_rng(seed).permutation(24)[:16].tolist()), 4, shuffle=True)


@pytest.mark.parametrize("step", [2, 4])  # within an epoch, and at its end
def test_a_different_split_is_reported(
    step: int, tmp_path: Path, quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved.ckpt"
    fx.Trainer(max_steps=step, callbacks=SavesAtStep(path, step), **quiet).fit(TinyModule(), split(0))
    reported = []
    for seed in (0, 1):
        fx.Trainer(max_steps=6, **quiet).fit(TinyModule(), split(seed), ckpt_path=path)
        reported.append("the Subset of the training data has other items" in capsys.readouterr().out)
    assert reported == [False, True]


class _Resets(Optimized):
    """Sets entries of a checkpoint by which Lightning begins with new optimizers."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []


class _Changes(Optimized):
    """Changes entries of a checkpoint in place."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for group in checkpoint["optimizer_states"][0]["param_groups"]:
            group["lr"] = 123.0


class _Removes(Optimized):
    """Removes the states of optimizers, as code does that makes files of Lightning smaller."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.pop("optimizer_states")


def test_states_that_a_hook_sets_and_a_resumed_run_does_not_restore_are_refused(own_folder: Path) -> None:
    remedy = r"has changed 'optimizer_states' of.*fit\(Module.load_from_checkpoint\(path\)\)"
    with pytest.raises(CheckpointError, match=remedy):
        resumed(own_folder, Optimized(), _Resets())
    with pytest.raises(CheckpointError, match="has changed 'optimizer_states' of"):
        resumed(own_folder, Optimized(), _Changes())
    with pytest.warns(UserWarning, match="on_save_checkpoint has removed 'optimizer_states', and the checkpoint keeps"):
        resumed(own_folder, _Removes(), Optimized())
    fx.Trainer(**QUIET).validate(_Resets(), tiny_loader(), ckpt_path=own_folder / "two.ckpt", verbose=False)
    begun = fx.Trainer(max_steps=1, **QUIET)
    begun.fit(_Resets.load_from_checkpoint(own_folder / "two.ckpt", make=SGD), tiny_loader())
    assert begun.global_step == 1


@pytest.mark.parametrize(("divides", "batch", "reported"), [(True, 3, False), (False, 3, True), (False, 0, False)])
def test_positions_in_orders_of_ranks_are_lost_on_another_number_of_ranks(
    divides: bool, batch: int, reported: bool
) -> None:
    lines: list[str] = []
    state = SimpleNamespace(samples=6, batch=batch, uncounted=False)
    session: Any = SimpleNamespace(
        data=SimpleNamespace(train_feed=SimpleNamespace(batches_before=lambda position, accumulate: 3)), state=state,
        options=SimpleNamespace(accumulate_grad_batches=1, use_distributed_sampler=divides), print=lines.append,
        world=World(),
    )  # fmt: skip
    _report_lost_position(session, 2, [{"position": None}] * 2)
    assert state.uncounted is bool(lines) is reported
