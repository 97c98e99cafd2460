"""Ranks with different behaviour train as a single process, or are refused on all ranks; none hangs."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import fabricx as fx
from fabricx.callbacks import EMA, EarlyStopping, FaultRecovery, ModelCheckpoint
from fabricx.distributed import world as worlds
from fabricx.errors import NotPicklable, WorkerFailed
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer, Reproducible
from fabricx.testing import QUIET, run_ranks
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

KINDS = {
    "ddp": DDP,
    "fsdp": FSDP,
    "shared memory": lambda: ParameterServer(servers=0),
    "local_sgd": LocalSGD,
    "reproducible": Reproducible,
}


def data(samples: int = 8) -> Any:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, generator=generator) for _ in range(samples)]


class BuildsDifferently(fx.Module):
    """Builds a different object on rank 1.

    Args:
        what: name of the difference.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.what = what
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def is_other(self, what: str) -> bool:
        return self.what == what and self.global_rank == 1

    def setup(self, stage: str) -> None:
        if self.is_other("option"):
            self.trainer.accumulate_grad_batches = 2
        if self.is_other("callback"):
            self.trainer.callbacks.append(EMA(0.5))

    def configure_model(self) -> None:
        if self.is_other("parameter"):
            self.extra = nn.Linear(2, 2)
        if self.is_other("shape"):
            self.last = nn.Linear(4, 2)
        if self.is_other("frozen"):
            self.first.bias.requires_grad_(False)
        if self.is_other("buffer"):
            self.register_buffer("seen", torch.zeros(3))
        if self.is_other("layer"):
            self.middle: nn.Module = nn.Dropout(0.1)
        elif self.what == "layer":
            self.middle = nn.Dropout(0.2)
        if self.is_other("weights"):
            nn.init.ones_(self.first.weight)

    def train_dataloader(self) -> Any:
        samples = 6 if self.is_other("length") else 8
        shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(3 + self.is_other("order"))}
        batch = 1 if self.is_other("batch") else 2
        if self.what == "items":
            return DataLoader(Subset(data(), [5, 3] if self.is_other("items") else [3, 4]), batch)
        return DataLoader(data(samples), batch, **(shuffled if self.what == "order" else {}))  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.last(torch.tanh(self.first(batch))).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        if self.is_other("optimizer"):
            return torch.optim.Adam(self.parameters(), lr=0.1)
        if self.is_other("group"):
            return torch.optim.SGD([{"params": part.parameters()} for part in (self.first, self.last)], lr=0.1)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2 if self.is_other("rate") else 0.1)
        steps = 7 if self.is_other("schedule") else 5
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, steps)]


DIFFERENCES = {
    "parameter": "extra.weight: nothing on rank 0, parameter, shape [2, 2], float32, trained on rank 1",
    "shape": "last.weight: parameter, shape [1, 4], float32, trained on rank 0, parameter, shape [2, 4]",
    "frozen": "first.bias: parameter, shape [4], float32, trained on rank 0, parameter, shape [4], float32, frozen",
    "buffer": "seen: nothing on rank 0, buffer, shape [3], float32 on rank 1",
    "layer": "middle: Dropout(p=0.2, inplace=False) on rank 0, Dropout(p=0.1, inplace=False) on rank 1",
    "option": "accumulate_grad_batches: 1 on rank 0, 2 on rank 1",
    "callback": "callback 1: nothing on rank 0, EMA(decay=0.5",
    "optimizer": "optimizer 0: SGD on rank 0, Adam on rank 1",
    "group": "optimizer 0, group 1, params: nothing on rank 0, ['last.weight', 'last.bias'] on rank 1",
    "rate": "optimizer 0, group 0, lr: 0.1 on rank 0, 0.2 on rank 1",
    "schedule": "schedule 0, step_size: 5 on rank 0, 7 on rank 1",
    "length": "training data: DataLoader of 8 samples, 2 in a batch, SequentialSampler on rank 0, DataLoader of 6",
    "batch": "2 in a batch, SequentialSampler on rank 0, DataLoader of 8 samples, 1 in a batch",
    "items": "of a Subset (draw them after fx.seed_everything) on rank 0, DataLoader of 2 samples, 2 in a batch, Seq",
    "order": "RandomSampler, seed 3 on rank 0, DataLoader of 8 samples, 2 in a batch, RandomSampler, seed 4 on rank 1",
}


