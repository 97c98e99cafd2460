"""A resumed run is bitwise identical to the uninterrupted run, wherever its checkpoint was saved."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA, GradientAccumulation, ModelCheckpoint
from fabricx.loggers import JSONLogger
from fabricx.testing import QUIET, LayeredModule, Ledger, SavesAtEnd, TinyModule, layered_data, tiny_loader
from fabricx.testing.modules import SavesAtStep
from tests.soak import params

from .meshes import ChangesOnce

pytestmark = pytest.mark.usefixtures("warm_ranks")

SAMPLES = 22  # 6 per global batch: the last global batch has 4


class Noisy(Dataset[Any]):
    """Draws from every source of random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return torch.full((4,), index / 10.0) + 0.1 * noise, torch.tensor([index % 3 - 1.0])


class AllFeatures(fx.Module):
    """Dropout, running statistics, two optimizers, three schedules, a metric object, values by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)
        self.error = torchmetrics.MeanMetric()
        self.average = torchmetrics.MeanMetric()
        error = torchmetrics.MeanSquaredError
        self.both = torchmetrics.MetricCollection({"mse": error(), "rmse": error(squared=False)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.head(self.body(batch[0]))
        loss = nn.functional.mse_loss(outputs, batch[1])
        self.both.update(outputs.detach().float(), batch[1])
        for name, metric in self.both.items():
            self.log(name, metric, on_step=False, on_epoch=True)
        self.error.update(loss.detach(), weight=len(batch[0]))
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.head(self.body(batch[0])), batch[1]) + torch.rand(())
        self.log("val", loss)
        self.average.update(loss)
        self.log("average", self.average)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.body.parameters(), lr=0.03)
        sgd = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)
        schedules = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(adam, 2, 0.8), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9), "interval": "epoch"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0), "monitor": "loss_epoch"},
        ]
        return [adam, sgd], schedules


class SaveEverywhere(fx.Callback):
    """Saves once at each of the moments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save(self, trainer: fx.Trainer, moment: str) -> None:
        path = self.folder / f"{moment}.ckpt"
        if trainer.current_epoch == 0 and not trainer.world.broadcast_object(path.exists()):
            trainer.save_checkpoint(path)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 2):  # one of them is within a window of two batches
            self._save(trainer, f"after batch {batch_idx}")

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "between validation batches")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "after validation")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._save(trainer, "at the end of an epoch")


MOMENTS = [
    "after batch 1", "after batch 2", "between validation batches", "after validation", "at the end of an epoch",
]  # fmt: skip


