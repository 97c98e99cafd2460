"""Functions of torch within a shard; attention is in `test_context_attention.py`, layers in the process tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fabricx.distributed.world import World
from fabricx.model_parallel.context.functions import ContextFunctions
from fabricx.model_parallel.context.sequence_shard import SequenceShard

SHARD = SequenceShard(8, 2, 1)  # positions 2, 3, 4, 5


def within(*tables: torch.Tensor) -> ContextFunctions:
    mode = ContextFunctions(World(), 1, tables)
    mode.shard = SHARD
    return mode


def test_arange_yields_the_positions_of_the_shard() -> None:
    with within():
        assert torch.arange(4).tolist() == [2, 3, 4, 5]
        assert torch.arange(end=4, dtype=torch.float64).tolist() == [2.0, 3.0, 4.0, 5.0]
        assert torch.arange(10, 14).tolist() == [12, 13, 14, 15]
        assert torch.arange(0, 8, 2).tolist() == [0, 2, 4, 6]  # frequencies
        assert torch.arange(5).tolist() == [0, 1, 2, 3, 4]
        assert torch.arange(0.0, 4.0).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_functions_outside_of_the_blocks_are_unchanged() -> None:
    mode = within()
    mode.shard = None
    with mode:
        assert torch.arange(4).tolist() == [0, 1, 2, 3]


def test_a_size_equal_to_the_shard_length_is_an_error() -> None:
    mode = within()
    mode.in_trial = True
    for length, local in ((12, 6), (12, 6)):
        mode.shard = None
        assert not mode.counts_positions(length)
        mode.counts_positions(4)  # equal in both runs: a number of features
        mode.shard = SequenceShard(12, 2, 0)
        assert mode.counts_positions(local)
        assert not mode.counts_positions(4)
    mode.in_trial, mode.shard = False, SHARD
    with mode, pytest.raises(ValueError, match="a shard has 4 positions, and the module also uses 4"):
        torch.arange(4)
    mode.shard = SequenceShard(16, 2, 0)
    assert mode.counts_positions(8)


def test_a_position_table_is_indexed_with_the_positions_of_the_shard() -> None:
    table, mask = torch.arange(20).view(10, 2), torch.ones(1, 9, 9).tril()
    with within(table, mask):
        assert table[:4, 0].tolist() == [4, 6, 8, 10]
        assert table[:3, 0].tolist() == [0, 2, 4]
        assert torch.equal(mask[:, :4, :4], torch.ones(8, 8).tril()[None, [2, 3, 4, 5]])
        assert torch.equal(mask[..., :4, :4], torch.ones(8, 8).tril()[None, [2, 3, 4, 5]])
        other = torch.arange(20)
        assert other[:4].tolist() == [0, 1, 2, 3]  # no buffer
    with (
        within(small := torch.zeros(5)),
        pytest.raises(ValueError, match="a buffer has 5 positions, but the sequence has 8"),
    ):
        small[:4]


def test_dropout_is_equal_to_that_of_the_whole_sequence() -> None:
    whole = torch.randn(2, 8, 3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = SHARD.part(F.dropout(whole, 0.5), 1)
        torch.manual_seed(1)
        with within():
            assert torch.equal(F.dropout(SHARD.part(whole, 1), 0.5), expected)
            assert F.dropout(whole, 0.5, training=False) is whole


def test_dropout_with_as_many_heads_as_positions_is_along_the_dim_of_the_trial() -> None:
    heads, mode = torch.randn(2, 4, 8, 3), within()
    mode.in_trial, mode.shard, mode.length = True, None, 8
    with torch.random.fork_rng():
        torch.manual_seed(1)
        with mode:
            expected = SHARD.part(F.dropout(heads, 0.5), 2)
        mode.in_trial, mode.shard = False, SHARD
        torch.manual_seed(1)
        with mode:
            assert torch.equal(F.dropout(SHARD.part(heads, 2), 0.5), expected)


def test_convolutions_along_the_sequence_are_refused_and_others_are_not() -> None:
    along, image = torch.randn(2, 3, 4), torch.randn(2, 3, 4, 9)
    with within(), pytest.raises(ValueError, match=r"kernel \[3\] combines neighbouring positions"):
        nn.Conv1d(3, 3, 3, padding=1)(along)
    with within(), pytest.raises(ValueError, match=r"kernel \[3\] combines neighbouring positions"):
        nn.Conv1d(3, 3, 3)(F.pad(along, (2, 0)))  # causal
    with within(), pytest.raises(ValueError, match=r"kernel \[2, 1\] combines neighbouring positions"):
        F.conv2d(image, torch.randn(3, 3, 2, 1))
    with within():
        assert nn.Conv1d(3, 3, 1)(along).shape == along.shape  # each position independently
        assert F.conv2d(image, torch.randn(3, 3, 1, 2)).shape == (2, 3, 4, 8)
        assert F.conv1d(weight=torch.randn(3, 3, 2), input=torch.randn(2, 3, 9)).shape == (2, 3, 8)  # features
    mode = within()
    mode.shard = None
    with mode:
        assert nn.Conv1d(3, 3, 3, padding=1)(along).shape == along.shape


class AheadOfItsPeer(World):
    """Rank 0 of two; numbers of the second rank are greater by 2."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor + 2 if op == "max" else tensor


