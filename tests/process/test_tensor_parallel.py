"""Tensor-parallel training equals training in a single process: losses, gradient norms and weights.

In float64, because the gradient of a key's bias is a rounding error, which Adam converts into steps.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabricx.distributed import world as worlds
from fabricx.model_parallel.gradient_norm import clip_norm
from fabricx.model_parallel.scaling.traffic import (
    Passes,
    embedding_exchange,
    head_exchange,
    sequence_ends,
    tensor_exchange,
)
from fabricx.model_parallel.tensor.collectives import scattered
from fabricx.model_parallel.tensor.plan import find_tensor_plan
from fabricx.model_parallel.tensor.tensor_parallel import TensorParallel
from fabricx.model_parallel.trial import StepChanged, check_unchanged, fingerprint, recorded_step
from fabricx.testing import run_ranks
from tests.process.parallel_models import (
    LAYERS,
    ROWS,
    C,
    Called,
    H,
    HandTied,
    LanguageModel,
    Logits,
    OneHead,
    Penalised,
    T,
    Torch,
)
from tests.soak import SOAK, params

pytestmark = pytest.mark.usefixtures("warm_ranks")
CLOSE = 1e-9
VOCABULARY = {"embed": "vocab", "head": "head"}


def batches(number: int, rows: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(ROWS, (rows, T + 1), generator=generator) for _ in range(number)]


def train(module: Any, step: Any, clip: Any, steps: int, optimizer: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    optimizer = optimizer(module.parameters())
    losses, norms = [], []
    for index, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = step(batch, index)
        loss.backward()
        norms.append(float(clip(module.parameters())))
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    with torch.no_grad():
        losses.append(step(batches(1)[0], 0).item())
    random = torch.rand(()).item()
    return {"losses": losses, "norms": norms, "random": random, "logged": module.logged}


def compare(build: Any, overrides: dict[str, str], sequence: bool, optimizer: Any, steps: int) -> dict[str, float]:
    """Train on all ranks and in a single process; return the largest differences."""
    world = worlds.current()
    assert world is not None
    torch.manual_seed(0)
    module = build()
    alone = copy.deepcopy(module)
    plan = find_tensor_plan(module, lambda: module.training_step(batches(1, 2)[0], 0), world.size, overrides)
    module.logged.clear()
    blocks = list(module.blocks) if sequence else ()
    parallel = TensorParallel(module, plan, world, sequence=sequence, blocks=blocks)
    sharded = {id(p) for name, p in module.named_parameters() if name in parallel.placements}

    def clip(parameters: Any) -> torch.Tensor:
        return clip_norm(parameters, 0.5, world, lambda p: 1 if id(p) in sharded else world.size)

    parallel_run = train(module, parallel.wrap_step(module.training_step), clip, steps, optimizer)
    stored = sum(p.numel() for p in module.parameters())
    parallel.undo()
    single_run: dict[str, Any] = {}
    if world.rank == 0:  # in a single process; all ranks compare their values with it
        single_run = train(alone, alone.training_step, lambda p: nn.utils.clip_grad_norm_(p, 0.5), steps, optimizer)
        single_run["weights"] = [parameter.detach() for parameter in alone.parameters()]
    single_run = world.broadcast_object(single_run)
    weights = zip(module.parameters(), single_run["weights"], strict=True)
    logged = zip(parallel_run["logged"], single_run["logged"], strict=True)
    return {
        "losses": max(abs(a - b) for a, b in zip(parallel_run["losses"], single_run["losses"], strict=True)),
        "norms": max(abs(a - b) for a, b in zip(parallel_run["norms"], single_run["norms"], strict=True)),
        "weights": max(float((a - b).detach().abs().max()) for a, b in weights),
        "logged": max((abs(float(a) - float(b)) for a, b in logged), default=0.0),
        "random": abs(parallel_run["random"] - single_run["random"]),
        "stored": stored / sum(p.numel() for p in alone.parameters()),
        "layers": len(plan.layers),
    }


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


# name -> module, overrides of the plan, sequence parallelism, optimizer
CASES: dict[str, tuple[Any, dict[str, str], bool, Any]] = {
    "gpt": (lambda: LanguageModel("gpt", 0.2), {}, False, adamw),
    "gpt, sgd": (lambda: LanguageModel("gpt"), {}, False, sgd),
    "manual attention": (lambda: LanguageModel("manual", 0.2), {}, False, adamw),
    "llama": (lambda: LanguageModel("llama"), {}, False, adamw),
    "vocabulary": (lambda: LanguageModel("gpt"), VOCABULARY, False, adamw),
    "tied": (lambda: LanguageModel("llama", tied=True), VOCABULARY, False, adamw),
    "logits": (Logits, VOCABULARY, False, adamw),
    "one head of keys": (OneHead, {}, False, adamw),
    "tied by hand": (HandTied, {"embed": "vocab"}, False, adamw),
    "recomputed": (lambda: LanguageModel("gpt", 0.2, recompute=True), VOCABULARY, False, adamw),
    "penalised": (Penalised, {}, False, adamw),
    "torch's layers": (lambda: Torch(0.2), {}, False, adamw),
    "sequence": (lambda: LanguageModel("gpt", 0.2), {}, True, adamw),
    "sequence, recomputed": (lambda: LanguageModel("llama", recompute=True), {}, True, adamw),
    "uncommon calls": (Called, {}, False, sgd),
    "sequence, uncommon calls": (Called, {}, True, adamw),
    "replicated": (lambda: LanguageModel("gpt"), {"*": "replicate"}, False, adamw),
    "single layers": (
        lambda: LanguageModel("gpt"),
        {"*.qkv": "replicate", "*.up": "replicate", "*.out": "colwise", "*.down": "rowwise"},
        False,
        adamw,
    ),
}


def all_cases(steps: int, names: list[str]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    results: dict[str, Any] = {}
    try:
        for name in names:
            build, overrides, sequence, optimizer = CASES[name]
            results[name] = compare(build, overrides, sequence, optimizer, steps)
    finally:
        torch.set_default_dtype(torch.float32)
    return results


@pytest.mark.parametrize("ranks", params([2], [4]))
def test_tensor_parallel_training_equals_training_in_a_single_process(ranks: int) -> None:
    names = list(CASES)
    if ranks == 4:  # two key heads can't be divided by four
        names = [
            "llama",
            "one head of keys",
            *(["gpt", "logits", "tied", "torch's layers", "sequence"] if SOAK else []),
        ]
    for results in run_ranks(all_cases, ranks, (20 if SOAK else 6) if ranks == 2 else 5, names):
        for name, differences in results.items():
            for quantity in ("losses", "norms", "weights", "logged", "random"):
                assert differences[quantity] < CLOSE, (name, quantity, differences)
            whole = name == "replicated"
            assert (differences["stored"] == 1) == whole, (name, differences)


def tried(broken: str) -> tuple[str, Any]:
    """Record the step before and after sharding; return the error, and whether the random state is unchanged."""
    world = worlds.current()
    assert world is not None
    torch.manual_seed(0)
    module = Torch(0.2) if not broken else LanguageModel("gpt", 0.2)
    module.add_module("statistics", nn.BatchNorm1d(3))

    def run() -> Any:
        return {"loss": module.training_step(batches(1, 2)[0], 0)}

    before = recorded_step(module, run)
    plan = find_tensor_plan(module, run, world.size)
    parallel = TensorParallel(module, plan, world)
    if broken == "outputs":
        linear = parallel._functions.linear
        parallel._functions.linear = lambda weight, x, local, bias=None: linear(weight, x, local * 1.01, bias)  # type: ignore[method-assign]
    if broken == "gradients":
        module.norm.bias.register_hook(lambda gradient: gradient * (1 + world.rank))
    random = torch.get_rng_state()
    try:
        mark = lambda name, output: fingerprint(parallel.ordinary(output))  # noqa: E731
        after = recorded_step(module, parallel.wrap_step(run), world, mark)
        check_unchanged(before, after, list(parallel.placements), world.size)
        error = ""
    except StepChanged as raised:
        error = str(raised)
    return error, torch.equal(random, torch.get_rng_state())


def test_the_trial_accepts_a_sharded_module_and_names_the_first_differing_output() -> None:
    for error, unchanged in run_ranks(tried, 2, ""):
        assert error == ""
        assert unchanged
    for error, _ in run_ranks(tried, 2, "outputs"):
        assert "The first output that differs is that of blocks.0.attn.qkv." in error
    for error, _ in run_ranks(tried, 2, "gradients"):
        assert error.startswith("the gradient of norm.bias has the norm")


class Counts(TorchDispatchMode):
    """Counts the elements in collectives: inputs of reductions, outputs of gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and "wait" not in func.__name__
            and "wrap" not in func.__name__
        ):
            parts = ("reduce_scatter", "reduce", "gather", func.__name__)
            name = next(part for part in parts if part in func.__name__)
            tensors = tree_leaves(args[name == "reduce_scatter"])  # of c10d: outputs are the first arguments
            bytes_sent = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            count = bytes_sent // torch.float32.itemsize  # gathers count bytes
            self.counts[name] = self.counts.get(name, 0) + count
        return output


