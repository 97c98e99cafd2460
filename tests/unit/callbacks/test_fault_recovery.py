"""Intervals of snapshots, with a simulated clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fabricx.callbacks import FaultRecovery, fault_recovery
from fabricx.core.state import RunState
from fabricx.core.strategy import Traits
from fabricx.core.strategy_parts import DealsData
from fabricx.data.map_style import OrderedFeed
from fabricx.distributed.world import World
from fabricx.errors import CopiesLost
from fabricx.loop.boundary import advance
from fabricx.parameter_server.server.leases import LeaseSet
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import OpenSection, Push, RequestLease
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.dealer import LeaseDealer
from fabricx.session.fault_tolerance import FaultTolerance
from fabricx.session.status import BatchStatus
from fabricx.strategies import DDP, LocalSGD, Single
from tests.unit.parameter_server.server.test_server import begin


class Trainer:
    """A run with steps of 0.25 s; snapshots are written in the background, for `writing_s` seconds each."""

    def __init__(self, root: Path, writing_s: float) -> None:
        self.now, self.global_step, self.saved = 1000.0, 0, []
        self.world, self.failures = World(), []
        self.fast_dev_run, self.run_dir = False, root
        self.writing_s = writing_s
        self.ends: list[tuple[float, Callable[[], None]]] = []
        self.strategy: Any = DDP()

    @property
    def session(self) -> Any:
        writer = SimpleNamespace(busy=lambda: bool(self.ends))
        return SimpleNamespace(checkpoints=SimpleNamespace(writer=writer))

    def save_checkpoint(self, path: Path, *, wait: bool, after: Callable[[], None], single_file: bool) -> None:
        assert not single_file  # all ranks write, as fast as possible
        self.saved.append(self.global_step)
        self.ends.append((self.now + self.writing_s, after))

    def step(self, recovery: FaultRecovery) -> None:
        self.now += 0.25
        self.global_step += 1
        while self.ends and self.ends[0][0] <= self.now:
            self.ends.pop(0)[1]()
        recovery.on_train_batch_end(self, None, None, None, 0)


def snapshots(
    root: Path, writing_s: float, steps: int, monkeypatch: pytest.MonkeyPatch, strategy: Any = None, **options: Any
) -> list[int]:
    trainer, recovery = Trainer(root, writing_s), FaultRecovery(**options)
    trainer.strategy = strategy or trainer.strategy
    monkeypatch.setattr(fault_recovery.time, "monotonic", lambda: trainer.now)
    recovery.on_train_start(trainer, None)
    for _ in range(steps):
        trainer.step(recovery)
    return trainer.saved


def test_a_cheap_snapshot_is_taken_every_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = snapshots(tmp_path, 0.5, 1600, monkeypatch)
    assert [after - before for before, after in itertools.pairwise(saved)] == [60 * 4] * (len(saved) - 1)
    assert len(saved) >= 6


def test_an_expensive_snapshot_takes_at_most_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = snapshots(tmp_path, 5.0, 12_000, monkeypatch)
    assert [after - before for before, after in itertools.pairwise(saved[1:])] == [500 * 4] * (len(saved) - 2)
    assert len(saved) * 5.0 <= 0.01 * 3000 + 2 * 5.0  # and the first two, before the first measurement


def test_a_requested_number_of_steps_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshots(tmp_path, 2.0, 40, monkeypatch, every_n_train_steps=10) == [10, 20, 30, 40]


def test_a_snapshot_that_would_wait_is_omitted_unless_results_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"writing_s": 3.0, "steps": 40, "monkeypatch": monkeypatch, "every_n_train_steps": 5}
    assert snapshots(tmp_path, **options) == [5, 20, 35]  # writing a snapshot lasts 12 steps
    assert snapshots(tmp_path, strategy=LocalSGD(), **options) == [5, 10, 15, 20, 25, 30, 35, 40]


class Dealt(DealsData):
    """A strategy of ranks at their own pace."""

    traits = Traits(synchronous=False, lockstep=False)
    dealer: Any = None

    def __init__(self, dealer: Any) -> None:
        self.dealer = dealer


def account(*, dealer: Any = None, automatic: bool = True, streams: bool = False, **state: int) -> str:
    strategy = Single() if dealer is None else Dealt(dealer)
    session = SimpleNamespace(data=SimpleNamespace(train_feed=SimpleNamespace(exact_position=not streams)))
    trainer: Any = SimpleNamespace(strategy=strategy, state=RunState(**state), session=session)
    return fault_recovery._account(trainer, SimpleNamespace(automatic_optimization=automatic))  # type: ignore[arg-type]


def test_the_last_line_counts_global_batches_of_ranks_in_lockstep() -> None:
    assert account(passed=12, trained=12) == ", 0 samples lost"
    assert account(passed=12, trained=10).startswith(", 2 global batches lost: ")
    assert account(passed=12, trained=13).startswith(", 1 global batch trained twice: ")
    assert account(passed=12, automatic=False) == ""


def test_the_last_line_counts_samples_between_windows_of_the_data_order() -> None:
    assert account(left_out=3).startswith(", 3 samples lost: ")
    assert account(left_out=1, again=8, automatic=False).startswith(", 1 sample lost, 8 samples trained twice: ")


@pytest.mark.parametrize(("position", "expected"), [(4, (0, 0)), (6, (2, 0)), (2, (0, 2))])
def test_a_difference_between_the_positions_of_data_and_training_is_detected(
    position: int, expected: tuple[int, int]
) -> None:
    feed = OrderedFeed(DataLoader(range(12), 2), World(), 0, float("inf"))
    session: Any = SimpleNamespace(state=RunState(), data=SimpleNamespace(val_every=float("inf")), batch=BatchStatus())
    session.fault_tolerance = FaultTolerance(None, None, session.state, None)  # type: ignore[arg-type]
    state = session.state
    for micro in itertools.chain(itertools.islice(feed.epoch(0), 2), feed.epoch(0, position=position, first=2)):
        advance(session, micro)
    assert (state.left_out, state.again) == expected
    assert state.samples == 12


@pytest.mark.parametrize("second", [(0, 1, 2), (0, 1), (0, 2, 2)])
def test_the_last_line_counts_the_samples_that_each_server_has_used(second: tuple[int, ...]) -> None:
    """The second of two servers misses leases of the first server, or uses a lease twice."""
    begun, _ = begin(workers=1, aggregate=False)
    servers = [Server(1), Server(1, grants=False)]
    empty = torch.empty(0)
    for server in servers:
        server.handle(0, begun, empty, empty)
        server.handle(0, OpenSection(0, 3), empty, empty)
    for _ in range(3):
        lease = servers[0].handle(0, RequestLease(0, True), empty, empty).lease
        servers[0].handle(0, Push(0, 1, (lease,), True), empty, empty)
    for lease in second:
        servers[1].state.ledger._received = LeaseSet()  # disables the detection of repeated gradients
        servers[1].handle(0, Push(0, 1, (lease,), True), empty, empty)
    protocol = Asynchronous(begun.settings)
    samples = [server.state.shard.samples for server in servers]  # these pushes have no lease
    remote = SimpleNamespace(counts=lambda: [server.counts for server in servers], samples=lambda: samples)
    protocol._exchange = SimpleNamespace(remote=remote)  # type: ignore[assignment]
    apart = LeaseDealer(protocol)
    line = account(dealer=apart)
    lost, repeated = 3 - len(set(second)), len(second) - len(set(second))
    assert apart.lost_and_repeated() == (lost, repeated, 0)
    assert ("1 batch lost" in line, "1 batch trained twice" in line) == (bool(lost), bool(repeated))
    assert (", 0 samples lost" in line) == (not lost and not repeated)
    assert account(dealer=apart, streams=True) == ""  # a lease is a batch of any rank


@pytest.mark.parametrize(
    ("error", "restarts"),
    [(EOFError("unexpected EOF"), True), (CopiesLost("no copies"), True), (EOFError("no data"), False)],
)
def test_lost_processes_and_missing_copies_are_not_errors_of_the_program(error: Exception, restarts: bool) -> None:
    failed = RuntimeError("rank 1 failed")
    failed.__cause__ = error
    assert FaultRecovery(max_restarts=1).restarts_after(failed, -1) is restarts


@pytest.mark.parametrize("action", ["raise", "roll_back"])
def test_overflows_of_a_scaled_loss_end_no_run(trainer: Any, action: Any) -> None:
    scaled = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="'16-mixed'"):
        trainer(FaultRecovery(bad_gradients=action), precision=scaled).start()
    trainer(FaultRecovery(bad_gradients="skip"), precision=scaled).start()


def test_the_checksum_of_weights_changes_with_each_part_of_a_complex_weight() -> None:
    weight = torch.ones(3, dtype=torch.complex128)
    checksums = {fault_recovery._bits([weight])}
    for change in (1e-9, 1e-9j):
        checksums.add(fault_recovery._bits([weight + change]))
    assert len(checksums) == 3
