"""The fastest mesh for a number of devices, by prediction; and the lines that `fabricx simulate` prints about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from fabricx.model_parallel.pipeline.cuts import stages_of, times_of
from fabricx.model_parallel.scaling.cost import (
    FULL,
    Prediction,
    cut,
    fullest,
    predict,
    predicted_parts,
    state_memory,
    working_memory,
)  # fmt: skip
from fabricx.model_parallel.scaling.dimensions import Cluster, Layout, Transformer

SAMPLES: Final = (1, 2, 4)  # of a microbatch
VIRTUAL: Final = (1, 2, 4, 5)
LETTERS: Final = {
    "products": "#", "recompute": "r", "tensor": "t", "context": "c", "bubble": ".", "data": "d", "update": "u",
}  # fmt: skip
SMALLEST: Final = 50  # layouts that are compared if none fits
WIDTH: Final = 60  # characters of the longest bar


def layouts(
    model: Transformer,
    cluster: Cluster,
    devices: int,
    batch: int,
    fixed: Mapping[str, object] | None = None,
    element: int = 2,
) -> Iterator[Layout]:
    """Yield the meshes that a search compares: those that divide the model evenly, and stay within its limits.

    Args:
        model: dimensions of the transformer.
        cluster: tensor groups stay within its nodes.
        devices: number of ranks.
        batch: samples of a step, over all data ranks.
        fixed: values that fields of the layout have to have.
        element: bytes of an element of activations.
    """
    for tensor in _divisors(devices, min(cluster.node, model.kv_heads)):
        if model.kv_heads % tensor or model.ffn % tensor:
            continue
        for pipeline in _divisors(devices // tensor, model.layers):
            for context in _divisors(devices // tensor // pipeline, 16):
                data = devices // tensor // pipeline // context
                if batch % data or model.sequence % (2 * context):  # the cost has no rounding of shards
                    continue
                sizes = Layout(data, pipeline, context, tensor, rows=batch // data, element=element)
                yield from (candidate for candidate in _options(model, sizes) if _agrees(candidate, fixed or {}))


def _options(model: Transformer, sizes: Layout) -> Iterator[Layout]:
    """Yield the layouts with the sizes of a layout."""
    orders = [("1f1b", virtual) for virtual in VIRTUAL] + [("zero_bubble", 1)] if sizes.pipeline > 1 else [("1f1b", 1)]
    for samples in (samples for samples in SAMPLES if sizes.rows % samples == 0):
        microbatches = sizes.rows // samples
        for schedule, virtual in orders:
            if sizes.pipeline * virtual > model.layers or (virtual > 1 and microbatches % sizes.pipeline):
                continue
            for sharded in (False, True) if sizes.data * sizes.context > 1 else (False,):
                for sequence in (False, True) if sizes.tensor > 1 else (False,):
                    for recompute in (False, True):
                        yield replace(
                            sizes, microbatches=microbatches, schedule=schedule, virtual=virtual, sharded=sharded,
                            sequence=sequence, recompute=recompute,
                        )  # fmt: skip


def _agrees(layout: Layout, fixed: Mapping[str, object]) -> bool:
    return all(getattr(layout, name) == value for name, value in fixed.items())


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def fastest(model: Transformer, cluster: Cluster, candidates: Iterable[Layout]) -> Prediction | None:
    """Return the prediction of the fastest layout that fits in the memory of a device, or else of the smallest layout.

    Layouts are simulated in the order of an estimate of their time, until it is longer than the best time.

    Args:
        model: dimensions of the transformer.
        cluster: speeds of devices and links, and memory.
        candidates: result of `layouts`.

    Returns:
        None without a candidate.
    """
    by_memory = sorted(((_least_memory(model, layout), layout) for layout in candidates), key=lambda pair: pair[0])
    small = [layout for least, layout in by_memory if least <= cluster.memory]
    estimates = sorted(((_estimate(model, cluster, layout), layout) for layout in small), key=lambda pair: pair[0])
    best: Prediction | None = None
    for estimate, layout in estimates:
        if best is not None and estimate >= best.step:
            break
        if _memory(model, cluster, layout) <= cluster.memory:
            prediction = predict(model, cluster, layout)
            best = prediction if best is None or prediction.step < best.step else best
    if best is None and by_memory:
        few = [layout for _, layout in by_memory[:SMALLEST]]
        return predict(model, cluster, min(few, key=lambda layout: _memory(model, cluster, layout)))
    return best


def _memory(model: Transformer, cluster: Cluster, layout: Layout) -> float:
    measured = predicted_parts(model, cluster, layout)
    numbers = (layout.pipeline, layout.schedule, layout.virtual, layout.microbatches, layout.rows)
    return fullest(model, layout, stages_of(measured, cut(model, layout, measured), *numbers))


def _estimate(model: Transformer, cluster: Cluster, layout: Layout) -> float:
    """Return a lower bound of the time of a step: each rank computes all microbatches, and waits for earlier chunks.

    A rank waits for the first forward of earlier chunks, and these for its last backward; later ranks may compute while
    it does. With deferred weight gradients it may still compute while the earlier chunks have their last backward.
    """
    measured = predicted_parts(model, cluster, layout)
    chunks, block = times_of(measured, cut(model, layout, measured)), measured.parts[1]
    forward = block.products + sum(block.forward.values())
    waits = forward / block.total if layout.schedule == "zero_bubble" else 1.0
    return max(
        layout.microbatches * sum(chunks[rank :: layout.pipeline]) + waits * sum(chunks[:rank])
        for rank in range(layout.pipeline)
    )


def _least_memory(model: Transformer, layout: Layout) -> float:
    """Return a lower bound of the bytes on a rank: an equal part of the weights, and the block that is computed."""
    weights = FULL * model.parameters / layout.tensor / layout.pipeline
    return state_memory(weights, layout) + working_memory(model, layout)


# -- lines -------------------------------------------------------------------------------------------------------------


def name_of(layout: Layout) -> str:
    """Return a layout in words.

    Args:
        layout: degrees of parallelism; an axis of size 1 is omitted, except for "data".

    >>> name_of(Layout(data=4, pipeline=2, tensor=8, rows=8, microbatches=8, recompute=True))
    'data 4 x pipeline 2 x tensor 8; 1f1b, 8 microbatches of 1; recompute'
    """
    axes = " x ".join(
        f"{axis} {getattr(layout, axis)}"
        for axis in ("data", "pipeline", "context", "tensor")
        if getattr(layout, axis) > 1 or axis == "data"
    )
    order = f"{layout.schedule}{f', virtual {layout.virtual}' if layout.virtual > 1 else ''}, "
    kind = "microbatch" if layout.pipeline > 1 else "batch"
    batches = f"{layout.microbatches} {kind}{'es' if layout.microbatches > 1 else ''} of {layout.samples:g}"
    extra = [name for name in ("sequence", "recompute") if getattr(layout, name)]
    return "; ".join([
        axes + (" (fsdp)" if layout.sharded else ""), (order if layout.pipeline > 1 else "") + batches,
        *([", ".join(extra)] if extra else []),
    ])  # fmt: skip


def table(
    model: Transformer, cluster: Cluster, batch: int, predictions: Mapping[int, Prediction | None]
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of a table of predictions, by number of devices.

    Args:
        model: dimensions of the transformer.
        cluster: speeds of devices and links.
        batch: samples of a step.
        predictions: results of `fastest`.
    """
    yield f"{'devices':>7} {'step s':>8} {'tokens/s':>10} {'of peak':>7} {'idle':>5} {'memory GB':>9}  mesh"
    for devices, prediction in predictions.items():
        if prediction is None:
            yield f"{devices:>7}  no mesh: {batch} samples can't be divided over it; set another batch"
            continue
        tokens = batch * model.sequence / prediction.step
        used = batch * model.step_operations / prediction.step / devices / cluster.flops
        room = "" if prediction.memory <= cluster.memory else f"; doesn't fit in {cluster.memory / 1e9:.0f} GB"
        yield (
            f"{devices:>7} {prediction.step:>8.2f} {tokens:>10,.0f} {used:>7.0%} {prediction.idle:>5.0%} "
            f"{prediction.memory / 1e9:>9.1f}  {name_of(prediction.layout)}{room}"
        )


