"""Steps of a module with manual optimization."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.testing import TinyModule, tiny_loader


def test_a_manual_step_in_bf16_uses_the_weights_of_its_own_update(quiet: dict[str, Any]) -> None:
    """Autocast caches 16-bit copies of weights: the second forward of a step must not use the copies of the first."""

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


def test_hooks_before_a_step_read_the_gradient_of_its_closure(quiet: dict[str, Any]) -> None:
    calls: list[Any] = []

    class Closures(TinyModule):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2, line_search_fn="strong_wolfe")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.layer.weight.grad is not None
            calls.append(float(self.layer.weight.grad.norm()))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                self.optimizers().zero_grad()
                loss = super(Closures, self).training_step(batch, batch_idx)
                self.manual_backward(loss)
                calls.append(f"{loss.item():.6f}")
                return loss

            first = f"{super().training_step(batch, batch_idx).item():.6f}"
            calls.append(["returns", first, f"{self.optimizers().step(closure).item():.6f}"])

    trainer = fx.Trainer(max_epochs=1, limit_train_batches=1, **quiet)
    trainer.fit(Closures(), tiny_loader())
    *computed, (_, first, returned) = calls
    assert first == returned == computed[0]  # the loss of the first call of the closure
    assert [type(call) for call in computed] == [str, float] * (len(computed) // 2)  # each gradient is passed once
    assert len({call for call in computed if isinstance(call, float)}) > 1
    assert trainer.global_step == 1


def test_an_output_that_is_no_loss_and_no_dict_is_refused(quiet: dict[str, Any]) -> None:
    class Number(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 5

    with pytest.raises(RuntimeError, match="training_step returned int: in manual optimization return a tensor"):
        fx.Trainer(max_steps=1, **quiet).fit(Number(), tiny_loader())


def test_a_clipping_limit_of_zero_clips_nothing(quiet: dict[str, Any]) -> None:
    class Manual(TinyModule):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    trainer = fx.Trainer(max_epochs=1, gradient_clip_val=0, **quiet)
    trainer.fit(Manual(), tiny_loader(8, 4))
    assert trainer.global_step == 2
