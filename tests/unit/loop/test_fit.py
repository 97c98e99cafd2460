"""What the loop does, in which order, and when it stops."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.core.callback import Callback
from fabricx.testing import QUIET, TinyModule, tiny_data, tiny_loader


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    return {**QUIET, "default_root_dir": tmp_path}


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []


def _record(name: str) -> Any:
    def hook(self: Recorder, *args: Any) -> None:
        self.calls.append(name)

    return hook


for _name in [n for n in vars(Callback) if n.startswith("on_")] + ["setup", "teardown"]:
    setattr(Recorder, _name, _record(_name))


def test_hooks_run_in_the_documented_order(quiet: dict[str, Any]) -> None:
    recorder = Recorder()
    trainer = fx.Trainer(max_epochs=1, limit_val_batches=1, callbacks=[recorder], **quiet)
    trainer.fit(TinyModule(), tiny_loader(8, 4), tiny_loader(4, 4))
    validation = [
        "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end",
        "on_validation_epoch_end", "on_validation_end",
    ]  # fmt: skip
    batch = [
        "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_train_batch_end",
    ]  # fmt: skip
    assert recorder.calls == [
        "setup", "on_fit_start", "on_sanity_check_start", *validation, "on_sanity_check_end", "on_train_start",
        "on_train_epoch_start", *batch, *batch, *validation, "on_train_epoch_end", "on_train_end", "on_fit_end",
        "teardown",
    ]  # fmt: skip


def test_callbacks_run_before_the_module_and_those_that_watch_metrics_after_it(quiet: dict[str, Any]) -> None:
    order: list[str] = []

    class First(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append("callback")

    class Watching(Callback):
        watches_metrics = True

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            order.append(f"watching {float(trainer.callback_metrics['late'])}")

    class Mine(TinyModule):
        def on_train_epoch_end(self) -> None:
            order.append("module")
            self.log("late", 3.0)

    fx.Trainer(max_epochs=1, callbacks=[Watching(), First()], **quiet).fit(Mine(), tiny_loader())
    assert order == ["callback", "module", "watching 3.0"]


def test_a_misspelt_hook_is_refused_with_the_nearest_name(quiet: dict[str, Any]) -> None:
    class Wrong(Callback):
        def on_train_epoch_edn(self) -> None: ...

    with pytest.raises(ValueError, match="Did you mean 'on_train_epoch_end'"):
        fx.Trainer(callbacks=[Wrong()], **quiet)


@pytest.mark.parametrize("batches", [4, 5, 6, 8])
def test_the_last_partial_window_has_the_whole_gradient(batches: int, quiet: dict[str, Any]) -> None:
    norms: list[float] = []

    class Constant(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer.weight.sum()  # a gradient of one everywhere

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(self.layer.weight.grad.mean()))

    fx.Trainer(max_epochs=1, accumulate_grad_batches=4, **quiet).fit(Constant(), tiny_loader(4 * batches, 4))
    assert norms == [1.0] * -(-batches // 4)


def test_a_stream_without_length_closes_its_last_window_whole(quiet: dict[str, Any]) -> None:
    norms: list[float] = []

    class Constant(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer.weight.sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(self.layer.weight.grad.mean()))

    class Stream:
        def __iter__(self) -> Any:
            return iter(list(tiny_loader(20, 4)))

    fx.Trainer(max_epochs=1, accumulate_grad_batches=4, **quiet).fit(Constant(), Stream())
    assert norms == [1.0, 1.0]


def test_a_generator_that_is_used_up_is_an_error_and_no_endless_run(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_steps=10, **quiet)
    with pytest.raises(ValueError, match=r"generator yielded no batch in epoch 1.* can be iterated only once"):
        trainer.fit(TinyModule(), (batch for batch in tiny_loader(8, 4)))
    assert trainer.global_step == 2


def test_two_optimizers_count_one_weight_update(quiet: dict[str, Any]) -> None:
    class Two(TinyModule):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.Adam(self.parameters())]

    class Manual(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self(batch[0]).mean())
                optimizer.step()

        configure_optimizers = Two.configure_optimizers

    for module in (Two(), Manual()):
        seen: list[int] = []
        original = module.training_step
        module.training_step = lambda b, i, seen=seen, original=original: (seen.append(i), original(b, i))[1]
        trainer = fx.Trainer(max_steps=6, **quiet)
        trainer.fit(module, tiny_loader(64, 4))
        assert (trainer.global_step, len(seen)) == (6, 6)


def test_limits_stop_where_they_say(quiet: dict[str, Any]) -> None:
    for options, steps, epochs in [
        ({"max_epochs": 3}, 12, 3),
        ({"max_steps": 5}, 5, 1),
        ({"max_epochs": 2, "limit_train_batches": 1}, 2, 2),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4, 2),
        ({"max_epochs": 0}, 0, 0),
        ({"fast_dev_run": True}, 1, 1),
        ({"max_epochs": "2ep", "overfit_batches": 2}, 4, 2),
    ]:
        trainer = fx.Trainer(**options, **quiet)
        trainer.fit(TinyModule(), tiny_loader(16, 4))
        assert (trainer.global_step, trainer.current_epoch) == (steps, epochs), options


def test_should_stop_is_honoured_at_the_step_and_held_back_by_min_epochs(quiet: dict[str, Any]) -> None:
    class Stops(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 2:
                self.trainer.should_stop = True

    for options, steps in (({}, 2), ({"min_epochs": 2}, 8), ({"min_steps": 3}, 3)):
        trainer = fx.Trainer(max_epochs=5, **options, **quiet)
        trainer.fit(Stops(), tiny_loader())
        assert trainer.global_step == steps


def test_a_second_fit_does_nothing_at_the_limit_and_goes_on_when_it_is_raised(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_epochs=1, **quiet)
    module = TinyModule()
    trainer.fit(module, tiny_loader())
    trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4
    trainer.max_epochs = 2
    trainer.fit(module, tiny_loader())
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)


def test_validation_comes_when_it_is_due(quiet: dict[str, Any]) -> None:
    for options, expected in [
        ({}, [8, 16]),
        ({"val_check_interval": 0.5}, [4, 8, 12, 16]),
        ({"val_check_interval": 3}, [3, 6, 11, 14]),
        ({"val_check_interval": 6, "check_val_every_n_epoch": None}, [6, 12]),
        ({"val_check_interval": "5st"}, [5, 10, 15]),
        ({"check_val_every_n_epoch": 2}, [16]),
        ({"limit_val_batches": 0}, []),
    ]:
        steps: list[int] = []

        class Mine(TinyModule):
            def on_validation_start(self, steps: list[int] = steps) -> None:
                steps.append(self.global_step)

        trainer = fx.Trainer(max_epochs=2, num_sanity_val_steps=0, **options, **quiet)
        trainer.fit(Mine(), tiny_loader(32, 4), tiny_loader(4, 4))
        assert steps == expected, options


def test_the_sanity_check_leaves_no_trace(quiet: dict[str, Any]) -> None:
    def trained(checks: int) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(0)
        module = _Dropout()
        trainer = fx.Trainer(max_epochs=1, num_sanity_val_steps=checks, check_val_every_n_epoch=5, **quiet)
        trainer.fit(module, tiny_loader(shuffle=True), tiny_loader())
        return [float(p.detach().sum()) for p in module.parameters()], trainer.callback_metrics

    first, metrics = trained(2)
    assert (first, set(metrics)) == (trained(0)[0], {"loss"})


class _Dropout(TinyModule):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(nn.functional.dropout(inputs, 0.5))
        return output


def test_each_submodule_gets_its_own_mode_back_after_validation(quiet: dict[str, Any]) -> None:
    class Mine(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.BatchNorm1d(4).eval()

        def on_train_start(self) -> None:
            self.frozen.eval()

        def on_train_epoch_end(self) -> None:
            assert self.layer.training
            assert not self.frozen.training

        def validation_step(self, batch: Any) -> None:
            assert not self.layer.training

    fx.Trainer(max_epochs=1, **quiet).fit(Mine(), tiny_loader(), tiny_loader())


def test_a_stopped_run_goes_on_bit_for_bit(quiet: dict[str, Any], tmp_path: Path) -> None:
    def run(steps: int, path: Path | None) -> tuple[fx.Trainer, _Dropout]:
        torch.manual_seed(1)
        module = _Dropout()
        trainer = fx.Trainer(max_epochs=3, max_steps=steps, accumulate_grad_batches=2, **quiet)
        trainer.fit(module, tiny_loader(30, 4, shuffle=True), ckpt_path=path)
        return trainer, module

    _, whole = run(-1, None)
    for steps in (3, 4, 5):
        stopped, _ = run(steps, None)
        path = stopped.save_checkpoint(tmp_path / f"at-{steps}")
        torch.manual_seed(77)
        _, resumed = run(-1, path)
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_predictions_come_in_the_order_of_the_data(quiet: dict[str, Any]) -> None:
    class Echo(TinyModule):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return batch[0]

    outputs = fx.Trainer(**quiet).predict(Echo(), tiny_loader(10, 4))
    assert torch.equal(torch.cat(outputs), tiny_data(10).tensors[0])


def test_several_validation_loaders_have_their_own_names(quiet: dict[str, Any]) -> None:
    class Mine(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("which", float(dataloader_idx))
            self.log("all", float(dataloader_idx), add_dataloader_idx=False)

    results = fx.Trainer(**quiet).validate(Mine(), [tiny_loader(), tiny_loader()], verbose=False)
    assert results[0]["which/dataloader_idx_0"] == 0.0
    assert results[1]["which/dataloader_idx_1"] == 1.0
    assert results[0]["all"] == 0.5


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m: torch.ones(2, requires_grad=True), r"shape \(2,\)"),
        (lambda m: torch.ones(()), "without a gradient"),
        (lambda m: "high", "returned str"),
        (lambda m: {"los": 1}, r"without 'loss' \(\['los'\]\)"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_explained(loss: Any, message: str, quiet: dict[str, Any]) -> None:
    class Wrong(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss(self)

    with pytest.raises(ValueError, match=message):
        fx.Trainer(max_epochs=1, **quiet).fit(Wrong(), tiny_loader())


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_precisions_train(precision: str, quiet: dict[str, Any]) -> None:
    module = TinyModule()
    fx.Trainer(max_epochs=2, precision=precision, **quiet).fit(module, tiny_loader(), tiny_loader())
    kept = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    assert module.dtype == kept
    assert float(module.layer.weight.detach().mean()) != 0.5


def test_a_manual_step_in_bf16_computes_with_the_weights_of_its_own_update(quiet: dict[str, Any]) -> None:
    """Autocast keeps 16-bit copies of weights: the second forward of a step must not see those of the first."""

    class Twice(TinyModule):
        automatic_optimization = False
        losses: ClassVar[list[float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(2):
                self.optimizers().zero_grad()
                loss = super().training_step(batch, batch_idx)
                self.losses.append(loss.item())
                self.manual_backward(loss)
                self.optimizers().step()

    module, plain = Twice(lr=0.1), TinyModule(lr=0.1)
    fx.Trainer(max_epochs=1, precision="bf16-mixed", limit_train_batches=2, **quiet).fit(module, tiny_loader())
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for batch in itertools.islice(tiny_loader(), 2):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(plain(batch[0]), batch[1])
            wanted.append(loss.item())
            loss.backward()
            optimizer.step()
    assert module.losses == wanted
    assert len(set(wanted)) == 4


def test_clipping_limits_the_norm_and_the_values(quiet: dict[str, Any]) -> None:
    for algorithm in ("norm", "value"):
        before = TinyModule()
        after = TinyModule(lr=1.0)
        options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
        fx.Trainer(max_steps=1, **options, **quiet).fit(after, tiny_loader())
        moved = torch.cat(
            [(a - b).detach().flatten() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
        )
        size = moved.norm() if algorithm == "norm" else moved.abs().max()
        assert float(size) == pytest.approx(0.01, rel=1e-3)


def test_a_value_logged_by_step_and_by_epoch_is_known_by_three_names(quiet: dict[str, Any]) -> None:
    seen: list[float] = []

    class Mine(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("index", float(batch_idx), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(float(self.trainer.callback_metrics["index"]))

        def on_train_epoch_end(self) -> None:
            seen.append(float(self.trainer.callback_metrics["index"]))

    trainer = fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(Mine(), tiny_loader(16, 4))
    assert seen == [0.0, 1.0, 2.0, 3.0, 1.5]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("index")}
    assert metrics == {"index": 1.5, "index_step": 3.0, "index_epoch": 1.5}


class _Plateau(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_a_checkpoint_of_an_epochs_end_has_the_metric_that_the_schedule_still_waits_for(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    def run(epochs: int, path: str | None) -> tuple[float, str]:
        saver = ModelCheckpoint(tmp_path, save_last=True)
        options = {**quiet, "enable_checkpointing": True, "callbacks": [saver], "max_epochs": epochs}
        trainer = fx.Trainer(**options)
        trainer.fit(_Plateau(), tiny_loader(), tiny_loader(), ckpt_path=path)
        return trainer.optimizers[0].param_groups[0]["lr"], saver.last_model_path

    whole, _ = run(4, None)
    _, path = run(2, None)
    assert run(4, path)[0] == whole < 0.1


class _Augmented(Dataset[Any]):
    """Adds noise to what it gives."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        inputs = torch.full((4,), index / 30) + torch.rand(4) + random.random() + float(np.random.rand())
        return inputs, inputs.sum(0, keepdim=True)


@pytest.mark.parametrize("processes", [0, 2])
def test_random_augmentation_is_the_same_in_a_resumed_run(
    quiet: dict[str, Any], tmp_path: Path, processes: int
) -> None:
    def run(steps: int, path: Path | None) -> tuple[fx.Trainer, TinyModule]:
        fx.seed_everything(1)
        module, trainer = TinyModule(lr=0.01), fx.Trainer(max_epochs=2, max_steps=steps, **quiet)
        trainer.fit(module, DataLoader(_Augmented(), 4, shuffle=True, num_workers=processes), ckpt_path=path)
        return trainer, module

    _, whole = run(-1, None)
    for steps in (3, 10):
        stopped, _ = run(steps, None)
        _, resumed = run(-1, stopped.save_checkpoint(tmp_path / f"at-{steps}"))
        assert torch.equal(whole.layer.weight, resumed.layer.weight)
