"""A resumed run goes on exactly, says what differs, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


class Optimized(TinyModule):
    """Has the optimizer and the schedule that it is given; each parameter has another weight decay."""

    def __init__(
        self, make: type[torch.optim.Optimizer] = SGD, order: str = "weight bias more", schedule: str = ""
    ) -> None:  # fmt: skip
        super().__init__()
        self.make, self.order, self.schedule = make, order, schedule
        self.more = nn.Parameter(torch.ones(()))

    def configure_optimizers(self) -> Any:
        decays = {"weight": (self.layer.weight, 0.5), "bias": (self.layer.bias, 0.0), "more": (self.more, 0.1)}
        groups: list[dict[str, Any]] = []
        for names in self.order.split():
            chosen = [decays[name] for name in names.split("+")]
            groups.append({"params": [parameter for parameter, _ in chosen], "weight_decay": chosen[0][1]})
        optimizer: Any = self.make(groups, lr=0.1)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer if not self.schedule else ([optimizer], [{"scheduler": steps, "interval": self.schedule}])


def resumed(folder: Path, first: fx.Module, second: fx.Module) -> fx.Trainer:
    trainer = fx.Trainer(max_steps=2, **QUIET)
    trainer.fit(first, tiny_loader())
    trainer.save_checkpoint(folder / "two.ckpt")
    again = fx.Trainer(max_steps=3, **QUIET)
    again.fit(second, tiny_loader(), ckpt_path=folder / "two.ckpt")
    return again


def test_parameter_groups_in_another_order_keep_their_options(own_folder: Path) -> None:
    trainer = resumed(own_folder, Optimized(), Optimized(order="bias weight more"))
    assert [group["weight_decay"] for group in trainer.optimizers[0].param_groups] == [0.0, 0.5, 0.1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Optimized(Adam), Optimized(AdamW), "checkpoint is Adam, and the module's is AdamW"),
        (Optimized(), Optimized(order="weight+bias more"), "other parameter groups"),
        (Optimized(order="weight+bias more"), Optimized(order="weight bias+more"), "other parameter groups"),
        (Optimized(schedule="step"), Optimized(schedule="epoch"), "StepLR by step; the module's are: StepLR by epoch"),
        (Optimized(schedule="step"), Optimized(), "StepLR by step; the module's are: none"),
    ],
    ids=["class", "fewer groups", "another division", "interval", "no schedule"],
)  # fmt: skip
def test_an_optimizer_whose_state_would_mean_something_else_is_refused(
    own_folder: Path, first: fx.Module, second: fx.Module, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        resumed(own_folder, first, second)
    assert "load_from_checkpoint" in str(raised.value)
