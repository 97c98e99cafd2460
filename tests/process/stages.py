"""Training of a module in a single process and in pipeline stages, for tests of pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fabricx.core.module_state.rng import seed_often
from fabricx.distributed import world as worlds
from fabricx.distributed.point_to_point import open_channels
from fabricx.model_parallel.pipeline.chain import find_blocks, trace_chain
from fabricx.model_parallel.pipeline.cuts import divide
from fabricx.model_parallel.pipeline.placeholders import tensors_by_name
from fabricx.model_parallel.pipeline.stages import Pipeline
from tests.soak import SOAK

WORDS, WIDTH, LENGTH, LIMIT = 29, 16, 8, 0.5
STEPS = 20 if SOAK else 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projection, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.projection(self.first(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.inner(self.second(x))


class Language(nn.Module):
    """A GPT without code for pipelines; its mask is computed before the blocks and is not passed between stages."""

    reduction = "mean"

    def __init__(self, layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(layers))
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x

    def training_step(self, batch: Tensor, index: int) -> Any:
        ids = batch[:, :-1]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        logits = self.head(self.norm(self.body(self.embed(ids) + self.positions[: ids.shape[1]], mask)))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction=self.reduction)
        return {"loss": loss, "logits": logits}


def make(make_module: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_module(**options).double()


def batches(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (rows, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def alone(module: Any, data: list[Any]) -> dict[str, Any]:
    """Train in a single process; return losses, norms and weights."""
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


def divided(
    module: Any, batch: Any, *, schedule: str = "1f1b", microbatches: int = 4, virtual: int = 1, blocks: Any = "auto",
    by_time: bool = False, channels: bool = False, carries: bool = False,
) -> Pipeline:  # fmt: skip
    """Divide a module over all ranks."""
    world = worlds.current()
    assert world is not None
    run = lambda: module.training_step(first(batch, 2), 0)  # noqa: E731
    named = find_blocks(module, blocks, run, outside=True, carries=carries)
    chain = world.broadcast_object(trace_chain(module, named, run, carries=carries))
    equal = [0.0, *[1.0] * len(chain.blocks), 0.0]
    cuts = divide(chain.costs if by_time else equal, world.size * virtual, chain.joined)
    if channels:  # like NCCL, whose groups have neither tags nor concurrent operations
        world = replace(world, backend="gloo in the place of nccl")
    return Pipeline(
        module, chain, cuts, world, schedule=schedule, microbatches=microbatches, virtual=virtual,
        channels=open_channels(world, [range(world.size)]),
    )  # fmt: skip


def first(batch: Any, rows: int) -> Any:
    return {k: v[:rows] for k, v in batch.items()} if isinstance(batch, dict) else batch[:rows]


def backward_of(pipeline: Pipeline) -> Any:
    """Return the function that the loop calls; a factor of the loss has no effect on the surrogate."""
    return lambda output: pipeline.backward(output["loss"] if isinstance(output, dict) else 3 * output)


def compute(pipeline: Pipeline, batch: Any, index: int) -> Any:
    """Compute the gradients of a batch."""
    seed = lambda number: seed_often(1000 * index + number)  # noqa: E731
    step = pipeline.module.training_step
    return pipeline.forward_backward(step, backward_of(pipeline), batch, index, seed=seed)


def whole(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return the parameters and buffers of all stages."""
    local = {
        name: value.detach() for name, value in tensors_by_name(pipeline.module).items() if name in pipeline.own_names
    }
    gathered = pipeline.world.gather_objects(local)
    return {name: value for part in reversed(gathered) for name, value in part.items()}


def staged(module: Any, data: list[Any], **options: Any) -> dict[str, Any]:
    """Train as a pipeline stage; return the results of `alone`, and counts."""
    pipeline = divided(module, data[0], **options)
    world = pipeline.world
    parameters = {n: p for n, p in module.named_parameters() if n in pipeline.own_names and p.requires_grad}
    stored = sum(p.untyped_storage().nbytes() for p in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses, norms, shapes = [], [], []
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        output = compute(pipeline, batch, index)
        pipeline.reduce_shared()
        gradients = [(p.grad, len(pipeline.owners[n])) for n, p in parameters.items() if p.grad is not None]
        square = torch.tensor(sum(g.square().sum().item() / stages for g, stages in gradients), dtype=torch.float64)
        norm = world.all_reduce(square).sqrt()
        for gradient, _ in gradients:
            gradient.mul_(torch.clamp(LIMIT / (norm + 1e-6), max=1.0))
        optimizer.step()
        norms.append(norm.item())
        losses.append(output["loss"].item() if output else 0.0)
        shapes.append(output and output["logits"].shape)
    sent = world.all_reduce(torch.tensor(pipeline.transfers.sent_bytes)).item()
    with torch.no_grad():
        module.eval()
        evaluated = pipeline.evaluate(module.training_step, data[0], 0, seed=torch.manual_seed)
        weights = whole(pipeline)
        pipeline.undo(weights)
        expected = module.training_step(data[0], 0)["loss"].item()
    return {
        "losses": losses, "norms": norms, "weights": weights, "sent": sent, "stored": stored, "copies": len(parameters),
        "evaluated": evaluated and evaluated["loss"].item() - expected, "states": len(optimizer.state),
        "shapes": shapes,
    }  # fmt: skip


def compare(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare all ranks with a single process."""
    last, weights = ranks[-1], ranks[0]["weights"]
    assert last["losses"] == pytest.approx(expected["losses"], abs=1e-9)
    assert weights.keys() >= expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-9), name
    for rank in ranks:
        assert rank["norms"] == pytest.approx(expected["norms"], abs=1e-9)
    assert [rank["evaluated"] is None for rank in ranks] == [True] * (len(ranks) - 1) + [False]
    assert abs(last["evaluated"]) < 1e-9
