"""Traffic, memory and waiting time of a step on meshes equal the cost model's prediction; see docs/scaling.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.model_parallel.pipeline.cuts import STATE, stages_of
from fabricx.model_parallel.pipeline.schedule import replay
from fabricx.model_parallel.scaling.cost import predicted_parts, sent_bytes
from fabricx.model_parallel.scaling.dimensions import Cluster, Layout
from fabricx.model_parallel.scaling.traffic import Exchange, data_exchange
from fabricx.strategies import DDP, Mesh
from fabricx.testing import QUIET, run_ranks
from tests.process.llama import MODEL, Llama
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

ROWS, BYTES = 4, 4  # samples per data rank; bytes per element in these runs
MOST = 1.02  # relative to theory: ranks also compare batches, and the use of parameters
VOCABULARY = {"embed": "vocab", "head": "head"}


class Collectives(TorchDispatchMode):
    """Counts the bytes of collectives: inputs of reductions, outputs of gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"reduced": 0, "gathered": 0, "scattered": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__
            kinds = {
                "reduce_scatter": "scattered",
                "allreduce": "reduced",
                "all_reduce": "reduced",
                "gather": "gathered",
            }
            kind = next((kind for part, kind in kinds.items() if part in name), None)
            if kind is not None:
                tensors = tree_leaves(args[kind == "scattered"])  # of c10d: outputs are the first arguments
                self.counts[kind] += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        return output


class Counts(fx.Callback):
    """Records the second step, after shapes are announced and optimizer states exist; excludes hooks."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        strategy, calls = trainer.strategy, []
        compute, update = strategy.forward_backward, strategy.optimizer_step

        def counted(*args: Any) -> Any:
            calls.append(0)
            if len(calls) != 2:
                return compute(*args)
            pipeline, actions, before = strategy._pipeline, [], 0
            if pipeline is not None:
                expect, before = pipeline._expect, pipeline.transfers.sent_bytes
                pipeline._expect = lambda passes, now, then: actions.append(now) or expect(passes, now, then)
            with Collectives() as collectives:
                outputs = compute(*args)
            self.counts["exchanged"] = collectives.counts
            if pipeline is not None:
                sent = pipeline.transfers.sent_bytes - before
                self.counts |= {"sent": sent, "cuts": pipeline.cuts, "actions": actions}
            return outputs

        def updated(optimizer: Any, *args: Any) -> Any:
            result = update(optimizer, *args)
            with strategy._hidden.shown():
                self.counts["stored"] = stored(module, optimizer)
            return result

        strategy.forward_backward, strategy.optimizer_step = counted, updated


def stored(module: Any, optimizer: Any) -> int:
    """Return the bytes of weights, gradients and moments."""
    total = 0
    for parameter in module.parameters():
        moments = [value for value in optimizer.state.get(parameter, {}).values() if value.dim()]
        for tensor in (parameter, parameter.grad, *moments):
            if tensor is not None:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                total += min(local.nbytes, local.untyped_storage().nbytes())  # placeholders have no memory
    return total


def step(strategy: Mesh, recompute: bool) -> dict[str, Any]:
    counts, ids = Counts(), torch.randint(MODEL.vocabulary, (32, MODEL.sequence))
    options: dict[str, Any] = {**QUIET, "max_steps": 2}
    trainer = fx.Trainer(
        devices=torch.distributed.get_world_size(), strategy=strategy, callbacks=[counts], **options
    )  # fmt: skip
    with mock.patch.object(DDP, "_can_share_memory", return_value=False):  # collectives are counted
        trainer.fit(Llama(recompute), DataLoader(ids, ROWS))  # type: ignore[arg-type]
    return counts.counts


CASES: dict[str, tuple[Mesh, Layout]] = {
    "tensor": (Mesh(tensor=2, plan=VOCABULARY), Layout(tensor=2, recompute=True)),
    "sequence": (Mesh(tensor=2, plan=VOCABULARY, sequence=True), Layout(tensor=2, sequence=True)),
    "context": (Mesh(context=2), Layout(context=2)),
    "fsdp": (Mesh(data="fsdp"), Layout(data=2, sharded=True)),
    "pipeline": (Mesh(pipeline=2), Layout(data=2, pipeline=2, microbatches=4)),
    "pipeline x sequence": (
        Mesh(pipeline=2, tensor=2, plan=VOCABULARY, sequence=True),
        Layout(pipeline=2, tensor=2, sequence=True, microbatches=4),
    ),
    "pipeline x context": (Mesh(pipeline=2, context=2), Layout(pipeline=2, context=2, microbatches=4)),
    "fsdp x pipeline": (Mesh(pipeline=2, data="fsdp"), Layout(data=2, pipeline=2, sharded=True, microbatches=4)),
}


def near(measured: float, theory: float) -> bool:
    return theory <= measured <= MOST * theory


TWO_AXES = ("pipeline x context", "fsdp x pipeline")  # "pipeline x sequence" has two axes as well


@pytest.mark.parametrize("name", params([name for name in CASES if name not in TWO_AXES], TWO_AXES))
def test_traffic_memory_and_idle_time_of_a_step_equal_the_cost_model(name: str) -> None:
    strategy, sizes = CASES[name]
    layout = replace(sizes, rows=ROWS, element=BYTES)
    ranks = run_ranks(step, layout.devices, strategy, layout.recompute)
    p, m = layout.pipeline, layout.microbatches
    # The cuts depend on measured times and differ between runs.
    cuts = [tuple(cut) for cut in ranks[0].get("cuts", [(0, MODEL.layers)])]
    stages = stages_of(predicted_parts(MODEL, Cluster(), layout), cuts, p, layout.schedule, 1, m, ROWS)
    sent = sent_bytes(MODEL, layout, stages)
    exchanged = [Exchange(**rank["exchanged"]).sent(2) for rank in ranks]  # each axis in these cases has two ranks
    activations = sent["tensor"] + sent["context"]
    weights = max(stage.parameters for stage in stages) / BYTES
    data = data_exchange(weights, sharded=layout.sharded, pipelined=p > 1, kept=MODEL.ends(1)).total
    theory = activations + data.in_bytes(BYTES, BYTES).sent(layout.data * layout.context)
    assert near(max(exchanged), theory), (max(exchanged), theory)
    inner = layout.context * layout.tensor  # ranks of a stage, which are consecutive
    for number, rank in enumerate(ranks):
        memory = STATE * stages[number // inner % p].parameters / layout.shards
        assert near(rank["stored"], memory), (rank["stored"], memory)
    if p > 1:
        of_stages = ranks[: p * inner : inner]
        assert sum(rank["sent"] for rank in of_stages) == sent["pipeline"] * p
        idle = replay([rank["actions"] for rank in of_stages], 1).idle
        assert idle == pytest.approx((p - 1) / (m + p - 1))  # in units of slots
