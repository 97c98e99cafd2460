from __future__ import annotations

import re

from fabricx.model_parallel.scaling.cost import predict
from fabricx.model_parallel.scaling.dimensions import Cluster, Layout, Transformer
from fabricx.model_parallel.scaling.search import _estimate, chart, fastest, layouts, name_of, table, traffic_table

SMALL = Transformer(layers=8, hidden=512, heads=8, kv_heads=4, ffn=1024, vocabulary=1000, sequence=512)


def test_the_fastest_layout_that_fits_is_equal_to_an_exhaustive_search():
    for cluster in (Cluster(), Cluster(memory=4e8), Cluster(memory=3e8, inside=1e9, between=1e8)):
        candidates = list(layouts(SMALL, cluster, 16, 64))
        best = fastest(SMALL, cluster, candidates)
        predictions = [predict(SMALL, cluster, layout) for layout in candidates]
        fitting = [prediction for prediction in predictions if prediction.memory <= cluster.memory]
        assert best is not None
        assert best.memory <= cluster.memory
        assert best.step <= 1.001 * min(prediction.step for prediction in fitting)


def test_the_estimate_of_a_layout_is_no_longer_than_its_predicted_time():
    model = Transformer(layers=6, hidden=256, heads=8, kv_heads=4, ffn=512, vocabulary=500, sequence=512)
    cluster = Cluster()
    for layout in layouts(model, cluster, 8, 16):
        assert _estimate(model, cluster, layout) <= 1.000001 * predict(model, cluster, layout).step, layout


def test_the_smallest_layout_is_shown_if_no_layout_fits():
    cluster = Cluster(memory=1e6)
    best = fastest(SMALL, cluster, layouts(SMALL, cluster, 8, 64))
    assert best is not None
    [_, line] = table(SMALL, cluster, 64, {8: best})
    assert "doesn't fit in 0 GB" in line
    assert fastest(SMALL, cluster, []) is None
    assert "no mesh" in list(table(SMALL, cluster, 64, {8: None}))[1]


def test_layouts_divide_the_model_and_stay_within_nodes():
    cluster = Cluster(node=2)
    candidates = list(layouts(SMALL, cluster, 24, 48))
    assert len(set(candidates)) == len(candidates)
    for layout in candidates:
        assert layout.devices == 24
        assert layout.tensor <= 2
        assert layout.pipeline * layout.virtual <= SMALL.layers
        assert layout.rows * layout.data == 48
        assert layout.tensor > 1 or not layout.sequence
        assert layout.virtual == 1 or layout.microbatches % layout.pipeline == 0
    selected = list(layouts(SMALL, cluster, 24, 48, {"tensor": 2, "sharded": True}))
    assert selected == [layout for layout in candidates if layout.tensor == 2 and layout.sharded]


def test_lines_name_layouts_and_limits():
    layout = Layout(data=2, pipeline=2, virtual=2, rows=4, microbatches=4, sharded=True)
    assert name_of(layout) == "data 2 x pipeline 2 (fsdp); 1f1b, virtual 2, 4 microbatches of 1"
    predictions = {4: predict(SMALL, Cluster(between=1e6, node=1), layout), 8: None}
    first, legend = chart(predictions)
    assert re.search(r"\|[#.dtu]{60}\|  data \d+%$", first)
    assert "# products" in legend
    assert len(list(traffic_table(predictions))) == 2
