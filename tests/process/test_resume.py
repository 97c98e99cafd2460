"""A resumed run is bitwise identical to the uninterrupted run, wherever its checkpoint was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA, GradientAccumulation, ModelCheckpoint
from fabricx.testing import QUIET, LayeredModule, SavesAtEnd, TinyModule, layered_data, tiny_loader
from fabricx.testing.modules import SavesAtStep
from tests.soak import params

from .meshes import ChangesOnce
from .resuming import MOMENTS, Noisy, assert_same, train

pytestmark = pytest.mark.usefixtures("warm_ranks")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("strategy", "options"),
    params(
        [
            ("ddp", {"workers": 2, "precision": "bf16-mixed"}),
            ("fsdp", {"accumulate_grad_batches": 2}),
        ],
        [
            ("single", {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
            ("single", {"workers": 2}),
            ("ddp", {"accumulate_grad_batches": 2}),
            ("fsdp", {"workers": 2, "precision": "bf16-mixed"}),
        ],
    ),
    ids=str,
)
def test_a_run_resumed_from_any_moment_is_bitwise_identical(
    tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    rows, end, metrics = train(tmp_path / "whole", strategy, saves=tmp_path, callbacks=(EMA(0.5),), **options)
    again = train(tmp_path / "unsaved", strategy, callbacks=(EMA(0.5),), **options)
    assert_same(again, (rows, end, metrics), "saving changed something")
    for moment in MOMENTS:
        path = tmp_path / f"{moment}.ckpt"
        resumed = train(tmp_path / moment, strategy, ckpt=path, callbacks=(EMA(0.5),), **options)
        step = checkpoint.read_manifest(path)["step"]
        before = [row for row in rows if row["step"] < step]
        # Some rows of the step itself were written before the checkpoint.
        assert resumed[0] == rows[len(rows) - len(resumed[0]) :], moment
        assert len(rows) - len(resumed[0]) >= len(before), moment
        assert_same(resumed[1], end, moment)
        assert_same(resumed[2], metrics, moment)


class SavesIn(fx.Callback):
    """Saves at each call of a hook, under successive names.

    Args:
        hook: its name.
        folder: the folder of the checkpoints.
    """

    def __init__(self, hook: str, folder: Path) -> None:
        self.folder, self.saved = folder, 0
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{self.saved}.ckpt")
        self.saved += 1


@pytest.mark.parametrize(
    ("hook", "accumulation"),
    [
        ("on_sanity_check_end", {}),
        ("on_validation_batch_start", {}),
        ("on_train_batch_start", {}),
        ("on_train_batch_end", {0: 2}),  # the second is within a window
    ],
    ids=str,
)
def test_a_run_resumed_from_a_checkpoint_of_a_hook_is_bitwise_identical(
    tmp_path: Path, hook: str, accumulation: dict[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The data draws random numbers: reading a batch and validating change the random state of a resumed run."""
    windows = (GradientAccumulation(accumulation),) if accumulation else ()
    rows, end, metrics = train(tmp_path / "whole", "single", callbacks=(*windows, SavesIn(hook, tmp_path)))
    for number in {0, len(list(tmp_path.glob("*.ckpt"))) // 2}:
        resumed = train(tmp_path / str(number), "single", ckpt=tmp_path / f"{number}.ckpt", callbacks=windows)
        assert resumed[0] == rows[len(rows) - len(resumed[0]) :]
        assert_same(resumed[1:], (end, metrics), f"{hook} {number}")
    assert "each update has" not in capsys.readouterr().out  # the global batch is unchanged


class FreezesFirst(fx.Callback):
    """Freezes the last layer of the body before training."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        module.body[2].requires_grad_(False)


def partly_frozen(strategy: str, root: Path, *callbacks: fx.Callback, **options: Any) -> LayeredModule:
    """Return a module trained for six steps."""
    torch.manual_seed(3)
    module = LayeredModule().double()
    data = [tuple(part.double() for part in sample) for sample in layered_data(24)]
    trainer = fx.Trainer(
        devices=1 if strategy == "single" else 2, strategy=strategy, max_epochs=1, default_root_dir=root,
        callbacks=list(callbacks), **QUIET,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 4 if strategy in {"single", "tensor"} else 2), **options)  # type: ignore[arg-type]
    return module


CHANGED = [("single", True), ("single", False), ("ddp", True), ("fsdp", False)]  # each strategy and each change
CHANGED_TOO = [
    *((strategy, trains) for strategy in ("tensor", "pipeline", "parameter_server") for trains in (True, False)),
    ("ddp", False), ("fsdp", True),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "trains"), params(CHANGED, CHANGED_TOO))
def test_a_resumed_run_restores_requires_grad_as_set_by_hooks(
    tmp_path: Path, strategy: str, trains: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 3 changes the trained parameters; they are also restored in a resume of a resumed run."""
    path, change = tmp_path / "four.ckpt", ChangesOnce("body.0", 3, trains=trains)
    whole = partly_frozen(strategy, tmp_path, change, SavesAtStep(path, 4))
    resumed = partly_frozen(strategy, tmp_path, change, SavesAtStep(tmp_path / "five.ckpt", 5), ckpt_path=path)
    assert_same(resumed.state_dict(), whole.state_dict(), strategy)
    if strategy == "single":  # this process prints
        word = "unfrozen" if trains else "frozen"
        assert f"before the checkpoint, hooks had {word} body.0." in capsys.readouterr().out
    again = partly_frozen(strategy, tmp_path, change, ckpt_path=tmp_path / "five.ckpt")
    assert_same(again.state_dict(), whole.state_dict(), "of a run that was resumed")


def test_parameters_that_are_frozen_before_a_resume_stay_frozen(tmp_path: Path) -> None:
    path, change = tmp_path / "four.ckpt", ChangesOnce("body.0", 3, trains=False)
    whole = partly_frozen("single", tmp_path, change, SavesAtStep(path, 4))
    saved = checkpoint.load(path)["strategy"]["module"]
    resumed = partly_frozen("single", tmp_path, change, FreezesFirst(), ckpt_path=path).state_dict()
    for name, values in whole.state_dict().items():
        assert torch.equal(resumed[name], saved[name]) == name.startswith(("body.0", "body.2")), name
        assert torch.equal(values, saved[name]) == name.startswith("body.0"), name


@pytest.mark.parametrize("options", [{}, {"every_n_train_steps": 3}], ids=str)
def test_checkpoints_due_after_a_resumed_step_are_ranked_and_kept(tmp_path: Path, options: dict[str, int]) -> None:
    """A snapshot after the last batch precedes the validation of these weights, and a save may wait for it."""

    def kept(folder: Path, ckpt: Path | None = None) -> dict[str, float]:
        saves = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, **options)
        trainer_options: Any = {**QUIET, "default_root_dir": tmp_path, "max_epochs": 2}
        trainer = fx.Trainer(devices=1, callbacks=[saves, SavesIn("on_train_batch_end", folder)], **trainer_options)
        trainer.fit(TinyModule(), tiny_loader(12), tiny_loader(12), ckpt_path=ckpt)
        return {Path(path).name: float(score) for path, score in saves.best_k_models.items()}

    whole = kept(tmp_path / "whole")
    assert len(whole) == 2
    for step in (2, 5):  # of the last batch of an epoch
        resumed = kept(tmp_path / f"resumed {step}", tmp_path / "whole" / f"{step}.ckpt")
        assert resumed == whole


