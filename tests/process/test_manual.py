"""A module with manual optimization trains as in a single process on the global batch, or is refused."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.callbacks import GradientAccumulation
from fabricx.distributed import world as worlds
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, LocalSGD, ParameterServer, Reproducible
from fabricx.testing import QUIET, run_ranks
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

GLOBAL_BATCH = 12


def mse(outputs: Tensor, targets: Tensor | float) -> Tensor:
    return (outputs - targets).pow(2).mean()


class Manual(fx.Module):
    """Two networks in float64, with large steps; successive batches are trained by different methods.

    Args:
        methods: names of the methods that train a batch, in order.
    """

    def __init__(self, *methods: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.methods = methods
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.critic = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.norms: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs

    def configure_optimizers(self) -> Any:
        options: dict[str, Any] = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.05}
        return [torch.optim.SGD(part.parameters(), **options) for part in (self.net, self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", mse(self.net(batch[0]), batch[1]).detach(), on_step=True, on_epoch=True)
        getattr(self, self.methods[batch_idx % len(self.methods)])(*self.optimizers(), batch[0], batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", mse(self.net(batch[0]), batch[1]))

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            # Outside of the step, before the first gathering of weights.
            self.net(torch.zeros(1, 6, dtype=torch.float64))

    def submodule(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        self.manual_backward(mse(self.net(x), y))
        first.step()

    def whole(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        loss = mse(self(x), y)
        self.net.zero_grad()  # between forward and backward
        self.manual_backward(loss)
        first.step()

    def adversarial(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        self.toggle_optimizer(first)
        self.manual_backward(self.critic(self.net(x)).mean())
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(mse(self.critic(self.net(x).detach()), 0.0) + mse(self.critic(y), 1.0))
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def one_forward_for_both(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        made = self.net(x)
        losses = self.critic(made).mean(), mse(self.critic(made.detach()), 0.0)
        for optimizer, loss in zip((first, second), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
        first.step()
        second.step()

    def begins_to_accumulate(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        self.manual_backward(mse(self.net(x), y) / 2)

    def ends_accumulation(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        self.manual_backward(mse(self.net(x), y) / 2)
        first.step()

    def closure(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        def computes() -> Tensor:
            first.zero_grad()
            loss = mse(self.net(x), y)
            self.manual_backward(loss)
            return loss

        first.step(computes)

    def clipped(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        for algorithm in ("norm", "value"):
            first.zero_grad()
            self.manual_backward(mse(self.net(x), y))
            self.clip_gradients(first, 0.05, algorithm)
            first.step()

    def clipped_by_torch(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        self.manual_backward(mse(self.net(x), y))
        norm: Any = nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        first.step()

    def several_backwards(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        outputs = self.net(x)
        self.manual_backward(mse(outputs, y), retain_graph=True)
        self.manual_backward(mse(outputs, 2.0 * y))
        self.manual_backward(mse(self.net(x), 0.5 * y))
        first.step()

    def penalised(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        penalty = sum(parameter.square().sum() for parameter in self.net.parameters())
        self.manual_backward(mse(self.net(x), y) + 0.05 * penalty)
        first.step()

    def nothing(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        first.step()

    def by_torch(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        mse(self.net(x), y).backward()
        first.step()

    def by_hand(self, first: Any, second: Any, x: Tensor, y: Tensor) -> None:
        parameters = list(self.net.parameters())
        gradients = torch.autograd.grad(mse(self.net(x), y), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        first.step()


ANYWHERE = (
    "submodule", "whole", "adversarial", "one_forward_for_both", "closure", "clipped", "clipped_by_torch",
    "several_backwards", "nothing", "adversarial", "begins_to_accumulate", "ends_accumulation",
)  # fmt: skip
LINEAR = ("submodule", "begins_to_accumulate", "ends_accumulation", "closure", "several_backwards")

STRATEGIES: dict[str, tuple[Callable[[], fx.Strategy], int, tuple[str, ...]]] = {
    "ddp": (DDP, 3, ("penalised", *ANYWHERE)),
    "fsdp": (FSDP, 2, ANYWHERE),
    "fsdp on 3 ranks": (FSDP, 3, ANYWHERE),
    "shared memory": (lambda: ParameterServer(servers=0), 3, ("penalised", *ANYWHERE)),
    "a server": (ParameterServer, 2, ("penalised", *ANYWHERE)),
    "2 servers": (lambda: ParameterServer(servers=2), 3, ("penalised", *ANYWHERE)),
    "local_sgd": (lambda: LocalSGD(every=1), 2, LINEAR),  # a nonlinear step would be a local step of each rank
}


def data(samples: int) -> TensorDataset:
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(strategy: Any, devices: int, methods: tuple[str, ...], **options: Any) -> tuple[Manual, fx.Trainer]:
    """Train an epoch with a single sample in the last global batch: all other ranks have no sample."""
    module = Manual(*methods)
    trainer = fx.Trainer(
        devices=devices,
        strategy=strategy,
        **{"max_epochs": 1, "log_every_n_steps": 1, "precision": "64-true", **QUIET, **options},
    )
    samples = GLOBAL_BATCH * (len(methods) - 1) + 1
    trainer.fit(module, DataLoader(data(samples), GLOBAL_BATCH // devices, shuffle=True), DataLoader(data(5), 2))
    return module, trainer


@functools.cache
def alone(methods: tuple[str, ...]) -> tuple[Manual, fx.Trainer]:
    return train("single", 1, methods)


def assert_same(module: fx.Module, expected: fx.Module) -> None:
    for (name, a), b in zip(module.named_parameters(), expected.parameters(), strict=True):
        # float64 sums in a different order.
        assert torch.allclose(a, b, rtol=0.0, atol=1e-10), (name, (a - b).abs().max())


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters.*")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_manual_optimization_on_several_ranks_trains_the_weights_of_a_single_process(strategy: str) -> None:
    make, devices, methods = STRATEGIES[strategy]
    expected, single = alone(methods)
    module, several = train(make(), devices, methods)
    assert_same(module, expected)
    assert several.global_step == single.global_step
    assert module.norms == pytest.approx(expected.norms)
    for name in ("loss_step", "loss_epoch", "val"):
        assert float(several.callback_metrics[name]) == pytest.approx(float(single.callback_metrics[name]), rel=1e-9)


def fit_in_ranks(cases: list[tuple[Any, str]]) -> list[str]:
    """Train with a method per strategy, successively; return the errors, "" without an error."""
    errors = []
    for strategy, method in cases:
        try:
            train(strategy, worlds.current().size, (method, method))  # type: ignore[union-attr]
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("")
    return errors


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters.*")
def test_gradients_that_were_not_reduced_are_an_error_on_all_ranks() -> None:
    cases = [
        (DDP(), "by_torch"), (DDP(), "by_hand"), (ParameterServer(servers=0), "by_torch"),
        (FSDP(), "by_torch"), (FSDP(), "penalised"), (DDP(), "submodule"),
    ]  # fmt: skip
    for errors in run_ranks(fit_in_ranks, 2, cases):
        assert all("self.manual_backward" in error for error in errors[:4]), errors
        assert "weight_decay" in errors[4]
        assert errors[5] == ""


class OwnsParameter(Manual):
    """Has a parameter outside of its submodules."""

    def __init__(self) -> None:
        super().__init__("submodule")
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))


class HasBatchWeight(Manual):
    def batch_weight(self, batch: Any) -> float:
        return float(len(batch[0]))


class UsesLBFGS(Manual):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters())


def set_up_in_ranks(cases: list[tuple[Any, fx.Module, dict[str, Any]]]) -> list[str]:
    errors = []
    for strategy, module, options in cases:
        trainer = fx.Trainer(
            devices=2, strategy=strategy, **{"max_epochs": 1, "precision": "64-true", **QUIET, **options}
        )
        try:
            trainer.fit(module, DataLoader(data(24), 6))
        except Exception as error:
            errors.append(f"{error} at {trainer.global_step}")
        else:
            errors.append("")
    return errors


def test_unsupported_options_with_manual_optimization_are_refused_at_set_up() -> None:
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        (DDP(), Manual("submodule"), {"accumulate_grad_batches": 2}, "optimizer.zero_grad() after these"),
        (DDP(), Manual("submodule"), {"gradient_clip_val": 0.1}, "self.clip_gradients(optimizer, limit, algorithm)"),
        (
            DDP(),
            Manual("submodule"),
            {"callbacks": [GradientAccumulation({0: 2})]},
            "divide the loss by the number of batches",
        ),
        (DDP(), HasBatchWeight("submodule"), {}, "self.all_gather"),
        (FSDP(), OwnsParameter(), {}, "scale belongs to the manually optimised module"),
        (FSDP(), UsesLBFGS("submodule"), {}, "use strategy=ddp"),
        (ParameterServer(servers=0, optimizer="server"), Manual("submodule"), {}, "optimizer=worker"),
        (Reproducible(), Manual("submodule"), {}, "needs automatic optimization"),
    ]
    for errors in run_ranks(set_up_in_ranks, 2, [case[:3] for case in refused]):
        for error, (*_, expected) in zip(errors, refused, strict=True):
            assert expected in error
            assert error.endswith(" at 0")


class Stream:
    """Batches of unknown number; rank 1 has fewer batches."""

    def __iter__(self) -> Iterator[Any]:
        rank = worlds.current().rank  # type: ignore[union-attr]
        batches = list(DataLoader(data(24), 4))
        yield from batches[rank::2][: 3 - rank]


def fit_streams() -> list[Any]:
    module = Manual("submodule", "adversarial")
    trainer = fx.Trainer(devices=2, strategy=DDP(), max_epochs=1, precision="64-true", **QUIET)
    trainer.fit(module, Stream())
    return [trainer.global_step, [parameter.detach() for parameter in module.parameters()]]


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters.*")
def test_streams_of_different_lengths_are_trained_to_their_ends() -> None:
    module = Manual("submodule", "adversarial")
    batches = list(DataLoader(data(24), 4))
    joined = [[torch.cat(pair) for pair in zip(*batches[n : n + 2], strict=True)] for n in (0, 2)]
    trainer = fx.Trainer(max_epochs=1, precision="64-true", **QUIET)
    trainer.fit(module, [*joined, batches[4]])
    for steps, weights in run_ranks(fit_streams, 2):
        assert steps == trainer.global_step == 3
        for a, b in zip(weights, module.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0.0, atol=1e-10)


class SecondOrder(Manual):
    """Keeps the graph of gradients, as second-order optimizers do."""

    def keep_graph(self, first: Any, second: Any, inputs: Tensor, targets: Tensor) -> None:
        self.manual_backward(mse(self.net(inputs), targets), create_graph=True)
        first.step()


@pytest.mark.parametrize("strategy", params([FSDP, lambda: ParameterServer(servers=0)], [DDP]))
def test_create_graph_is_refused_if_gradients_are_averaged(strategy: Any) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 6).double(), torch.randn(8, 1).double()), 4)
    with pytest.raises(WorkerFailed, match=r"create_graph=True\) on 2 ranks.*or use devices=1"):
        fx.Trainer(max_steps=1, devices=2, strategy=strategy(), **QUIET).fit(SecondOrder("keep_graph"), loader)


class StepsItself(fx.Module):
    """Steps its optimizer with gradients of `loss.backward()`, under automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        mse(self.layer(batch[0]), batch[1]).backward()
        optimizer: Any = self.optimizers()
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_steps_without_manual_optimization_are_refused_on_several_ranks():
    loader = DataLoader(TensorDataset(torch.randn(8, 6).double(), torch.randn(8, 1).double()), 4)
    with pytest.raises(WorkerFailed, match=r"calls the step of SGD itself.*self\.automatic_optimization = False"):
        fx.Trainer(max_steps=1, devices=2, **QUIET).fit(StepsItself(), loader)


