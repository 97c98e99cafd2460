"""Contract of every strategy: equal to a single process for every task. A new strategy is added to WAYS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

import fabricx as fx
import fabricx.strategies as package
from fabricx.callbacks import EMA
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, Mesh, ParameterServer, Reproducible, Single
from fabricx.testing import QUIET, LayeredModule, layered_data
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

WAYS: dict[str, tuple[Callable[[], fx.Strategy], int]] = {
    "single": (Single, 1),
    "ddp": (DDP, 2),
    "ddp, over gloo": (lambda: DDP(shared_memory=False), 2),
    "fsdp": (FSDP, 2),
    "fsdp, weights kept": (lambda: FSDP(wrap=["Linear"], reshard_after_forward=False), 2),
    "fsdp, recomputed, offloaded": (lambda: FSDP(wrap=60, activation_checkpointing="auto", cpu_offload=True), 2),
    "fsdp, 2 groups of 2": (lambda: FSDP(replicas=2), 4),
    "reproducible": (Reproducible, 2),
    "local_sgd": (LocalSGD, 2),
    "parameter_server": (lambda: ParameterServer(servers=2), 2),
    "parameter_server, no server": (lambda: ParameterServer(servers=0), 3),
    "parameter_server, no server, one memory": (lambda: ParameterServer(servers=0, optimizer="server"), 3),
    "parameter_server, over gloo": (lambda: ParameterServer(link="gloo"), 2),
    "parameter_server, servers step": (lambda: ParameterServer(servers=2, optimizer="server"), 2),
    "parameter_server, bounded": (lambda: ParameterServer(mode="bounded", max_staleness=0), 2),
    "async_sgd": (AsyncSGD, 2),
    "mesh, ddp": (Mesh, 2),  # with all axes 1; tests/process/test_mesh.py has larger axes
    "mesh, fsdp": (lambda: Mesh(data="fsdp"), 2),
}
SYNCHRONOUS = [name for name, (make, _) in WAYS.items() if make().traits.synchronous]

# Strategies that share most code with other strategies: their tasks in `make test`; `make soak` runs all tasks.
VARIANTS = {
    "ddp, over gloo": ("accumulated", "fewer samples than ranks", "manual"),
    "reproducible": ("clipped by norm", "accumulated", "fewer samples than ranks", "manual"),
    "parameter_server": ("clipped by norm", "accumulated", "averaged", "manual", "in bf16"),
    "parameter_server, servers step": ("clipped by norm", "accumulated", "manual", "in bf16"),
    "parameter_server, no server, one memory": ("clipped by value", "averaged", "manual"),
    "fsdp, weights kept": ("accumulated", "fewer samples than ranks"),
    "fsdp, recomputed, offloaded": ("compiled", "in bf16", "clipped by value"),
    "fsdp, 2 groups of 2": ("clipped by norm",),
    "mesh, ddp": ("accumulated", "clipped by norm"),
    "mesh, fsdp": ("clipped by value", "fewer samples than ranks"),
    "parameter_server, no server": ("averaged", "clipped by norm"),
    "parameter_server, over gloo": ("accumulated", "fewer samples than ranks"),
    "parameter_server, bounded": ("averaged", "clipped by value"),
}

COMPILED_BACKWARD = ("single", "ddp", "fsdp")  # elsewhere the forward alone: half of the time

GLOBAL_BATCH = 12


def test_the_list_is_complete() -> None:
    exported = {getattr(package, name) for name in package.__all__}
    presets = {strategy for strategy in exported if issubclass(strategy, Mesh) and strategy is not Mesh}
    assert exported - presets == {type(make()) for make, _ in WAYS.values()}


def train(way: str, *, samples: int = 43, **options: Any) -> tuple[LayeredModule, fx.Trainer]:
    make, devices = WAYS[way]
    if "compile" in options and way not in COMPILED_BACKWARD:
        options["compile"] = {"backend": "eager"}
    torch.manual_seed(2)
    module = LayeredModule(options.pop("manual", False))
    trainer = fx.Trainer(devices=devices, strategy=make(), **{"max_epochs": 2, **QUIET, **options})
    batch = GLOBAL_BATCH // devices
    trainer.fit(module, DataLoader(layered_data(samples), batch, shuffle=True), DataLoader(layered_data(5), 1))
    return module, trainer


TASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clipped by norm": lambda: {"gradient_clip_val": 0.3},
    "clipped by value": lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": lambda: {"accumulate_grad_batches": 2},
    "averaged": lambda: {"callbacks": [EMA(0.5)]},
    "compiled": lambda: {"compile": {"backend": "aot_eager"}},
    "manual": lambda: {"manual": True},
    "in bf16": lambda: {"precision": "bf16-mixed"},
    "fewer samples than ranks": lambda: {"samples": 1, "max_epochs": 3},
}


REFUSED = {
    ("parameter_server, servers step", "manual"),
    ("parameter_server, no server, one memory", "manual"),
    ("reproducible", "manual"),
}


@functools.cache
def alone(task: str) -> tuple[LayeredModule, fx.Trainer]:
    return train("single", **TASKS[task]())


CASES = [(way, task) for way in SYNCHRONOUS if way != "single" for task in TASKS]
SHORT = [(way, task) for way, task in CASES if task in VARIANTS.get(way, TASKS)]


@pytest.mark.parametrize(("way", "task"), params(SHORT, [case for case in CASES if case not in SHORT]))
def test_ranks_train_the_weights_of_a_single_process(way: str, task: str) -> None:
    if (way, task) in REFUSED:
        with pytest.raises(
            WorkerFailed, match=r"a manually optimised module steps by itself|needs automatic optimization"
        ):
            train(way, **TASKS[task]())
        return
    wanted, single = alone(task)
    weights, several = train(way, **TASKS[task]())
    loose = task == "in bf16"  # 8 bits of mantissa, and a part of a batch is rounded elsewhere than the whole
    for (name, a), b in zip(weights.named_parameters(), wanted.parameters(), strict=True):
        # different summation order of float32 values
        assert torch.allclose(a, b, rtol=2e-5, atol=6e-3 if loose else 1e-6), (name, (a - b).abs().max())
    assert (several.global_step, several.current_epoch) == (single.global_step, single.current_epoch)
    for name in ("loss_epoch", "val"):
        value, right = float(several.callback_metrics[name]), float(single.callback_metrics[name])
        assert value == pytest.approx(right, rel=5e-2 if loose else 1e-4), name


class CountsCollectives(fx.Callback):
    """Notes which collectives each training batch has needed."""

    def __init__(self) -> None:
        self.by_batch: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._mode = CommDebugMode()
        self._mode.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._mode.__exit__(None, None, None)
        sums = ("reduce_scatter", "allreduce_")
        counts = self._mode.get_comm_counts()
        self.by_batch.append(sum(n for name, n in counts.items() if any(kind in str(name) for kind in sums)))
        del self._mode


@pytest.mark.parametrize(
    "way",
    params(["fsdp, weights kept", "fsdp, 2 groups of 2"], ["fsdp", "fsdp, recomputed, offloaded"]),
)
def test_gradients_are_sent_once_per_accumulation_window(way: str) -> None:
    counts = CountsCollectives()
    train(way, samples=48, accumulate_grad_batches=2, max_epochs=1, callbacks=[counts], log_every_n_steps=0)
    assert counts.by_batch[0::2] == [0, 0]
    assert all(count > 0 for count in counts.by_batch[1::2])


class Skips(LayeredModule):
    """Returns no loss for the third batch: before or after the forward, on all ranks or only on the second."""

    def __init__(self, early: bool, everywhere: bool) -> None:
        super().__init__()
        self.early, self.everywhere = early, everywhere

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        skips = batch_idx == 2 and (self.everywhere or self.global_rank == 1)
        if skips and self.early:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if skips else loss


SKIPPING = ["ddp", "fsdp", "reproducible", "parameter_server, servers step", "local_sgd"]


@pytest.mark.parametrize(
    "way", params(SKIPPING, [way for way in WAYS if way not in ("single", "async_sgd", *SKIPPING)])
)
def test_a_batch_is_skipped_by_all_ranks_or_is_an_error_on_all_ranks(way: str) -> None:
    make, devices = WAYS[way]

    def fit(early: bool, everywhere: bool) -> int:
        trainer = fx.Trainer(devices=devices, strategy=make(), max_epochs=1, **QUIET)
        trainer.fit(Skips(early, everywhere), DataLoader(layered_data(48), GLOBAL_BATCH // devices))
        return trainer.global_step

    if make().traits.batch_parts:  # not possible on a single rank, since its gradients are already in the sum
        with pytest.raises(WorkerFailed, match="return a loss of zero"):
            fit(early=True, everywhere=True)
        return
    if not make().traits.synchronous:  # a rank skips its own part; all other ranks train their parts
        # In lockstep, a rank cannot detect that all other ranks had no loss. At their own pace, a rank may
        # have trained both batches of a global batch, or none, with or without an update.
        possible = {4} if make().traits.lockstep else {3, 4}
        assert {fit(early=True, everywhere=True), fit(early=False, everywhere=True)} <= possible
        assert fit(early=True, everywhere=False) in possible
        return
    assert fit(early=True, everywhere=True) == 3
    assert fit(early=False, everywhere=True) == 3
    for early in (True, False):
        with pytest.raises(WorkerFailed, match="returned None on rank 1"):
            fit(early, everywhere=False)
