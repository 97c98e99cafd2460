"""Workers with servers: each sample is trained once at any pace, exactly where possible, with common checkpoints."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint, fault_recovery
from fabricx.core.strategy_parts import DealsData, as_part
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, AsyncSGD, ParameterServer, Single
from fabricx.testing import QUIET, SavesAtEnd, assert_same_state
from tests.process.served import SAMPLES, Numbered, Recorded, train
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")


def same_weights(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("link", "optimizer"),
    params(
        [("auto", "momentum"), ("auto", "scheduled"), ("gloo", "adamw")],
        [("auto", "adamw"), ("gloo", "momentum"), ("gloo", "scheduled")],
    ),
)
def test_a_single_worker_trains_bitwise_the_weights_of_a_single_process(optimizer: str, link: Any) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "batch": 5}
    expected, single = train(Single(), 1, module=Recorded(optimizer), **options)
    module, trainer = train(AsyncSGD(servers=2, link=link), 1, module=Recorded(optimizer), **options)
    assert same_weights(module, expected)
    assert trainer.global_step == single.global_step == 10
    assert module.by_rank == expected.by_rank
    assert float(trainer.callback_metrics["val"]) == float(single.callback_metrics["val"])
    assert float(trainer.callback_metrics["loss_epoch"]) == pytest.approx(float(single.callback_metrics["loss_epoch"]))


@pytest.mark.parametrize(("workers", "loaders"), params([(3, 0), (2, 2)], [(2, 0), (3, 2)]))
def test_each_sample_is_trained_once_per_epoch(workers: int, loaders: int) -> None:
    torch.manual_seed(2)
    module = Recorded()
    trainer = fx.Trainer(devices=workers, strategy=AsyncSGD(), max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(Numbered(), 4, shuffle=True, num_workers=loaders))
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    assert sorted(trained) == list(range(SAMPLES))
    assert trainer.global_step == 11
    assert sum(module.counts[0].staleness.values()) == 11


class _Skips(fx.Module):
    """A module whose gradient is the mean square of a batch; some batches have no loss."""

    def __init__(self, *skipped: float) -> None:
        super().__init__()
        self.layer, self.skipped = nn.Linear(1, 1, bias=False), skipped

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if float(batch[0]) in self.skipped else (self.layer(batch) * batch).mean()

    def configure_optimizers(self) -> Any:
        nn.init.zeros_(self.layer.weight)
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("accumulate", "skipped", "weight", "steps"),
    [
        (1, (2.0, 5.0, 6.0), -1 - (9 + 16) / 2 - (49 + 64) / 2, 3),  # samples 1 to 8; two samples make an update
        (2, (1.0, 2.0, 7.0), -(9 + 16) / 2 - (25 + 36 + 64) / 3, 2),
    ],
)
def test_batches_without_a_loss_are_excluded_from_the_mean_of_an_update(
    accumulate: int, skipped: tuple[float, ...], weight: float, steps: int
) -> None:
    module, samples = _Skips(*skipped), torch.arange(1.0, 9.0).reshape(-1, 1)
    options: Any = {"max_epochs": 1, "accumulate_grad_batches": accumulate, **QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer = fx.Trainer(devices=2, strategy=ParameterServer(mode="bounded", max_staleness=0), **options)
        trainer.fit(module, DataLoader(samples, 1))  # type: ignore[arg-type]
    assert float(module.layer.weight.detach()) == pytest.approx(weight)
    assert trainer.global_step == steps


def test_bounded_training_without_staleness_equals_ddp() -> None:
    expected, single = train(Single(), 1)
    module, trainer = train(ParameterServer(mode="bounded", max_staleness=0, servers=2), 2, batch=6)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-6)
    assert trainer.global_step == single.global_step == 8
    assert all(set(counts.staleness) == {0} for counts in module.counts)


@pytest.mark.parametrize(
    ("strategy", "most"),
    params(
        [
            (AsyncSGD(max_staleness=1, servers=2), 1),
            (AsyncSGD(max_staleness=0, on_stale="drop"), 0),
            (AsyncSGD(max_staleness=1, bound="clock"), 6),  # (n - 1)(2s + 1)
            (ParameterServer(mode="bounded", max_staleness=1, apply="arrival"), 6),
        ],
        [
            (AsyncSGD(max_staleness=1), 1),
            (AsyncSGD(compensation="dc-adaptive", link="gloo"), None),
            (ParameterServer(mode="bounded", max_staleness=1), 1),
            (ParameterServer(mode="async", servers=2), None),
        ],
    ),
)
def test_staleness_is_bounded(strategy: Any, most: int | None) -> None:
    module, trainer = train(strategy, 3, batch=2, max_epochs=1)
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    assert set(trained) == set(range(SAMPLES))
    assert most is None or all(max(counts.staleness) <= most for counts in module.counts)
    assert trainer.global_step == module.counts[0].updates == (8 if strategy._settings.aggregate else 22)


class Slow(Recorded):
    """The last rank is slow."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == self.trainer.world_size - 1:
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 25, "max_epochs": -1}])
def test_late_gradients_are_dropped_and_their_samples_trained_by_other_workers(limit: Any) -> None:
    strategy = ParameterServer(backup_workers=1)
    module, trainer = train(strategy, 3, module=Slow(), batch=2, val_check_interval=4, **limit)
    [counts] = module.counts
    assert set(counts.staleness) == {0}
    assert counts.dropped > 0
    assert trainer.global_step == (33 if "max_steps" not in limit else 25)  # two batches each
    if "max_steps" not in limit:
        assert counts.updates == 33
        assert sum(counts.staleness.values()) == 3 * 22
    assert float(trainer.callback_metrics["val"]) < 4.0  # 11 at the beginning


