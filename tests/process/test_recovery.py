"""Runs with killed workers continue in place, and each sample is trained the right number of times."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import EarlyStopping, FaultRecovery
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer
from fabricx.testing import (
    QUIET,
    Fault,
    LayeredModule,
    Ledger,
    SavesAtEnd,
    TinyModule,
    cut,
    fail,
    kill,
    layered_data,
    tiny_loader,
)  # fmt: skip
from tests.soak import covering, params

from .kills import IN_PLACE, STRATEGIES
from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact, train


def test_options_of_other_callbacks_have_no_effect_on_recovery(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: EarlyStopping's patience, a number of checks, was read as seconds and ended recovery in place."""
    stops: Any = EarlyStopping("entries", patience=3, strict=False)
    fault = kill(rank=1).during("forward", step=3)
    module, trainer = train(DDP(), [stops, fault], tmp_path, recovery=FaultRecovery(snapshots=False))
    assert exact(module)
    assert len(trainer.failures) == 1
    assert "all workers restart" not in capfd.readouterr().err


# Each update sends a part of the previous gradients.
LOSSY = ("compressed both ways", "powersgd", "ddp, powersgd", "compressed pulls")


VARIANTS = (
    "powersgd", "fsdp, backend without errors", "compressed both ways", "optimizer on servers", "ddp, powersgd",
    "compressed pulls", "parameter_server",
)  # fmt: skip


@pytest.mark.parametrize(
    "strategy", params([strategy for strategy in STRATEGIES if strategy not in VARIANTS], VARIANTS)
)
def test_weights_after_many_kills_equal_those_of_an_undisturbed_run(strategy: str, tmp_path: Path) -> None:
    expected, reference = train(STRATEGIES[strategy](), [], tmp_path / "a")
    module, trainer = train(STRATEGIES[strategy](), IN_PLACE, tmp_path / "b")
    assert len(trainer.failures) == len(IN_PLACE) - 1
    assert trainer.global_step == reference.global_step == STEPS
    assert trainer.state.passed == trainer.state.trained == STEPS
    if strategy not in LOSSY:
        assert exact(module)
        assert exact(expected)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert float(trainer.callback_metrics["loss"]) == float(reference.callback_metrics["loss"])
    assert float(trainer.callback_metrics["val"]) == float(reference.callback_metrics["val"])
    assert not list(tmp_path.glob("*/runs/*/recovery"))


