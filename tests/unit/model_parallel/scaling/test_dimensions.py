from __future__ import annotations

import pytest

from fabricx.model_parallel.scaling.dimensions import Cluster, Layout, Transformer
from fabricx.model_parallel.scaling.traffic import Exchange
from tests.process.llama import MODEL, Llama


def test_parameter_counts_match_llama_and_a_module_with_these_dimensions():
    assert Transformer().parameters == 70_553_706_496  # the published model
    assert MODEL.parameters == sum(parameter.numel() for parameter in Llama().parameters())


def test_operations_are_six_for_each_parameter_and_token_and_attention():
    model = Transformer()
    products = 6 * (model.layers * model.matrices + model.vocabulary * model.hidden) * model.sequence
    attention = 6 * model.layers * model.sequence**2 * model.hidden
    assert model.step_operations == products + attention


def test_activations_of_a_block_are_divided_within_the_pairs_only():
    model = Transformer()
    whole, divided, sharded = (model.block_activations(*args) for args in ((1,), (8,), (8, True)))
    assert divided - 4 * model.hidden == pytest.approx((whole - 4 * model.hidden) / 8)
    assert divided - sharded == pytest.approx(2 * model.hidden * 7 / 8)


def test_a_group_across_nodes_uses_the_links_of_its_ranks_on_a_node():
    cluster = Cluster()
    assert cluster.link(8, 1) == (cluster.inside, cluster.inside_latency)
    assert cluster.link(2, 8) == (cluster.between, cluster.between_latency)
    assert cluster.link(4, 4) == (2 * cluster.between, cluster.between_latency / 2)
    assert cluster.link(1024, 1)[0] == 8 * cluster.between
    assert Cluster(inside=60e9).link(1024, 1)[0] == 60e9


def test_collectives_take_the_time_of_their_bytes_and_messages():
    cluster = Cluster(inside=100.0, inside_latency=0.5)
    assert cluster.seconds(Exchange(reduced=100.0, collectives=2), 4, 1) == pytest.approx(1.5 + 2 * 3 * 0.5)
    assert cluster.seconds(Exchange(reduced=100.0, collectives=2), 1, 1) == 0


def test_a_layout_counts_its_ranks_shards_and_samples():
    layout = Layout(data=2, pipeline=3, tensor=4, rows=6, microbatches=3)
    assert (layout.devices, layout.shards, layout.samples) == (24, 1, 2)
    assert Layout(data=2, context=2, sharded=True).shards == 4
