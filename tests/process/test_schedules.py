"""Each update uses the hyperparameters of its global batch, for gradients of any worker and any staleness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricx.strategies import AsyncSGD, ParameterServer, Single
from fabricx.testing import SavesAtEnd
from tests.process.served import Recorded, train
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

RATES = 100


class RecordsHyperparameters(torch.optim.SGD):
    """Records the hyperparameters of each update in its state; on a server, the server records them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.recorded: list[Any] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.recorded.append([(group["lr"], group["momentum"]) for group in self.param_groups])
        super().step()

    def state_dict(self) -> Any:
        return {**super().state_dict(), "recorded": self.recorded}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.recorded = state_dict["recorded"]


def rate(batch: int) -> float:
    return 1.0 / (1 + batch)


class Scheduled(Recorded):
    """Has two groups with their own rate and momentum per global batch, and a different rate per epoch."""

    def __init__(self, every: int = 1, by_hand: bool = False) -> None:
        super().__init__()
        self.every, self.by_hand = every, by_hand
        self.recorded: list[Any] = []

    def configure_optimizers(self) -> Any:
        groups: Any = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 1e-4}]
        optimizer = RecordsHyperparameters(groups, lr=1e-3, momentum=0.5)
        if self.by_hand:
            return optimizer
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-4], total_steps=RATES)
        by_epoch = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda epoch: 0.5)
        by_step = {"scheduler": cycle, "interval": "step", "frequency": self.every}
        return [optimizer], [by_step] if self.every > 1 else [by_step, {"scheduler": by_epoch, "interval": "epoch"}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.by_hand:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * rate(self.trainer.global_step)

    def on_train_end(self) -> None:
        state = self.trainer.strategy.state_dict(self, self.trainer.optimizers)
        self.recorded = state["optimizers"][0]["recorded"]


def expected(**options: Any) -> list[Any]:
    """Return the hyperparameters of each global batch in a single process."""
    module, _ = train(Single(), 1, module=Scheduled(**options), batch=12)
    assert len(module.recorded) == 8
    return list(module.recorded)


@pytest.mark.filterwarnings("ignore:.*delays act like additional momentum.*")
@pytest.mark.parametrize(
    ("strategy", "devices"),
    params(
        [
            (ParameterServer(optimizer="server", servers=2, shard_by="element"), 2),
            (ParameterServer(mode="bounded", max_staleness=3, overlap="forward"), 3),
            (AsyncSGD(every=2, outer="sum"), 1),
        ],
        [
            (ParameterServer(optimizer="server", servers=0, shard_by="element"), 2),
            (ParameterServer(mode="bounded", max_staleness=0), 3),
            (AsyncSGD(), 1),
        ],
    ),
)
def test_an_update_uses_the_hyperparameters_of_its_global_batch(strategy: Any, devices: int) -> None:
    module, trainer = train(strategy, devices, module=Scheduled(), batch=12 // devices)
    assert module.recorded == expected()
    assert trainer.global_step == 8
    module, _ = train(strategy, devices, module=Scheduled(every=3), batch=12 // devices)
    assert module.recorded == expected(every=3)
    if getattr(strategy, "max_staleness", None) != 3:  # otherwise a hook doesn't determine the update of a gradient
        module, _ = train(strategy, devices, module=Scheduled(by_hand=True), batch=12 // devices)
        assert module.recorded == expected(by_hand=True)


@pytest.mark.filterwarnings("ignore:.*delays act like additional momentum.*")
@pytest.mark.parametrize(
    "strategy",
    params(
        [AsyncSGD(max_staleness=1, servers=2, shard_by="element"), ParameterServer(mode="bounded", apply="arrival")],
        [AsyncSGD(), AsyncSGD(max_staleness=0), AsyncSGD(overlap="forward")],
    ),
)
def test_updates_per_gradient_use_the_hyperparameters_of_their_global_batch(strategy: Any, tmp_path: Path) -> None:
    saver = SavesAtEnd(tmp_path / "end.ckpt")
    module, trainer = train(strategy, 3, module=Scheduled(), batch=4, callbacks=[saver], max_epochs=1)
    assert trainer.global_step == 11
    batches = expected()
    assert module.recorded == [batch for batch in batches[:4] for _ in range(3)][:11]
    again, _ = train(strategy, 3, module=Scheduled(), batch=4, ckpt=tmp_path / "end.ckpt")
    halved = [[(rate / 2, momentum) for rate, momentum in groups] for groups in again.recorded]
    assert len(halved) == 22
    # By the end of the epoch.
    assert halved[10:12] == [halved[9], [(rate / 2, momentum) for rate, momentum in halved[9]]]
    # A single process halves the rates of its fifth batch, in the second epoch.
    assert halved[12:15] == [batches[4]] * 3


def test_updates_with_backup_workers_use_the_hyperparameters_of_their_global_batch() -> None:
    module, trainer = train(ParameterServer(backup_workers=1), 3, module=Scheduled(), batch=6)
    assert trainer.global_step == 8  # two gradients each
    assert module.recorded == expected()
