"""Ring attention of all ranks, compared with torch's attention over the whole sequence."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabricx.distributed import world as worlds
from fabricx.model_parallel.context import ring_attention as ring
from fabricx.model_parallel.context.attention import scaled_dot_product_attention
from fabricx.model_parallel.context.sequence_shard import SequenceShard
from fabricx.testing import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

LENGTH, FEATURES, VALUES, HEADS = 24, 3, 5, 4
ROWS = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.3
ROWS[4] = False  # a query without keys
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "scaled": {"is_causal": True, "scale": 0.3},
    "rows": {"attn_mask": ROWS},
    "padding": {"attn_mask": torch.arange(LENGTH)[None, None, None] < torch.tensor([20, 9])[:, None, None, None]},
    "bias": {"attn_mask": torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).double()},
}  # fmt: skip


def inputs(key_heads: int, value_heads: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, HEADS, LENGTH, FEATURES), (2, key_heads, LENGTH, FEATURES), (2, value_heads, LENGTH, VALUES)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def attended(options: dict[str, Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's attention, and the gradients of its inputs and of an added mask, for a fixed loss."""
    world = worlds.current()
    assert world is not None
    shard = SequenceShard(tensors[0].shape[2], world.size, world.rank)
    parts = [shard.part(tensor, 2).requires_grad_() for tensor in tensors]
    mask, options = options.get("attn_mask"), dict(options)
    if mask is not None:  # as an argument of a block is divided
        mask = shard.part(mask, mask.dim() - 2 if mask.shape[-2] > 1 else mask.dim() - 1)
        options["attn_mask"] = mask = mask.requires_grad_(mask.is_floating_point())
    output = scaled_dot_product_attention(world, shard, *parts, ring=True, **options)
    loss = output * weights(output.shape[:2]).index_select(2, shard.positions)
    loss.narrow(2, 0, shard.filled).sum().backward()
    outputs = [*parts, *([mask] if mask is not None and mask.requires_grad else [])]
    return [output.detach(), *(tensor.grad for tensor in outputs)]  # type: ignore[list-item]


def weights(batch: Any) -> Tensor:
    return torch.linspace(-1, 2, math.prod(batch) * LENGTH * VALUES, dtype=torch.float64).view(*batch, LENGTH, VALUES)


def every_kind(cases: list[tuple[dict[str, Any], list[Tensor]]], most: int) -> list[list[Tensor]]:
    with mock.patch.object(ring, "SCORES", most):
        return [attended(*case) for case in cases]


@pytest.mark.parametrize(("ranks", "most", "length"), [(2, 2**24, LENGTH), (3, 40, LENGTH), (3, 40, LENGTH - 5)])
def test_attention_and_gradients_are_equal_to_those_of_the_whole_sequence(ranks: int, most: int, length: int) -> None:
    cases = [(options, inputs(HEADS, HEADS, torch.float64)) for options in KINDS.values()]
    for heads in ((2, 2), (1, 2)):
        cases += [({**KINDS[kind], "enable_gqa": True}, inputs(*heads, torch.float64)) for kind in ("causal", "bias")]
    cases = [
        ({n: v[..., :length, :length] if n == "attn_mask" else v for n, v in options.items()},
         [tensor[:, :, :length] for tensor in tensors])
        for options, tensors in cases
    ]  # fmt: skip
    by_rank = run_ranks(every_kind, ranks, cases, most)
    for number, (options, tensors) in enumerate(cases):
        whole = [tensor.clone().requires_grad_() for tensor in tensors]
        mask = options.get("attn_mask")
        learned = [mask.clone().requires_grad_()] if mask is not None and mask.is_floating_point() else []
        expected = F.scaled_dot_product_attention(
            *whole, **{**options, **({"attn_mask": learned[0]} if learned else {})}
        )
        (expected * weights(expected.shape[:2])[:, :, :length]).sum().backward()
        shards = [SequenceShard(length, ranks, rank) for rank in range(ranks)]
        for index, target in enumerate([expected, *(tensor.grad for tensor in (*whole, *learned))]):
            parts = torch.stack([results[number][index] for results in by_rank])
            dim = 1 if index == 4 else 2
            actual = shards[0].ordered(parts, dim)
            assert target is not None
            assert torch.allclose(actual, target, rtol=0, atol=1e-12), (options, index)


