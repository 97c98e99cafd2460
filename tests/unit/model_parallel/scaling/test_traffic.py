from __future__ import annotations

import pytest

from fabricx.model_parallel.scaling.traffic import (
    Exchange,
    boundary_elements,
    context_end,
    context_exchange,
    data_exchange,
    embedding_exchange,
    head_exchange,
    sequence_ends,
    tensor_exchange,
)


def test_a_ring_sends_the_bytes_of_the_literature():
    for ranks in (1, 2, 3, 8, 512):
        assert Exchange(reduced=6.0).sent(ranks) == pytest.approx(6 * 2 * (ranks - 1) / ranks)
        assert Exchange(gathered=6.0).sent(ranks) == Exchange(scattered=6.0).sent(ranks)
        assert Exchange(gathered=6.0, scattered=6.0).sent(ranks) == pytest.approx(Exchange(reduced=6.0).sent(ranks))


def test_elements_of_different_sizes_become_bytes():
    sizes = Exchange(reduced=1, gathered=2, scattered=3, collectives=4).in_bytes(4, 2)
    assert sizes == Exchange(reduced=4, gathered=4, scattered=12, collectives=4)


def test_a_block_has_four_all_reduces_and_five_with_recomputation():
    assert tensor_exchange(3, 10.0).total.reduced == 3 * 4 * 10
    assert tensor_exchange(3, 10.0, recompute=True).total.reduced == 3 * 5 * 10
    assert tensor_exchange(3, 10.0).forward == tensor_exchange(3, 10.0).backward


def test_sequence_parallelism_sends_as_much_in_two_halves():
    whole, halves = tensor_exchange(3, 10.0).total, tensor_exchange(3, 10.0, sequence=True).total
    assert halves.sent(4) == whole.sent(4)
    assert halves.reduced == 0
    before, after = sequence_ends(10.0)
    assert (before.backward.gathered, after.forward.gathered) == (10, 10)
    assert before.forward == after.backward == Exchange()


def test_embedding_output_and_context_traffic_is_counted():
    assert (embedding_exchange(10.0) + head_exchange(10.0, 2.0)).total.reduced == 2 * 10 + 3 * 2
    assert context_exchange(3, 8.0).total == Exchange(gathered=24, reduced=24, collectives=9)
    assert context_exchange(3, 8.0, recompute=True).total.gathered == 48
    assert context_end(10.0).backward == Exchange()


def test_an_activation_and_a_gradient_cross_each_boundary():
    assert [boundary_elements(chunks, 10.0) for chunks in (1, 2, 8)] == [0, 20, 140]


def test_fsdp_exchanges_three_times_the_weights_and_under_a_pipeline_twice():
    assert data_exchange(5.0).total.sent(2) == 5
    assert data_exchange(5.0, sharded=True).total.sent(2) == 7.5
    assert data_exchange(5.0, sharded=True, batches=3).total.gathered == 30
    assert data_exchange(5.0, sharded=True, pipelined=True, batches=3).total.sent(2) == 5