class TwoSteps(torch.optim.SGD):
    """Sharpness-aware minimization (SAM); the module calls its two steps."""

    assigns = False

    @torch.no_grad()
    def first_step(self) -> None:
        weights = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        for p in weights:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad / norm, alpha=0.3)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if self.assigns:
                    p.data = self.state[p]["before"]
                else:
                    p.copy_(self.state[p]["before"])
        super().step()
        self.zero_grad()


class SharpnessAware(fx.Module):
    """Calls both steps; rank `dies` is killed between the steps of the fourth batch, once."""

    def __init__(self, dies: int | None = None, *, assigns: bool = False) -> None:
        super().__init__()
        self.assigns = assigns
        torch.manual_seed(3)
        self.automatic_optimization, self.dies, self.batches = False, dies, 0
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.batches += 1
        self.manual_backward(mse(self.net(batch[0]), batch[1]))
        optimizer.first_step()
        if self.batches == 4 and self.dies == self.global_rank and not self.trainer.failures:
            os.kill(os.getpid(), signal.SIGKILL)
        self.manual_backward(mse(self.net(batch[0]), batch[1]))
        optimizer.second_step()

    def configure_optimizers(self) -> Any:
        optimizer = TwoSteps(self.parameters(), lr=0.2, momentum=0.5)
        optimizer.assigns = self.assigns
        return optimizer


