"""Ranks of unequal speed receive unequal shares of global batches, and the weights equal those of a single process."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import FaultRecovery, LoadBalancer, load_balancer
from fabricx.distributed.sharding.fsdp_internals import DeviceWaits
from fabricx.loggers import JSONLogger
from fabricx.strategies import DDP, FSDP, AsyncSGD, ParameterServer, Single
from fabricx.testing import QUIET, Ledger, kill
from tests.soak import params

from .ledgers import Numbered

SAMPLES, BATCH, EPOCHS = 96, 24, 8  # 4 steps an epoch


class Paced(Ledger):
    """Module with a simulated clock that advances by each rank's time per sample; records its samples."""

    def __init__(self, *seconds: float, since: int = 0, until: int = 10**9, memory: int = 10**9) -> None:
        super().__init__(SAMPLES, BATCH)
        self.seconds, self.since, self.until, self.memory = seconds, since, until, memory
        self.now, self.had = 0.0, list[int]()
        self.by_rank: list[list[int]] = []
        self.step_had, self.by_step = dict[int, int](), list[dict[int, int]]()
        self.rows: list[Any] = []

    def on_fit_start(self) -> None:
        load_balancer._clock = lambda: self.now  # type: ignore[assignment]
        load_balancer._now = lambda trainer: self.now  # without waiting

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        size, rank = len(batch[0]), self.global_rank
        if size > self.memory and rank == 0:
            raise torch.OutOfMemoryError("no room for so many")
        slow = rank < len(self.seconds) and self.since <= self.trainer.global_step < self.until
        self.now += size * (self.seconds[rank] if slow else 0.01)
        self.had.append(size)
        self.step_had[self.trainer.global_step] = size
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.by_rank = self.trainer.world.gather_objects(self.had)
        self.by_step = self.trainer.world.gather_objects(self.step_had)


