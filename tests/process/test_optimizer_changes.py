"""Hooks and methods that change optimizers, or create and copy parameters, in training: supported or refused."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer, PipelineMesh, Reproducible, TensorMesh
from fabricx.testing import QUIET
from fabricx.testing.modules import SavesAtStep
from tests.soak import covering

pytestmark = pytest.mark.usefixtures("warm_ranks")

GLOBAL_BATCH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return output


class Net(fx.Module):
    """Two blocks and a head in float64; subclasses change the optimizer or parameters during training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.head(self.body(batch[0])) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.8, weight_decay=0.01)

    @torch.no_grad()
    def normalise(self) -> None:
        """Scale the rows of matrices, of which ranks may hold a part."""
        for block in self.body:
            for weight in (block.up.weight, block.down.weight):
                weight.div_(weight.norm(dim=1, keepdim=True))


def train(
    kind: type[Net], strategy: Any = "auto", devices: int = 1, save: Path | None = None, resume: Path | None = None
) -> dict[str, Tensor]:  # fmt: skip
    """Return the weights after two epochs of three global batches and a smaller batch."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(14, columns, generator=generator, dtype=torch.float64) for columns in (4, 2)]
    shares = 1 if isinstance(strategy, (PipelineMesh, TensorMesh)) else devices
    module = kind()
    callbacks = [] if save is None else [SavesAtStep(save, 5)]
    trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=2, callbacks=callbacks, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(*data), GLOBAL_BATCH // shares), ckpt_path=resume)
    return module.state_dict()


# -- supported changes --------------------------------------------------------------------------------------------


class StepHook(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.normalise())
        return optimizer


class StepHookInOwnStep(StepHook):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        with torch.no_grad():
            self.body[0].down.weight.mul_(0.9)


class GradientHook(Net):
    def configure_optimizers(self) -> Any:
        def scale(optimizer: Any, *_: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.div_(1.0 + parameter.grad.norm())

        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(scale)
        return optimizer


class ReplacedStep(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        step = optimizer.step
        optimizer.step = lambda closure=None: (step(closure), self.normalise())[0]
        return optimizer


class OfRows(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.div_(parameter.norm(dim=-1, keepdim=True))


class StepOfRows(Net):
    def configure_optimizers(self) -> Any:
        return OfRows(self.parameters(), lr=0.05)


class CopiesTeacher(Net):
    """In each epoch, learns from a copy of the blocks at the end of the previous epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher: list[Any] = [None]

    def on_train_epoch_start(self) -> None:
        self.teacher[0] = copy.deepcopy(self.body).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.teacher[0] is None:  # before training
            return loss
        return loss + (self.body(batch[0]) - self.teacher[0](0.9 * batch[0])).square().mean()


class MovingAverage(Net):
    """Has a frozen teacher that is a moving average of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + (self.body(batch[0]) - self.teacher(0.9 * batch[0])).square().mean()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        for average, weight in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            average.data.mul_(0.9).add_(weight.data, alpha=0.1)  # as in DINO


class MovingAverageOutside(MovingAverage):
    """The teacher is not in the optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.05)


class MovingAverageInStep(MovingAverageOutside):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        next(self.teacher.parameters()).data.mul_(0.9)
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)


