"""Each update uses its own hyperparameters, whoever brings its gradient, and however old that is."""

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


class Notes(torch.optim.SGD):
    """Notes with what each update was made, in its own state: on a server it is the server that notes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: list[Any] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.noted.append([(group["lr"], group["momentum"]) for group in self.param_groups])
        super().step()

    def state_dict(self) -> Any:
        return {**super().state_dict(), "noted": self.noted}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.noted = state_dict["noted"]


def rate(batch: int) -> float:
    return 1.0 / (1 + batch)


class Scheduled(Recorded):
    """Has two groups with a rate and a momentum of their own for each global batch, and another rate in each epoch."""

    def __init__(self, every: int = 1, by_hand: bool = False) -> None:
        super().__init__()
        self.every, self.by_hand = every, by_hand
        self.noted: list[Any] = []

    def configure_optimizers(self) -> Any:
        groups: Any = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 1e-4}]
        optimizer = Notes(groups, lr=1e-3, momentum=0.5)
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
        self.noted = state["optimizers"][0]["noted"]


def wanted(**options: Any) -> list[Any]:
    """Return the hyperparameters of each global batch, from one process."""
    module, _ = train(Single(), 1, module=Scheduled(**options), batch=12)
    assert len(module.noted) == 8
    return list(module.noted)


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
def test_an_update_of_a_global_batch_has_its_hyperparameters(strategy: Any, devices: int) -> None:
    found, trainer = train(strategy, devices, module=Scheduled(), batch=12 // devices)
    assert found.noted == wanted()
    assert trainer.global_step == 8
    found, _ = train(strategy, devices, module=Scheduled(every=3), batch=12 // devices)
    assert found.noted == wanted(every=3)
    if getattr(strategy, "max_staleness", None) != 3:  # then a hook doesn't know of which update a gradient will be
        found, _ = train(strategy, devices, module=Scheduled(by_hand=True), batch=12 // devices)
        assert found.noted == wanted(by_hand=True)


@pytest.mark.filterwarnings("ignore:.*delays act like additional momentum.*")
@pytest.mark.parametrize(
    "strategy",
    params(
        [AsyncSGD(max_staleness=1, servers=2, shard_by="element"), ParameterServer(mode="bounded", apply="arrival")],
        [AsyncSGD(), AsyncSGD(max_staleness=0), AsyncSGD(overlap="forward")],
    ),
)
def test_updates_as_gradients_arrive_have_those_of_their_global_batch(strategy: Any, tmp_path: Path) -> None:
    saver = SavesAtEnd(tmp_path / "end.ckpt")
    found, trainer = train(strategy, 3, module=Scheduled(), batch=4, callbacks=[saver], max_epochs=1)
    assert trainer.global_step == 11
    batches = wanted()
    assert found.noted == [batch for batch in batches[:4] for _ in range(3)][:11]
    again, _ = train(strategy, 3, module=Scheduled(), batch=4, ckpt=tmp_path / "end.ckpt")
    halved = [[(rate / 2, momentum) for rate, momentum in groups] for groups in again.noted]
    assert len(halved) == 22
    assert halved[10:12] == [halved[9], [(rate / 2, momentum) for rate, momentum in halved[9]]]  # by the epoch's end
    assert halved[12:15] == [batches[4]] * 3  # one process halves the rates of its fifth batch, of the second epoch


def test_backup_workers_make_updates_with_their_hyperparameters() -> None:
    found, trainer = train(ParameterServer(backup_workers=1), 3, module=Scheduled(), batch=6)
    assert trainer.global_step == 8  # of two gradients each
    assert found.noted == wanted()