def sharpness_aware(
    ranks: int, strategy: Any = "auto", dies: int | None = None, *, assigns: bool = False
) -> tuple[SharpnessAware, fx.Trainer]:
    x = torch.randn(42, 6, generator=torch.Generator().manual_seed(1)).double()
    module = SharpnessAware(dies, assigns=assigns)
    trainer = fx.Trainer(devices=ranks, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), GLOBAL_BATCH // ranks))
    return module, trainer


def test_two_step_optimizers_count_one_update_per_batch() -> None:
    single, alone = sharpness_aware(1)
    assert alone.global_step == 8
    for strategy, dies in (("ddp", None), ("ddp", 1), ("ddp", 0), ("fsdp", None)):
        sharded, trainer = sharpness_aware(2, strategy, dies)
        assert trainer.global_step == 8
        assert len(trainer.failures) == (dies is not None)
        assert all(
            torch.allclose(a, b, rtol=0, atol=1e-12)
            for a, b in zip(single.parameters(), sharded.parameters(), strict=True)
        )
    with pytest.raises(WorkerFailed, match=r"TwoSteps\.second_step assigns to the data of a sharded parameter"):
        sharpness_aware(2, "fsdp", assigns=True)


class Limited(torch.optim.SGD):
    """Has a method that changes weights without an update."""

    @torch.no_grad()
    def limit(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.1, 0.1)


class StepsEachSecondBatch(SharpnessAware):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(mse(self.net(batch[0]), batch[1]))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.limit()

    def configure_optimizers(self) -> Any:
        return Limited(self.parameters(), lr=0.2)


def test_a_method_of_an_optimizer_without_a_step_is_not_counted_as_an_update() -> None:
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
    trainer = fx.Trainer(max_epochs=1, **QUIET)
    trainer.fit(StepsEachSecondBatch(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 6))
    assert trainer.global_step == 2