class Prunes(Net):
    """Prunes a layer further in each epoch, and ends the pruning of another layer."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.body[0].down, "weight", 0.2)

    def on_train_epoch_start(self) -> None:
        prune.l1_unstructured(self.head, "weight", 0.3)
        if self.current_epoch:
            prune.remove(self.body[0].down, "weight")


@pytest.mark.parametrize(
    ("kind", "strategies"),
    [
        (Prunes, [DDP(), ParameterServer(), Reproducible()]),
        (MovingAverage, [DDP(), FSDP(), LocalSGD(every=1)]),
        (StepHook, [DDP(), FSDP(), TensorMesh(), PipelineMesh()]),
        (StepHookInOwnStep, [TensorMesh()]),
        (GradientHook, [DDP(), FSDP()]),
        (StepOfRows, [DDP(), FSDP()]),
        (CopiesTeacher, [DDP(), TensorMesh()]),
    ],
)
def test_supported_changes_of_optimizers_train_the_weights_of_a_single_process(
    kind: type[Net], strategies: list[Any]
) -> None:
    expected = train(kind)
    for strategy in strategies:
        for name, weight in train(kind, strategy, 2).items():
            assert torch.allclose(weight, expected[name], rtol=0, atol=1e-9), (strategy, name)  # float64


def test_a_run_of_local_steps_resumes_with_the_mean_of_the_teachers(tmp_path: Path) -> None:
    saved = train(MovingAverage, LocalSGD(every=3), 2, save=tmp_path / "middle.ckpt")
    resumed = train(MovingAverage, LocalSGD(every=3), 2, resume=tmp_path / "middle.ckpt")
    for name, weight in resumed.items():
        assert torch.equal(weight, saved[name]), name


class ResetsMomentum(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].state.clear()


class HalvesRate(Net):
    def on_train_epoch_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5


class AddsToWeights(Net):
    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        for parameter in self.parameters():
            parameter.add_(0.1)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    covering(product([ResetsMomentum, HalvesRate, AddsToWeights], [DDP(), FSDP(), TensorMesh(), PipelineMesh()])),
)
def test_changes_of_a_repeated_epoch_start_are_undone(kind: type[Net], strategy: Any, tmp_path: Path) -> None:
    saved = train(kind, strategy, 2, save=tmp_path / "middle.ckpt")
    resumed = train(kind, strategy, 2, resume=tmp_path / "middle.ckpt")
    for name, weight in resumed.items():
        assert torch.equal(weight, saved[name]), name


@pytest.mark.parametrize("kind", [HalvesRate, Net])
def test_undone_changes_of_a_repeated_epoch_start_are_printed(
    kind: type[Net], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(kind, save=tmp_path / "middle.ckpt")
    assert "called again" not in "".join(capfd.readouterr())
    train(kind, resume=tmp_path / "middle.ckpt")
    text = "called again in epoch 1, after 1 batches, and its changes of options of SGD were undone"
    assert (text in "".join(capfd.readouterr())) is (kind is HalvesRate)


# -- refused changes ----------------------------------------------------------------------------------------------


class ClearsState(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].state.clear()


class LoadsState(Net):
    def on_train_epoch_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        optimizer.load_state_dict(optimizer.state_dict())


class KeepsGradients(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not batch_idx % 2:
            optimizer.zero_grad()


class ZeroGradients(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class SchedulerStep(Net):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.normalise()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class NewParameter(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.head.weight = nn.Parameter(0.5 * self.head.weight.detach())
            self.trainer.optimizers[0].param_groups[0]["params"] = list(self.parameters())


class NewTensor(Net):
    def on_fit_start(self) -> None:
        self.scales = [torch.ones(1, requires_grad=True)]
        self.trainer.optimizers[0].add_param_group({"params": self.scales})


class NewLayer(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.body.append(Block().double())
            self.trainer.optimizers[0].add_param_group({"params": list(self.body[-1].parameters())})


class MakesLayer(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.Linear(4, 4)
            nn.init.eye_(self.extra.weight)
            nn.init.zeros_(self.extra.bias)
        return super().training_step(batch, batch_idx)


class DropsLayer(Net):
    def on_train_epoch_start(self) -> None:
        self.body[1] = nn.Identity()


def test_layers_that_are_added_or_removed_in_workers_are_an_error_at_the_end() -> None:
    with pytest.raises(ValueError, match=r"hooks or steps have added extra\.bias, extra\.weight in the workers"):
        train(MakesLayer, DDP(), 2)
    with pytest.raises(ValueError, match=r"have removed body\.1\.down\.bias, .* in the workers\. Create and replace"):
        train(DropsLayer, DDP(), 2)


class ReplacesOptimizers(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class AddsNoise(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(torch.ones(parameter.shape, dtype=torch.float64))  # type: ignore[union-attr]


class Freezes(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.body[0].requires_grad_(not batch_idx % 2)


class ComputesAgain(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        optimizer.step(closure=closure)
        closure()


@pytest.mark.parametrize(
    ("strategy", "kinds", "message"),
    [
        (ParameterServer(optimizer="server"), [ClearsState, LoadsState], "uses the state of an optimizer, such as its"),
        (ParameterServer(servers=0, optimizer="server"), [ClearsState], "uses the state of an optimizer, such as its"),
        (ParameterServer(), [KeepsGradients], "optimizer_zero_grad keeps gradients, which are sums over the ranks"),
        (ParameterServer(optimizer="server"), [KeepsGradients], "optimizer_zero_grad keeps gradients"),
        (ParameterServer(optimizer="server"), [ZeroGradients], "call optimizer.zero_grad.. without set_to_none=False"),
        (ParameterServer(optimizer="server"), [SchedulerStep], "lr_scheduler_step changes weights, but servers hold"),
        (
            AsyncSGD(every=2, outer="average"), [MovingAverageOutside, MovingAverageInStep],
            "changes .*a frozen parameter.* that servers don't hold",
        ),
        (LocalSGD(every=1), [NewParameter, NewLayer], "was created or replaced after set-up, and LocalSGD exchanges"),
        (FSDP(), [NewLayer], "was created or replaced after set-up, and FSDP exchanges gradients of the parameters at"),
        (DDP(), [ReplacesOptimizers], "trainer.optimizers can't be replaced, since the strategy, schedules and check"),
        (FSDP(), [AddsNoise], "a hook computes with a gradient that fsdp has sharded in a way .*distribute_tensor"),
        (DDP(), [NewParameter], r"head\.weight was created or replaced after set-up, and DDP exchanges gradients of"),
        (DDP(), [NewTensor], r"an optimizer trains self\.scales, but the module does not have it in self\.parameters"),
        (Reproducible(), [Freezes], r"requires_grad of body\.0\.up\.weight was changed between the parts of a global"),
        (Reproducible(), [ComputesAgain], "computes the loss again for a step of SGD, but deterministic='elastic'"),
        (TensorMesh(), [GradientHook], "this gradient is divided over ranks, and a rank has only its part"),
        (TensorMesh(), [ReplacedStep], "the step of SGD is replaced by another function, and tensor=2 divides param"),
        (TensorMesh(), [StepOfRows], "OfRows computes an update from a whole matrix or from several parameters, and"),
    ],
)  # fmt: skip
def test_changes_that_would_train_other_weights_on_several_ranks_are_refused(
    strategy: Any, kinds: list[type[Net]], message: str
) -> None:
    for kind in kinds:
        with pytest.raises(WorkerFailed, match=message):
            train(kind, copy.copy(strategy), 2)


@pytest.mark.parametrize("strategy", [ParameterServer(), LocalSGD(every=1), DDP(), FSDP()])
def test_zero_gradients_continue_momentum_if_workers_step(strategy: Any) -> None:
    expected = train(ZeroGradients)
    for name, weight in train(ZeroGradients, strategy, 2).items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-9), name  # float64


class HiddenHeads(Net):
    """A part of the trained layers is in a list, and so not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2, dtype=torch.float64)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        outputs = self.head(self.body(batch[0]))
        return torch.stack([head(outputs).square().mean() for head in self.heads]).mean()

    def configure_optimizers(self) -> Any:
        hidden = [p for head in self.heads for p in head.parameters()]
        return torch.optim.SGD([*self.parameters(), *hidden], lr=0.05)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "parameter_server", "local_sgd", "reproducible"])
