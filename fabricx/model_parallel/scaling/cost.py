"""Predicted time and memory of a transformer's step on a mesh, from its dimensions and the speeds of a cluster.

Stages are cut by `pipeline.cuts.divide`, filled by `pipeline.cuts.stages_of` and timed by `pipeline.schedule.simulate`,
as those of a run; their times are computed from numbers of operations and bytes, where a run measures them.
`traffic.py` has what the axes exchange. Docs: docs/scaling.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fabricx.model_parallel.pipeline.cuts import STATE, Cuts, Stage, divide, stages_of, times_of
from fabricx.model_parallel.pipeline.schedule import simulate
from fabricx.model_parallel.scaling.dimensions import Cluster, Layout, Transformer
from fabricx.model_parallel.scaling.traffic import (
    Exchange,
    Passes,
    boundary_elements,
    context_end,
    context_exchange,
    data_exchange,
    embedding_exchange,
    head_exchange,
    sequence_ends,
    tensor_exchange,
)  # fmt: skip

Axes = Mapping[str, Passes]
FULL: Final = 4  # bytes of an element of weights, gradients and moments
UPDATE: Final = 7  # tensors that an update reads and writes: weight, gradient, two moments; weight and moments again
NORMS: Final = 2  # of a block


@dataclass(frozen=True)
class Part:
    """Seconds of a microbatch in a part of the module, on one rank.

    Attributes:
        products: time of the products of the forward; those of the backward take twice as long.
        again: time of the products of a recomputation.
        forward, backward: times of collectives, by axis.
    """

    products: float
    again: float
    forward: Mapping[str, float]
    backward: Mapping[str, float]

    @property
    def total(self) -> float:
        """Return the time of forward and backward."""
        return 3 * self.products + self.again + sum(self.forward.values()) + sum(self.backward.values())


@dataclass(frozen=True)
class Predicted:
    """What a trial run measures, in place of a `Chain`: see `pipeline.cuts.Measured`.

    Attributes:
        parts: times before the blocks, of each block, and after the blocks.
        costs: times of a microbatch, by part.
        sizes: bytes of the weights of a rank, before the data axis divides them.
        saved: bytes of the activations of a sample, with the 16-bit copies of weights that a microbatch keeps.
    """

    parts: tuple[Part, ...]
    costs: tuple[float, ...]
    sizes: tuple[float, ...]
    saved: tuple[float, ...]


def predicted_parts(model: Transformer, cluster: Cluster, layout: Layout) -> Predicted:
    """Return times, weights and activations of the parts of a module on one rank of a mesh.

    Args:
        model: dimensions of the transformer.
        cluster: speeds of devices and links.
        layout: mesh.
    """
    tensor, context = layout.tensor, layout.context

    def part(operations: float, again: bool, axes: Axes) -> Part:
        products = cluster.products(operations)
        forward = {axis: _seconds(cluster, layout, axis, passes.forward) for axis, passes in axes.items()}
        backward = {axis: _seconds(cluster, layout, axis, passes.backward) for axis, passes in axes.items()}
        return Part(products, products * again, forward, backward)

    first, block, last = exchanges(model, layout)
    before = part(0.0, False, first)
    middle = part(model.block_operations(layout.samples) / tensor / context, layout.recompute, block)
    after = part(model.head_operations(layout.samples) / tensor, False, last)
    weights, table = model.matrices / tensor + model.norms, model.vocabulary * model.hidden / tensor
    sizes = tuple(FULL * size for size in (table, *[weights] * model.layers, table + model.hidden))
    parts = (before, *[middle] * model.layers, after)
    costs = (before.total, *[middle.total] * model.layers, after.total)
    return Predicted(parts, costs, sizes, _saved(model, layout, weights))


def _seconds(cluster: Cluster, layout: Layout, axis: str, exchange: Exchange) -> float:
    """Return the time of an exchange of activations along an axis of a model group."""
    ranks, stride = {"tensor": (layout.tensor, 1), "context": (layout.context, layout.tensor)}[axis]
    return cluster.seconds(exchange.in_bytes(layout.element, layout.element), ranks, stride)


def exchanges(model: Transformer, layout: Layout) -> tuple[Axes, Axes, Axes]:
    """Return what a microbatch exchanges along the axes of a model group: before the blocks, in a block, after them.

    Args:
        model: dimensions of the transformer.
        layout: mesh; embedding and head are divided along the vocabulary.
    """
    positions = layout.samples * model.sequence
    whole, stream = positions * model.hidden, positions * model.hidden / layout.context
    keys = positions * 2 * model.keys / layout.tensor
    first, last = embedding_exchange(whole), head_exchange(whole, positions)
    if layout.sequence:
        before, after = sequence_ends(stream)
        first, last = first + before, last + after
    matrices = tensor_exchange(1, stream, sequence=layout.sequence, recompute=layout.recompute)
    if layout.sequence:  # each rank has the gradients of norms for its positions
        matrices += Passes(backward=Exchange(reduced=model.norms, collectives=2 * NORMS))
    block = {"tensor": matrices, "context": context_exchange(1, keys, recompute=layout.recompute)}
    return {"tensor": first}, block, {"tensor": last, "context": context_end(whole)}


def _saved(model: Transformer, layout: Layout, weights: float) -> tuple[float, ...]:
    """Return the bytes that a sample stores in each part."""
    positions, element = model.sequence / layout.context, layout.element
    # Mixed precision converts weights in each microbatch; fsdp without stages has gathered them in 16 bits.
    converts = element < FULL and not (layout.sharded and layout.pipeline == 1)
    copied = element / layout.samples if converts else 0.0
    if layout.recompute:
        block = element * model.sequence * model.hidden / layout.stream_ranks
    else:
        elements = model.block_activations(layout.tensor, layout.sequence) + model.keys * 2 * (layout.context - 1)
        block = element * positions * elements + copied * weights
    table = model.vocabulary * model.hidden / layout.tensor
    # Logits as the head returns them, in 32 bits if these are others, and their probabilities.
    logits = ((element if element < FULL else 0) + 2 * FULL) * model.vocabulary / layout.tensor
    head = model.sequence * (logits + 2 * element * model.hidden) + copied * table
    return (element * model.sequence * model.hidden, *[block] * model.layers, head)


# -- memory ------------------------------------------------------------------------------------------------------------


def state_memory(weights: float, layout: Layout) -> float:
    """Return the bytes of weights, gradients and two moments of a rank while it computes.

    Args:
        weights: bytes of the weights of a rank, before the data axis divides them.
        layout: mesh. Under a pipeline fsdp has whole weights and gradients during a step; otherwise only blocks,
            and whole gradients where several batches are accumulated.

    >>> state_memory(8.0, Layout(data=4)), state_memory(8.0, Layout(data=4, sharded=True))
    (32.0, 8.0)
    """
    if layout.shards == 1:
        return STATE * weights
    whole = 2 * weights if layout.pipeline > 1 else weights if layout.microbatches > 1 else 0.0
    return whole + STATE * weights / layout.shards


def working_memory(model: Transformer, layout: Layout) -> float:
    """Return the bytes that the block that is computed needs beside what it stores.

    Args:
        model: dimensions of the transformer.
        layout: mesh.
    """
    positions = layout.samples * model.sequence / layout.context
    activations = layout.element * positions * model.block_activations(layout.tensor, layout.sequence)
    weights = model.matrices / layout.tensor + model.norms
    if layout.sharded and layout.pipeline == 1:  # this block and the next; embedding and head stay gathered
        gathered = 2 * weights + model.ends(layout.tensor)
        return activations + layout.element * gathered + FULL * (weights + model.ends(layout.tensor))
    return activations + (layout.element * weights if layout.recompute and layout.element < FULL else 0.0)


def fullest(model: Transformer, layout: Layout, stages: Sequence[Stage]) -> float:
    """Return the bytes of the rank that needs the most memory.

    Args:
        model: dimensions of the transformer.
        layout: mesh.
        stages: blocks, weights and activations of each stage.
    """
    most = max(state_memory(stage.parameters, layout) + stage.activations for stage in stages)
    return most + working_memory(model, layout)


# -- a step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """Predicted step of a layout.

    Attributes:
        layout: mesh.
        cuts: blocks of each chunk of the pipeline.
        stages: blocks, weights and activations of each stage.
        memory: bytes of the fullest rank.
        seconds: time of a step, by cause: "products", "recompute", "tensor", "context", "bubble", "data", "update";
            without communication that computation hides.
        idle: part of the pipeline's time in which a rank computes nothing, as the printed plan has it.
        sent: bytes that a rank sends in a step along "tensor", "context", "pipeline" and "data".
    """

    layout: Layout
    cuts: Cuts
    stages: tuple[Stage, ...]
    memory: float
    seconds: Mapping[str, float]
    idle: float
    sent: Mapping[str, float]

    @property
    def step(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())


def predict(model: Transformer, cluster: Cluster, layout: Layout) -> Prediction:
    """Return time and memory of a step.

    Args:
        model: dimensions of the transformer.
        cluster: speeds of devices and links.
        layout: mesh.

    Raises:
        ValueError: there are fewer blocks than chunks of the pipeline.
    """
    p, m = layout.pipeline, layout.microbatches
    measured = predicted_parts(model, cluster, layout)
    cuts = cut(model, layout, measured)
    stages = stages_of(measured, cuts, p, layout.schedule, layout.virtual, m, layout.rows)
    products, again = (sum(getattr(part, name) for part in measured.parts) / p for name in ("products", "again"))
    forward, backward = (
        {axis: sum(getattr(part, name).get(axis, 0.0) for part in measured.parts) / p for axis in ("tensor", "context")}
        for name in ("forward", "backward")
    )
    speed, latency = cluster.link(p, layout.tensor * layout.context)
    transfer = layout.samples * model.sequence * model.hidden / layout.stream_ranks * layout.element / speed + latency
    times = (products + sum(forward.values()), products + again + sum(backward.values()), products)
    simulated = simulate(
        layout.schedule, p, layout.virtual, m, forward=times[0], input_gradient=times[1], weight_gradient=times[2],
        costs=times_of(measured, cuts), transfer=transfer,
    )  # fmt: skip
    weights = max(stage.parameters for stage in stages)
    seconds = {
        "products": 3 * m * products,
        "recompute": m * again,
        **{axis: m * (forward[axis] + backward[axis]) for axis in ("tensor", "context")},
        "bubble": simulated.time * simulated.idle,
        "data": _data_seconds(model, cluster, layout, weights, times[0], times[1] + times[2]),
        "update": UPDATE * weights / layout.shards / cluster.memory_speed,
    }
    memory, sent = fullest(model, layout, stages), sent_bytes(model, layout, stages)
    return Prediction(layout, cuts, tuple(stages), memory, seconds, simulated.idle, sent)


def cut(model: Transformer, layout: Layout, measured: Predicted) -> Cuts:
    """Return the blocks of each chunk of the pipeline.

    Args:
        model: dimensions of the transformer.
        layout: mesh.
        measured: result of `predicted_parts`.

    Raises:
        ValueError: there are fewer blocks than chunks.
    """
    costs = measured.costs
    return _cuts(costs[0], costs[1], costs[-1], model.layers, layout.pipeline * layout.virtual)


@functools.lru_cache(4096)
def _cuts(first: float, block: float, last: float, layers: int, chunks: int) -> Cuts:
    return divide([first, *[block] * layers, last], chunks)


def _data_seconds(
    model: Transformer, cluster: Cluster, layout: Layout, weights: float, forward: float, backward: float
) -> float:  # fmt: skip
    """Return the time of the data axis that the computation of a microbatch does not hide."""
    ranks, stride = layout.data * layout.context, layout.tensor * layout.pipeline
    passes = data_exchange(weights / FULL, sharded=layout.sharded, pipelined=layout.pipeline > 1)
    if layout.pipeline > 1:  # before the first microbatch and after the last: nothing hides it
        return cluster.seconds(passes.total.in_bytes(FULL, FULL), ranks, stride)
    if not layout.sharded:
        return max(0.0, cluster.seconds(passes.backward.in_bytes(FULL, FULL), ranks, stride) - backward)
    # Weights are gathered in 16 bits, and gradients summed in 32 bits, block by block.
    parts = (
        Exchange(gathered=passes.forward.gathered, collectives=model.layers),
        Exchange(scattered=passes.backward.scattered, collectives=model.layers),
    )
    gather, scatter = (cluster.seconds(part.in_bytes(FULL, layout.element), ranks, stride) for part in parts)
    earlier = (layout.microbatches - 1) * max(0.0, gather - backward)
    return layout.microbatches * max(0.0, gather - forward) + earlier + max(0.0, gather + scatter - backward)


def sent_bytes(model: Transformer, layout: Layout, stages: Sequence[Stage]) -> dict[str, float]:
    """Return the bytes that a rank sends in a step along each axis; the most of all stages.

    Args:
        model: dimensions of the transformer.
        layout: mesh.
        stages: stages of the prediction.
    """
    first, block, last = exchanges(model, layout)
    sent = {}
    for axis, ranks in (("tensor", layout.tensor), ("context", layout.context)):
        per_block, before, after = (
            part[axis].total.in_bytes(layout.element, layout.element).sent(ranks) if axis in part else 0.0
            for part in (block, first, last)
        )
        counts = [sum(end + 1 - begin for begin, end in stage.blocks) * per_block for stage in stages]
        counts[0] += before
        counts[-1] += after
        sent[axis] = layout.microbatches * max(counts)
    stream = layout.rows * model.sequence * model.hidden * layout.element / layout.stream_ranks
    pipelined = layout.pipeline > 1
    weights = max(stage.parameters for stage in stages) / FULL
    exchange = data_exchange(
        weights,
        sharded=layout.sharded,
        pipelined=pipelined,
        batches=layout.microbatches,
        kept=model.ends(layout.tensor),
    ).total
    return {
        **sent,
        "pipeline": boundary_elements(layout.pipeline * layout.virtual, stream) / layout.pipeline,  # mean of the stages
        "data": exchange.in_bytes(FULL, FULL if pipelined else layout.element).sent(layout.data * layout.context),
    }
