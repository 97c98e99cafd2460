"""The recovery protocol under random schedules of deaths, with all ranks in a single process."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.core.module_state.tracked_attributes import TrackedAttributes
from fabricx.distributed.membership import generations
from fabricx.distributed.membership.generations import Membership
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from fabricx.distributed.world import World
from fabricx.fault_tolerance.in_place import _Joined, _joined, _report, _report_attributes, recover
from fabricx.fault_tolerance.records import RankRecords
from fabricx.fault_tolerance.recovery import Recovery
from fabricx.session.fault_tolerance import FaultTolerance
from fabricx.strategies import AsyncSGD
from fabricx.testing import QUIET, Ledger
from tests.process.ledgers import Numbered
from tests.soak import seeds

from .simulated import Killed, Machine, Simulation, Summed, install

SAMPLES, BATCH, EPOCHS, RANKS = 24, 6, 2, 3
SCHEDULES = seeds(short=3, full=20)


class Mortal(fx.Callback):
    """Dies between any two hooks."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.machine.point("at the start of an epoch")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.machine.point("before a forward")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.machine.point("after an update")

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, number: int = 0) -> None:
        self.machine.point("in a validation")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.machine.point("at the end of an epoch")


class Updates(fx.Callback):
    """Counts weight updates, and keeps their number by the hooks of checkpoints only."""

    every_batch = True
    count = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += trainer.global_step > self.count

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["updates"] = self.count

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["updates"]


