"""A module divided into stages trains as in one process: losses, gradient norms and weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fabricx.distributed import world as worlds
from fabricx.model_parallel.pipeline import Pipeline
from fabricx.model_parallel.pipeline_chain import find_blocks, trace_chain
from fabricx.model_parallel.pipeline_cuts import divide
from fabricx.testing import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

WORDS, WIDTH, LENGTH, STEPS, LIMIT = 29, 16, 8, 20, 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.projection, self.output = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.second, self.inner = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.projection(self.first(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.inner(self.second(x))


class Language(nn.Module):
    """A GPT without any code for a pipeline; the mask is computed before the blocks, and is no part of the stream."""

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(layers))
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor, index: int) -> Any:
        ids = batch[:, :-1]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), "logits": logits}


def make(make_module: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_module(**options).double()


def batches(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (rows, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def alone(module: Any, data: list[Any]) -> dict[str, Any]:
    """Train in one process; returns losses, norms and weights."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses, norms = [], []
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        loss = module.training_step(batch, index)["loss"]
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), LIMIT).item())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in module.named_parameters()}}


def staged(
    module: Any, data: list[Any], *, schedule: str = "1f1b", microbatches: int = 4, virtual: int = 1,
    blocks: Any = "auto", alike: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Train as a stage; returns what `alone` returns, and counts."""
    world = worlds.current()
    assert world is not None
    run = lambda: module.training_step(_first(data[0], 2), 0)  # noqa: E731
    chain = trace_chain(module, find_blocks(module, blocks, run), run)
    equal = [1.0] * len(chain.blocks) if alike else chain.costs[1:-1]
    cuts = world.broadcast_object(divide([0.0, *equal, 0.0], world.size * virtual, chain.joined))
    pipeline = Pipeline(
        module, chain, cuts, world, schedule=schedule, microbatches=microbatches, virtual=virtual
    )  # fmt: skip
    parameters = {n: p for n, p in module.named_parameters() if n in pipeline.own_names}
    stored = sum(p.untyped_storage().nbytes() for p in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses, norms, shapes = [], [], []

    def backward(output: Any) -> None:
        pipeline.backward(output["loss"] if isinstance(output, dict) else 3 * output)

    for index, batch in enumerate(data):
        optimizer.zero_grad()
        seed = lambda number: torch.manual_seed(1000 * index + number)  # noqa: E731, B023
        output = pipeline.forward_backward(module.training_step, backward, batch, index, seed=seed)
        pipeline.reduce_shared()
        square = sum(p.grad.square().sum() / len(pipeline.owners[n]) for n, p in parameters.items())
        norm = world.all_reduce(torch.as_tensor(square)).sqrt()
        for parameter in parameters.values():
            parameter.grad.mul_(torch.clamp(LIMIT / (norm + 1e-6), max=1.0))
        optimizer.step()
        norms.append(norm.item())
        losses.append(output["loss"].item() if output else 0.0)
        shapes.append(output and output["logits"].shape)
    sent = world.all_reduce(torch.tensor(pipeline.transfers.sent_bytes)).item()
    with torch.no_grad():
        module.eval()
        evaluated = pipeline.evaluate(module.training_step, data[0], 0, seed=torch.manual_seed)
    gathered = world.gather_objects({n: p.detach() for n, p in parameters.items()})
    weights = {name: value for part in gathered for name, value in part.items()}
    copies = [name for part in gathered for name in part]
    pipeline.undo(weights)
    expected = module.training_step(data[0], 0)["loss"].item()
    return {
        "losses": losses, "norms": norms, "weights": weights, "sent": sent, "stored": stored, "copies": len(copies),
        "evaluated": evaluated and evaluated["loss"].item() - expected, "states": len(optimizer.state),
        "shapes": shapes,
    }  # fmt: skip


def _first(batch: Any, rows: int) -> Any:
    return {k: v[:rows] for k, v in batch.items()} if isinstance(batch, dict) else batch[:rows]


CASES: list[tuple[dict[str, Any], dict[str, Any], int]] = [  # module, pipeline, rows
    ({}, {}, 8),
    ({}, {"schedule": "gpipe"}, 8),
    ({}, {"schedule": "zero_bubble"}, 8),
    ({"tied": True}, {"alike": False}, 8),
    ({"layers": 5}, {"microbatches": 3}, 7),
    ({"layers": 8, "tied": True}, {"virtual": 2}, 8),
    ({}, {"microbatches": 8}, 3),
]


def train_all() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [staged(make(Language, **model), batches(rows), **options) for model, options, rows in CASES]


def compare(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare all ranks with one process."""
    last, weights = found[-1], found[0]["weights"]
    assert last["losses"] == pytest.approx(expected["losses"], abs=1e-9)
    assert weights.keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-9), name
    for rank in found:
        assert rank["norms"] == pytest.approx(expected["norms"], abs=1e-9)
    assert [rank["evaluated"] is None for rank in found] == [True] * (len(found) - 1) + [False]
    assert abs(last["evaluated"]) < 1e-9


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_train_what_one_process_trains(ranks: int) -> None:
    by_rank = run_ranks(train_all, ranks)
    for number, (model, options, rows) in enumerate(CASES):
        found = [rank[number] for rank in by_rank]
        compare(found, alone(make(Language, **model), batches(rows)))
        # Traffic: an activation and a gradient for each boundary, 2 (p v - 1) B T C, and the tied weights.
        chunks = ranks * options.get("virtual", 1)
        theory = 2 * (chunks - 1) * rows * LENGTH * WIDTH * 8
        theory += 2 * WORDS * WIDTH * 8 if model.get("tied") else 0
        assert theory <= found[0]["sent"] / STEPS <= 1.02 * theory + 2000 * chunks / STEPS
        # A stage stores its own weights, and has optimizer states for these only.
        whole = sum(value.numel() * 8 for value in found[0]["weights"].values())
        tied = WORDS * WIDTH * 8 if model.get("tied") else 0
        placeholders = 8 * 100
        assert sum(rank["stored"] for rank in found) <= whole + tied + ranks * placeholders
        assert sum(rank["states"] for rank in found) == found[0]["copies"]
        assert found[-1]["shapes"] == [(rows, LENGTH, WORDS)] * STEPS
        assert found[0]["shapes"] == [None] * STEPS
    assert math.isfinite(by_rank[-1][0]["losses"][-1])