def traffic_table(predictions: Mapping[int, Prediction | None]) -> Iterator[str]:
    """Yield the lines of a table of the bytes that a rank sends in a step.

    Args:
        predictions: results of `fastest`, by number of devices.
    """
    axes = ("tensor", "context", "pipeline", "data")
    yield f"{'devices':>7} " + " ".join(f"{axis:>9}" for axis in axes) + "  GB that a rank sends in a step"
    for devices, prediction in predictions.items():
        if prediction is not None:
            yield f"{devices:>7} " + " ".join(f"{prediction.sent[axis] / 1e9:>9.1f}" for axis in axes)


def chart(predictions: Mapping[int, Prediction | None]) -> Iterator[str]:
    """Yield bars that show where the time of a device goes.

    Args:
        predictions: results of `fastest`, by number of devices.
    """
    for devices, prediction in predictions.items():
        if prediction is not None:
            yield f"{devices:>7} |{_bar(list(prediction.seconds.values()))}|  {_limit(prediction)}"
    yield f"        {', '.join(f'{letter} {name}' for name, letter in LETTERS.items())}"


def _bar(seconds: Sequence[float]) -> str:
    """Return letters in proportion to times.

    >>> len(_bar([3.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    60
    """
    total, letters, begin, before = sum(seconds), list(LETTERS.values()), 0, 0.0
    bar = ""
    for letter, time in zip(letters, seconds, strict=True):
        before += time
        end = round(before / total * WIDTH)
        bar += letter * (end - begin)
        begin = end
    return bar


def _limit(prediction: Prediction) -> str:
    """Return the name and percentage of the largest part of the time besides matrix products."""
    others = {name: time for name, time in prediction.seconds.items() if name != "products"}
    name = max(others, key=lambda key: others[key])
    return f"{name} {others[name] / prediction.step:.0%}"