def train(
    root: Path, strategy: str, *, workers: int = 0, ckpt: Path | None = None, saves: Path | None = None,
    callbacks: tuple[fx.Callback, ...] = (), data: Any = None, **options: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """Return the logged rows, weights and optimizer states at the end, and the metrics."""
    devices = 1 if strategy == "single" else 2
    fx.seed_everything(4)
    module = AllFeatures()
    end = root / "end.ckpt"
    extra = [SaveEverywhere(saves)] if saves is not None else []
    trainer_options = {**QUIET, "max_epochs": 2, "val_check_interval": 3, "log_every_n_steps": 1, **options}
    trainer = fx.Trainer(
        strategy=strategy, devices=devices, default_root_dir=root, callbacks=[*callbacks, *extra, SaveAtEnd(end)],
        **{**trainer_options, "logger": JSONLogger()},
    )  # fmt: skip
    batch = 6 // devices
    source = (
        data
        if data is not None
        else DataLoader(
            Noisy(), batch, shuffle=True, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
    )
    trainer.fit(module, source, DataLoader(Noisy(), batch), ckpt_path=ckpt)
    [log] = root.rglob("metrics.jsonl")
    rows = [{k: v for k, v in json.loads(line).items() if k != "time"} for line in log.read_text().splitlines()]
    return rows, checkpoint.load(end)["strategy"], trainer.callback_metrics


class SaveAtEnd(fx.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def assert_same(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{where}/{number}")
    else:
        assert actual == expected, where


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


class Reader:
    """A stateful stream of batches with its own order."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(8)
        self.done, self.read = 0, 0
        self.begun = self.generator.get_state()

    def __iter__(self) -> Any:
        if self.done == 0:
            self.begun = self.generator.get_state()
        self.generator.set_state(self.begun)
        order = torch.randperm(5, generator=self.generator).tolist()
        while self.done < 5:
            number = order[self.done]
            self.done += 1
            self.read += 1
            yield torch.full((3, 4), number / 5.0) + torch.eye(3, 4), torch.full((3, 1), 1.0 - number)
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "begun": self.begun if self.done else self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.begun = state["done"], state["begun"]
        self.generator.set_state(self.begun)


class SizedReader(Reader):
    def __len__(self) -> int:
        return 5


def stateful(kind: str) -> Any:
    return Reader() if kind == "stream" else SizedReader()


@pytest.mark.parametrize(("kind", "strategy", "accumulate"), [
    *params(
        [("stream", "single", 2), ("sized", "ddp", 2)],
        [("stream", "single", 1), ("sized", "single", 1), ("sized", "single", 2), ("stream", "ddp", 2)],
    ),
])  # fmt: skip
def test_a_stateful_loader_is_resumed_by_its_state(tmp_path: Path, kind: str, strategy: str, accumulate: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "val_check_interval": 1.0}
    rows, end, _ = train(tmp_path / "whole", strategy, data=stateful(kind), saves=tmp_path, **options)
    for moment in MOMENTS:
        path, again = tmp_path / f"{moment}.ckpt", stateful(kind)
        resumed = train(tmp_path / moment, strategy, ckpt=path, data=again, **options)
        assert resumed[0] == rows[len(rows) - len(resumed[0]) :], moment
        assert_same(resumed[1], end, moment)
        if strategy == "single":
            assert again.read <= 10 - checkpoint.read_manifest(path)["step"] * accumulate + 1  # no batch is read twice


def test_rereading_a_stream_without_a_state_is_reported_and_rereading_a_list_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = list(DataLoader(Noisy(), 6))
    for data, reported in ((batches, False), (Stream(batches), True)):
        root = tmp_path / type(data).__name__
        rows, end, _ = train(root / "whole", "single", data=data, val_check_interval=1.0)
        train(root / "stopped", "single", data=data, max_steps=3, val_check_interval=1.0)
        capsys.readouterr()
        path = root / "stopped" / "end.ckpt"
        resumed = train(root / "resumed", "single", data=data, ckpt=path, val_check_interval=1.0)
        assert resumed[0] == [row for row in rows if row["step"] > 3]
        assert_same(resumed[1], end, "resumed")
        assert ("its first 3 batches of this epoch are read" in capsys.readouterr().out) is reported


class ContinuingStream:
    """A stateful stream of samples that continues from epoch to epoch."""

    at = 0

    def __iter__(self) -> Any:
        while True:
            numbers = torch.arange(self.at, self.at + 3)
            self.at += 3
            yield torch.randn(3, 6), torch.zeros(3, 1), numbers

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class SavesAtTheBegin(fx.Callback):
    """Saves a checkpoint before the first batch of the second epoch."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "between.ckpt")


@pytest.mark.parametrize("devices", [1, 2])
def test_stream_states_that_are_lost_with_another_number_of_ranks_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], devices: int
) -> None:
    def fit(folder: Path, devices: int, ckpt: Path | None = None) -> list[int]:
        module = Ledger(24, 3)
        options: dict[str, Any] = {**QUIET, "default_root_dir": folder, "max_epochs": 2, "limit_train_batches": 4}
        fx.Trainer(devices=devices, callbacks=[SavesAtTheBegin()], **options).fit(
            module, ContinuingStream(), ckpt_path=ckpt
        )
        return [round(-entry) for entry in module.entries.tolist()]

    assert fit(tmp_path, 2) == [1] * 24
    capfd.readouterr()
    counts = fit(tmp_path / "again", devices, tmp_path / "between.ckpt")
    reported = "the states of the loaders of 2 ranks, and the run has 1 now" in capfd.readouterr().out
    assert (counts == [1] * 24, reported) == ((True, False) if devices == 2 else (False, True))


class Stream:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class NoisyStream(IterableDataset[Any]):
    """A stream of noise without a state."""

    def __iter__(self) -> Any:
        for index in range(12):
            yield torch.randn(4) + index, torch.rand(1)


def test_a_stream_in_loader_processes_resumes_the_generator_of_their_seeds(tmp_path: Path) -> None:
    def stream() -> Any:
        return DataLoader(
            NoisyStream(), 6, num_workers=1, multiprocessing_context="fork", generator=torch.Generator().manual_seed(9)
        )

    rows, end, _ = train(tmp_path / "whole", "single", data=stream(), val_check_interval=1.0)
    train(tmp_path / "stopped", "single", data=stream(), max_steps=3, val_check_interval=1.0)  # in the second epoch
    path = tmp_path / "stopped" / "end.ckpt"
    resumed = train(tmp_path / "resumed", "single", data=stream(), ckpt=path, val_check_interval=1.0)
    assert resumed[0] == [row for row in rows if row["step"] > 3]
    assert_same(resumed[1], end, "resumed")


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
