"""Steps of a module with manual optimization."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import torch
from torch import nn

import fabricx as fx
from fabricx.testing import TinyModule, tiny_loader


def test_a_manual_step_in_bf16_computes_with_the_weights_of_its_own_update(quiet: dict[str, Any]) -> None:
    """Autocast keeps 16-bit copies of weights: the second forward of a step must not see those of the first."""

    class Twice(TinyModule):
        automatic_optimization = False
        losses: ClassVar[list[float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for _ in range(2):
                self.optimizers().zero_grad()
                loss = super().training_step(batch, batch_idx)
                self.losses.append(loss.item())
                self.manual_backward(loss)
                self.optimizers().step()

    module, plain = Twice(lr=0.1), TinyModule(lr=0.1)
    fx.Trainer(max_epochs=1, precision="bf16-mixed", limit_train_batches=2, **quiet).fit(module, tiny_loader())
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for batch in itertools.islice(tiny_loader(), 2):
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(plain(batch[0]), batch[1])
            wanted.append(loss.item())
            loss.backward()
            optimizer.step()
    assert module.losses == wanted
    assert len(set(wanted)) == 4