def fit_here(cases: list[tuple[Any, fx.Module, dict[str, Any]]]) -> list[tuple[str, list[Tensor]]]:
    """Train each module on the present ranks; return its error ("" without an error) and its weights."""
    results: list[tuple[str, list[Tensor]]] = []
    world = worlds.current()
    assert world is not None
    for strategy, module, options in cases:
        trainer = fx.Trainer(devices=world.size, strategy=strategy, **{"max_epochs": 1, **QUIET, **options})
        try:
            trainer.fit(module, None if isinstance(module, BuildsDifferently) else DataLoader(data(), 2))
        except Exception as error:
            results.append((f"{type(error).__name__}: {error} at step {trainer.global_step}", []))
        else:
            results.append(("", list(trainer.session.sharding.whole_weights(module).values())))
    return results


def test_ranks_that_build_different_objects_are_an_error_on_all_ranks_at_set_up() -> None:
    expected = {(kind, what): text for kind in ("ddp", "fsdp") for what, text in DIFFERENCES.items()}
    expected |= {(kind, what): DIFFERENCES[what] for kind in KINDS for what in ("parameter", "rate")}
    cases: list[Any] = [(KINDS[kind](), BuildsDifferently(what), {}) for kind, what in expected]
    for results in run_ranks(fit_here, 2, cases):
        for (error, _), (case, text) in zip(results, expected.items(), strict=True):
            assert error.startswith("RanksDisagree: ranks differ at set-up"), (case, error)
            assert text in error, (case, error)
            assert error.endswith("at step 0"), (case, error)


def test_workers_with_servers_that_build_different_objects_are_an_error() -> None:
    for strategy, what in ((ParameterServer(), "parameter"), (AsyncSGD(), "rate")):
        trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET)
        with pytest.raises(WorkerFailed, match="ranks differ at set-up") as error:
            trainer.fit(BuildsDifferently(what), DataLoader(data(), 2))
        assert DIFFERENCES[what] in str(error.value)