def test_an_output_in_16_bits_is_rounded_once() -> None:
    options, tensors = {"is_causal": True}, inputs(HEADS, HEADS, torch.bfloat16)
    parts = [results[0][0] for results in run_ranks(every_kind, 2, [(options, tensors)], 40)]
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors), **options)  # type: ignore[arg-type]
    outputs = SequenceShard(LENGTH, 2, 0).ordered(torch.stack(parts), 2)
    assert outputs.dtype is torch.bfloat16
    assert torch.equal(outputs, exact.to(torch.bfloat16))


def with_dropout(seed: int) -> list[Tensor]:
    """Return an attention with dropout, its repetition, its gradients, and their finite differences."""
    world = worlds.current()
    assert world is not None
    shard = SequenceShard(LENGTH, world.size, world.rank)
    parts = [shard.part(tensor, 2) for tensor in inputs(HEADS, HEADS, torch.float64)]

    def loss(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        output = scaled_dot_product_attention(world, shard, *tensors, dropout_p=0.4, is_causal=True, ring=True)  # type: ignore[arg-type]
        return output, (output * weights((2, HEADS)).index_select(2, shard.positions)).sum()

    leaves = [part.clone().requires_grad_() for part in parts]
    output, value = loss(*leaves)
    drawn = torch.rand(1)
    value.backward()
    changes = [
        torch.randn(part.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) for part in parts
    ]
    step = 1e-6
    ends = [loss(*(p + sign * step * c for p, c in zip(parts, changes, strict=True)))[1] for sign in (1, -1)]
    total = world.all_reduce(torch.stack([ends[0] - ends[1]])) / step / 2
    slopes = sum(float((leaf.grad * change).sum()) for leaf, change in zip(leaves, changes, strict=True))  # type: ignore[operator]
    slope = world.all_reduce(torch.tensor([slopes], dtype=torch.float64))
    return [output.detach(), loss(*parts)[0], total, slope, drawn]


def test_dropout_is_the_same_in_the_backward_and_differs_between_ranks() -> None:
    first, second = run_ranks(with_dropout, 2, 5)
    for output, again, difference, slope, _ in (first, second):
        assert torch.equal(output, again)
        assert torch.allclose(difference, slope, rtol=1e-6)
    assert torch.equal(first[-1], second[-1])  # the common stream of random numbers
    other = run_ranks(with_dropout, 2, 6)
    assert not torch.equal(other[0][0], first[0])


def means(rounds: int) -> Tensor:
    """Return the mean of attention with dropout over many draws, which is equal to attention without dropout."""
    world = worlds.current()
    assert world is not None
    shard = SequenceShard(LENGTH, world.size, world.rank)
    parts = [shard.part(tensor, 2) for tensor in inputs(HEADS, HEADS, torch.float64)]
    torch.manual_seed(3)
    options: dict[str, Any] = {"is_causal": True, "ring": True}
    drawn = [scaled_dot_product_attention(world, shard, *parts, dropout_p=0.3, **options) for _ in range(rounds)]
    return torch.stack(drawn).mean(0) - scaled_dot_product_attention(world, shard, *parts, **options)


def test_dropout_keeps_the_expected_attention() -> None:
    for difference in run_ranks(means, 2, 60):
        # Each output has a standard deviation of at most 1 per draw; 960 outputs are averaged.
        assert abs(float(difference.mean())) < 0.02
        assert float(difference.abs().max()) < 1.0


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors, and counts elements that are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and "send" in func.__name__:
            self.sent += sum(tensor.numel() for tensor in args[0])
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.sizes.update(leaf.shape)
        return output


def counted(key_heads: int) -> tuple[set[int], int, int]:
    world = worlds.current()
    assert world is not None
    shard = SequenceShard(LENGTH, world.size, world.rank)
    parts = [shard.part(x, 2).requires_grad_() for x in inputs(key_heads, key_heads, torch.float64)]
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with Shapes() as shapes:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = scaled_dot_product_attention(world, shard, *parts, is_causal=True, enable_gqa=True, ring=True)
        output.sum().backward()
    return shapes.sizes, sum(saved.values()), shapes.sent


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_holds_all_keys_and_memory_and_messages_match_theory(ranks: int) -> None:
    kept = 2
    keys = 2 * kept * LENGTH * (FEATURES + VALUES)  # of the whole sequence
    for sizes, saved, sent in run_ranks(counted, ranks, kept):
        assert LENGTH not in sizes
        # Queries, keys, values and outputs of the shard, and the logarithm of a sum for each query and head.
        assert saved == (2 * HEADS * LENGTH * (FEATURES + VALUES + 1) + keys) / ranks
        # Keys and values visit the other ranks in the forward and the backward; their gradients also return.
        assert sent == 2 * keys * (ranks - 1) / ranks + keys
