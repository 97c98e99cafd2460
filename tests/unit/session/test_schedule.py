"""Times at which a run validates, stops, or ends an epoch."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader


@pytest.mark.parametrize(
    ("options", "validations"),
    [
        ({"limit_train_batches": 2}, [3, 5]), ({"limit_train_batches": 3}, [3, 6]),
        ({"limit_train_batches": 4}, [4, 8]),
        ({"limit_train_batches": 0.5}, [3, 6]), ({"val_check_interval": 1, "limit_train_batches": 2}, [4, 5]),
        ({"check_val_every_n_epoch": 2, "limit_train_batches": 2}, [5]),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None, "limit_train_batches": 2}, [4]),
    ],
    ids=str,
)  # fmt: skip
def test_an_epoch_shorter_than_its_trained_batches_ends_with_its_validation(
    own_folder: Path, options: dict[str, Any], validations: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    class Validated(fx.Callback):
        steps: list[int]

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.steps.append(trainer.global_step)

    def train(ckpt: Path | None = None, **limits: Any) -> list[int]:
        seen = Validated()
        seen.steps = []
        trainer = fx.Trainer(callbacks=[seen], **{**QUIET, "num_sanity_val_steps": 0, **limits})
        trainer.fit(TinyModule(), tiny_loader(24, 4), tiny_loader(4, 4), ckpt_path=ckpt)
        if ckpt is None:
            trainer.save_checkpoint(own_folder / "three.ckpt")
        return seen.steps

    train(max_steps=3)
    assert train(own_folder / "three.ckpt", max_epochs=2, **options) == validations
    ends = "the epoch ends here" in capsys.readouterr().out
    assert ends is (options["limit_train_batches"] in (2, 3, 0.5))


def train(steps: int, batch_size: int, accumulate: int, ckpt: Path | None) -> fx.Trainer:
    trainer = fx.Trainer(max_steps=steps, accumulate_grad_batches=accumulate, **QUIET)
    trainer.fit(TinyModule(), DataLoader(tiny_loader().dataset, batch_size=batch_size), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 1), (8, 1), (2, 1), (2, 2), (4, 2)])
def test_the_end_of_an_epoch_is_validated_after_a_resume_with_any_global_batch(
    own_folder: Path, batch_size: int, accumulate: int
) -> None:
    train(1, 4, 1, None).save_checkpoint(own_folder / "one.ckpt")
    trainer = fx.Trainer(max_epochs=1, accumulate_grad_batches=accumulate, **QUIET)
    validated: list[int] = []
    module = TinyModule()
    module.on_validation_end = lambda: validated.append(trainer.global_step)  # type: ignore[method-assign]
    data = tiny_loader().dataset
    trainer.fit(module, DataLoader(data, batch_size), DataLoader(data, 8), ckpt_path=own_folder / "one.ckpt")
    assert validated == [1 + -(-12 // (batch_size * accumulate))] == [trainer.global_step]


def test_limits_stop_at_the_requested_step_or_epoch(quiet: dict[str, Any]) -> None:
    for options, steps, epochs in [
        ({"max_epochs": 3}, 12, 3),
        ({"max_steps": 5}, 5, 2),
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


def test_a_stop_that_is_delayed_is_still_requested_after_resuming(own_folder: Path, quiet: dict[str, Any]) -> None:
    class Stops(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 2 and not resumed:
                self.trainer.should_stop = True
                self.trainer.save_checkpoint(own_folder / "two.ckpt")

    for resumed in (False, True):
        trainer = fx.Trainer(max_epochs=5, min_steps=6, **quiet)
        trainer.fit(Stops(), tiny_loader(), ckpt_path=own_folder / "two.ckpt" if resumed else None)
        assert (trainer.global_step, trainer.should_stop) == (6, True)
    trainer = fx.Trainer(max_epochs=5, min_steps=2, **quiet)  # not delayed any more
    trainer.fit(Stops(), tiny_loader(), ckpt_path=own_folder / "two.ckpt")
    assert trainer.global_step == 2


@pytest.mark.parametrize(("options", "steps"), [({}, 8), ({"min_steps": 6}, 8)], ids=["at once", "delayed"])
def test_a_single_rank_withdraws_its_stop(options: dict[str, Any], steps: int, quiet: dict[str, Any]) -> None:
    class Withdraws(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 2:
                self.trainer.should_stop = True
            if self.global_step == (4 if options else 2):
                self.trainer.should_stop = False

    trainer = fx.Trainer(max_epochs=2, **options, **quiet)
    trainer.fit(Withdraws(), tiny_loader())
    assert (trainer.global_step, trainer.should_stop) == (steps, False)


class Stream:
    """Batches without a number."""

    batches: list[Any]

    def __iter__(self) -> Any:
        return iter(self.batches)


class Shrinks(Stream):
    """Has fewer batches in the first epoch than its length."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        yield from self.batches[: self.first]
        self.first = len(self.batches)

    first = 5


