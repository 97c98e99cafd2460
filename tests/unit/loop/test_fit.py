"""The loop of a fit: the order of hooks, the end, and the continuation bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import LambdaCallback, ModelCheckpoint
from fabricx.core.callback import Callback
from fabricx.testing import TinyModule, tiny_loader


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


@pytest.mark.parametrize("limit", [{"limit_train_batches": 0}, {"max_epochs": 0}, {"max_steps": 0}])
def test_without_a_batch_to_train_no_hook_of_training_is_called(
    limit: dict[str, Any], quiet: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    trainer = fx.Trainer(callbacks=[recorder], **{"max_epochs": 2, **limit}, **quiet)
    trainer.fit(TinyModule(), tiny_loader(8, 4))
    assert recorder.calls == ["setup", "on_fit_start", "on_fit_end", "teardown"]
    assert (trainer.current_epoch, trainer.global_step) == (0, 0)
    assert ("there is nothing to train" in capsys.readouterr().out) is ("max_steps" not in limit)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_stop_before_the_first_epoch_calls_no_hook_of_an_epoch(hook: str, quiet: dict[str, Any]) -> None:
    stops: Any = LambdaCallback(**{hook: lambda trainer, module: setattr(trainer, "should_stop", True)})
    recorder = Recorder()
    trainer = fx.Trainer(max_epochs=2, callbacks=[stops, recorder], **quiet)
    trainer.fit(TinyModule(), tiny_loader(8, 4))
    assert recorder.calls == ["setup", "on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "teardown"]
    assert (trainer.current_epoch, trainer.global_step) == (0, 0)


def test_a_callback_does_not_skip_the_rest_of_an_epoch(quiet: dict[str, Any]) -> None:
    class Returns(Callback):
        def on_train_batch_start(self, *args: Any) -> int:  # type: ignore[override]
            return -1

    trainer = fx.Trainer(max_epochs=1, callbacks=[Returns()], **quiet)
    trainer.fit(TinyModule(), tiny_loader(8, 4))
    assert trainer.global_step == 2


def test_a_stopped_epoch_is_counted(quiet: dict[str, Any]) -> None:
    class Epochs(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = self.global_step == 6

        def on_train_epoch_end(self) -> None:
            self.seen = [*getattr(self, "seen", []), self.current_epoch]

        def on_train_end(self) -> None:
            self.seen.append(self.current_epoch)

    module, trainer = Epochs(), fx.Trainer(max_epochs=5, **quiet)
    trainer.fit(module, tiny_loader())
    assert module.seen == [0, 1, 2]
    assert (trainer.current_epoch, trainer.state.epoch, trainer.global_step) == (2, 1, 6)


class _Silent(TinyModule):
    """Optimizes manually, and returns None."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class _Skips(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx else super().training_step(batch, batch_idx)


def test_a_step_that_returns_nothing_has_empty_outputs(quiet: dict[str, Any]) -> None:
    def keys(module: TinyModule) -> list[list[str]]:
        seen: list[list[str]] = []
        ends = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *args: seen.append(list(outputs)))
        fx.Trainer(max_epochs=1, callbacks=[ends], **quiet).fit(module, tiny_loader(8, 4))
        return seen

    assert keys(_Silent()) == [[], []]
    with pytest.warns(UserWarning, match="returned no loss"):
        assert keys(_Skips()) == [["loss"], []]