class OrderOfARank:
    """A sampler whose order differs between processes."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(os.getpid()).sample(range(40), 40))

    def __len__(self) -> int:
        return 40


def test_workers_with_servers_that_read_data_in_different_orders_are_an_error() -> None:
    trainer = fx.Trainer(devices=2, strategy=AsyncSGD(), max_epochs=1, **QUIET)
    with pytest.raises(WorkerFailed, match="OrderOfARank returns a different order of the data on each rank"):
        trainer.fit(BuildsDifferently(""), DataLoader(data(40), 2, sampler=OrderOfARank()))  # type: ignore[arg-type]


class JoinsDifferently(BuildsDifferently):
    """Differs in the worker that joins after the death of rank 1; this worker stores its error in the store."""

    error = ""  # of that worker; rank 0 reads it in its first batch, while rank 1 dies

    def is_other(self, what: str) -> bool:
        return self.what == what and self.trainer.world.newcomer

    def on_exception(self, error: BaseException) -> None:
        store = self.trainer.world.store
        if self.trainer.world.newcomer and store is not None:
            store.set("error of the joining worker", f"{type(error).__name__}: {error}")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        world = self.trainer.world
        if (world.rank, world.generation) == (1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.error:
            store: Any = world.store
            store.wait(["error of the joining worker"], timedelta(seconds=60))
            self.error = store.get("error of the joining worker").decode()
        return super().training_step(batch, batch_idx)


JOINED = [(AsyncSGD, "parameter"), (AsyncSGD, "optimizer"), (DDP, "rate"), (DDP, "length")]


@pytest.mark.parametrize(("kind", "what"), JOINED)
def test_a_joining_worker_that_builds_different_objects_fails_alone(kind: Any, what: str, tmp_path: Path) -> None:
    module = JoinsDifferently(what)
    options: dict[str, Any] = {"default_root_dir": tmp_path, "callbacks": [FaultRecovery(max_restarts=1)], **QUIET}
    trainer = fx.Trainer(devices=2, strategy=kind(), max_epochs=2, **options)
    trainer.fit(module)
    assert module.error.startswith("RanksDisagree: a worker that joins the run has created other objects")
    assert DIFFERENCES[what].replace("rank 0", "the ranks at set-up").replace("rank 1", "this worker") in module.error
    assert (trainer.current_epoch, len(trainer.failures), trainer.world.size) == (2, 1, 1)


def test_initial_weights_may_differ_and_are_those_of_rank_0() -> None:
    cases: list[Any] = [
        (make(), BuildsDifferently(what), {}) for make in KINDS.values() for what in ("weights", "none")
    ]
    for results in run_ranks(fit_here, 2, cases):
        for number, kind in enumerate(KINDS):
            (error, weights), (other_error, expected) = results[2 * number : 2 * number + 2]
            assert (error, other_error) == ("", ""), kind
            for actual, reference in zip(weights, expected, strict=True):
                assert torch.equal(actual, reference), kind


class Evaluated(BuildsDifferently):
    """Logs a weight that each rank draws with its own seed; rank 1 may lack it."""

    def configure_model(self) -> None:
        super().configure_model()
        torch.seed()
        self.drawn = nn.Linear(3, 1)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("drawn", self.drawn.weight.sum())
        self.log("of_rank_0", self.drawn.weight.sum(), sync_dist=False)


def evaluate_here(modules: list[Evaluated]) -> list[str]:
    """Validate each module on the present ranks; return its error, or its values."""
    results = []
    for module in modules:
        try:
            [values] = fx.Trainer(devices=2, strategy="ddp", **QUIET).validate(module, DataLoader(data(), 2))
            results.append(f"{values['drawn']:.6g} {values['of_rank_0']:.6g}")
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def test_an_evaluation_without_a_checkpoint_is_of_the_weights_of_rank_0() -> None:
    for values, error in run_ranks(evaluate_here, 2, [Evaluated("none"), Evaluated("parameter")]):
        mean, of_rank_0 = values.split()
        assert mean == of_rank_0
        assert DIFFERENCES["parameter"] in error


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


class Hooked(fx.Module):
    """Doubles its gradients in hooks of its parameters.

    Args:
        kind: "hook"; "post" for hooks after the accumulation of the gradient; "" for no hook.
        moment: the method that registers them.
    """

    def __init__(self, kind: str, moment: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.kind, self.moment = kind, moment
        self.net = nn.Linear(3, 2)
        self.register("init")

    def register(self, moment: str) -> None:
        for parameter in self.parameters() if moment == self.moment else ():
            if self.kind == "hook":
                parameter.register_hook(lambda gradient: 2.0 * gradient)
            elif self.kind == "post":
                parameter.register_post_accumulate_grad_hook(double)

    def configure_model(self) -> None:
        self.register("configure_model")

    def on_fit_start(self) -> None:
        self.register("on_fit_start")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_gradient_hooks_act_on_each_rank_or_are_refused() -> None:
    alone = Hooked("hook", "configure_model")
    fx.Trainer(max_epochs=1, **QUIET).fit(alone, DataLoader(data(), 4))
    refused = {
        ("fsdp", "hook", "configure_model"): "net.weight has a gradient hook, which is lost when strategy=fsdp shards",
        ("fsdp", "hook", "on_fit_start"): "net.weight has a hook of register_hook, which is never called under",
    }
    moments = ("configure_model", "on_fit_start")
    variants = [(name, kind, moment) for name in KINDS for kind in ("hook", "post") for moment in moments]
    refused["fsdp", "post", "configure_model"] = refused["fsdp", "hook", "configure_model"]
    cases: list[Any] = [(LocalSGD(every=1) if name == "local_sgd" else KINDS[name](), Hooked(kind, moment), {})
                        for name, kind, moment in variants]  # fmt: skip
    for rank, results in enumerate(run_ranks(fit_here, 2, cases)):
        for (error, weights), variant in zip(results, variants, strict=True):
            assert refused.get(variant, "") in error, (variant, error)
            assert bool(error) == (variant in refused), (variant, error)
            if not error and (rank == 0 or variant[0] != "fsdp"):
                for actual, expected in zip(weights, alone.parameters(), strict=True):
                    torch.testing.assert_close(actual, expected.detach(), msg=str(variant))


def test_gradient_hooks_that_cannot_be_pickled_are_refused_before_workers_start() -> None:
    for kind in ("hook", "post"):
        trainer = fx.Trainer(devices=2, strategy="ddp", max_epochs=1, **QUIET)
        with pytest.raises(NotPicklable, match=r"a gradient hook of module\.net\.weight .* in configure_model"):
            trainer.fit(Hooked(kind, "init"), DataLoader(data(), 2))


class Branches(fx.Module):
    """Calls other layers on rank 1 from some step on; all linear layers are units of FSDP.

    Args:
        way: "other" calls a different layer of the same shape, "fewer" omits a layer, "order" swaps two layers,
            "backward" omits a gradient; "" has no difference.
        begins: the step.
    """

    def __init__(self, way: str, begins: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.way, self.begins = way, begins
        self.first, self.second, self.third, self.large = (nn.Linear(3, 3) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        way = self.way if self.global_rank == 1 and batch_idx >= self.begins else ""
        first, second, third = self.first, self.second, self.third
        outputs: Tensor = first(batch)
        if way == "other":
            outputs = third(outputs)
        elif way == "order":
            outputs = second(third(outputs))
        elif way == "backward":
            second(outputs)
            outputs = third(outputs)
        elif way != "fewer":
            outputs = third(second(outputs))
        loss: Tensor = self.large(outputs).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("way", "begins", "kept", "message"),
    [
        ("other", 0, False, "rank 0 gathers the weights of second, rank 1 gathers the weights of third"),
        ("order", 2, True, "rank 0 gathers the weights of second, rank 1 gathers the weights of third"),
        ("fewer", 3, False, "rank 0 gathers the weights of second, rank 1 gathers the weights of large"),
        ("backward", 1, True, "rank 0 reduces the gradients of second, rank 1 reduces the gradients of first"),
    ],
)
def test_ranks_that_call_different_units_are_an_error_under_fsdp(
    way: str, begins: int, kept: bool, message: str
) -> None:
    strategy = FSDP(wrap=["Linear"], reshard_after_forward=not kept)
    trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET)
    with pytest.raises(WorkerFailed, match=rf"ranks call different submodules.*{message}"):
        trainer.fit(Branches(way, begins), DataLoader(data(), 1))


class Masked(fx.Module):
    """Has a buffer, and a loss over the marked samples of a batch; some ranks have no marked sample."""

    forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Linear(3, 1)
        self.register_buffer("forwards", torch.zeros(()))

    def batch_weight(self, batch: Tensor) -> float:
        return float((batch[:, 0] > 0).sum())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.forwards += 1
        loss: Tensor = self.net(batch).square().flatten()[batch[:, 0] > 0].mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def marked() -> list[Tensor]:
    samples = [sample.abs() for sample in data(16)]
    # Rank 1 has no marked sample in the first batch, and rank 0 has no marked sample in the third.
    for number in (2, 3, 8, 9):
        samples[number][0] = -1.0
    return samples


@pytest.mark.parametrize("strategy", params([DDP(static_graph=True), FSDP(wrap=["Linear"])], [DDP()]))
def test_a_batch_without_weight_on_one_rank_is_computed_once(strategy: Any) -> None:
    alone, parallel = Masked(), Masked()
    fx.Trainer(max_epochs=1, **QUIET).fit(alone, DataLoader(marked(), 4))
    fx.Trainer(devices=2, strategy=strategy, max_epochs=1, **QUIET).fit(parallel, DataLoader(marked(), 2))
    for actual, expected in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)
    assert (int(parallel.forwards), int(alone.forwards)) == (4, 4)


class RecordsHookValues(fx.Module):
    """Records the values in hooks of a step, in windows of two batches; the last batch leaves a rank without samples.

    Args:
        own_score: the monitored value differs between ranks.
    """

    def __init__(self, *, own_score: bool = False) -> None:
        super().__init__()
        self.weight, self.own_score = nn.Parameter(torch.ones(())), own_score
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if self.own_score and batch_idx == 0 else (self.weight * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.own_score:  # increases on rank 0, decreases on rank 1
            self.log("score", float(self.current_epoch if self.global_rank else -self.current_epoch), sync_dist=False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append((self.trainer.is_last_batch, float(self.weight.grad)))  # type: ignore[arg-type]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.seen.append(float(optimizer_closure()))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def recorded_hook_values(folder: str) -> tuple[list[Any], list[Any], list[str]]:
    options: dict[str, Any] = {**QUIET, "max_epochs": 3, "accumulate_grad_batches": 2, "devices": 2, "strategy": DDP()}
    module, skips = RecordsHookValues(), RecordsHookValues(own_score=True)
    fx.Trainer(**options).fit(module, DataLoader(torch.ones(25), 4))  # type: ignore[arg-type]
    saver = ModelCheckpoint(folder, monitor="score", filename="{epoch}")
    batches = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9], [10], [11], [12], [13]]
    data = DataLoader(torch.ones(14), batch_sampler=batches)  # type: ignore[arg-type]
    callbacks = [saver, EarlyStopping("score", patience=1)]
    trainer = fx.Trainer(**{**options, "callbacks": callbacks, "enable_checkpointing": True})
    trainer.fit(skips, data, DataLoader(torch.ones(2)))  # type: ignore[arg-type]
    return module.seen, skips.seen, list(map(os.path.basename, saver.best_k_models))


@pytest.mark.filterwarnings("ignore:training_step returned no loss")
def test_hooks_read_equal_values_on_all_ranks_which_are_means_over_the_samples(tmp_path: Path) -> None:
    """The last batch, the gradient and the loss of a window; the main rank's score ranks checkpoints, and stops."""
    first, second = run_ranks(recorded_hook_values, 2, str(tmp_path))
    assert first == second
    seen, skipping, kept = first
    assert seen == [(False, 1.0), 1.0, (True, 1.0), 1.0] * 3
    assert skipping == [(False, pytest.approx(1.0)), 1.0, (True, 1.0), 1.0] * 3
    assert kept == ["epoch=2.ckpt"]