class Accounted(Recorded):
    """Records the accounts of samples at the end; a wrong position skips samples of the second epoch."""

    def __init__(self, skips: int = 0) -> None:
        super().__init__()
        self.skips, self.account, self.by_leases, self.by_position = skips, "", (0, 0, 0), (0, 0)

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            self.trainer.state.samples = self.skips

    def on_train_end(self) -> None:
        state, strategy = self.trainer.state, as_part(self.trainer.strategy, DealsData)
        self.account = fault_recovery._account(self.trainer, self)
        self.by_leases, self.by_position = strategy.dealer.lost_and_repeated(), (state.left_out, state.again)


@pytest.mark.parametrize(
    ("strategy", "options"),
    params(
        [
            (AsyncSGD(servers=2), {"val_check_interval": 1}),
            (AsyncSGD(every=3, outer="sum"), {"accumulate_grad_batches": 2, "batch": 3}),
            (ParameterServer(mode="bounded", servers=2), {"max_steps": 3, "limit_train_batches": 0.9}),
            (ParameterServer(backup_workers=1), {"batch": 2, "limit_train_batches": 4}),
        ],
        [(AsyncSGD(max_staleness=1, bound="clock"), {"max_steps": 5, "max_epochs": -1})],
    ),
    ids=lambda value: type(value).__name__,
)
def test_servers_count_each_sample_once(strategy: Any, options: dict[str, Any]) -> None:
    assert train(strategy, module=Accounted(), **options)[0].account == ", 0 samples lost"


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_untrained_samples_are_reported_as_lost_if_positions_and_leases_agree(mode: Any) -> None:
    module, _ = train(ParameterServer(mode=mode), module=Accounted(skips=24))
    assert module.by_leases == (0, 0, 0)
    assert module.by_position == (0, 0)
    assert module.account.startswith(", 24 samples lost: ")


def test_a_worker_with_a_late_backup_worker_trains_the_weights_of_a_single_process() -> None:
    """Each update has one batch with the newest weights, and all batches are equal."""
    module, trainer = train(
        ParameterServer(backup_workers=1), 2, module=IgnoresBatch(), batch=3, limit_train_batches=6, max_epochs=1
    )
    assert trainer.global_step == 12  # the number of batches of each rank
    expected, _ = train(Single(), 1, module=IgnoresBatch(), batch=3, limit_train_batches=12, max_epochs=1)
    assert same_weights(module, expected)