class _Ends(TinyModule):
    """Records the ends of epochs, with the value that an epoch has logged."""

    def __init__(self, saves_in: str = "", path: Path | None = None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.saves_in, self.path = saves_in, path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def _at(self, hook: str) -> None:
        state = self.trainer.state
        value = float(self.trainer.callback_metrics.get("mean", 0.0))
        self.seen.append((hook, self.global_step, self.current_epoch, state.epoch, value))
        if hook == self.saves_in and self.global_step == self.trainer.max_steps:
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._at("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self._at("on_train_epoch_end")

    def on_train_end(self) -> None:
        self._at("on_train_end")


@pytest.mark.parametrize(("steps", "epochs"), [(4, 1), (6, 2)])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "stream"])
def test_a_run_that_resumes_at_its_limit_ends_the_epoch_unless_it_has_ended(
    steps: int, epochs: int, sized: bool, quiet: dict[str, Any], tmp_path: Path
) -> None:
    def data() -> Any:
        return tiny_loader() if sized else _Unsized(list(tiny_loader()))

    def fit(module: _Ends, path: Path | None, limit: int = steps) -> tuple[fx.Trainer, list[str]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        options = {**quiet, "enable_checkpointing": True, "callbacks": ModelCheckpoint(folder)}
        trainer = fx.Trainer(max_epochs=5, max_steps=limit, **options)
        trainer.fit(module, data(), ckpt_path=path)
        return trainer, [path.name for path in folder.glob("*")]

    for hook, follow in (("on_train_batch_end", 2), ("on_train_epoch_end", 2), ("on_train_end", 1)):
        path = tmp_path / hook
        whole, resumed = _Ends(hook, path), _Ends()
        (first, files), (second, files_again) = fit(whole, None), fit(resumed, path)
        assert resumed.seen == whole.seen[-follow:]
        assert files_again == (files if follow == 2 else [])
        assert first.current_epoch == second.current_epoch == epochs
        assert first.state.epoch == second.state.epoch
        longer = fit(_Ends(), path, steps + 1)[0]
        assert (longer.current_epoch, longer.global_step) == (2, steps + 1)


class _Unsized:
    """A stream of batches, which has no length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_an_exhausted_generator_is_an_error(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_steps=10, **quiet)
    with pytest.raises(ValueError, match=r"generator yielded no batch in epoch 1.* can be iterated only once"):
        trainer.fit(TinyModule(), (batch for batch in tiny_loader(8, 4)))
    assert trainer.global_step == 2


def test_a_second_fit_does_nothing_at_the_limit_and_continues_with_a_higher_limit(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_epochs=1, **quiet)
    module = TinyModule()
    trainer.fit(module, tiny_loader())
    trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4
    trainer.max_epochs = 2
    trainer.fit(module, tiny_loader())
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)


def test_a_second_fit_within_an_epoch_keeps_the_options_that_its_hooks_set(quiet: dict[str, Any]) -> None:
    class Sets(TinyModule):
        def on_train_start(self) -> None:
            self.trainer.optimizers[0].add_param_group({"params": [self.added], "lr": 0.2})

        def on_train_epoch_start(self) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01
            with torch.no_grad():
                self.added += 1.0

    module, trainer = Sets(), fx.Trainer(max_epochs=2, max_steps=2, **quiet)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.added = nn.Parameter(torch.zeros(()))
    module.configure_optimizers = lambda: torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
    for max_steps in (2, 3):
        trainer.max_steps = max_steps
        trainer.fit(module, tiny_loader(16, 4))
        assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.01, 0.2]
    assert module.added.item() == 1.0  # by the first call in this epoch


class _Dropout(TinyModule):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(nn.functional.dropout(inputs, 0.5))
        return output


def test_a_stopped_run_continues_bit_for_bit(quiet: dict[str, Any], tmp_path: Path) -> None:
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


class _Positions(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        saves = trainer.checkpoint_callback
        best = Path(saves.best_model_path).name, len(saves.best_k_models)
        self.seen.append((trainer.current_epoch, trainer.global_step, *best))

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.current_epoch)


def test_a_run_that_resumes_at_the_end_of_an_epoch_begins_in_the_next(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Steps(TinyModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def run(epochs: int, path: Any = None) -> tuple[list[Any], float]:
        saves, positions = ModelCheckpoint(tmp_path / "saved", monitor="val_loss", save_top_k=2), _Positions()
        options = {**quiet, "enable_checkpointing": True, "callbacks": [saves, positions]}
        trainer = fx.Trainer(max_epochs=epochs, **options)
        trainer.fit(Steps(), tiny_loader(16, 4), tiny_loader(8, 4), ckpt_path=path)
        return positions.seen, trainer.optimizers[0].param_groups[0]["lr"]

    assert run(2) == ([(0, 0, "", 0), 0, 1], 0.25e-3)
    best = "epoch=1-step=8.ckpt"
    assert run(3, tmp_path / "saved" / best) == ([(2, 8, best, 2), 2], 0.125e-3)
    with pytest.raises(ValueError, match=r"written after 2 epochs, and max_epochs=1: set max_epochs to more than 2"):
        run(1, tmp_path / "saved" / best)
    assert run(2, tmp_path / "saved" / best) == ([(2, 8, best, 2)], 0.25e-3)  # complete: nothing is trained


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_run_with_max_steps_and_no_update_is_an_error(
    manual: bool, quiet: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fabricx.session.schedule.FEWEST_WITHOUT_STEP", 150)

    class ReturnsNone(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    module = ReturnsNone()
    module.automatic_optimization = not manual
    cause = "no optimizer made a step" if manual else "training_step returned no loss"
    with (
        pytest.warns(UserWarning, match="no optimizer made a step in" if manual else "returned no loss for a batch"),
        pytest.raises(
            ValueError, match=rf"{cause} in 1[05]0 batches in a row, and max_steps=3 .*: the run would never"
        ),
    ):
        fx.Trainer(max_steps=3, **quiet).fit(module, tiny_loader())


def test_a_manual_step_may_have_the_gradients_of_many_batches(quiet: dict[str, Any]) -> None:
    class Accumulates(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx) / 120)
            if batch_idx % 120 == 119:
                self.optimizers().step()
                self.optimizers().zero_grad()

    trainer = fx.Trainer(max_steps=1, max_epochs=-1, **quiet)
    trainer.fit(Accumulates(), tiny_loader(240, 2))
    assert trainer.global_step == 1


def test_batches_without_a_loss_are_reported_once_and_skipped(quiet: dict[str, Any]) -> None:
    class Some(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    trainer = fx.Trainer(max_steps=60, **quiet)
    with pytest.warns(UserWarning, match=r"no loss for a batch \(step 0\), so the batch is skipped") as caught:
        trainer.fit(Some(), tiny_loader(8, 4))
    warned = [warning for warning in caught if warning.category is UserWarning]
    assert (len(warned), trainer.global_step) == (1, 60)


class MeanOfOnes(fx.Module):
    """The gradient of the mean over any samples is 1; the batches in `skipped` have no loss."""

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight, self.skipped = nn.Parameter(torch.zeros(())), skipped
        self.gradients: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else (self.weight * batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(float(self.weight.grad))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
@pytest.mark.parametrize("skipped", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(4, 4, 2), (7, 2, 1)])
def test_a_window_with_a_skipped_batch_has_the_mean_over_all_other_samples(
    sizes: tuple[int, ...], skipped: int, quiet: dict[str, Any]
) -> None:
    places = iter(range(sum(sizes)))
    batches = [[next(places) for _ in range(size)] for size in sizes]
    module = MeanOfOnes((skipped,))
    data = DataLoader(torch.ones(sum(sizes)), batch_sampler=batches)  # type: ignore[arg-type]
    fx.Trainer(max_epochs=1, accumulate_grad_batches=3, **quiet).fit(module, data)
    assert module.gradients == pytest.approx([1.0])


def test_a_closure_can_not_compute_an_accumulated_gradient_again(quiet: dict[str, Any]) -> None:
    class Twice(MeanOfOnes):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer_closure()
            optimizer.step()

    data = DataLoader(torch.ones(8), 4)  # type: ignore[arg-type]
    fx.Trainer(max_epochs=1, **quiet).fit(Twice(), data)
    with pytest.raises(ValueError, match="accumulated over 2 microbatches, of which only the last is known"):
        fx.Trainer(max_epochs=1, accumulate_grad_batches=2, **quiet).fit(Twice(), data)


def test_an_optimizer_step_hook_without_a_step_is_reported(quiet: dict[str, Any]) -> None:
    class Forgets(TinyModule):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None: ...

    with pytest.warns(UserWarning, match=r"neither steps the SGD that it receives nor calls its closure"):
        fx.Trainer(max_epochs=1, **quiet).fit(Forgets(), tiny_loader())


def test_a_module_without_an_optimizer_is_reported(quiet: dict[str, Any]) -> None:
    class Fixed(TinyModule):
        def configure_optimizers(self) -> Any: ...

    with pytest.warns(UserWarning, match="configure_optimizers returned no optimizer, so no weight will change"):
        fx.Trainer(max_epochs=1, **quiet).fit(Fixed(), tiny_loader(8, 4))


def test_the_phase_of_a_call_holds_from_its_set_up_to_its_end(quiet: dict[str, Any]) -> None:
    seen: list[tuple[str, str]] = []

    class StageRecorder(TinyModule):
        def _look(self, hook: str) -> None:
            run_trainer = self.trainer
            words = [
                w
                for w in ("training", "validating", "testing", "predicting", "sanity_checking")
                if getattr(run_trainer, w)
            ]
            seen.append((hook, " ".join(words)))

        def setup(self, stage: str) -> None:
            self._look("setup " + stage)

        def teardown(self, stage: str) -> None:
            self._look("teardown " + stage)

        def on_fit_start(self) -> None:
            self._look("on_fit_start")

        def on_validation_start(self) -> None:
            self._look("on_validation_start")

    module, trainer = StageRecorder(), fx.Trainer(max_epochs=1, **quiet)
    trainer.fit(module, tiny_loader(8, 4), tiny_loader(4, 4))
    trainer.validate(module, tiny_loader(4, 4), verbose=False)
    trainer.test(module, tiny_loader(4, 4), verbose=False)
    trainer.predict(module, tiny_loader(4, 4))
    assert seen == [
        ("setup fit", "training"), ("on_fit_start", "training"), ("on_validation_start", "sanity_checking"),
        ("on_validation_start", "validating"), ("teardown fit", "training"), ("setup validate", "validating"),
        ("on_validation_start", "validating"), ("teardown validate", "validating"), ("setup test", "testing"),
        ("teardown test", "testing"), ("setup predict", "predicting"), ("teardown predict", "predicting"),
    ]  # fmt: skip
    assert not trainer.training
    assert not trainer.predicting
