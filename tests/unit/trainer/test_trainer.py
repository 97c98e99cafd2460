"""What the arguments of the Trainer do, one by one; those of the loop's order are in test_loop.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Counts(TinyModule):
    """Counts what is run, and stops when it was told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.seen: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": [], "predict": []}
        self.stop_at = stop_at
        self.grad_modes: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["train"].append(batch[0])
        if self.stop_at is not None and len(self.seen["train"]) >= self.stop_at:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validation"].append(batch[0])
        self.grad_modes.append(torch.is_inference_mode_enabled())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["test"].append(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["predict"].append(batch[0])
        return batch[0]

    def counts(self) -> dict[str, int]:
        return {stage: len(batches) for stage, batches in self.seen.items()}


def fitted(module: Counts | None = None, **options: Any) -> tuple[Counts, fx.Trainer]:
    module, trainer = module or Counts(), fx.Trainer(**{"max_epochs": 2, "num_sanity_val_steps": 0, **QUIET, **options})
    trainer.fit(module, tiny_loader(), tiny_loader())
    return module, trainer


def test_fast_dev_run_touches_everything_for_a_few_batches() -> None:
    module, trainer = fitted(fast_dev_run=3, max_epochs=50)
    assert module.counts() == {"train": 3, "validation": 3, "test": 0, "predict": 0}
    trainer.test(module, tiny_loader(), verbose=False)
    assert module.counts()["test"] == 3
    assert (trainer.global_step, trainer.loggers, trainer.checkpoint_callback) == (3, [], None)


def test_limits_count_batches_or_parts() -> None:
    module, trainer = fitted(
        limit_train_batches=0.5, limit_val_batches=1, limit_test_batches=3, limit_predict_batches=0.25
    )
    trainer.test(module, tiny_loader(), verbose=False)
    trainer.predict(module, tiny_loader())
    assert module.counts() == {"train": 4, "validation": 2, "test": 3, "predict": 1}


def test_overfit_takes_the_same_batches_in_each_epoch_and_for_validation() -> None:
    module = Counts()
    trainer = fx.Trainer(max_epochs=3, overfit_batches=2, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module, tiny_loader(shuffle=True), tiny_loader())
    epochs = [torch.cat(module.seen["train"][at : at + 2]) for at in (0, 2, 4)]
    assert torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])
    assert torch.equal(torch.cat(module.seen["validation"][:2]), epochs[0])


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 2), ({"min_steps": 3}, 3), ({"min_epochs": 1}, 4), ({"min_epochs": 1, "min_steps": 6}, 6)],
)
def test_nobody_stops_a_run_before_its_least_steps_and_epochs(options: dict[str, Any], steps: int) -> None:
    assert fitted(Counts(stop_at=2), max_epochs=5, **options)[1].global_step == steps


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_that_of_torch(algorithm: str) -> None:
    class Sees(Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if module.layer.weight.grad is not None:
                self.clipped = [p.grad.clone() for p in module.parameters()]

    sees = Sees()
    fitted(gradient_clip_val=0.05, gradient_clip_algorithm=algorithm, max_steps=2, callbacks=[sees])
    plain = TinyModule()
    batch = next(iter(tiny_loader()))
    nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
    if algorithm == "norm":
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    else:
        nn.utils.clip_grad_value_(plain.parameters(), 0.05)
    for found, wanted in zip(sees.clipped, plain.parameters(), strict=True):
        assert wanted.grad is not None
        assert torch.equal(found, wanted.grad)


@pytest.mark.parametrize("wanted", [True, False])
def test_inference_mode_is_a_choice(wanted: bool) -> None:
    assert set(fitted(inference_mode=wanted)[0].grad_modes) == {wanted}


class _Switches(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.anomaly, self.deterministic = torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()


def test_switches_of_torch_are_on_during_the_run_only() -> None:
    switches = _Switches()
    fitted(detect_anomaly=True, deterministic=True, callbacks=[switches])
    assert switches.anomaly
    assert switches.deterministic
    assert not torch.is_anomaly_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


class _Reloads(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return tiny_loader()


@pytest.mark.parametrize(("every", "asked"), [(0, 1), (1, 4), (2, 2)])
def test_loaders_are_asked_for_anew_each_so_many_epochs(every: int, asked: int) -> None:
    module = _Reloads()
    fx.Trainer(max_epochs=4, reload_dataloaders_every_n_epochs=every, **QUIET).fit(module)
    assert module.asked == asked


def test_a_compiled_module_trains_to_the_same_weights() -> None:
    compiled, _ = fitted(compile={"backend": "eager"})
    assert torch.equal(compiled.layer.weight, fitted()[0].layer.weight)
    assert list(compiled.state_dict()) == ["layer.weight", "layer.bias"]


def test_max_time_ends_a_run_that_nothing_else_would_end() -> None:
    trainer = fx.Trainer(max_time={"milliseconds": 50}, **QUIET)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step > 0
    assert not trainer.interrupted


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"val_check_interval": 1.5}, "val_check_interval=1.5: set a fraction of an epoch"),
        ({"val_check_interval": 0}, "val_check_interval=0: "),
        ({"val_check_interval": -3}, "val_check_interval=-3: "),
        ({"num_sanity_val_steps": -2}, "num_sanity_val_steps=-2: set an integer number of batches, -1 or more"),
        ({"num_sanity_val_steps": True}, "num_sanity_val_steps=True: set an integer number of batches"),
        ({"fast_dev_run": -1}, "fast_dev_run=-1: "),
        ({"deterministic": 1}, "deterministic=1: set False, True, 'warn' or 'elastic'"),
        ({"deterministic": 0}, "deterministic=0: "),
        ({"gradient_clip_val": "low"}, "gradient_clip_val='low': set a limit of 0 or more"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val=nan: "),
        ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs=-1: "),
    ],
)
def test_an_invalid_value_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fx.Trainer(**options, **QUIET)


