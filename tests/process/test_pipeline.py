"""A module in pipeline stages trains as in a single process: losses, gradient norms and weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fabricx.model_parallel.scaling.traffic import boundary_elements
from fabricx.testing import run_ranks
from tests.process.stages import (
    LENGTH,
    STEPS,
    WIDTH,
    WORDS,
    Block,
    Language,
    alone,
    batches,
    compare,
    compute,
    divided,
    make,
    staged,
)
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

CASES: list[tuple[dict[str, Any], dict[str, Any], int]] = [  # options of the module, options of the pipeline, rows
    ({}, {}, 8),
    ({}, {"schedule": "gpipe"}, 8),
    ({}, {"schedule": "zero_bubble"}, 8),
    ({"tied": True}, {"by_time": True}, 8),
    ({"layers": 5}, {"microbatches": 3}, 7),
    ({"layers": 8, "tied": True}, {"virtual": 2}, 8),
    ({"layers": 8}, {"virtual": 2, "channels": True}, 8),
    ({}, {"microbatches": 8}, 3),
]


def cases_of(ranks: int) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    return CASES if ranks == 2 else CASES[::2]


def train_all(ranks: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [staged(make(Language, **model), batches(rows), **options) for model, options, rows in cases_of(ranks)]


@pytest.mark.parametrize("ranks", params([2], [4]))
def test_pipeline_stages_train_the_weights_of_a_single_process(ranks: int) -> None:
    by_rank = run_ranks(train_all, ranks, ranks)
    for number, (model, options, rows) in enumerate(cases_of(ranks)):
        ranks_of_case = [rank[number] for rank in by_rank]
        compare(ranks_of_case, alone(make(Language, **model), batches(rows)))
        # Traffic: one activation and one gradient per boundary, and the tied weights.
        chunks = ranks * options.get("virtual", 1)
        theory = boundary_elements(chunks, rows * LENGTH * WIDTH) * 8
        theory += 2 * WORDS * WIDTH * 8 if model.get("tied") else 0
        assert theory <= ranks_of_case[0]["sent"] / STEPS <= 1.02 * theory + 2000 * chunks / STEPS
        # A stage stores its own weights only, and has optimizer states for these.
        whole = sum(value.numel() * 8 for value in ranks_of_case[0]["weights"].values())
        tied = WORDS * WIDTH * 8 if model.get("tied") else 0
        placeholders = 8 * 100
        assert sum(rank["stored"] for rank in ranks_of_case) <= whole + tied + ranks * placeholders
        assert sum(rank["states"] for rank in ranks_of_case) == sum(rank["copies"] for rank in ranks_of_case)
        assert ranks_of_case[-1]["shapes"] == [(rows, LENGTH, WORDS)] * STEPS
        assert ranks_of_case[0]["shapes"] == [None] * STEPS


class TakesSource(Block):
    def forward(self, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + 0.5 * source, mask)


class PassesSource(Language):
    """Each block also receives the embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesSource() for _ in range(4))

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        source = x
        for block in self.blocks:
            x = block(x, mask, source)
        return x


def train_with_source() -> dict[str, Any]:
    torch.set_num_threads(1)
    return staged(make(PassesSource), batches(6))


def test_a_tensor_that_all_blocks_receive_is_forwarded_through_all_stages() -> None:
    """The middle stage of three forwards the tensor that it has received."""
    compare(run_ranks(train_with_source, 3), alone(make(PassesSource), batches(6)))


def residual(block: nn.Module, x: Tensor) -> Any:
    return block(x) + x


class ResidualsOutside(Language):
    """Has residual connections outside of the blocks, and scales between the blocks."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
            for _ in range(2)
        )
        self.scales, self.checkpoints = nn.Parameter(torch.ones(3)), checkpoints

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        for number, (first, second) in enumerate(self.blocks):  # type: ignore[misc]
            x = first(x) + x.flip(1)
            add = functools.partial(residual, second)
            x = checkpoint(add, x, use_reentrant=False) if self.checkpoints else add(x)
            x = x * self.scales[number]
        return x * self.scales[2]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, normed: Tensor) -> Any:
        return self.inner(normed) + 0.5 * x


class Normed(Language):
    """Autograd has stored an argument of each block before the call of the block; `view`: the argument is a view."""

    def __init__(self, *, view: bool = False, residual: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.view, self.residual = view, residual

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = (x * 1.5)[:] if self.view else x * 1.5
            x = block(x, norm(x)) + self.residual * x if self.residual else block(x, norm(x))
        return x


class InCheckpoint(Language):
    """A stage begins within a function that is checkpointed in training only; the trial run doesn't checkpoint."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale, self.checkpoints = nn.Parameter(torch.ones(())), checkpoints

    def layer(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) + self.scale * x
        return x

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False) if self.checkpoints else self.layer(x)