class Logged(Ledger):
    """Logs the mean over an epoch, in which each sample must have equal weight, on any rank."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("epoch", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]), on_step=False, on_epoch=True)
        return loss


def parts(machine: Machine, samples: int, accumulate: int) -> tuple[fx.Trainer, fx.Module, Any]:
    module = Logged(samples, BATCH)
    trainer = fx.Trainer(
        strategy=Summed(), max_epochs=EPOCHS, default_root_dir=machine.folder, callbacks=[Mortal(machine), Updates()],
        accumulate_grad_batches=accumulate, num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip
    trainer.run_dir = machine.folder
    data, validation = Numbered(samples), DataLoader(Numbered(samples), 4)
    loader = DataLoader(data, BATCH // RANKS, shuffle=True)
    return trainer, module, (loader, validation)


def train(folder: Path, seed: int, kills: int, waits: float, variant: tuple[int, int]) -> tuple[list[Any], Machine]:
    folder.mkdir(mode=0o700)
    with contextlib.closing(StoreServer(str(folder), KEY)) as server:
        machine = Machine(random.Random(seed), kills, folder, PrivateStore(server.path, KEY))
        return Simulation(machine, lambda machine: parts(machine, *variant), RANKS, waits).run(), machine


KEY = b"k" * 32
VARIANTS = [(24, 1), (23, 1), (22, 2)]  # samples, accumulated batches: with a last batch that is shorter, too


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("waits", [10.0, 0.0], ids=["replaced", "without"])
def test_each_sample_is_trained_once_per_epoch_under_any_schedule_of_deaths(
    waits: float, variant: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    [(reference, quiet), *_], _ = train(tmp_path / "quiet", 0, 0, waits, variant)
    deaths = 0
    for seed in SCHEDULES:
        results, machine = train(tmp_path / str(seed), seed, 4, waits, variant)
        deaths += len(machine.log)
        for trainer, module in results:
            assert trainer.global_step == reference.global_step
            counted = next(callback.count for callback in trainer.callbacks if isinstance(callback, Updates))
            assert counted == trainer.global_step, (seed, machine.log)
            for weight, wanted in zip(module.parameters(), quiet.parameters(), strict=True):
                assert torch.allclose(weight, wanted, atol=1e-5), (seed, machine.log)
            # The loss of a step is that of a rank's last piece, and fewer ranks divide it into different pieces.
            for name in ("loss", "val", "epoch") if waits else ("val", "epoch"):
                assert float(trainer.callback_metrics[name]) == pytest.approx(
                    float(reference.callback_metrics[name]), rel=1e-4
                ), (seed, name, machine.log)
    assert deaths >= len(SCHEDULES)  # otherwise nothing was tested


class Completing(random.Random):
    """All exchanges that a dead worker has contributed to are complete on the others."""

    def random(self) -> float:
        return 1.0


def test_values_of_a_rank_that_dies_in_a_microbatch_without_samples_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(number: int) -> tuple[float, bool]:
        """Let the last rank die after its n-th reduction."""
        folder, reductions, died = tmp_path / str(number), itertools.count(1), list[bool]()
        folder.mkdir(mode=0o700)

        def point(where: str) -> None:
            of_last_rank = where == "after a reduction" and generations.membership().worker == RANKS - 1
            if of_last_rank and next(reductions) == number:
                died.append(machine.safe(RANKS - 1))
                raise Killed

        with contextlib.closing(StoreServer(str(folder), KEY)) as server:
            machine = Machine(Completing(), 1, folder, PrivateStore(server.path, KEY))
            machine.point = point  # type: ignore[method-assign]
            # In the last window of an epoch the last rank has samples in the first microbatch only.
            [(trainer, _), *_] = Simulation(machine, lambda machine: parts(machine, 19, 2), RANKS, 0.0).run()
        return float(trainer.callback_metrics["epoch"]), bool(died)

    install(monkeypatch)
    expected, _ = train(0)
    for number in itertools.count(12):  # in the last window
        value, died = train(number)
        assert value == pytest.approx(expected, rel=1e-4), number
        if not died:
            break
    assert number > 12


def test_an_error_between_two_collectives_is_not_a_cut_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(
        "fabricx.fault_tolerance.in_place.membership", lambda: Membership(send=lambda *message: sent.append(message))
    )
    monkeypatch.setattr("fabricx.fault_tolerance.in_place.ANSWER_S", 0.0)
    monkeypatch.setattr("fabricx.fault_tolerance.in_place.NOTICE_S", 0.0)
    strategy: Any = AsyncSGD()
    strategy.dealer.within_section = True
    session: Any = SimpleNamespace(strategy=strategy, dealer=strategy.dealer, world=World(), callbacks=[])
    ft: Any = SimpleNamespace(torn=False, memory=None)
    with pytest.raises(ConnectionResetError):  # for example of a user's tracking server
        recover(session, ft, ConnectionResetError("Connection reset by peer"))
    assert not sent


def test_fabricx_does_not_catch_a_simulated_kill() -> None:
    assert not issubclass(Killed, Exception)


def test_a_worker_that_has_left_is_not_reported_as_joined() -> None:
    shown: list[str] = []
    session: Any = SimpleNamespace(
        failures=SimpleNamespace(errors=[]), world=SimpleNamespace(size=2), state=SimpleNamespace(step=90),
        metrics=SimpleNamespace(loggers=SimpleNamespace(event=lambda *_, **__: None)), print=shown.append,
    )  # fmt: skip
    _report(session, before=0, reached=90, seconds=0.04)
    assert shown == ["the workers have changed; 2 workers continue from step 90, after 0.04 s"]


def test_attributes_with_which_a_replacement_begins_anew_are_named_where_they_are_not_recovered() -> None:
    class Cools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature, self.seen = 1.0, list[int]()

    def joined(*, newcomer: bool, cools: bool, lockstep: bool = False) -> _Joined:
        owner = Cools()
        attributes = TrackedAttributes({"": owner}, observed=[""])
        owner.temperature, owner.seen = 0.5 if cools else 1.0, [] if newcomer else [3]
        strategy = SimpleNamespace(traits=SimpleNamespace(lockstep=lockstep))
        of_rank: Any = SimpleNamespace(strategy=strategy, state=SimpleNamespace(step=7))
        return _joined(of_rank, cast(Any, SimpleNamespace(attributes=attributes)), None, None if newcomer else 7)

    shown: list[str] = []
    session: Any = SimpleNamespace(
        state=SimpleNamespace(step=7), print_once=lambda key, text: shown.append(text),
        metrics=SimpleNamespace(loggers=SimpleNamespace(event=lambda *_, **__: None)),
    )  # fmt: skip
    survivor = joined(newcomer=False, cools=True)
    _report_attributes(session, [survivor, joined(newcomer=True, cools=False)], {})
    assert "do not recover attributes that training changes: seen, temperature. A replacement" in shown.pop()
    _report_attributes(session, [survivor, joined(newcomer=True, cools=True)], {})  # by its on_load_checkpoint
    assert "that training changes: seen. A replacement" in shown.pop()
    _report_attributes(session, [survivor, survivor], {})  # without a replacement
    members = [joined(newcomer=newcomer, cools=True, lockstep=True) for newcomer in (False, True)]
    _report_attributes(session, members, {})
    assert not shown
    _report_attributes(session, [survivor], {"own": False, "taken": True})
    assert [": own. Those of the rank that failed" in shown[0], ": taken. A sum" in shown[1]] == [True, True]


def test_recovery_has_no_method_that_the_loop_does_not_call() -> None:
    public = {name for cls in (RankRecords, Recovery) for name in vars(cls) if not name.startswith("_")}
    assert public <= set(dir(FaultTolerance))