def strides_of_a_row() -> tuple[int, ...]:
    world = worlds.current()
    assert world is not None
    return scattered(torch.ones(5, 2, 3), world, 1).stride()


def test_a_shard_of_one_row_has_the_memory_order_of_the_whole_tensor() -> None:
    """In this order dropout draws a mask: after `nn.MultiheadAttention`, shards of two samples have one row."""
    assert run_ranks(strides_of_a_row, 2) == [(3, 3, 1)] * 2


def counted(build: Any, overrides: dict[str, str], sequence: bool) -> dict[str, int]:
    """Return the exchanged elements of a step, by collective."""
    world = worlds.current()
    assert world is not None
    module = build()
    plan = find_tensor_plan(module, lambda: module.training_step(batches(1, 2)[0], 0), world.size, overrides)
    parallel = TensorParallel(module, plan, world, sequence=sequence, blocks=module.blocks)
    with Counts() as counts:
        parallel.wrap_step(module.training_step)(batches(1)[0], 0).backward()
    assert parallel.gathered == {}
    return counts.counts


def test_the_traffic_of_a_step_equals_theory() -> None:
    size = 4 * T * C  # rows, positions, features of the residual stream
    counts = {}
    for name in ("gpt", "llama", "sequence", "vocabulary"):
        kind = name if name == "llama" else "gpt"
        overrides = VOCABULARY if name == "vocabulary" else {}
        [counts[name], _] = run_ranks(counted, 2, functools.partial(LanguageModel, kind), overrides, name == "sequence")
    layers = tensor_exchange(LAYERS, size).total.reduced
    assert counts["gpt"] == {"reduce": layers}
    assert counts["llama"] == {"reduce": layers + LAYERS * C // H}  # and the gradients of norms over heads
    replicated = 6 * LAYERS * C - C  # norms and biases of rowwise layers; the weight of a norm is frozen
    halves = tensor_exchange(LAYERS, size, sequence=True).total + sum(sequence_ends(size), Passes()).total
    assert counts["sequence"] == {"gather": halves.gathered, "reduce_scatter": halves.scattered, "reduce": replicated}
    vocabulary = (embedding_exchange(size) + head_exchange(size, 4 * T)).total.reduced
    assert counts["vocabulary"] == {"reduce": layers + vocabulary}


def behaviour() -> dict[str, Any]:
    """Return the messages of errors, and checks of states."""
    world = worlds.current()
    assert world is not None
    torch.manual_seed(0)
    module = LanguageModel("llama", tied=True)
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = list(module.parameters())
    plan = find_tensor_plan(module, lambda: module.training_step(batches(1, 2)[0], 0), world.size, VOCABULARY)
    parallel = TensorParallel(module, plan, world)
    results: dict[str, Any] = {"errors": {}}
    names = dict(module.named_parameters(remove_duplicate=False))
    moments = {name: parallel.part(name, value * 2) for name, value in whole.items()}
    results["round trip"] = all(
        torch.equal(parallel.whole(name, names[name]), whole[name])
        and torch.equal(parallel.whole(name, moments[name]), whole[name] * 2)
        for name in names
    )
    results["step count"] = parallel.whole("embed.weight", torch.tensor(3.0)).item()

    def attempt(name: str, step: Any) -> None:
        try:
            parallel.wrap_step(step)(batches(1)[0], 0)
            results["errors"][name] = ""
        except (RuntimeError, NotImplementedError) as error:
            results["errors"][name] = str(error)

    mlp: Any = module.get_submodule("blocks.0.mlp")
    x = torch.randn(2, 3, C)
    attempt("in place", lambda batch, index: mlp.gate_up(x).chunk(2, -1)[0].cumsum_(-1))
    attempt("hook", lambda batch, index: mlp.gate_up(x).chunk(2, -1)[0].register_hook(print))
    attempt("sizes", lambda batch, index: results.update(sizes=[*mlp.gate_up.weight.shape, len(mlp.down.weight)]))
    try:
        mlp.gate_up(x)
    except RuntimeError as error:
        results["errors"]["outside"] = str(error)
    module.eval()
    with torch.no_grad():
        results["outputs"] = type(parallel.wrap_step(lambda batch, index: mlp.gate_up(x))(0, 0)).__name__
    module.train()
    attempt("after errors", module.training_step)
    results["parameters"] = all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    parallel.undo()
    results["undone"] = all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
    results["outside of the step"] = mlp.gate_up(x).shape == (2, 3, 4 * C)
    return results


def test_states_are_converted_between_shards_and_whole_tensors_and_unsupported_uses_are_errors() -> None:
    for results in run_ranks(behaviour, 2):
        assert results["round trip"]
        assert results["step count"] == 3.0
        assert "changes it in place" in results["errors"]["in place"]
        assert "register_hook was called on an activation or a weight of which each" in results["errors"]["hook"]
        assert "blocks.0.mlp.gate_up is sharded" in results["errors"]["outside"]
        assert results["sizes"] == [4 * C, C, C]
        assert results["errors"]["after errors"] == results["errors"]["sizes"] == ""
        assert results["outputs"] == "Tensor"
        assert results["parameters"]
        assert results["undone"]
        assert results["outside of the step"]


class FewRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, C), nn.Linear(C, 5)
        self.head.weight = self.embed.weight

    def step(self) -> Any:
        ids = torch.tensor([[0, 1, 4], [2, 3, 4]])
        logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits[:, 1:].reshape(-1, 5), ids[:, 1:].flatten())
        return loss + logits[:, :1].softmax(-1).square().mean()