@pytest.mark.parametrize("strategy", params(["single", "fsdp"], ["ddp"]))
def test_a_run_that_was_stopped_by_max_steps_continues_with_a_higher_limit(tmp_path: Path, strategy: str) -> None:
    rows, end, metrics = train(tmp_path / "whole", strategy)
    train(tmp_path / "stopped", strategy, max_steps=3)
    resumed = train(tmp_path / "resumed", strategy, ckpt=tmp_path / "stopped" / "end.ckpt")
    assert resumed[0] == [row for row in rows if row["step"] > 3]
    assert_same(resumed[1:], (end, metrics), "resumed")


class UsesLBFGS(fx.Module):
    """Linear regression by LBFGS."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


def test_resuming_lbfgs_with_fewer_ranks_is_refused(tmp_path: Path) -> None:
    """An update would have several microbatches, and LBFGS would compute the loss of the last microbatch only."""
    data = DataLoader(Noisy(), 3)
    options: Any = {**QUIET, "default_root_dir": tmp_path}
    trainer = fx.Trainer(devices=2, max_steps=1, callbacks=[SavesAtEnd(tmp_path / "saved")], **options)
    trainer.fit(UsesLBFGS(), data)
    module = UsesLBFGS()
    with pytest.raises(ValueError, match=r"LBFGS computes the loss of a batch several times.*continue with \d ranks"):
        fx.Trainer(devices=1, max_steps=2, **options).fit(module, data, ckpt_path=tmp_path / "saved")


class Validates(fx.Callback):
    """Writes the steps of validations to a file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero and not trainer.sanity_checking:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step} ")


def validated(folder: Path, devices: int, *, ckpt: Path | None = None, batch: int = 4, **options: Any) -> list[int]:
    """Return the steps after which a run validates; save a checkpoint after step 2."""
    path = folder / f"{devices}-{ckpt is None}"
    saves = [SavesAtStep(folder / "saved", 2)] if ckpt is None else []
    trainer = fx.Trainer(
        devices=devices, max_epochs=2, default_root_dir=folder, callbacks=[Validates(path), *saves],
        **{**QUIET, **options},
    )  # fmt: skip
    trainer.fit(TinyModule(0.01), tiny_loader(80, batch), tiny_loader(8, 4), ckpt_path=ckpt)
    return [int(step) for step in path.read_text().split()]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"val_check_interval": 3}, [3, 6, 9, 13, 16, 19]),
        ({"val_check_interval": 0.35}, [3, 6, 9, 13, 16, 19]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12, 16, 20]),
        ({"val_check_interval": 4, "accumulate_grad_batches": 2}, [2, 4, 7, 9]),
    ],
    ids=str,
)
def test_validations_of_a_run_resumed_with_another_number_of_ranks_follow_the_same_samples(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    """A rank then has more microbatches per global batch: intervals count batches of the original ranks."""
    assert validated(tmp_path, 2, **options) == steps
    devices = 4 if "accumulate_grad_batches" in options else 1
    later = [step for step in steps if step > 2]
    assert validated(tmp_path, devices, ckpt=tmp_path / "saved", **options) == later


def test_validation_intervals_count_global_batches_under_elastic(tmp_path: Path) -> None:
    """Schedules and stops may follow validations, and weights are to be equal for any number of ranks."""
    trainer_options: dict[str, Any] = {"deterministic": "elastic", "val_check_interval": 3}
    for devices in (1, 2):
        assert validated(tmp_path, devices, batch=8 // devices, **trainer_options) == [3, 6, 9, 13, 16, 19]