def train(
    strategy: Any, module: Any, tmp_path: Path, *callbacks: Any, devices: int = 3, epochs: int = EPOCHS,
    num_workers: int = 0, batch: int = 0, **options: Any,
) -> fx.Trainer:  # fmt: skip
    torch.manual_seed(3)
    trainer = fx.Trainer(
        devices=devices, strategy=strategy, max_epochs=epochs, default_root_dir=tmp_path, callbacks=list(callbacks),
        **{**QUIET, **options},
    )  # fmt: skip
    loader: Any = DataLoader(
        Numbered(SAMPLES), batch or BATCH // devices, shuffle=True, num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(Numbered(SAMPLES), 16))
    return trainer


def assert_like_one_process(module: Any, tmp_path: Path, epochs: int = EPOCHS) -> None:
    """Compare with a single process: 32 steps of sums in a different order differ by about 1e-7 of the weights each."""
    expected = Paced()
    train(Single(), expected, tmp_path / "one", devices=1, epochs=epochs)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert float((module.entries.detach() + epochs).abs().max()) < 1e-4  # each sample once an epoch


@pytest.mark.parametrize(
    ("strategy", "num_workers"),  # a loader process prefetches shares
    params([(DDP(), 1), (FSDP(), 0)], [(DDP(), 0), (ParameterServer(), 0), (ParameterServer(servers=0), 0)]),
)
def test_slow_ranks_receive_smaller_shares_and_the_weights_are_unchanged(
    strategy: Any, num_workers: int, tmp_path: Path
) -> None:
    module = Paced(0.01, 0.01, 0.03)
    logger = JSONLogger()
    train(
        strategy, module, tmp_path / "a", LoadBalancer(every_n_steps=2), logger=logger, log_every_n_steps=2,
        num_workers=num_workers,
    )  # fmt: skip
    assert [had[0] for had in module.by_rank] == [8, 8, 8]
    fast, alike, slow = (had[-1] for had in module.by_rank)
    assert (fast + alike, slow) == (21, 3)  # exact: 20.6 and 3.4
    assert_like_one_process(module, tmp_path)
    [log] = (tmp_path / "a").rglob("metrics.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    shares = [row["balance/share_2"] for row in rows if "balance/share_2" in row]
    assert shares[-1] == 3 / 24
    assert sum("balance/gain" in row for row in rows) < 16  # not in each step


def test_the_share_of_a_rank_follows_its_speed(tmp_path: Path) -> None:
    module = Paced(0.01, 0.01, 0.05, until=20)
    train(DDP(), module, tmp_path, LoadBalancer(every_n_steps=2), epochs=12)
    sizes = list(zip(*module.by_rank, strict=True))
    assert sizes[0] == (8, 8, 8)
    assert sorted(sizes[17]) == [2, 11, 11]
    assert sizes[-1] == (8, 8, 8)
    assert_like_one_process(module, tmp_path, 12)


def test_ranks_of_equal_speed_keep_equal_shares_and_exchange_speeds_once_per_window(tmp_path: Path) -> None:
    counter = CountsExchanges(every_n_steps=5)
    module = Paced(0.01, 0.01)
    train(DDP(), module, tmp_path, counter, devices=2)
    assert {size for had in module.by_rank for size in had} == {12}
    assert module.rows == [1 + (EPOCHS * 4 - 2) // 5]  # the first exchanges the limits of memory


def test_a_much_slower_rank_receives_a_smaller_share_before_the_window_ends(tmp_path: Path) -> None:
    module = Paced(0.01, 0.01, 0.05, since=30)
    train(DDP(), module, tmp_path, LoadBalancer(every_n_steps=20), epochs=12)
    sizes = list(zip(*module.by_rank, strict=True))
    assert set(sizes[:31]) == {(8, 8, 8)}  # the window that began at 22 would end at 42
    assert sizes[34] == (10, 10, 4)


class RealClock(Paced):
    """Module whose samples really take ten times as long on rank 1."""

    def on_fit_start(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(len(batch[0]) * (0.02 if self.global_rank else 0.002))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", params([DDP(), ParameterServer(servers=0)], [DDP(shared_memory=False), FSDP()]))
def test_waiting_for_other_ranks_within_backward_does_not_count_as_computation(strategy: Any, tmp_path: Path) -> None:
    """With real clocks; shared-memory sums wait during backward. A rank of apparently equal speed keeps its share."""
    module = RealClock()
    train(strategy, module, tmp_path, LoadBalancer(every_n_steps=2), devices=2, epochs=3)
    sizes = list(zip(*module.by_rank, strict=True))
    assert sizes[0] == (12, 12)
    assert any(fast > 2 * slow for fast, slow in sizes)  # a busy machine may delay the fast rank in a later window


class Sleeps(Ledger):
    """Sleep on rank 1 before its computation, and record how long each rank waits."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.waited: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.8 * self.global_rank)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.waited = self.trainer.world.gather_objects(self.trainer.strategy.waited_s)


@pytest.mark.parametrize("strategy", [FSDP(), ParameterServer()])
def test_the_time_that_a_rank_waits_for_other_ranks_is_recorded_as_waiting(strategy: Any, tmp_path: Path) -> None:
    module = Sleeps()
    train(strategy, module, tmp_path, devices=2, epochs=1)
    first, second = module.waited
    assert first > 4 * 0.4 > second  # busy cores make the second rank wait for tenths of a second


class Waiting(Paced):
    """Simulate the waiting of a device on the faster rank: before each block, and after its backward."""

    def __init__(self, *seconds: float, marked: bool) -> None:
        super().__init__(*seconds)
        self.marked = marked

    def on_fit_start(self) -> None:
        super().on_fit_start()
        for name in ("wait_for_unshard", "post_backward"):
            setattr(FSDPParamGroup, name, self.waiting(getattr(FSDPParamGroup, name)))
        if self.marked:
            module = self
            FSDP.record_pauses = lambda strategy, mark: DeviceWaits(module, lambda: module.now).spans  # type: ignore[method-assign]

    def waiting(self, method: Any) -> Any:
        def wait(group: Any) -> Any:
            self.now += 0.01 if self.global_rank == 0 else 0.0
            return method(group)

        return wait


def test_waiting_of_a_device_within_a_step_does_not_count_as_computation(tmp_path: Path) -> None:
    module = Waiting(0.01, 0.03, marked=True)
    train(FSDP(), module, tmp_path / "a", LoadBalancer(every_n_steps=2), devices=2)
    assert [had[-1] for had in module.by_rank] == [18, 6]
    module = Waiting(0.01, 0.03, marked=False)
    train(FSDP(), module, tmp_path / "b", LoadBalancer(every_n_steps=2), devices=2)
    assert module.by_rank[0][-1] < 18  # unmarked waiting counts as computation


class CountsExchanges(fx.Callback):
    """Count the collectives of a `LoadBalancer`."""

    def __init__(self, **options: Any) -> None:
        self.balancer = LoadBalancer(**options)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.balancer.on_fit_start(trainer, module)
        world = type(trainer.world)
        gather, self.count = world.all_gather, 0

        def counted(*arguments: Any) -> Any:
            self.count += 1
            return gather(*arguments)

        world.all_gather = counted

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.balancer.on_train_epoch_start(trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.balancer.on_train_batch_start(trainer, module, batch, batch_idx)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.balancer.on_before_backward(trainer, module, loss)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.balancer.on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.rows.append(self.count)


@pytest.mark.parametrize("strategy", [DDP(), FSDP()])
def test_fixed_shares_are_computed_in_pieces_of_at_most_max_batch_size(strategy: Any, tmp_path: Path) -> None:
    module = Paced()
    balancer = LoadBalancer(shares=[0.7, 0.3], max_batch_size=4)
    train(
        strategy, module, tmp_path / "a", balancer, devices=2, epochs=2,
        accumulate_grad_batches=2, batch=6, val_check_interval=3, check_val_every_n_epoch=None,
    )  # fmt: skip
    first, second = module.by_rank
    assert max(first) <= 4
    assert sum(first) == 2 * 4 * 17
    assert (
        sum(second) == 2 * 4 * 7 if isinstance(strategy, DDP) else sum(second) > 2 * 4 * 7
    )  # samples of the other ranks
    assert_like_one_process(module, tmp_path, 2)


def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_pieces(tmp_path: Path) -> None:
    module = Paced(0.01, 0.03, memory=14)
    trainer = train(
        DDP(), module, tmp_path / "a", LoadBalancer(every_n_steps=2), FaultRecovery(), devices=2,
        enable_checkpointing=True,
    )  # fmt: skip
    [failure] = trainer.failures
    assert "OutOfMemoryError" in failure
    assert max(module.by_rank[0]) <= 14
    assert sum(module.by_rank[0][-2:]) > 14  # in two pieces
    assert_like_one_process(module, tmp_path)


@pytest.mark.parametrize("strategy", params([FSDP()], [DDP()]))
def test_no_sample_is_lost_after_deaths_of_balanced_ranks(strategy: Any, tmp_path: Path) -> None:
    faults = [kill(rank=1).during("backward", step=3), kill(rank=0).during("validation", step=8, attempt=1)]
    module = Paced(0.01, 0.02, 0.03)
    trainer = train(
        strategy, module, tmp_path / "a", LoadBalancer(every_n_steps=2), FaultRecovery(), *faults,
        enable_checkpointing=True, epochs=6,
    )  # fmt: skip
    assert len(trainer.failures) == 2
    assert module.by_rank[0][-1] > module.by_rank[2][-1]
    assert_like_one_process(module, tmp_path, 6)


@pytest.mark.parametrize("patience", params([0.0], [10.0]))
def test_shares_after_a_death_are_computed_from_the_measured_speeds(patience: float, tmp_path: Path) -> None:
    module = Paced(0.01, 0.01, 0.03)
    trainer = train(
        DDP(), module, tmp_path / "a", LoadBalancer(every_n_steps=2), FaultRecovery(patience=patience),
        kill(rank=0).during("forward", step=25), enable_checkpointing=True,
    )  # fmt: skip
    assert len(trainer.failures) == 1
    # A new rank is assumed to have the median speed; two ranks compute their 18 and 6 samples in two pieces.
    sizes = [steps[25] for steps in module.by_step if 25 in steps]
    # A replacement that joins later has the attributes of rank 0.
    assert sizes[: 3 if patience else 2] == ([8, 12, 4] if patience else [9, 3])
    assert_like_one_process(module, tmp_path)


def test_a_rank_that_has_joined_after_the_last_batch_meets_the_other_ranks_at_the_end() -> None:
    """Regression: a rank without a listener for slower ranks was in another collective than the others."""
    met: list[LoadBalancer] = []
    balancer = LoadBalancer()
    world = SimpleNamespace(axis=lambda name: SimpleNamespace(size=2), barrier=lambda: met.append(balancer))
    trainer: Any = SimpleNamespace(world=world, strategy=DDP())
    for _ in range(2):  # a rank that repeats the hook has closed its listener
        balancer.on_train_end(trainer, Paced())
    assert met == [balancer, balancer]


def test_a_resumed_run_continues_with_the_saved_shares(tmp_path: Path) -> None:
    first, second = Paced(0.01, 0.03), Paced(0.01, 0.03)
    options: dict[str, Any] = {"devices": 2, "enable_checkpointing": True}
    trainer = train(DDP(), first, tmp_path / "a", LoadBalancer(every_n_steps=2), epochs=3, **options)
    saved = trainer.checkpoint_callback.best_model_path
    torch.manual_seed(3)
    trainer = fx.Trainer(
        devices=2, strategy=DDP(), max_epochs=EPOCHS, default_root_dir=tmp_path / "b",
        callbacks=[LoadBalancer(every_n_steps=2)], **{**QUIET, "enable_checkpointing": True},
    )  # fmt: skip
    loader: Any = DataLoader(Numbered(SAMPLES), BATCH // 2, shuffle=True)
    trainer.fit(second, loader, DataLoader(Numbered(SAMPLES), 16), ckpt_path=saved)
    assert first.by_rank[0][-1] == second.by_rank[0][0] == 18
    assert_like_one_process(second, tmp_path)


def test_the_load_balancer_has_no_effect_on_asynchronous_workers(tmp_path: Path) -> None:
    module = Paced(0.01, 0.03)
    train(AsyncSGD(damp=False), module, tmp_path, LoadBalancer(every_n_steps=1), devices=2)
    assert sum(sum(had) for had in module.by_rank) == EPOCHS * SAMPLES