def few_rows() -> tuple[float, list[int]]:
    world = worlds.current()
    assert world is not None
    torch.manual_seed(0)
    module = FewRows().double()
    before = recorded_step(module, module.step)
    plan = find_tensor_plan(module, module.step, world.size, VOCABULARY)
    parallel = TensorParallel(module, plan, world)
    mark = lambda name, output: fingerprint(parallel.ordinary(output))  # noqa: E731
    after = recorded_step(module, parallel.wrap_step(module.step), world, mark)
    check_unchanged(before, after, list(parallel.placements), world.size)

    def loss(ids: list[int], targets: list[int]) -> Any:
        return F.cross_entropy(module.head(module.embed(torch.tensor(ids))), torch.tensor(targets))

    assert parallel.wrap_step(loss)([0, 4], [-100, 4]).isfinite()
    for wrong in (([0, 5], [0, 0]), ([-1, 0], [0, 0]), ([0, 4], [0, 5]), ([0, 4], [-1, 0])):  # as in a single process
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            parallel.wrap_step(loss)(*wrong)
    rows = [len(parameter) for parameter in module.parameters()]
    parallel.undo()
    return abs((before.loss or 0) - (after.loss or 0)), rows


def test_a_rank_may_have_no_rows_of_a_vocabulary() -> None:
    results = run_ranks(few_rows, 4)
    assert [rows for _, rows in results] == [[2, 2], [2, 2], [1, 1], [0, 0]]
    assert max(difference for difference, _ in results) < CLOSE