def test_a_misspelt_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"Trainer has no argument 'device'\. Did you mean 'devices'\?"):
        fx.Trainer(device=2)  # type: ignore[call-arg]

    class Own(Callback):
        def __init__(self, patience: int, **options: Any) -> None:
            self.given = (patience, options)

    assert Own(patience=3, anything=4).given == (3, {"anything": 4})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "data", "said"),
    [
        ({}, {"samples": 0}, "there is no batch to train on: DataLoader is empty"),
        ({}, {"samples": 3, "drop_last": True}, "drop_last=True"),
        ({"limit_train_batches": 0.01}, {}, "limit_train_batches=0.01 of 4 batches is less than one"),
        ({"overfit_batches": 0.01}, {}, "overfit_batches=0.01 of 4 batches is less than one"),
        ({"limit_val_batches": 0.01}, {}, "limit_val_batches=0.01 of 4 batches is less than one"),
    ],
)
def test_no_batch_at_all_is_an_error(options: dict[str, Any], data: dict[str, Any], said: str) -> None:
    trainer = fx.Trainer(max_epochs=1, **QUIET, **options)
    whole: Any = tiny_loader().dataset
    kept = torch.utils.data.Subset(whole, range(data.pop("samples", len(whole))))
    with pytest.raises(ValueError, match=said):
        trainer.fit(Counts(), torch.utils.data.DataLoader(kept, batch_size=4, **data), tiny_loader())
    fx.Trainer(max_epochs=1, limit_train_batches=0, **QUIET).fit(Counts(), tiny_loader())  # nothing was asked for


def test_predictions_have_the_order_of_the_data_set() -> None:
    whole = torch.cat(fx.Trainer(**QUIET).predict(Counts(), tiny_loader(shuffle=True)))
    assert torch.equal(whole, torch.cat([batch[0] for batch in tiny_loader()]))
