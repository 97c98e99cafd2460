"""None in place of a batch, for example from a `collate_fn` that drops all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.testing import TinyModule, tiny_data


class Follows(fx.Callback):
    def __init__(self) -> None:
        self.ended: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append(batch is None)


class Automatic(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.validated: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch is not None
        self.trained.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch is None)


class Manual(Automatic):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def dropping(samples: list[Any]) -> Any:
    """Return no batch where sample 4 is in it."""
    if any(torch.equal(inputs, tiny_data(16)[4][0]) for inputs, _ in samples):
        return None
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_the_training_step_is_not_called_and_the_validation_step_is(
    kind: type[Automatic], quiet: dict[str, Any]
) -> None:
    loader = DataLoader(tiny_data(16), 4, collate_fn=dropping)
    module, follows, trainer = kind(), Follows(), fx.Trainer(max_epochs=1, **quiet)
    trainer.callbacks.append(follows)
    with pytest.warns(UserWarning, match="DataLoader yielded None instead of a batch") as warned:
        trainer.fit(module, loader, loader)
    assert sum("None instead of a batch" in str(warning.message) for warning in warned) == 1
    assert module.trained == [0, 2, 3]
    assert follows.ended == module.validated[2:] == [False, True, False, False]  # after the sanity check
    assert trainer.global_step == 3
