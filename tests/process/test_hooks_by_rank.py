"""Hooks that act on a single rank are errors that name the difference; they neither hang nor let ranks diverge."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn import functional as nn_functional
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.distributed import world as worlds
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer
from fabricx.testing import QUIET, run_ranks
from tests.process.test_ranks_differ import data
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")


class ChangesSetting(fx.Module):
    """Changes a setting on rank 1 only, or on all ranks.

    Args:
        what: name of the change.
        everywhere: change it on all ranks.
    """

    def __init__(self, what: str, *, everywhere: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.what, self.everywhere = what, everywhere
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.first.requires_grad_(not what.startswith("unfreezes"))

    def changes(self, what: str) -> bool:
        return self.what == what and (self.everywhere or self.global_rank == 1)

    def train_dataloader(self) -> Any:
        return DataLoader(data(6 if self.changes("reloads") and self.current_epoch else 8), 2)

    def on_train_start(self) -> None:
        if self.changes("steps"):
            self.trainer.max_steps = 1

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.optimizers()
        if self.current_epoch == 0:
            return
        if self.changes("unfreezes"):
            self.first.requires_grad_(True)
        if self.changes("rate"):
            optimizer.param_groups[0]["lr"] = 0.5
        if self.changes("hook"):
            self.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        if self.changes("accumulates"):
            self.trainer.accumulate_grad_batches = 2

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        if self.changes("unfreezes in a batch") and batch_idx == 1:
            self.first.requires_grad_(True)
        if self.changes("freezes in a batch") and batch_idx == 1:
            self.first.requires_grad_(False)
        if self.changes("watches in a batch") and batch_idx == 1:
            self.first.weight.register_hook(lambda gradient: gradient)
        return -1 if self.changes("skips") and batch_idx == 1 else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.changes("gradients"):
            for parameter in self.last.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2.0)

    def on_train_epoch_end(self) -> None:
        if self.changes("epochs"):
            self.trainer.max_epochs = 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.last(torch.tanh(self.first(batch))).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def options(what: str) -> dict[str, Any]:
    return {"max_epochs": 2, **QUIET, "reload_dataloaders_every_n_epochs": int(what == "reloads")}


def fit_here(cases: list[tuple[Any, ChangesSetting]]) -> list[str]:
    """Train each module on the present ranks; return its error, or "" without an error."""
    errors = []
    world = worlds.current()
    assert world is not None
    for strategy, module in cases:
        trainer = fx.Trainer(devices=world.size, strategy=strategy, **options(module.what))
        try:
            trainer.fit(module)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("")
    return errors


START = "ranks differ at the start of epoch 1, so they would not train the same model"
FROZEN = "first.weight: parameter, shape [4, 3], float32, frozen on rank 0, parameter, shape [4, 3], float32, trained"
DIFFERENCES = {
    "unfreezes": (START, FROZEN),
    "rate": (START, "optimizer 0, group 0, lr: 0.1 on rank 0, 0.5 on rank 1"),
    "hook": (START, "trained on rank 0, parameter, shape [1, 4], float32, trained, 1 gradient hooks on rank 1"),
    "accumulates": (START, "accumulate_grad_batches: 1 on rank 0, 2 on rank 1"),
    "reloads": (START, "DataLoader of 8 samples, 2 in a batch, SequentialSampler on rank 0, DataLoader of 6 samples"),
    "steps": ("ranks differ at the start of epoch 0", "max_steps: -1 on rank 0, 1 on rank 1"),
    "epochs": ("ranks differ after step 2", "max_epochs: 2 on rank 0, 1 on rank 1"),
    "gradients": ("ranks differ after step 2", "weights of last.weight: alike on rank 0, other values on rank 1"),
}
STRATEGIES: dict[str, Any] = {
    "ddp": DDP, "fsdp": FSDP, "shared memory": lambda: ParameterServer(servers=0), "local_sgd": LocalSGD
}  # fmt: skip


def test_settings_that_hooks_change_on_one_rank_are_an_error_on_all_ranks() -> None:
    excluded = [("gradients", "fsdp"), ("gradients", "local_sgd")]  # each rank has different weights
    expected = [(what, kind) for what in DIFFERENCES for kind in STRATEGIES if (what, kind) not in excluded]
    for errors in run_ranks(fit_here, 2, [(STRATEGIES[kind](), ChangesSetting(what)) for what, kind in expected]):
        for error, (what, kind) in zip(errors, expected, strict=True):
            for text in ("RanksDisagree: ", *DIFFERENCES[what]):
                assert text in error, (what, kind, error)


def test_settings_that_hooks_change_on_all_ranks_are_accepted() -> None:
    changes = [*DIFFERENCES, "unfreezes in a batch", "freezes in a batch", "skips"]
    excluded = [(what, "local_sgd") for what in changes if what.startswith("unfreezes")]  # refused under this strategy
    cases = [(what, kind) for what in changes for kind in STRATEGIES if (what, kind) not in excluded]
    modules = [(STRATEGIES[kind](), ChangesSetting(what, everywhere=True)) for what, kind in cases]
    for errors in run_ranks(fit_here, 2, modules):
        for error, (what, kind) in zip(errors, cases, strict=True):
            assert not error, (what, kind, error)


WITHIN = {
    "unfreezes in a batch": "first.weight: frozen on rank 0, trained on rank 1",
    "freezes in a batch": "first.weight: trained on rank 0, frozen on rank 1",
    "skips": "on_train_batch_start: goes on with the epoch on rank 0, skips the rest of the epoch on rank 1",
}


@pytest.mark.parametrize(
    ("strategy", "what"),
    params(
        [*((DDP(), what) for what in WITHIN), (FSDP(), "unfreezes in a batch")],
        [(FSDP(), "freezes in a batch"), (FSDP(), "skips")],
    ),
)
def test_a_setting_that_a_hook_changes_on_one_rank_within_an_epoch_is_an_error(strategy: Any, what: str) -> None:
    with pytest.raises(WorkerFailed, match=rf"step 1: hooks have changed settings on some ranks .*\n  {WITHIN[what]}"):
        fx.Trainer(devices=2, strategy=strategy, **options(what)).fit(ChangesSetting(what))


def test_a_tensor_hook_of_a_sharded_parameter_is_refused_at_the_step_that_would_not_call_it() -> None:
    module = ChangesSetting("watches in a batch", everywhere=True)
    with pytest.raises(WorkerFailed, match=r"first\.weight has a hook of register_hook, which is never called"):
        fx.Trainer(devices=2, strategy=FSDP(), **options(module.what)).fit(module)


class FreezesInItsFirstBatch(ChangesSetting):
    """Rank 1 freezes a layer in its first batch; rank 0 waits for it in its own first batch, so both have a batch."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        store = self.trainer.world.store
        assert store is not None
        if self.global_rank == 1:
            self.first.requires_grad_(False)
            store.set("frozen", "")
            return
        deadline = time.monotonic() + 60
        while not store.check(["frozen"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_settings_of_asynchronous_workers_are_compared_at_meetings() -> None:
    message = r"after step \d+.*\n  first\.weight: .* trained on rank 0, .* frozen on rank 1"
    with pytest.raises(WorkerFailed, match=message):
        fx.Trainer(devices=2, strategy=AsyncSGD(), **options("")).fit(FreezesInItsFirstBatch(""))


def test_learning_rates_of_asynchronous_workers_are_compared_at_the_start_of_an_epoch() -> None:
    with pytest.raises(WorkerFailed, match=r"start of epoch 1.*\n  optimizer 0, group 0, lr: 0\.1 on rank 0, 0\.5 on"):
        fx.Trainer(devices=2, strategy=AsyncSGD(), **options("")).fit(ChangesSetting("rate"))
    fx.Trainer(devices=2, strategy=AsyncSGD(), **options("")).fit(ChangesSetting("rate", everywhere=True))


class Gathers(ChangesSetting):
    """Calls a collective in a hook of each batch."""

    def gathers(self, where: str) -> None:
        if self.what == where:
            self.all_gather(torch.ones(1))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        self.gathers("on_train_batch_start")
        return None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.gathers("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.gathers("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gathers("on_before_optimizer_step")

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.gathers("on_train_batch_end")

    def train_dataloader(self) -> Any:
        return DataLoader(data(5), 2)  # rank 1 has no sample of the last batch


class OnSubgroup(Gathers):
    """Calls a collective on a subgroup, at each batch."""

    def on_fit_start(self) -> None:
        self.pair = dist.new_group([0, 1], timeout=timedelta(seconds=60))
        self.single = [dist.new_group([rank]) for rank in (0, 1)][self.global_rank]

    def gathers(self, where: str) -> None:
        if self.what == where:
            assert dist.get_world_size(self.pair) == 2
            assert dist.get_rank(self.pair) == self.global_rank
            dist.all_reduce(torch.ones(1), group=self.single)  # no other rank has to join
            dist.all_reduce(torch.ones(1), group=self.pair)


@pytest.mark.parametrize(
    "where", params(["training_step", "on_train_batch_end"], ["on_train_batch_start", "on_after_backward"])
)
def test_a_collective_that_a_rank_without_a_sample_would_not_join_is_an_error(where: str) -> None:
    with pytest.raises(WorkerFailed, match="RanksApart: a collective at a batch of which some ranks have no sample"):
        fx.Trainer(devices=2, strategy=DDP(), **options("")).fit(Gathers(where))


@pytest.mark.parametrize(
    ("kind", "where"),
    params(
        [(Gathers, "on_train_batch_start"), (OnSubgroup, "training_step")],
        [(Gathers, "on_after_backward"), (OnSubgroup, "on_train_batch_end")],
    ),
)  # fmt: skip
def test_a_collective_in_a_step_of_asynchronous_workers_is_an_error(kind: Any, where: str) -> None:
    with pytest.raises(
        WorkerFailed, match="RanksApart: a collective in training_step, or in a hook of a batch: each rank"
    ):
        fx.Trainer(devices=2, strategy=AsyncSGD(), **options("")).fit(kind(where))


@pytest.mark.parametrize("where", params(["training_step"], ["on_train_batch_end"]))
def test_a_collective_of_a_group_with_a_rank_without_a_sample_is_an_error(where: str) -> None:
    with pytest.raises(WorkerFailed, match="RanksApart: a collective at a batch of which some ranks have no sample"):
        fx.Trainer(devices=2, strategy=DDP(), **options("")).fit(OnSubgroup(where))


class OnMembers(Gathers):
    """Sums over a group of two ranks in training_step; rank 2 of 3 has no sample of the second batch.

    Args:
        members: ranks of the group.
        api: API that calls the collective.
    """

    def __init__(self, members: list[int], api: str) -> None:
        super().__init__("training_step")
        self.members, self.api = members, api

    def on_fit_start(self) -> None:
        self.pair = dist.new_group(self.members, timeout=timedelta(seconds=60))

    def gathers(self, where: str) -> None:
        if self.what == where and self.global_rank in self.members:
            tensor = torch.ones(1, requires_grad=self.api == "nn")
            if self.api == "functional":
                total: Any = functional.all_reduce(tensor, "sum", self.pair)
            elif self.api == "nn":
                total = nn_functional.all_reduce(tensor, group=self.pair)
                total.sum().backward()
            elif self.api == "method":
                total = tensor
                self.pair.allreduce([total]).wait()
            elif self.api == "operator":
                ops: Any = torch.ops._c10d_functional
                total = ops.wait_tensor(ops.all_reduce(tensor, "sum", self.pair.group_name))
            else:
                total = tensor
                dist.all_reduce(total, group=self.pair)
            assert float(total) == 2.0

    def train_dataloader(self) -> Any:
        return DataLoader(data(8), 2)


APIS = ["plain", "functional", "nn", "method", "operator"]


@pytest.mark.parametrize("api", APIS)
def test_every_api_for_collectives_is_checked_for_ranks_without_a_sample(api: str) -> None:
    with pytest.raises(WorkerFailed, match=r"of which some ranks have no sample: ranks 2 don't call training_step"):
        fx.Trainer(devices=3, strategy=DDP(), **options("")).fit(OnMembers([1, 2], api))


def test_a_group_of_ranks_with_samples_may_call_a_collective() -> None:
    for errors in run_ranks(fit_here, 3, [(DDP(), OnMembers([0, 1], api)) for api in APIS]):
        assert errors == [""] * len(APIS)


@pytest.mark.parametrize("api", params(["operator"], ["functional", "method"]))
def test_every_api_for_collectives_is_checked_in_steps_of_asynchronous_workers(api: str) -> None:
    with pytest.raises(WorkerFailed, match="RanksApart: a collective in training_step, or in a hook of a batch: each"):
        fx.Trainer(devices=2, strategy=AsyncSGD(), **options("")).fit(OnMembers([0, 1], api))


class GathersInEvaluation(Gathers):
    """Calls a collective in a step or hook of each evaluation batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ChangesSetting.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gathers("validation_step")

    def on_validation_batch_end(self, *arguments: Any) -> None:
        self.gathers("on_validation_batch_end")

    def on_validation_epoch_end(self) -> None:
        self.gathers("on_validation_epoch_end")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.gathers("predict_step")
        return batch


def evaluate_here(cases: list[tuple[Any, GathersInEvaluation, int]]) -> list[str]:
    """Evaluate each module on the present ranks; return its error, or "" without an error."""
    world = worlds.current()
    assert world is not None
    errors = []
    for strategy, module, samples in cases:
        trainer = fx.Trainer(devices=world.size, strategy=strategy, **options(""))
        try:
            if module.what == "predict_step":
                trainer.predict(module, DataLoader(data(samples), 2))
            else:
                trainer.validate(module, DataLoader(data(samples), 2), verbose=False)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("")
    return errors


def test_an_evaluation_of_sharded_weights_refuses_a_collective_that_would_count_another_sample() -> None:
    def fit(samples: int) -> None:
        trainer = fx.Trainer(devices=2, strategy=FSDP(wrap="Linear"), **options(""))  # blocks are gathered by all ranks
        trainer.fit(GathersInEvaluation("validation_step"), val_dataloaders=DataLoader(data(samples), 2))

    fit(8)
    with pytest.raises(WorkerFailed, match=r"in validation_step at a batch .*: ranks 1 compute another sample"):
        fit(5)


@pytest.mark.parametrize("where", params(["validation_step", "predict_step"], ["on_validation_batch_end"]))
def test_a_collective_in_an_evaluation_that_a_rank_without_a_sample_would_not_join_is_an_error(where: str) -> None:
    kind = where.removeprefix("on_").split("_")[0]
    message = f"RanksApart: .* ranks 1 don't call {kind}_step and the hooks .* Call it in on_{kind}_epoch_end"
    with pytest.raises(WorkerFailed, match=message):
        run_ranks(evaluate_and_raise, 2, DDP(), GathersInEvaluation(where))


def evaluate_and_raise(strategy: Any, module: GathersInEvaluation) -> None:
    if error := evaluate_here([(strategy, module, 5)])[0]:
        raise RuntimeError(error)


def test_a_collective_of_all_ranks_in_an_evaluation_is_accepted() -> None:
    cases = [
        ("on_validation_epoch_end", 5),
        ("validation_step", 8),
        ("on_validation_batch_end", 8),
        ("predict_step", 7),
    ]
    for errors in run_ranks(evaluate_here, 2, [(DDP(), GathersInEvaluation(where), size) for where, size in cases]):
        assert errors == [""] * len(cases)


def test_a_collective_of_all_ranks_in_a_hook_is_accepted() -> None:
    strategies: list[Any] = [DDP(), FSDP()]
    cases = [(strategy, kind("on_before_optimizer_step")) for strategy in strategies for kind in (Gathers, OnSubgroup)]
    cases += [(DDP(), Manual("on_before_optimizer_step"))]
    for errors in run_ranks(fit_here, 2, cases):
        assert errors == [""] * 5


class Manual(Gathers):
    """Calls a collective in a step with manual optimization, or in its hooks."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class ManualOnSubgroup(OnSubgroup, Manual):
    """Manual optimization with a collective on a subgroup."""


@pytest.mark.parametrize(
    ("strategy", "module"),
    params(
        [(FSDP(), Gathers("training_step")), (ParameterServer(), ManualOnSubgroup("training_step"))],
        [(FSDP(), OnSubgroup("training_step")), (DDP(), Manual("training_step"))],
    ),
)  # fmt: skip
def test_a_collective_that_would_include_the_repeated_sample_of_a_rank_without_data_is_an_error(
    strategy: Any, module: Any
) -> None:
    message = (
        "RanksApart: a collective in training_step at a batch .*: ranks 1 compute another sample, which has no weight"
    )
    with pytest.raises(WorkerFailed, match=message):
        fx.Trainer(devices=2, strategy=strategy, **options("")).fit(module)