class IgnoresBatch(Recorded):
    """Its loss doesn't depend on the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.append(batch[2].tolist())
        return self(torch.ones(4, 6)).square().mean()


def test_limits_validations_and_checkpoints_are_at_exact_updates(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": 17, "max_epochs": -1, "val_check_interval": 2, "enable_checkpointing": True}
    module, trainer = train(AsyncSGD(), 2, batch=4, callbacks=[saver], **options)
    assert trainer.global_step == 17
    assert sorted(checkpoint.read_manifest(path)["step"] for path in checkpoint.list_committed(tmp_path)) == [5, 10, 15]
    # Every two batches of each rank; a rank has 6 per epoch, and there are 11 leases.
    assert module.validated == [4, 8, 11, 15]


def test_checkpoints_move_between_strategies_with_and_without_servers(tmp_path: Path) -> None:
    strategies: list[tuple[Any, int]] = [
        (Single(), 1), (AsyncSGD(servers=2), 2), (DDP(), 2), (ParameterServer(), 2),
        (ParameterServer(optimizer="server", servers=3), 2), (ParameterServer(optimizer="server", servers=0), 3),
        (ParameterServer(mode="bounded"), 1), (AsyncSGD(every=2, outer="average"), 2), (Single(), 1),
    ]  # fmt: skip
    before: Any = None
    path: Path | None = None
    for number, (strategy, devices) in enumerate(strategies):
        # max_steps is reached after the first run: each run loads the checkpoint, and writes a checkpoint.
        saver = SavesAtEnd(tmp_path / f"{number}.ckpt")
        train(strategy, devices, ckpt=path, callbacks=[saver], max_steps=4, batch=12 // devices)
        path = tmp_path / f"{number}.ckpt"
        state = checkpoint.load(path)["strategy"]
        if before is not None:
            assert_same_state(state, before)
        before = state


@pytest.mark.parametrize(
    "strategy",
    params(
        [ParameterServer(), ParameterServer(servers=0, optimizer="server"), AsyncSGD()],
        [ParameterServer(servers=0), ParameterServer(optimizer="server")],
    ),
)
def test_a_run_with_servers_resumes_exactly(tmp_path: Path, strategy: Any) -> None:
    devices = 1 if isinstance(strategy, AsyncSGD) else 2
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    options: dict[str, Any] = {"batch": 6, "enable_checkpointing": True}
    whole, _ = train(strategy, devices, module=Recorded("scheduled"), callbacks=[saver], **options)
    path = sorted(checkpoint.list_committed(tmp_path), key=lambda saved: checkpoint.read_manifest(saved)["step"])[0]
    again, trainer = train(strategy, devices, module=Recorded("scheduled"), ckpt=path, batch=6)
    assert same_weights(again, whole)
    assert trainer.current_epoch == 2


class Normed(Recorded):
    """Updates running statistics of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs))

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.states = self.trainer.world.gather_objects([self.norm.running_mean, self.norm.running_var])


def test_running_statistics_are_combined_at_meetings() -> None:
    module, _ = train(AsyncSGD(), 3, module=Normed(), batch=5, max_epochs=1)
    for states in zip(*module.states, strict=True):
        assert all(torch.equal(statistics, states[0]) for statistics in states)
    assert float((module.norm.running_var - 1.0).abs().max()) < 0.8


class Meetings(fx.Callback):
    """Records step and weights at each meeting, without a collective; rank 1 receives the weights late."""

    watches_metrics = True

    @property
    def meeting_interval(self) -> int:
        return 1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        weights, self.met = trainer.strategy._exchange.weights, []
        pull = weights.pull

        def late(*arguments: Any, **options: Any) -> Any:
            if trainer.global_rank == 1 and not options.get("to_train"):
                time.sleep(0.2)
            return pull(*arguments, **options)

        weights.pull = late

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.met.append((trainer.global_step, float(module.body[0].up.weight.sum())))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        del trainer.strategy._exchange.weights.pull
        module.met = trainer.world.gather_objects(self.met)


@pytest.mark.parametrize("strategy", params([AsyncSGD()], [AsyncSGD(every=2, outer="average")]))
def test_no_rank_continues_training_before_the_end_of_a_meeting(strategy: Any) -> None:
    module, _ = train(strategy, 2, module=Recorded(), batch=6, max_epochs=1, callbacks=[Meetings()])
    first, second = module.met
    assert len(first) > 3
    assert first == second


class StopsAlone(Recorded):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:  # on a busy machine, it may have no batch of the first epoch
            self.trainer.should_stop = True


def test_a_single_rank_may_stop_all_ranks() -> None:
    module, trainer = train(AsyncSGD(), 2, module=StopsAlone(), batch=1, max_epochs=50)
    assert trainer.current_epoch < 50
    assert trainer.should_stop
    assert module.counts == [] or module.counts[0].updates == trainer.global_step


class Momentum(Recorded):
    """Has momentum; checks whether its warning is issued."""

    def __init__(self, warned: bool) -> None:
        super().__init__("momentum")
        self.warned = warned

    def setup(self, stage: str) -> None:
        self.caught = warnings.catch_warnings(record=True)
        self.recorded = self.caught.__enter__()
        warnings.simplefilter("always")

    def on_train_start(self) -> None:
        self.caught.__exit__(None, None, None)
        issued = any("delays act like additional momentum" in str(warning.message) for warning in self.recorded)
        assert issued == (self.warned and self.global_rank == 0)
        del self.caught, self.recorded


