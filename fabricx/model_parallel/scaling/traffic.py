"""Elements that the collectives of a mesh exchange in a step, by formula; tests compare them with counts of real steps.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022; Rajbhandari et al., "ZeRO", SC 2020, section 7.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Elements that a rank exchanges with the other ranks of an axis.

    Attributes:
        reduced: elements of the inputs of all-reduces.
        gathered: elements of the outputs of all-gathers.
        scattered: elements of the inputs of reduce-scatters.
        collectives: number of all-reduces, all-gathers and reduce-scatters; an all-reduce counts twice, as ring
            algorithms do it in two passes.
    """

    reduced: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0
    collectives: float = 0.0

    def __add__(self, other: Exchange) -> Exchange:
        """Return the sum of two exchanges."""
        return Exchange(
            self.reduced + other.reduced, self.gathered + other.gathered, self.scattered + other.scattered,
            self.collectives + other.collectives,
        )  # fmt: skip

    def in_bytes(self, reduced: int, gathered: int) -> Exchange:
        """Return the same in bytes.

        Args:
            reduced: bytes of an element that is reduced, or reduced and scattered.
            gathered: bytes of an element that is gathered.
        """
        return Exchange(
            self.reduced * reduced, self.gathered * gathered, self.scattered * reduced, self.collectives,
        )  # fmt: skip

    def sent(self, ranks: int) -> float:
        """Return the elements that a rank sends by ring algorithms, which send the fewest.

        Args:
            ranks: ranks of the axis.

        >>> Exchange(reduced=8).sent(4)
        12.0
        """
        return (2 * self.reduced + self.gathered + self.scattered) * (ranks - 1) / ranks


@dataclass(frozen=True)
class Passes:
    """Exchanges in the forward and the backward of a part of a module, along an axis.

    Attributes:
        forward, backward: exchanges of a rank.
    """

    forward: Exchange = Exchange()
    backward: Exchange = Exchange()

    def __add__(self, other: Passes) -> Passes:
        """Return the exchanges of two parts together."""
        return Passes(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> Exchange:
        """Return the sum of both."""
        return self.forward + self.backward


def tensor_exchange(
    blocks: int, stream: float, *, sequence: bool = False, recompute: bool = False, pairs: int = 2
) -> Passes:  # fmt: skip
    """Return the exchange of blocks along the tensor axis: for each pair of layers, a sum forward and a sum backward.

    Args:
        blocks: number of blocks.
        stream: elements of the residual stream of the samples: samples x positions x features.
        sequence: whether the residual stream is sharded; each sum is then a reduce-scatter, and an all-gather before
            the next pair.
        recompute: whether blocks are computed again in the backward, without the last sum of a block, which nothing
            stores.
        pairs: pairs of colwise and rowwise layers in a block.

    >>> tensor_exchange(2, 10.0).total
    Exchange(reduced=80.0, gathered=0.0, scattered=0.0, collectives=16)
    """
    again = blocks * recompute

    def sums(gathers: int, reductions: int) -> Exchange:
        if not sequence:
            return Exchange(reduced=reductions * stream, collectives=2 * reductions)
        return Exchange(gathered=gathers * stream, scattered=reductions * stream, collectives=gathers + reductions)

    once = pairs * blocks
    return Passes(sums(once, once), sums(once + pairs * again, once + (pairs - 1) * again))


def sequence_ends(stream: float) -> tuple[Passes, Passes]:
    """Return the additional exchange of a sharded residual stream: before the first block, and after the last.

    The gradient before the first block is gathered, and so are the values after the last block.

    Args:
        stream: see `tensor_exchange`.
    """
    gathered = Exchange(gathered=stream, collectives=1)
    return Passes(backward=gathered), Passes(forward=gathered)


def embedding_exchange(stream: float) -> Passes:
    """Return the exchange of an embedding that is divided along the vocabulary: the sum of the rows.

    Args:
        stream: see `tensor_exchange`.
    """
    return Passes(Exchange(reduced=stream, collectives=2))


def head_exchange(stream: float, positions: float) -> Passes:
    """Return the exchange of a head that is divided along the vocabulary.

    Forward three numbers for each position: the largest logit, the sum of exponentials and the logit of the target;
    backward the gradient of the head's input.

    Args:
        stream: see `tensor_exchange`.
        positions: samples x positions.
    """
    return Passes(Exchange(reduced=3 * positions, collectives=6), Exchange(reduced=stream, collectives=2))


def context_exchange(blocks: int, keys: float, *, recompute: bool = False) -> Passes:
    """Return the exchange of blocks along the context axis: keys and values, and the sum of their gradients.

    Args:
        blocks: number of blocks.
        keys: elements of keys and values of a block, of the whole sequence.
        recompute: whether blocks are computed again in the backward.
    """
    gather = Exchange(gathered=blocks * keys, collectives=blocks)
    reduce = Exchange(reduced=blocks * keys, collectives=2 * blocks)
    return Passes(gather, reduce + gather if recompute else reduce)


def context_end(stream: float) -> Passes:
    """Return the exchange at the end of the blocks along the context axis.

    Args:
        stream: see `tensor_exchange`.
    """
    return Passes(Exchange(gathered=stream, collectives=1))


def boundary_elements(chunks: int, stream: float) -> float:
    """Return the elements that the stages of a pipeline send in total: an activation and a gradient for each boundary.

    Args:
        chunks: chunks of all stages.
        stream: see `tensor_exchange`.
    """
    return 2 * (chunks - 1) * stream


def data_exchange(
    weights: float, *, sharded: bool = False, pipelined: bool = False, batches: int = 1, kept: float = 0.0
) -> Passes:  # fmt: skip
    """Return the exchange along the data axis in a step.

    Args:
        weights: elements of the weights of a rank, before the data axis divides them.
        sharded: whether data is "fsdp".
        pipelined: whether fsdp gathers the weights of a stage once, for all microbatches; otherwise it gathers each
            block twice for each batch, before its forward and before its backward.
        batches: batches whose gradients are accumulated in a step.
        kept: elements outside of blocks, which fsdp gathers once for each batch.

    >>> data_exchange(5.0, sharded=True, kept=1.0).total
    Exchange(reduced=0.0, gathered=9.0, scattered=5.0, collectives=3)
    """
    if not sharded:
        return Passes(backward=Exchange(reduced=weights, collectives=2))
    scatter = Exchange(scattered=weights, collectives=1)
    if pipelined:
        return Passes(Exchange(gathered=weights, collectives=1), scatter)
    again = Exchange(gathered=batches * (weights - kept), collectives=batches)
    return Passes(Exchange(gathered=batches * weights, collectives=batches), again + scatter)