def test_trained_tensors_outside_of_the_module_are_an_error_on_several_ranks(strategy: str) -> None:
    with pytest.raises(WorkerFailed, match=r"self\.heads = nn\.ModuleList\(\.\.\.\)\. .* not averaged over the ranks"):
        train(HiddenHeads, strategy, 2)


class Masters(torch.optim.SGD):
    """Steps copies of the weights, and writes them back."""

    def __init__(self, weights: Any, **options: Any) -> None:
        self.weights = list(weights)
        super().__init__([weight.detach().clone().requires_grad_() for weight in self.weights], **options)

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        copies = self.param_groups[0]["params"]
        for copied, weight in zip(copies, self.weights, strict=True):
            copied.grad = weight.grad
        super().step()
        with torch.no_grad():
            for copied, weight in zip(copies, self.weights, strict=True):
                weight.copy_(copied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None


class MasterCopies(Net):
    def configure_optimizers(self) -> Any:
        return Masters(self.parameters(), lr=0.05, momentum=0.8, weight_decay=0.01)


def test_an_optimizer_with_copies_of_the_weights_trains_with_a_warning() -> None:
    expected, trained = train(Net), train(MasterCopies, "ddp", 2)
    assert all(torch.allclose(trained[name], value, rtol=0.0, atol=1e-12) for name, value in expected.items())