@pytest.mark.parametrize(
    ("strategy", "warned"),
    [
        (AsyncSGD(damp=False), True),
        (AsyncSGD(compensation="dc"), True),
        (AsyncSGD(), False),
        (AsyncSGD(outer="average"), False),
        (ParameterServer(mode="bounded"), False),
    ],
)
def test_momentum_with_delayed_gradients_causes_a_warning(strategy: Any, warned: bool) -> None:
    train(strategy, 2, module=Momentum(warned), max_epochs=1)


class Pictures(Recorded):
    """Has weights in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.picture(inputs[:, :1, None, None].expand(-1, 2, 3, 3).contiguous())
        return super().forward(inputs) + seen.mean((1, 2, 3), keepdim=True)[:, 0, 0]


@pytest.mark.parametrize("servers", [1, 3])
def test_any_memory_format_is_trained(servers: int) -> None:
    expected, _ = train(Single(), 1, module=Pictures(), max_epochs=1)
    module, _ = train(ParameterServer(servers=servers), 2, module=Pictures(), batch=6, max_epochs=1)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-6)


class Stream:
    """Batches of unknown and different numbers on the ranks."""

    def __iter__(self) -> Any:
        for number in range(4 + 3 * dist.get_rank()):
            yield [torch.full((2, 6), float(number)), torch.ones(2, 1), torch.tensor([number])]


def test_streams_of_different_lengths_are_read_to_their_ends() -> None:
    module = Recorded()
    trainer = fx.Trainer(devices=2, strategy=AsyncSGD(), max_epochs=1, **QUIET)
    trainer.fit(module, Stream())
    assert module.by_rank == [[[n] for n in range(4)], [[n] for n in range(7)]]
    assert trainer.global_step == 11
    with pytest.raises(WorkerFailed, match="use a DataLoader over a map-style dataset"):
        fx.Trainer(devices=2, strategy=ParameterServer(mode="bounded"), max_epochs=1, **QUIET).fit(module, Stream())


class SizedStream(Stream):
    def __len__(self) -> int:
        return 4 + 3 * dist.get_rank()


class Validates(Recorded):
    """Records the number of updates before each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.trainer.global_step)


@pytest.mark.parametrize(
    "strategy", [AsyncSGD(), ParameterServer(mode="bounded", apply="arrival")], ids=["async_sgd", "bounded"]
)
def test_streams_with_different_lengths_are_validated_at_their_ends_by_all_ranks(strategy: fx.Strategy) -> None:
    module = Validates()
    trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module, SizedStream(), [[torch.ones(2, 6), torch.ones(2, 1), torch.tensor([0])]])
    assert module.validated == [11, 22]


class SetsWeightsTemporarily(Recorded):
    """Temporarily sets different weights on each rank at a meeting."""

    def on_validation_start(self) -> None:
        self.kept = [parameter.detach().clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.add_(torch.full_like(parameter, 1.0 + self.global_rank))
        self.means = self.trainer.world.gather_objects(float(self.head.bias))

    def on_validation_end(self) -> None:
        for parameter, kept in zip(self.parameters(), self.kept, strict=True):
            parameter.data.copy_(kept)


def test_weights_in_shared_memory_are_private_to_each_rank_at_meetings() -> None:
    expected, _ = train(Single(), 1, module=Recorded(), batch=12)
    module, _ = train(ParameterServer(servers=0, optimizer="server"), 3, module=SetsWeightsTemporarily(), batch=4)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-6)
    assert module.means[2] - module.means[0] == pytest.approx(2.0, abs=1e-5)


class WarmsUp(Recorded):
    """Sets the rate of the next step after each step, as in the documentation of Lightning."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1) / 4


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (ParameterServer(optimizer="server"), {}), (ParameterServer(servers=0, optimizer="server"), {}),
        (ParameterServer(servers=2, optimizer="server"), {"gradient_clip_val": 0.5}),
    ],  # not bounded: a worker without part in an update would send the rate of the previous step, which is an error
)  # fmt: skip
def test_a_learning_rate_set_after_the_step_applies_to_the_next_step(strategy: Any, options: Any) -> None:
    expected, _ = train(Single(), 1, module=WarmsUp("momentum"), **options)
    module, _ = train(strategy, 2, module=WarmsUp("momentum"), batch=6, **options)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=1e-6)
