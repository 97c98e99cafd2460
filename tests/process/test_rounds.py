"""Asynchronous workers with local steps, which send the sum of a round's updates to servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.errors import WorkerFailed
from fabricx.strategies import AsyncSGD, LocalSGD, Single
from fabricx.testing import LayeredModule, SavesAtEnd
from tests.process.served import SAMPLES, Dies, KillsServer, Recorded, serve_and_publish_pid, train
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

OUTERS = ("sum", "average", "nesterov", "elastic")


def near(first: Any, second: Any, tolerance: float = 2e-6) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.allclose(a, b, atol=tolerance) for a, b in pairs)


@pytest.mark.parametrize(("every", "servers"), params([(1, 1), (3, 2)], [(1, 2), (3, 1)]))
def test_rounds_of_a_single_worker_train_the_weights_of_a_single_process(every: int, servers: int) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "batch": 3}
    expected, single = train(Single(), 1, module=Recorded("scheduled"), **options)
    for outer in ("sum", "average"):
        strategy = AsyncSGD(every=every, outer=outer, servers=servers)
        module, trainer = train(strategy, 1, module=Recorded("scheduled"), **options)
        assert near(module, expected)
        assert trainer.global_step == single.global_step
        assert module.by_rank == expected.by_rank


@pytest.mark.parametrize("every", params([3], [2]))
def test_a_single_worker_with_outer_momentum_equals_diloco(every: int, tmp_path: Path) -> None:
    """Rounds of `async_sgd` end with the epoch, unlike rounds of `local_sgd`: the batches are a multiple of a round."""
    options: dict[str, Any] = {"batch": 8, "max_epochs": 2, "limit_train_batches": 6}
    local = LocalSGD(every=every, outer="nesterov")
    expected, _ = train(local, 1, module=Recorded("momentum"), callbacks=[SavesAtEnd(tmp_path / "a")], **options)
    strategy = AsyncSGD(every=every, outer="nesterov")
    module, _ = train(strategy, 1, module=Recorded("momentum"), callbacks=[SavesAtEnd(tmp_path / "b")], **options)
    assert near(module, expected)
    velocities = [checkpoint.load(tmp_path / name)["strategy"]["outer"] for name in "ab"]
    assert velocities[0].keys() == velocities[1].keys()
    assert all(torch.allclose(value, velocities[1][name], atol=1e-6) for name, value in velocities[0].items())
    assert max(float(value.abs().max()) for value in velocities[0].values()) > 1e-4
    again, _ = train(strategy, 1, module=Recorded("momentum"), ckpt=tmp_path / "a", **{**options, "max_epochs": 3})
    whole, _ = train(local, 1, module=Recorded("momentum"), **{**options, "max_epochs": 3})
    assert near(again, whole)


def test_elastic_averaging_moves_a_worker_and_the_servers_toward_each_other() -> None:
    rate = 0.25
    module, _ = train(
        AsyncSGD(every=4, outer="elastic", elastic_rate=rate), 1, module=Recorded("momentum"), max_steps=4
    )
    alone, _ = train(Single(), 1, module=Recorded("momentum"), max_steps=4)
    start = Recorded("momentum")
    for elastic, trained, initial in zip(module.parameters(), alone.parameters(), start.parameters(), strict=True):
        assert torch.allclose(elastic, initial + rate * (trained - initial), atol=1e-6)


@pytest.mark.parametrize("outer", params(["nesterov", "elastic"], ["sum", "average"]))
@pytest.mark.parametrize("workers", params([3], [2]))
def test_each_sample_is_trained_once_per_epoch_and_the_loss_decreases(outer: Any, workers: int) -> None:
    strategy = AsyncSGD(every=3, outer=outer, outer_momentum=0.5, servers=workers - 1)
    module, trainer = train(strategy, workers, batch=2, max_epochs=12)
    assert trainer.global_step == 12 * 22
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    assert sorted(trained) == sorted(12 * list(range(SAMPLES)))
    # Rounds; the end of an epoch has ended some of them early.
    assert module.counts[0].updates <= 12 * (22 // 3 + 1 + workers)
    assert float(trainer.callback_metrics["val"]) < 1.5  # 6 at the beginning


@pytest.mark.parametrize("outer", params(["elastic"], ["average"]))
@pytest.mark.filterwarnings("ignore:the checkpoint has the state of ModelCheckpoint")
def test_limits_validations_and_checkpoints_are_at_exact_steps(tmp_path: Path, outer: Any) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": 17, "max_epochs": -1, "val_check_interval": 2, "enable_checkpointing": True}
    module, trainer = train(AsyncSGD(every=4, outer=outer), 2, batch=4, callbacks=[saver], **options)
    assert trainer.global_step == 17
    steps = sorted(checkpoint.read_manifest(path)["step"] for path in checkpoint.list_committed(tmp_path))
    assert steps == [5, 10, 15]
    assert module.validated == [4, 8, 11, 15]
    path = checkpoint.list_committed(tmp_path)[0]
    _, after = train(Single(), 1, ckpt=path, batch=4, max_epochs=4)
    assert after.current_epoch == 4


def test_a_killed_worker_loses_its_current_round_only() -> None:
    module, trainer = train(AsyncSGD(every=3, outer="average"), 3, module=Dies(), batch=1)
    assert trainer.current_epoch == 2
    assert trainer.global_step == 2 * SAMPLES
    trained = [sample for rank in module.by_rank for batch in rank for sample in batch]
    # One round of the dead worker is in the weights; other workers trained its later batches.
    assert len(trained) == 2 * SAMPLES - 3


def test_a_killed_server_restarts_from_its_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    from fabricx.trainer import process

    monkeypatch.setattr(process, "serve", serve_and_publish_pid)
    module, trainer = train(AsyncSGD(every=3, outer="nesterov", snapshot_every=2), 2, module=KillsServer(), batch=1)
    assert trainer.current_epoch == 2
    assert trainer.global_step == 2 * SAMPLES
    assert {sample for rank in module.by_rank for batch in rank for sample in batch} == set(range(SAMPLES))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AsyncSGD(every=2), "a method for the result of a round"),
        (lambda: AsyncSGD(every=0, outer="sum"), "every=0"),
        (lambda: AsyncSGD(outer="avrage"), "Did you mean 'average'"),
        (lambda: AsyncSGD(outer="sum", max_staleness=2), "remove max_staleness"),
        (lambda: AsyncSGD(outer="sum", compensation="dc"), "remove max_staleness"),
    ],
)
def test_wrong_options_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_manual_optimization_with_rounds_is_refused() -> None:
    with pytest.raises(WorkerFailed, match="a manually optimised module"):
        train(AsyncSGD(outer="average"), module=LayeredModule(manual=True))


class Table(fx.Module):
    """A single table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.by_rank: list[Any] = []
        self.table = torch.nn.Embedding(SAMPLES, 6, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.table(batch[2]) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_rounds_train_tables_with_sparse_gradients() -> None:
    expected, _ = train(Single(), 1, module=Table())
    module, _ = train(AsyncSGD(every=2, outer="sum"), 1, module=Table())
    assert near(module, expected)