class InPlace(Language):
    """Each block changes its argument in place, and code after the block uses the changed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


OUTSIDE: list[dict[str, Any]] = [{}, {"schedule": "zero_bubble"}, {"virtual": 2}]


def train_outside() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    runs = [staged(make(ResidualsOutside), batches(8), **options) for options in OUTSIDE]
    runs += [staged(make(ResidualsOutside, checkpoints=True), batches(8)), staged(make(Normed), batches(8))]
    runs += [staged(make(InCheckpoint, checkpoints=True), batches(8)), staged(make(InPlace), batches(8))]
    return [*runs, staged(make(Normed, view=True, residual=0.0), batches(8))]


def test_code_after_a_block_may_use_the_arguments_of_the_block() -> None:
    modules = [make(ResidualsOutside) for _ in OUTSIDE]
    modules += [make(ResidualsOutside), make(Normed), make(InCheckpoint), make(InPlace), make(Normed, residual=0.0)]
    for module, results in zip(modules, zip(*run_ranks(train_outside, 2), strict=True), strict=True):
        compare(list(results), alone(module, batches(8)))


def train_stored_view() -> str:
    try:
        staged(make(Normed, view=True), batches(8))
    except ValueError as error:
        return str(error)
    except Exception:
        return "the other rank has ended"
    return ""


def test_a_view_that_autograd_stores_before_the_block_and_code_uses_after_it_is_an_error() -> None:
    texts = run_ranks(train_stored_view, 2)
    assert any("blocks.2 takes a tensor that the code after" in text and "tensor.clone()" in text for text in texts)


class UNet(Language):
    """Blocks of the second half receive outputs of the first half; `kind` of tensor that passes blocks by."""

    def __init__(self, kind: str = "outputs", *, checkpoints: bool = False) -> None:
        super().__init__()
        self.kind, self.checkpoints = kind, checkpoints
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.sides = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shared = nn.Tanh()
        if kind == "shared":
            for block in self.blocks:
                block.inner[1] = self.shared  # type: ignore[union-attr, operator, index]

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.inner, x, mask, use_reentrant=False)
        return self.inner(x, mask)

    def inner(self, x: Tensor, mask: Tensor) -> Any:
        start, condition, kept, added = x, self.condition(x), list[Tensor](), list[Tensor]()
        shared: Any = 0.0
        for number, block in enumerate(self.blocks):
            if self.kind == "outputs" and number >= 2:
                x = x + kept.pop()
            x = block(x, mask)
            kept.append(x)
            if self.kind == "shared" and number == 1:
                shared = self.shared(x)
            if self.kind == "sides":
                added.append(self.sides[number](x))
        if self.kind == "condition":
            x *= condition
        further = {"start": start, "sides": sum(added), "heads": sum(kept), "detached": condition.detach()}
        return x + {**further, "shared": shared}.get(self.kind, 0.0)


PASSING: list[tuple[dict[str, Any], dict[str, Any]]] = [  # module, pipeline
    ({}, {}),
    ({"kind": "start"}, {"schedule": "zero_bubble"}),
    ({"kind": "condition"}, {"virtual": 2}),
    ({"kind": "sides"}, {}),
    ({"kind": "detached"}, {}),  # a gradient of zeros would let AdamW decay the weights of the condition
    ({"kind": "shared"}, {}),  # blocks call the module, too
    ({"kind": "heads"}, {"virtual": 2, "channels": True}),
]


def train_passing() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [staged(make(UNet, **model), batches(8), **options, carries=True) for model, options in PASSING]


def test_tensors_pass_blocks_by() -> None:
    for (model, _), results in zip(PASSING, zip(*run_ranks(train_passing, 2), strict=True), strict=True):
        compare(list(results), alone(make(UNet, **model), batches(8)))


def train_in_checkpoint(kind: str) -> str:
    try:
        staged(make(UNet, kind=kind, checkpoints=True), batches(8), carries=True)
    except ValueError as error:
        return str(error)
    except Exception:
        return "the other rank has ended"
    return ""


@pytest.mark.parametrize("kind", ["start", "condition"])
def test_a_tensor_that_is_computed_again_and_passes_blocks_by_is_an_error(kind: str) -> None:
    assert any("checkpoint only the block" in text for text in run_ranks(train_in_checkpoint, 2, kind))


class Irregular(Language):
    """A later batch calls a module more often, or uses the output of an early block that the first did not use."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.batches, self.condition = kind, 0, nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x = self.blocks[0](x, mask)
        condition = self.condition(x)
        if self.kind == "calls" and self.batches:
            condition = self.condition(condition)
        for block in self.blocks[1:]:  # type: ignore[misc]
            x = block(x, mask)
        x = x + condition
        return x + 0.1 * first.mean() if self.kind == "output" and self.batches else x


def train_irregular(kind: str) -> str:
    module, data = make(Irregular, kind=kind), batches(8)
    pipeline = divided(module, data[0], carries=True)
    compute(pipeline, data[0], 0)
    module.batches = 1
    try:
        compute(pipeline, data[1], 1)
    except ValueError as error:
        return str(error)
    except Exception:
        return "the other rank has ended"
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("calls", "condition is called 2 times before blocks.2, and 1 times"),
        ("output", "the output of blocks.0, which"),
    ],
)
def test_a_later_step_that_passes_other_tensors_by_is_an_error(kind: str, message: str) -> None:
    assert any(message in text for text in run_ranks(train_irregular, 2, kind))


class ChangesBetween(nn.Module):
    """Changes outputs of blocks in place; the loss also uses the batch, whose shape the outputs have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def training_step(self, batch: Tensor, index: int) -> Any:
        x = batch
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5)
        return {"loss": (x - batch).square().mean(), "logits": x}


def numbers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def train_changed() -> dict[str, Any]:
    torch.set_num_threads(1)
    return staged(make(ChangesBetween), numbers())


def test_changes_in_place_between_blocks_leave_the_batch_as_it_is() -> None:
    compare(run_ranks(train_changed, 2), alone(make(ChangesBetween), numbers()))