def test_reductions_of_all_elements_cover_the_whole_sequence() -> None:
    mode, x = ContextFunctions(AheadOfItsPeer(), 1, ()), torch.tensor([[1.0, 3.0]])
    with mode:
        assert (x > 5).any().item() is False  # outside of the blocks
        mode.shard = SHARD
        assert (x > 5).any().item() is True
        assert (x > 0).all().item() is True
        assert (x.amax().item(), torch.max(x.half()).dtype, x.min().item()) == (5.0, torch.float16, 1.0)
        assert x.amax(-1).tolist() == [3.0]
        assert torch.max(x, x + 1).tolist() == [[2.0, 4.0]]
        with pytest.raises(ValueError, match=r"amax of all elements .* use it on x\.detach\(\)"):
            x.requires_grad_().amax()


def test_functions_over_positions_are_refused_unless_the_trial_shows_that_they_are_right() -> None:
    mode, shard, whole = within(), torch.ones(2, 4, 3), torch.ones(2, 8, 3)
    mode.within = mode.in_trial = True
    with mode:
        mode.shard = None
        _ = whole.mean(-1), whole.sum(1), whole.new_ones(3, 5).cumsum(0), whole.cumsum(1)
        mode.shard = SHARD
        _ = shard.mean(-1), shard.sum(1), shard.new_ones(3, 5).cumsum(0)  # the sum had no effect on the trial's results
        with pytest.raises(ValueError, match=r"cumsum within a block combines positions .* of which a shard does not"):
            shard.cumsum(1)  # for few samples, such as by the capacity of an expert
        mode.in_trial = False
        _ = shard.mean(-1), shard.sum(1), shard.softmax(-1), F.softmax(shard, dim=2), shard.topk(2), shard.roll(1, 2)
        _ = torch.max(shard, shard), torch.sum(input=shard, dim=-1), torch.topk(input=shard, k=2, dim=-1)
        for function in (
            lambda: shard.mean(1), lambda: shard.std(dim=(0, 1)), lambda: torch.softmax(shard, 1),
            lambda: shard.topk(2, dim=1), lambda: torch.roll(shard, 1, 1), lambda: F.normalize(shard), shard.norm,
            lambda: shard.amax(1), lambda: shard[None].argmax(-2), lambda: shard.flip(0, 1),
            lambda: torch.mean(input=shard, dim=1),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="and the trial run before training has not called it: compute"):
                function()
        mode.within, mode.shard = False, None
        assert whole.mean(1).shape == (2, 3)


def test_selections_of_positions_are_refused_even_if_they_are_right_for_the_length_of_the_trial() -> None:
    """Regression: with repeats at the end of each shard, as at 5, 6 and 9 positions, the last position was right."""
    mode, shard, whole, heads = within(), torch.ones(2, 4, 3), torch.ones(2, 8, 3), torch.ones(2, 6, 4, 3)
    mode.within = mode.in_trial = True
    with mode:
        mode.shard = None
        _ = whole[:, -1:], whole[..., 0, None, :], whole.select(1, 0), whole.narrow(1, 0, 4), whole.chunk(2, 1)
        _ = whole.split(4, 1), whole.unbind(1), heads[:, :2], whole[..., :2], whole[0], whole[:, :8]
        mode.shard = SHARD
        _ = heads[:, :2], shard[..., :2], shard[0], shard[:, :8], shard[:, None, :, -1], shard[shard > 0]
        for function in (
            lambda: shard[:, -1:], lambda: shard[..., 0, None, :], lambda: shard.select(1, 0),
            lambda: shard.narrow(1, 0, 4), lambda: shard.chunk(2, 1), lambda: shard.split(4, 1),
            lambda: shard.unbind(1),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="within a block selects positions of the sequence, of which a shard"):
                function()
        mode.in_trial = False
        _ = shard[..., :2], shard[0], shard[:, :4], heads[:, :2]
        with pytest.raises(ValueError, match=r"an index .* and the trial run before training has not called it"):
            _ = torch.ones(2, 4)[:, 1:]


def test_a_tensor_of_different_positions_is_not_read() -> None:
    mode, table = within(), torch.zeros(4)
    mode.stale = {id(table): "blocks.0.positions"}
    with mode:
        assert table.shape[0] == len(table) == 4
        for read in (lambda: table * 2, lambda: torch.stack([table]), lambda: table[:2]):
            with pytest.raises(ValueError, match=r"blocks\.0\.positions was computed within a block for"):
                read()


def test_attention_with_a_key_that_is_in_no_shard_is_an_error() -> None:
    x = torch.randn(1, 4, 8)
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        with within(), pytest.raises(ValueError, match="set both to False"):
            attention(x, x, x, need_weights=False)
        memory = torch.randn(1, 6, 8)  # whole on each rank
        with within():
            output, _ = attention(x, memory, memory, need_weights=False)
        assert torch.equal(output, attention(x, memory, memory, need_weights=False)[0])
