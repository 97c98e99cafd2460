from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fabricx.model_parallel.pipeline.chain import find_blocks, trace_chain
from fabricx.model_parallel.scaling.cost import predict, predicted_parts, state_memory
from fabricx.model_parallel.scaling.dimensions import Cluster, Layout, Transformer
from tests.process.llama import MODEL, Llama

FREE = Cluster(inside=1e30, between=1e30, inside_latency=0, between_latency=0)  # free links
EVEN = Transformer(layers=16, hidden=64, heads=4, kv_heads=2, ffn=128, vocabulary=8, sequence=512)


def test_a_pipeline_of_equal_stages_is_idle_as_long_as_the_literature_says():
    for stages, virtual in ((2, 1), (4, 1), (4, 2)):
        layout = Layout(pipeline=stages, virtual=virtual, rows=16, microbatches=16)
        prediction = predict(EVEN, FREE, layout)
        expected = (stages - 1) / (virtual * 16 + stages - 1)
        assert prediction.idle == pytest.approx(expected, abs=0.01)  # the head is a small part of the last stage
        pipeline = prediction.step - prediction.seconds["update"]
        assert prediction.seconds["bubble"] / pipeline == pytest.approx(prediction.idle, rel=1e-9)


def test_without_communication_and_bubble_a_step_takes_the_time_of_its_products():
    for layout in (Layout(rows=8, microbatches=8), Layout(tensor=2, rows=8), Layout(data=2, context=2, rows=8)):
        prediction = predict(replace(EVEN, vocabulary=1), FREE, layout)
        least = FREE.products(EVEN.step_operations * 8 * layout.data / layout.devices)
        assert prediction.seconds["products"] == pytest.approx(least, rel=1e-3)
        assert prediction.step == pytest.approx(prediction.seconds["products"] + prediction.seconds["update"])


def test_recomputation_adds_the_forward_of_the_blocks_and_saves_activations():
    stored, again = (predict(EVEN, FREE, Layout(rows=8, recompute=recompute)) for recompute in (False, True))
    blocks = FREE.products(EVEN.layers * EVEN.block_operations(8))
    assert again.seconds["recompute"] == pytest.approx(blocks)
    assert again.memory < stored.memory / 2


def test_the_parts_of_the_time_add_up_and_slow_links_cost_time():
    layout = Layout(data=4, pipeline=2, tensor=2, rows=8, microbatches=8)
    fast, slow = predict(EVEN, FREE, layout), predict(EVEN, Cluster(node=4), layout)
    assert fast.seconds["tensor"] + fast.seconds["data"] < 1e-20
    assert min(slow.seconds["tensor"], slow.seconds["data"], slow.seconds["bubble"]) > 0
    assert slow.step == sum(slow.seconds.values()) > fast.step


def test_state_is_four_tensors_for_each_weight_which_fsdp_divides():
    assert state_memory(8.0, Layout(data=4)) == 32
    assert state_memory(8.0, Layout(data=4, sharded=True)) == 8
    assert state_memory(8.0, Layout(data=4, sharded=True, pipeline=2)) == 16 + 8  # whole weights and gradients
    assert state_memory(8.0, Layout(data=4, sharded=True, microbatches=2)) == 8 + 8  # whole gradients


def test_weights_and_stored_activations_are_those_that_a_trial_run_counts():
    module = Llama()
    run = lambda: module.training_step(torch.zeros(2, MODEL.sequence, dtype=torch.int64), 0)  # noqa: E731
    chain = trace_chain(module, find_blocks(module, "auto", run), run)
    predicted = predicted_parts(MODEL, Cluster(), Layout(sharded=True, data=2, element=4))
    assert predicted.sizes == chain.sizes
    # Beside them, torch stores the output of a norm before its weight (on CPUs), and statistics of norms and attention.
    beside = 2 * MODEL.hidden + 2 + MODEL.heads
    assert chain.saved[1:-1] == (predicted.saved[1] + 4 * MODEL.sequence * beside,) * MODEL.layers
