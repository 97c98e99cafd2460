"""What a prediction of a step begins with: dimensions of a transformer, speeds of a cluster, and a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from fabricx.model_parallel.scaling.traffic import Exchange


@dataclass(frozen=True)
class Transformer:
    """Dimensions of a decoder of the Llama family: RMSNorm, grouped queries, SwiGLU, untied embedding and head.

    Attributes:
        layers: number of blocks.
        hidden: features of the residual stream.
        heads, kv_heads: heads of queries, and of keys and values.
        ffn: features within the feed-forward layers.
        vocabulary: number of tokens.
        sequence: positions of a sample.
    """

    layers: int = 80
    hidden: int = 8192
    heads: int = 64
    kv_heads: int = 8
    ffn: int = 28672
    vocabulary: int = 128256
    sequence: int = 4096

    @property
    def keys(self) -> int:
        """Return the features of the keys of a position."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def matrices(self) -> int:
        """Return the elements of the matrices of a block: q and o, k and v, gate, up and down."""
        return 2 * self.hidden * (self.hidden + self.keys) + 3 * self.hidden * self.ffn

    @property
    def norms(self) -> int:
        """Return the elements of the norms of a block, which the tensor axis does not divide."""
        return 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return round(self.layers * (self.matrices + self.norms) + self.ends(1))

    def ends(self, tensor: int) -> float:
        """Return the elements of a rank of embedding, last norm and head.

        Args:
            tensor: ranks of the tensor axis.
        """
        return 2 * self.vocabulary * self.hidden / tensor + self.hidden

    def block_operations(self, samples: float) -> float:
        """Return the floating-point operations of the forward of a block, with causal attention.

        Args:
            samples: whole sequences.
        """
        return samples * self.sequence * (2 * self.matrices + 2 * self.sequence * self.hidden)

    def head_operations(self, samples: float) -> float:
        """Return the floating-point operations of the forward of the head.

        Args:
            samples: whole sequences.
        """
        return samples * self.sequence * 2 * self.hidden * self.vocabulary

    @property
    def step_operations(self) -> float:
        """Return the floating-point operations of forward and backward of a sample, without recomputation."""
        return 3 * (self.layers * self.block_operations(1) + self.head_operations(1))

    def block_activations(self, tensor: int = 1, sequence: bool = False) -> float:
        """Return the elements that autograd stores for a position in a block.

        The inputs of both norms; the inputs of both pairs of layers, which are whole on each rank; queries and the
        output of attention; keys and values; gate, up, their activation and their product.

        Args:
            tensor: ranks of the tensor axis.
            sequence: whether the residual stream is sharded over them.
        """
        stream = 2 * self.hidden / (tensor if sequence else 1)
        return stream + 2 * self.hidden + (2 * self.hidden + 2 * self.keys + 4 * self.ffn) / tensor


@dataclass(frozen=True)
class Cluster:
    """Speeds of devices and links.

    Attributes:
        flops: peak of a device in matrix products, operations per second.
        efficiency: part of it that the products of a step reach.
        memory: bytes of a device that tensors can use.
        memory_speed: bytes per second of a device's memory.
        node: devices of a node.
        inside, between: bytes per second that a device sends within a node, and to other nodes.
        inside_latency, between_latency: seconds of a message.
    """

    flops: float = 989e12
    efficiency: float = 0.6
    memory: float = 74e9
    memory_speed: float = 2.5e12
    node: int = 8
    inside: float = 360e9
    between: float = 40e9
    inside_latency: float = 3e-6
    between_latency: float = 10e-6

    def link(self, ranks: int, stride: int) -> tuple[float, float]:
        """Return bytes per second and latency of the slowest link of a ring.

        Several ranks of a ring in the same node share the traffic that leaves it.

        Args:
            ranks: ranks of the ring.
            stride: distance of neighbours in the order of all ranks.
        """
        if ranks * stride <= self.node:
            return self.inside, self.inside_latency
        together = max(1, self.node // stride)
        return min(self.inside, self.between * together), self.between_latency / together

    def seconds(self, exchange: Exchange, ranks: int, stride: int) -> float:
        """Return the time of collectives by ring algorithms.

        Args:
            exchange: exchange in bytes.
            ranks: ranks of the axis.
            stride: distance of neighbours in the order of all ranks.
        """
        if ranks == 1:
            return 0.0
        speed, latency = self.link(ranks, stride)
        return exchange.sent(ranks) / speed + exchange.collectives * (ranks - 1) * latency

    def products(self, operations: float) -> float:
        """Return the time of matrix products.

        Args:
            operations: floating-point operations.
        """
        return operations / self.flops / self.efficiency


@dataclass(frozen=True)
class Layout:
    """A mesh and its options; see `Mesh`.

    Attributes:
        data, pipeline, context, tensor: ranks along the axes.
        sharded: whether data is "fsdp" in place of "ddp".
        sequence: whether the residual stream is sharded over the tensor axis.
        recompute: whether blocks are computed again in the backward (activation checkpointing).
        schedule, virtual: schedule of the pipeline, and chunks of each rank.
        rows: samples of a data rank in a step.
        microbatches: parts of these; without a pipeline, batches whose gradients are accumulated.
        element: bytes of an element of products, activations and their messages: 2 in mixed precision, 4 without.
    """

    data: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    sharded: bool = False
    sequence: bool = False
    recompute: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    rows: int = 1
    microbatches: int = 1
    element: int = 2

    @property
    def devices(self) -> int:
        """Return the number of ranks."""
        return self.data * self.pipeline * self.context * self.tensor

    @property
    def shards(self) -> int:
        """Return the number of ranks that divide the optimizer states of a rank of a model group."""
        return self.data * self.context if self.sharded else 1

    @property
    def stream_ranks(self) -> int:
        """Return the number of ranks that divide the residual stream between the blocks."""
        return self.context * (self.tensor if self.sequence else 1)

    @property
    def samples(self) -> float:
        """Return the samples of a microbatch."""
        return self.rows / self.microbatches