def test_validation_runs_when_due(quiet: dict[str, Any]) -> None:
    for options, expected in [
        ({}, [8, 16]),
        ({"val_check_interval": 0.5}, [4, 8, 12, 16]),
        ({"val_check_interval": 3}, [3, 6, 11, 14]),
        ({"val_check_interval": 6, "check_val_every_n_epoch": None}, [6, 12]),
        ({"val_check_interval": "5st"}, [5, 10, 15]),
        ({"check_val_every_n_epoch": 2}, [16]),
        ({"limit_val_batches": 0}, []),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None, "stream": True}, [3, 6, 9, 12, 15]),
        ({"val_check_interval": 3, "stream": True}, [3, 6, 11, 14]),
        ({"val_check_interval": 6, "check_val_every_n_epoch": None, "shrinks": True}, [6, 12]),
    ]:
        steps: list[int] = []
        loader: Any = tiny_loader(32, 4)
        if options.pop("stream", False):
            batches, loader = list(loader), Stream()
            loader.batches = batches
        if options.pop("shrinks", False):
            batches, loader = list(loader), Shrinks()
            loader.batches = batches

        class Net(TinyModule):
            def on_validation_start(self, steps: list[int] = steps) -> None:
                steps.append(self.global_step)

        trainer = fx.Trainer(max_epochs=2, num_sanity_val_steps=0, **options, **quiet)
        trainer.fit(Net(), loader, tiny_loader(4, 4))
        assert steps == expected, options


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
@pytest.mark.parametrize(("manual", "every", "expected"), [(False, "2st", [2, 4]), (True, "3st", [4, 6, 10, 12, 16])])
def test_validation_by_steps_follows_the_batch_that_reaches_them(
    manual: bool, every: str, expected: list[int], quiet: dict[str, Any]
) -> None:
    """Batches without a loss do not repeat a validation, and several steps of a batch do not skip a validation."""
    steps: list[int] = []

    class Own(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not manual:
                return None if batch_idx in (2, 3, 4) else super().training_step(batch, batch_idx)
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.step()
            return None

        def on_validation_start(self) -> None:
            steps.append(self.global_step)

    module = Own()
    module.automatic_optimization = not manual
    trainer = fx.Trainer(max_epochs=1, num_sanity_val_steps=0, val_check_interval=every, **quiet)
    trainer.fit(module, tiny_loader(32, 4), tiny_loader(4, 4))
    assert steps == expected


@pytest.mark.parametrize("limits", [{"max_steps": 9, "max_epochs": -1}, {"max_epochs": 3}])
def test_a_limit_ends_a_run_in_an_epoch_that_has_become_longer(limits: dict[str, Any], quiet: dict[str, Any]) -> None:
    """The limit is beyond the length that was counted at set-up, and before the new end of the epoch."""
    grown = list(tiny_loader(16, 4))

    class Grows(TinyModule):
        def on_train_epoch_end(self) -> None:
            if len(grown) == 4:
                grown.extend(grown[:2])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = self.global_step == 9

    trainer = fx.Trainer(**limits, **quiet)
    trainer.fit(Grows(), grown)
    assert (trainer.global_step, trainer.current_epoch) == (9, 2)  # as with a constant length


class Longer:
    """A batch sampler with 2 batches in the first epoch, and 4 more in each later epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 + 4 * self.epoch

    def __iter__(self) -> Any:
        return iter([[0, 1]] * len(self))


@pytest.mark.parametrize("source", [fx.data.CombinedLoader, lambda loaders: loaders["a"]], ids=["several", "one"])
def test_an_epoch_has_the_length_of_its_data(source: Any, own_folder: Path, quiet: dict[str, Any]) -> None:
    class Records(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, 0)

        def on_train_epoch_start(self) -> None:
            self.seen.append(self.trainer.num_training_batches)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == interrupted:
                signal.raise_signal(signal.SIGINT)

        def on_validation_end(self) -> None:
            self.seen.append(f"validation after {self.global_step}")

    def train(ckpt: Path | None = None, epochs: int = 2) -> tuple[Records, fx.Trainer]:
        loader = DataLoader(tiny_loader().dataset, batch_sampler=Longer())  # type: ignore[arg-type]
        options = {**quiet, "num_sanity_val_steps": 0, "val_check_interval": 0.5}
        module, trainer = Records(), fx.Trainer(max_epochs=epochs, **options)
        trainer.fit(module, source({"a": loader}), tiny_loader(4, 4), ckpt_path=ckpt)
        return module, trainer

    interrupted = 6  # the fourth of 6 batches
    module, trainer = train()
    assert module.seen == [2, "validation after 1", "validation after 2", 6, "validation after 5"]
    assert (trainer.current_epoch, trainer.state.batch) == (1, 4)
    trainer.save_checkpoint(own_folder / "six.ckpt")
    interrupted = -1
    module, trainer = train(own_folder / "six.ckpt", epochs=3)
    later = [f"validation after {step}" for step in (8, 13, 18)]
    assert module.seen == [6, later[0], 10, *later[1:]]
    assert (trainer.current_epoch, trainer.global_step) == (3, 18)


class Countless(fx.Strategy):
    """Returns no number of updates."""

    def after_update(self, step: int) -> int:
        return None  # type: ignore[return-value]


def test_a_strategy_that_returns_no_number_of_updates_is_named(own_folder: Path) -> None:
    with pytest.raises(TypeError, match=r"Countless\.after_update returned None, and has to return the number"):
        fx.Trainer(strategy=Countless(), max_steps=1, **QUIET).fit(TinyModule(), tiny_loader())
