"""Parameters without a gradient in some steps or on some ranks: several ranks train as a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.strategies import DDP, FSDP, LocalSGD, Mesh, ParameterServer, Reproducible
from fabricx.testing import QUIET
from tests.cases import check_each

pytestmark = [pytest.mark.usefixtures("warm_ranks"), pytest.mark.filterwarnings("ignore:.*got no gradient.*")]

SAMPLES, GLOBAL_BATCH = 26, 6  # the last batch has two samples: one of three ranks has no sample


class Experts(fx.Module):
    """Sample k trains expert k // 2 % 3 only; `late` is trained from the second epoch on, and `idle` never.

    Args:
        frozen: `late` is frozen before training, instead of excluded from the forward.
        manual: manual optimization.
    """

    def __init__(self, *, frozen: bool = False, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = not manual
        self.experts = nn.ModuleList([nn.Linear(3, 2) for _ in range(3)])
        self.late, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)
        self.frozen = frozen
        self.double()
        if frozen:
            self.late.requires_grad_(False)

    def training_step(self, numbers: Tensor, batch_idx: int) -> Any:
        if self.current_epoch and self.frozen:  # within the step, and so after the start of DDP's forward
            self.late.requires_grad_(True)
        losses = []
        for number in numbers.tolist():
            inputs = torch.tensor([1.0, number / 10.0, number % 3], dtype=torch.float64)
            hidden = self.experts[number // 2 % 3](inputs)
            losses.append((self.late(hidden) if self.current_epoch else hidden).square().mean())
        loss = torch.stack(losses).mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Weight decay and momentum change a parameter with a zero gradient, but not a parameter without a gradient.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def train(strategy: Any, devices: int, folder: Path, *, accumulate: int = 1, steps: int = -1, **how: Any) -> Tensor:
    module = Experts(**how)
    trainer = fx.Trainer(
        devices=devices, strategy=strategy, max_epochs=2, max_steps=steps, default_root_dir=folder,
        accumulate_grad_batches=accumulate, **QUIET,
    )  # fmt: skip
    samples = SAMPLES - 2 if how.get("manual") else SAMPLES
    numbers: Any = range(samples)
    trainer.fit(module, DataLoader(numbers, GLOBAL_BATCH // devices))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_ranks_that_use_different_parameters_train_the_weights_of_a_single_process(tmp_path: Path) -> None:
    def check(devices: int, strategy: Any, **how: Any) -> None:
        expected = train("single", 1, tmp_path, **how)
        torch.testing.assert_close(train(strategy, devices, tmp_path, **how), expected, rtol=1e-10, atol=1e-12)

    check_each(check, [
        {"devices": 3, "strategy": DDP(find_unused_parameters=True)},
        {"devices": 2, "strategy": DDP(bucket_mib=1e-5), "accumulate": 2, "frozen": True},
        {"devices": 3, "strategy": DDP(), "frozen": True},
        {"devices": 2, "strategy": DDP(), "frozen": True, "manual": True},
        {"devices": 2, "strategy": ParameterServer(servers=0), "frozen": True},
        {"devices": 3, "strategy": FSDP()},
        {"devices": 2, "strategy": FSDP(), "accumulate": 2},
        {"devices": 2, "strategy": FSDP(), "frozen": True},
        # A single update: there is no next forward in which torch would detect an incomplete reduction.
        {"devices": 2, "strategy": DDP(), "steps": 1},
    ])  # fmt: skip


def test_static_graph_refuses_parameters_other_than_those_of_the_first_step(tmp_path: Path) -> None:
    for frozen in (False, True):
        with pytest.raises(Exception, match=r"static_graph=True needs (the same|gradients of the same) parameters"):
            train(DDP(static_graph=True), 2, tmp_path, frozen=frozen)


def test_strategies_with_parameters_fixed_at_set_up_refuse_parameters_unfrozen_later(tmp_path: Path) -> None:
    for strategy in (LocalSGD(every=1), Reproducible()):
        with pytest.raises(Exception, match=r"late\.weight was frozen at set-up and is trained now"):
            train(strategy, 2, tmp_path, frozen=True)


class Tied(fx.Module):
    """The first and the last of the layers share a weight, which each second batch does not train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.last.weight = self.first.weight
        self.double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weight = self.first.weight.detach() if batch_idx % 2 else self.first.weight
        hidden = nn.functional.linear(batch, weight, self.first.bias)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        weight = self.last.weight.detach() if batch_idx % 2 else self.last.weight
        return nn.functional.linear(hidden, weight, self.last.bias).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def test_a_weight_of_several_stages_without_a_gradient_is_not_decayed(tmp_path: Path) -> None:
    def trained(strategy: Any, devices: int) -> Tensor:
        module = Tied()
        trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=1, default_root_dir=tmp_path, **QUIET)
        data: Any = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        trainer.fit(module, DataLoader(data, 4))
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    staged = trained(Mesh(pipeline=2, microbatches=2), 2)
    torch.testing.assert_close(staged, trained("single", 1), rtol=1e-10, atol=1e-12)


class Routed(Experts):
    """Each rank calls a different expert of the same size in a manual step; the first `begins` steps are equal.

    Args:
        begins: number of steps in which all ranks call the same expert.
    """

    def __init__(self, begins: int) -> None:
        super().__init__(manual=True)
        self.begins = begins

    def training_step(self, numbers: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        expert = self.experts[0 if batch_idx < self.begins else self.trainer.global_rank]
        self.manual_backward(expert(torch.ones(3, dtype=torch.float64)).sum())
        optimizer.step()


def test_ranks_that_call_different_submodules_are_an_error_under_fsdp(tmp_path: Path) -> None:
    for begins, named in ((0, r"rank 0 gathers the weights of experts\.0, rank 1 gathers .* experts\.1"), (3, "")):
        numbers: Any = range(12)
        trainer = fx.Trainer(devices=2, strategy="fsdp", max_epochs=1, default_root_dir=tmp_path, **QUIET)
        with pytest.raises(Exception, match=rf"ranks call different submodules.*{named}"):
            trainer.fit(Routed(begins), DataLoader(numbers, 1))
