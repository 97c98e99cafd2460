from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.callbacks import BackboneFinetuning, BaseFinetuning
from fabricx.testing import TinyModule, tiny_loader


class Tuned(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.rates: list[list[float]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.backbone(inputs))
        return output

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)]

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers()
        self.rates.append([group["lr"] for group in optimizer.param_groups])  # type: ignore[union-attr]


def test_the_backbone_is_frozen_and_then_trained_with_a_rising_rate(quiet: dict[str, Any]) -> None:
    module = Tuned()
    before = module.backbone[0].weight.clone()
    callback = BackboneFinetuning(2, backbone_initial_ratio_lr=0.25, train_bn=False)
    trainer = fx.Trainer(max_epochs=2, callbacks=callback, **quiet)
    trainer.fit(module, tiny_loader())
    assert torch.equal(before, module.backbone[0].weight)
    module = Tuned()
    callback = BackboneFinetuning(2, backbone_initial_ratio_lr=0.25)
    trainer = fx.Trainer(max_epochs=6, gradient_clip_val=0.01, callbacks=callback, **quiet)  # the rate becomes large
    trainer.fit(module, tiny_loader())
    assert [rates[1:] for rates in module.rates[:3]] == [[], [], [pytest.approx(0.025)]]
    assert not torch.equal(before, module.backbone[0].weight)


@pytest.mark.parametrize("epoch", [-1, 1.5])
def test_an_epoch_that_never_begins_is_refused(epoch: Any) -> None:
    with pytest.raises(ValueError, match="a whole number"):
        BackboneFinetuning(epoch)


def test_a_second_fit_unfreezes_the_backbone_in_its_first_epoch(quiet: dict[str, Any]) -> None:
    module = Tuned()
    callback = BackboneFinetuning(1, backbone_initial_ratio_lr=0.25)
    trainer = fx.Trainer(max_epochs=3, gradient_clip_val=0.01, callbacks=callback, **quiet)
    trainer.fit(module, tiny_loader())
    trainer.max_epochs = 5
    trainer.fit(module, tiny_loader())
    assert [rates[0] for rates in module.rates] == [0.1] * 5
    assert [rates[1:] for rates in module.rates[2:]] == [[0.05], [0.025], [0.05]]


class ListSchedule:
    """A scheduler object with a list attribute per parameter group, which torch saves."""

    def __call__(self, epoch: int) -> float:
        return 1.0


@pytest.mark.parametrize("train_bn", [True, False])
def test_a_run_resumes_with_the_added_parameter_groups(
    train_bn: bool, quiet: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    class Scheduled(Tuned):
        def configure_optimizers(self) -> Any:
            [optimizer], _ = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, ListSchedule())]

    def run(ckpt: Path | None = None, **options: Any) -> tuple[Tuned, fx.Trainer]:
        torch.manual_seed(0)
        module = Scheduled()
        callback = BackboneFinetuning(1, backbone_initial_ratio_lr=0.25, train_bn=train_bn)
        trainer = fx.Trainer(callbacks=callback, **quiet, **options)
        trainer.fit(module, tiny_loader(), ckpt_path=ckpt)
        return module, trainer

    whole, _ = run(max_epochs=3)
    _, trainer = run(max_steps=6)  # within the epoch in which the backbone was unfrozen
    rest, _ = run(trainer.save_checkpoint(tmp_path / "middle.ckpt"), max_epochs=3)
    for name, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], value), name


def test_tools() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1)))
    BaseFinetuning.freeze(net, train_bn=True)
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True, False, False]
    BaseFinetuning.freeze([net], train_bn=False)
    assert not net[1].track_running_stats
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    BaseFinetuning.unfreeze_and_add_param_group(net[2], optimizer)
    with pytest.warns(UserWarning, match="SGD has all parameters that are unfrozen already"):
        BaseFinetuning.unfreeze_and_add_param_group(net[2], optimizer, lr=0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    BaseFinetuning.unfreeze_and_add_param_group(net, optimizer, lr=0.5, train_bn=False)
    assert len(optimizer.param_groups[2]["params"]) == 2
    assert all(p.requires_grad for p in net.parameters())


def test_optimizers_and_schedules_that_cannot_have_new_groups_are_refused(quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="TinyModule has no `backbone`"):
        fx.Trainer(max_epochs=1, callbacks=BackboneFinetuning(1), **quiet).fit(TinyModule(), tiny_loader())

    class Whole(Tuned):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"SGD has backbone\.0\.weight of the frozen backbone already"):
        fx.Trainer(max_epochs=1, callbacks=BackboneFinetuning(1), **quiet).fit(Whole(), tiny_loader())
    trainer = fx.Trainer(max_epochs=1, strategy="local_sgd", callbacks=BackboneFinetuning(1), **quiet)
    with pytest.raises(ValueError, match="LocalSGD exchanges those at its start only"):
        trainer.fit(Tuned(), tiny_loader())


def test_nested_schedules_have_the_added_parameter_groups(quiet: dict[str, Any]) -> None:
    class Scheduled(Tuned):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)
            parts: Any = [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
            ]
            return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])]

    class Unfreezes(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.backbone, train_bn=False)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 2:
                self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.01)

    class Cycles(Tuned):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)]

    class Rises(Tuned):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, step_size_up=4)]

    rises = Rises()
    fx.Trainer(max_epochs=5, callbacks=Unfreezes(), **quiet).fit(rises, tiny_loader())
    assert [rates[1] for rates in rises.rates[2:]] == pytest.approx([0.01, 0.0175, 0.02])
    module = Scheduled()
    fx.Trainer(max_epochs=5, callbacks=Unfreezes(), **quiet).fit(module, tiny_loader())
    assert [rates[1] for rates in module.rates[2:]] == pytest.approx([0.01, 0.005, 0.0025])
    cycles = Cycles()
    with pytest.warns(RuntimeWarning, match="OneCycleLR makes a step each epoch"):
        fx.Trainer(max_epochs=5, callbacks=Unfreezes(), **quiet).fit(cycles, tiny_loader())
    assert [rates[1] / rates[0] for rates in cycles.rates[3:]] == pytest.approx(
        [cycles.rates[2][1] / cycles.rates[2][0]] * 2
    )
