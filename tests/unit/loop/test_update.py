"""A weight update: clipping, optimizer steps, schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.testing import TinyModule, tiny_loader
from tests.unit.trainer.counting import fitted


def test_two_optimizers_count_one_weight_update(quiet: dict[str, Any]) -> None:
    class Two(TinyModule):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.Adam(self.parameters())]

    class Manual(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self(batch[0]).mean())
                optimizer.step()

        configure_optimizers = Two.configure_optimizers

    for module in (Two(), Manual()):
        seen: list[int] = []
        original = module.training_step
        module.training_step = lambda b, i, seen=seen, original=original: (seen.append(i), original(b, i))[1]
        trainer = fx.Trainer(max_steps=6, **quiet)
        trainer.fit(module, tiny_loader(64, 4))
        assert (trainer.global_step, len(seen)) == (6, 6)


def test_clipping_limits_the_norm_and_the_values(quiet: dict[str, Any]) -> None:
    for algorithm in ("norm", "value"):
        before = TinyModule()
        after = TinyModule(lr=1.0)
        options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
        fx.Trainer(max_steps=1, **options, **quiet).fit(after, tiny_loader())
        moved = torch.cat(
            [(a - b).detach().flatten() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
        )
        size = moved.norm() if algorithm == "norm" else moved.abs().max()
        assert float(size) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_equal_to_torchs(algorithm: str) -> None:
    class RecordsGradients(Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if module.layer.weight.grad is not None:
                self.clipped = [p.grad.clone() for p in module.parameters()]

    sees = RecordsGradients()
    fitted(gradient_clip_val=0.05, gradient_clip_algorithm=algorithm, max_steps=2, callbacks=[sees])
    plain = TinyModule()
    batch = next(iter(tiny_loader()))
    nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
    if algorithm == "norm":
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    else:
        nn.utils.clip_grad_value_(plain.parameters(), 0.05)
    for actual, wanted in zip(sees.clipped, plain.parameters(), strict=True):
        assert wanted.grad is not None
        assert torch.equal(actual, wanted.grad)


@pytest.mark.parametrize("custom", [False, True], ids=["by the option", "by the module"])
def test_each_gradient_that_a_closure_computes_is_clipped(custom: bool, quiet: dict[str, Any]) -> None:
    norms: list[float] = []

    def stepped(optimizer: torch.optim.Optimizer, closure: Any) -> None:
        def noted() -> Any:
            loss = closure()
            norms.append(float(torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]).norm()))
            return loss

        torch.optim.LBFGS.step(optimizer, noted)  # type: ignore[arg-type]

    class Quasi(torch.optim.LBFGS):
        def step(self, closure: Any) -> Any:
            stepped(self, closure)

    class ClipsItself(TinyModule):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any):
            assert gradient_clip_val == 0.01
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    module, batch = (ClipsItself if custom else TinyModule)(), next(iter(tiny_loader()))
    plain = TinyModule()
    module.configure_optimizers = lambda: Quasi(module.parameters(), max_iter=4)  # type: ignore
    fx.Trainer(max_steps=1, gradient_clip_val=0.01, **quiet).fit(module, [batch])
    assert len(norms) > 2
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)

    by_hand = torch.optim.LBFGS(plain.parameters(), max_iter=4)

    def closure() -> Any:
        by_hand.zero_grad()
        loss = nn.functional.mse_loss(plain(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        return loss

    by_hand.step(closure)
    for actual, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


class _StepsItself(TinyModule):
    """Steps its optimizer in `training_step`, although `automatic_optimization` is True."""

    def __init__(self, *, returns: bool = False) -> None:
        super().__init__()
        self.returns = returns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.backward(retain_graph=self.returns)
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log("own", loss)
        return loss if self.returns else None


class _Unnamed(_StepsItself):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_steps_called_by_training_step_are_weight_updates(clip: float | None, quiet: dict[str, Any], tmp_path):
    options: dict[str, Any] = {**quiet, "max_epochs": 2, "gradient_clip_val": clip}
    saver = fx.callbacks.ModelCheckpoint(tmp_path, monitor="own")
    module = _StepsItself()
    trainer = fx.Trainer(**{**options, "enable_checkpointing": True, "callbacks": [saver]})
    trainer.fit(module, tiny_loader(8, 4))  # warnings are errors
    assert (trainer.global_step, "own" in trainer.callback_metrics) == (4, True)
    assert saver.best_model_path
    wanted: TinyModule = _Unnamed() if clip is None else TinyModule()  # clipping belongs to automatic optimization
    fx.Trainer(**options).fit(wanted, tiny_loader(8, 4))
    for actual, parameter in zip(module.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(actual, parameter, rtol=0, atol=0)  # the same operations in the same order


def test_a_loss_that_is_returned_after_a_step_of_training_step_is_a_warning(quiet: dict[str, Any]):
    trainer = fx.Trainer(max_epochs=1, **quiet)
    with pytest.warns(UserWarning, match="makes a second step"):
        trainer.fit(_StepsItself(returns=True), tiny_loader(8, 4))
    assert trainer.global_step == 4