class KeepsDDP(fx.Callback):
    """Keeps references to torch's DDP of each generation, like the traceback of an interrupted backward."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(trainer.strategy._ddp)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.kept.clear()


def test_an_interrupted_backward_has_no_effect_on_the_next_backward(tmp_path: Path) -> None:
    keeps: Any = KeepsDDP()
    _, trainer = train(STRATEGIES["ddp, powersgd"](), [keeps, *IN_PLACE], tmp_path)
    assert len(trainer.failures) == len(IN_PLACE) - 1
    assert trainer.global_step == STEPS


@pytest.mark.parametrize("strategy", params(["ddp", "fsdp"], ["parameter_server"]))
def test_a_lost_worker_is_replaced_without_checkpoints(strategy: str, tmp_path: Path) -> None:
    def fit(*faults: Fault) -> tuple[Ledger, fx.Trainer]:
        torch.manual_seed(3)
        module = Ledger(SAMPLES, BATCH)
        trainer = fx.Trainer(
            devices=2, strategy=strategy, max_epochs=EPOCHS, default_root_dir=tmp_path, callbacks=list(faults), **QUIET
        )
        trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
        return module, trainer

    expected, _ = fit()
    recovered, trainer = fit(kill(rank=1).during("backward", step=3))
    assert not trainer.enable_checkpointing
    assert len(trainer.failures) == 1
    assert all(torch.equal(a, b) for a, b in zip(recovered.parameters(), expected.parameters(), strict=True))
    assert not [path for path in tmp_path.rglob("*") if "recovery" in path.parts or "checkpoints" in path.parts]


@pytest.mark.parametrize("strategy", params(["fsdp"], ["ddp"]))
def test_recovery_with_indivisible_numbers_of_samples_is_exact(strategy: str, tmp_path: Path) -> None:
    (expected, _), (module, trainer) = (
        train(STRATEGIES[strategy](), faults, tmp_path / name, devices=3, module=Ledger(43, 12), data=Numbered(43))
        for name, faults in (("a", []), ("b", IN_PLACE))
    )
    assert len(trainer.failures) == len(IN_PLACE) - 1
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "strategy", params([AsyncSGD(damp=False)], [AsyncSGD(every=3, outer="sum"), ParameterServer(mode="bounded")])
)
def test_asynchronous_workers_continue_after_deaths_of_the_main_rank_and_at_a_meeting(
    strategy: Any, tmp_path: Path
) -> None:
    faults = [
        kill(rank=0).during("backward", step=3),
        kill(rank=1).during("validation", step=4, attempt=1),  # at a meeting of all workers
    ]
    module, trainer = train(strategy, faults, tmp_path, devices=3)
    assert len(trainer.failures) == 2
    assert trainer.current_epoch == EPOCHS
    # each gradient is the mean of a worker's own batch, a third of the batch size in the ledger
    updates_per_sample = 3.0 if not strategy._settings.aggregate else 1.0
    assert exact(module, EPOCHS * updates_per_sample)


@pytest.mark.parametrize("strategy", params([FSDP(), AsyncSGD(damp=False)], [DDP(), ParameterServer()]))
def test_a_run_continues_after_the_death_of_all_workers_and_cut_connections(strategy: Any, tmp_path: Path) -> None:
    faults = [
        *(kill(rank).during("batch end", step=5) for rank in range(2)),
        cut(rank=1).during("backward", step=7, attempt=1),
        cut(rank=0).during("optimizer", step=9, attempt=2),
    ]
    module, trainer = train(strategy, faults, tmp_path)
    assert exact(module, EPOCHS * (2.0 if isinstance(strategy, AsyncSGD) else 1.0))
    assert len(trainer.failures) >= 2
    assert trainer.current_epoch == EPOCHS


class Adversaries(TinyModule):
    """Trains two parts alternately in a manual step; `toggle_optimizer` freezes the other part."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            torch.nn.init.constant_(parameter, 0.3)
        del self.layer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (-0.1, 1.0), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            outputs = self.second(self.first(batch[0] + 0.1 * torch.randn_like(batch[0])))
            self.manual_backward(sign * torch.nn.functional.mse_loss(outputs, batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.first.parameters(), lr=0.01), torch.optim.Adam(self.second.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("strategy", "moment"),
    params(
        [(DDP, "backward"), (FSDP, "forward"), (lambda: LocalSGD(every=2), "backward"), (ParameterServer, "backward")],
        [(DDP, "forward"), (FSDP, "backward"), (lambda: LocalSGD(every=2), "forward"), (ParameterServer, "forward")],
    ),
)
def test_a_manual_step_that_freezes_parameters_is_repeated(strategy: Any, moment: Any, tmp_path: Path) -> None:
    """The survivor was interrupted while a part was frozen, or while it counted its steps."""

    def trained(*faults: Fault) -> tuple[list[Any], int, int]:
        fx.seed_everything(3)
        module, options = Adversaries(), {**QUIET, "default_root_dir": tmp_path}
        trainer = fx.Trainer(devices=2, strategy=strategy(), max_epochs=2, callbacks=[*faults], **options)
        trainer.fit(module, tiny_loader(16, 2))
        return [p.tolist() for p in module.parameters()], trainer.global_step, len(trainer.failures)

    weights, steps, _ = trained()
    assert trained(kill(rank=0).during(moment, step=3)) == (weights, steps, 1)


class OverBatches(LayeredModule):
    """Steps the head at each batch, and the body at every second batch, with the gradients of both batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            of_head = number == 1
            if of_head or batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.toggle_optimizer(optimizer)
            self.manual_backward(torch.nn.functional.mse_loss(self(batch[0]), batch[1]))
            if of_head or batch_idx % 2 == 1:
                optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize(
    ("strategy", "moment", "step"),
    params(
        [(DDP, "backward", 5), (FSDP, "forward", 5)],
        [(DDP, "batch end", 5), (ParameterServer, "backward", 5), (lambda: LocalSGD(every=2), "backward", 5)],
    ),
)
def test_gradients_accumulated_by_a_manual_step_are_not_lost_by_a_recovery(
    strategy: Any, moment: Any, step: int, tmp_path: Path
) -> None:
    def trained(*faults: Fault) -> tuple[list[Any], bool]:
        fx.seed_everything(3)
        module, options = OverBatches(), {**QUIET, "default_root_dir": tmp_path}
        recovery = FaultRecovery(every_n_train_steps=2)
        trainer = fx.Trainer(devices=2, strategy=strategy(), max_epochs=2, callbacks=[*faults, recovery], **options)
        trainer.fit(module, DataLoader(layered_data(29), 4, shuffle=True))  # a step of the body spans two epochs
        return [p.tolist() for p in module.parameters()], bool(trainer.failures)

    weights, _ = trained()
    assert trained(kill(rank=1).during(moment, step=step)) == (weights, True)


@pytest.mark.parametrize(("rank", "moment"), params([(1, "optimizer")], [(0, "optimizer"), (1, "backward")]))
def test_a_validation_within_an_interrupted_accumulation_window_is_repeated(
    rank: int, moment: Any, tmp_path: Path
) -> None:
    class Drops(Ledger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([torch.dropout(batch[0], 0.3, train=True), *batch[1:]], batch_idx)

    options: dict[str, Any] = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    results = []
    for faults in ([], [kill(rank=rank).during(moment, step=4)]):  # 2 steps in each of 3 epochs
        module, trainer = train(DDP(), faults, tmp_path / str(len(faults)), module=Drops(SAMPLES, BATCH), **options)
        assert len(trainer.failures) == len(faults)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.append(([p.tolist() for p in module.parameters()], metrics))
    assert results[0] == results[1]


class Annealing(fx.Callback):
    """Changes a weight of the loss, without a state of its own."""

    def __init__(self) -> None:
        self.scale = 1.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.scale *= 0.95
        pl_module.scale = self.scale


class Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class Counts(TinyModule):
    """A module whose loss depends on attributes that steps and hooks change."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.scale = 0, 1.0
        self.mean, self.center = Mean(), torch.zeros(1)
        self.history: list[int] = []

    def on_train_start(self) -> None:
        self.steps = 3

    def on_train_epoch_start(self) -> None:
        self.seen: list[float] = []
        self.steps += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.seen.append(0.5)
        self.center = 0.5 * self.center + len(self.seen)
        factor = 1 + 0.01 * (self.steps + len(self.history) + float(self.center) + self.mean.total)
        return factor * self.scale * super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.steps += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.add(0.1 * self.steps)
        self.history.append(self.steps)


@pytest.mark.parametrize(
    ("strategy", "rank"),
    covering(
        product([DDP, FSDP, lambda: LocalSGD(every=2), lambda: ParameterServer(servers=0), ParameterServer], [0, 1])
    ),
)
def test_attributes_that_the_run_changes_are_recovered(strategy: Any, rank: int, tmp_path: Path) -> None:
    def weights(*faults: Fault) -> dict[str, torch.Tensor]:
        callbacks = [Annealing(), FaultRecovery(snapshots=False), *faults]
        module = Counts()
        trainer = fx.Trainer(
            devices=2, max_epochs=3, strategy=strategy(), callbacks=callbacks, default_root_dir=tmp_path, **QUIET
        )
        trainer.fit(module, tiny_loader(16, 4))
        assert len(trainer.failures) == len(faults)
        return module.state_dict()

    expected = weights()
    kills = [
        kill(rank).during("forward", step=1), kill(1 - rank).during("batch end", step=3, attempt=1),
        kill(rank).during("backward", step=5, attempt=2),
    ]  # fmt: skip
    for name, value in weights(*kills).items():
        assert torch.equal(value, expected[name]), name


def test_attributes_are_restored_if_all_workers_restart_from_a_snapshot(tmp_path: Path) -> None:
    """A run that the user resumes has a new module, whose attributes keep their values."""

    def train_twice(*faults: Fault) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
        module, resumed = Counts(), Counts()
        folder = tmp_path / str(len(faults))
        options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "default_root_dir": folder, **QUIET}
        recovery = FaultRecovery(every_n_train_steps=2)
        callbacks = [Annealing(), recovery, *faults, SavesAtEnd(folder / "end.ckpt")]
        trainer = fx.Trainer(max_epochs=3, callbacks=callbacks, **options)
        trainer.fit(module, tiny_loader(16, 4))
        fx.Trainer(max_epochs=4, **options).fit(resumed, tiny_loader(16, 4), ckpt_path=folder / "end.ckpt")
        assert len(resumed.history) == 2
        return module.state_dict(), resumed.state_dict(), len(trainer.failures)

    expected, expected_later, _ = train_twice()
    restarted, later, failures = train_twice(fail(rank=1, error="a hiccup").during("forward", step=3))
    assert failures == 1
    for name in expected:
        assert torch.equal(restarted[name], expected[name]), name
        assert torch.equal(later[name], expected_later[name]), name
