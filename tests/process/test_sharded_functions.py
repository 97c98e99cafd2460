"""Functions of torch on sharded tensors: results and gradients equal those of a single process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from fabricx.distributed import world as worlds
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_functions import ShardedFunctions
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor
from fabricx.testing import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")
B, H, T, D = 2, 4, 3, 6

# Operands: a tensor [B, H, T, D] sharded in H, a second such tensor, and two ordinary tensors that broadcast.
LOCAL: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, heads, features: x + y,
    "radd": lambda x, y, heads, features: 2.0 + x - 1.0,
    "with heads": lambda x, y, heads, features: x * heads + heads / x.abs().clamp(min=0.1),
    "with features": lambda x, y, heads, features: (x * features).sigmoid() + features,
    "with whole": lambda x, y, heads, features: x + (heads * features),
    "where": lambda x, y, heads, features: torch.where(features > 0, x, y),
    "masked_fill": lambda x, y, heads, features: x.masked_fill(torch.ones(T, D).tril() == 0, -1.0),
    "activations": lambda x, y, heads, features: F.gelu(F.silu(x)) + torch.relu(y).square(),
    "in place": lambda x, y, heads, features: (x * 1.0).add_(y).mul_(heads),
    "part in place": lambda x, y, heads, features: _rotated(x * 1.0, y, features),
    "augmented": lambda x, y, heads, features: _augmented(x * 1.0, y, features),
    "split": lambda x, y, heads, features: torch.cat([-x.chunk(2, -1)[1], x.split([3, 3], -1)[0]], -1),
    "unbind": lambda x, y, heads, features: x.unbind(2)[1] + x[:, :, 0],
    "index": lambda x, y, heads, features: x[..., ::2] * y[:, :, :, None, 1:4].squeeze(3),
    "permute": lambda x, y, heads, features: x.permute(2, 0, 3, 1).mT.movedim(0, 1).transpose(-1, -2),
    "merge": lambda x, y, heads, features: x.transpose(1, 2).reshape(B, T, H * D).view(B, T, -1, D),
    "merge rows": lambda x, y, heads, features: x.transpose(1, 2).flatten(0, 1).unflatten(0, (B, T)).flatten(2),
    "repeat": lambda x, y, heads, features: x.repeat_interleave(2, dim=1),
    "expand": lambda x, y, heads, features: x[:, :, None].expand(B, H, 2, T, D).reshape(B, H * 2, T, D),
    "softmax": lambda x, y, heads, features: x.softmax(-1) + F.log_softmax(y, dim=-2),
    "norms": lambda x, y, heads, features: F.layer_norm(x, (D,), features) + F.rms_norm(y, (D,), features),
    "norm by hand": lambda x, y, heads, features: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "reductions": lambda x, y, heads, features: x.sum(2) + y.mean(dim=2) + x.amax(2) + x.std(2) + x.logsumexp(2),
    "product": lambda x, y, heads, features: (x @ y.transpose(-2, -1)) @ x,
    "einsum": lambda x, y, heads, features: torch.einsum("bhqd, bhkd -> bhqk", x, y),
    "einsum with whole": lambda x, y, heads, features: torch.einsum("bhtd,d->bht", x, features),
    "einsum of one head": lambda x, y, heads, features: torch.einsum("bhtd,bhd->bht", x, features.expand(B, 1, D)),
    "linear": lambda x, y, heads, features: F.linear(x, features.expand(5, D), features[:5]),
    "attention": lambda x, y, heads, features: F.scaled_dot_product_attention(x, y, x, heads + torch.zeros(T, T)),
    "causal": lambda x, y, heads, features: F.scaled_dot_product_attention(x, y, y, is_causal=True, scale=0.3),
    "conversions": lambda x, y, heads, features: x.float().to(x.dtype).type_as(y).contiguous() + x.detach(),
    "other tensors' dtypes": lambda x, y, heads, features: x * _ones().to(y).sum() + _ones().type_as(x) + x.to(y),
    "other names": lambda x, y, heads, features: torch.cat([x.sum(axis=2, keepdims=True), y], axis=-2).amax(axis=-1),
    "masked queries": lambda x, y, heads, features: F.scaled_dot_product_attention(x, y, y, _masked(), dropout_p=0.3),
    "sizes": lambda x, y, heads, features: x * x.size(1) + x.shape[-1] * len(x) * y.numel(),
    "dropout": lambda x, y, heads, features: F.dropout(x, 0.4) + F.dropout(y.transpose(1, 2), 0.2).transpose(1, 2),
    "dropout in attention": lambda x, y, heads, features: F.scaled_dot_product_attention(x, y, y, dropout_p=0.3),
    "stored": lambda x, y, heads, features: x.new_zeros(x.shape) + x.new_full((1,), 2.0),
}  # fmt: skip
COMMUNICATING: dict[str, Callable[..., Any]] = {
    "scalars": lambda x, y, heads, features: x.sum() + (x * y).mean() + y.max() + x.norm(),
    "mean of half precision": lambda x, y, heads, features: (x * 0 + 60000.0).half().mean(1).double() + y.mean((0, 1)),
    "mean of nothing": lambda x, y, heads, features: x[:0].mean().nan_to_num(5.0) + x,
    "no such head": lambda x, y, heads, features: x * _raises(IndexError, lambda: x[:, H]),
    "to a device": lambda x, y, heads, features: x * (1 + isinstance(x.to("meta"), ShardedTensor)),
    "flags": lambda x, y, heads, features: _flagged(x * 1.0) * y,
    "diagonal": lambda x, y, heads, features: torch.einsum("bhhd,bhtd->bht", x[:, :, :1].expand(B, H, H, D), y),
    "written": lambda x, y, heads, features: _written(x.detach(), y.detach()) + x,
    "over heads": lambda x, y, heads, features: x.softmax(1) + y.sum(1, keepdim=True) + F.normalize(x, dim=1),
    "mixed heads": lambda x, y, heads, features: x.flip(1) + y.roll(1, 1) + x.cumsum(1),
    "one head": lambda x, y, heads, features: x[:, 1] + y[:, -1] + x[:, torch.tensor([0, 2])].sum(1),
    "part of heads": lambda x, y, heads, features: x[:, 1:3] + y.split([1, 3], 1)[1][:, :2],
    "joined heads": lambda x, y, heads, features: torch.cat([x, y], 1) + torch.stack([x, y], 2).flatten(1, 2),
    "batch and heads": lambda x, y, heads, features: torch.bmm(x.reshape(B * H, T, D), y.reshape(B * H, D, T)),
    "features of heads": lambda x, y, heads, features: F.linear(x.transpose(1, 2).flatten(2), features.repeat(4)[None]),
    "random": lambda x, y, heads, features: x * torch.rand_like(x) + F.dropout1d(y.flatten(0, 1), 0.5).view_as(x),
    "sort": lambda x, y, heads, features: x.sort(dim=-1).values + y.topk(2, dim=1).values.sum(1, keepdim=True),
    "into zeros": lambda x, y, heads, features: _copied(x, torch.zeros_like(y) + 0.0),
    "into a buffer": lambda x, y, heads, features: _copied(x, torch.zeros(B, H, T, D)),
    "items": lambda x, y, heads, features: x * float(y.sum()) + x[0, 1, 2, 3].item() + len(f"{y.sum():.3f}"),
    "kinds": lambda x, y, heads, features: x.type(y.type()) * len(torch.where(x > 0)[0]),
    "gather": lambda x, y, heads, features: x.gather(-1, torch.zeros(B, H, T, 1, dtype=torch.long)).square(),
    "convolution": lambda x, y, heads, features: F.conv1d(x.flatten(0, 1), features[:3].expand(1, T, 3)),
}  # fmt: skip


def _ones() -> Tensor:
    return torch.ones(B, 1, T, 1, dtype=torch.bool)


def _masked() -> Tensor:
    """Return an attention mask with a query that attends to no key."""
    return torch.tensor([[False] * T, [True] * T, [True, False, True]])


def _augmented(x: Tensor, y: Tensor, features: Tensor) -> Tensor:
    x += y
    x *= features
    x **= 2
    return x


def _raises(kind: Any, function: Callable[[], Any]) -> float:
    with pytest.raises(kind):
        function()
    return 2.0


def _flagged(x: Tensor) -> Tensor:
    assert F.alpha_dropout(x, 0.5, training=True, inplace=True) is x
    F.threshold(x, 0.1, 0.3, inplace=True)
    return x


def _rotated(x: Tensor, y: Tensor, features: Tensor) -> Tensor:
    x[..., :3] = x[..., 3:] * 2
    x[:, :, 1, 4:] = y[:, :, 0, :2]
    x[:, :, 0] = features
    x[..., 5:].copy_(y[..., :1]).mul_(3.0)
    return x


def _copied(x: Tensor, buffer: Tensor) -> Tensor:
    buffer[:, 1:] = x[:, 1:]
    buffer[:, :1].copy_(x[:, :1])
    return buffer * 2


def _written(x: Tensor, y: Tensor) -> Tensor:
    buffer, sums = torch.full((B, H, T, D), 7.0), torch.zeros(B, H, D)
    torch.mul(x, y, out=buffer)
    torch.sum(x, 2, out=sums)
    return buffer + sums[:, :, None]


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, T, D), (B, H, T, D), (H, 1, 1), (D,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def results(function: Callable[..., Any], activations: Activations | None) -> list[Tensor]:
    """Return the result, and the gradients of all operands."""
    torch.manual_seed(1)
    leaves = operands()
    arguments: list[Any] = list(leaves)
    if activations is None:
        result = function(*arguments)
    else:
        arguments[:2] = [activations.sharded(activations.shard_of(leaf, 1), 1, (), leaf.shape) for leaf in leaves[:2]]
        with ShardedFunctions(activations, frozenset(), lambda *_: NotImplemented, {}, lambda x: x):
            result = function(*arguments)
        result = activations.whole(result)
    assert not isinstance(result, ShardedTensor)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2), dtype=result.dtype)
    gradients = torch.autograd.grad((result * weights).sum(), leaves, allow_unused=True) if result.requires_grad else []
    return [result.detach(), *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]


def differences(names: list[str]) -> dict[str, Any]:
    world = worlds.current()
    assert world is not None
    outcomes: dict[str, Any] = {}
    torch.set_default_dtype(torch.float64)
    try:
        for name in names:
            activations = Activations(world)
            try:
                pairs = zip(results(ALL[name], None), results(ALL[name], activations), strict=True)
                worst = sum(float((a - b).abs().max()) for a, b in pairs)  # NaN if any difference is NaN
                outcomes[name] = (worst, sorted(activations.gathered))
            except Exception as error:
                outcomes[name] = f"{type(error).__name__}: {error}"
    finally:
        torch.set_default_dtype(torch.float32)
    return outcomes


ALL = LOCAL | COMMUNICATING


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_and_gradients_of_each_function_equal_those_of_a_single_process(ranks: int) -> None:
    """On three ranks, two have two heads each and one has no head, like a sequence that can't be divided evenly."""
    for outcomes in run_ranks(differences, ranks, list(ALL)):
        wrong = {
            name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str) or not outcome[0] <= 1e-12
        }
        assert wrong == {}
        if ranks == 2:
            assert {
                name: outcome[1] for name, outcome in outcomes.items() if name in LOCAL and outcome[1]
            } == {}  # none is gathered


def test_reentrant_checkpointing_is_an_error_with_the_remedy() -> None:
    """Its autograd function hides the sharded tensor."""
    activations = Activations(worlds.World())
    with ShardedFunctions(activations, frozenset(), lambda *_: NotImplemented, {}, lambda x: x):
        stream = activations.sharded(torch.randn(B, T, D, requires_grad=True) * 2, 1)
        again = checkpoint(lambda x: x + 1, stream, use_reentrant=True)
        with pytest.raises(NotImplementedError, match="pass use_reentrant=False"):
            torch.add(again, 1)
