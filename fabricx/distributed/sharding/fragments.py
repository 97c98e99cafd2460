"""Fragments of a model, whose weights ranks combine at the same steps, as vectors of this rank's elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.distributed.compression.codecs import Codec, make_codec
from fabricx.distributed.sharding.dtensors import own_part

_BLOCK: Final = 16 << 20  # elements of a fragment that are combined at once, to bound temporary memory


@final
@dataclass
class Fragment:
    """Parameters that are synchronised at the same steps: a block of a fragment, all of a small fragment.

    Attributes:
        number: index of the fragment; several blocks have the same.
        parameters: this rank's parameters by name; of a shard, the vectors have the elements of this rank.
        base: weights of all ranks after the latest synchronisation, shape [elements].
        velocity: outer momentum, shape [elements]; empty without momentum.
        apart: whether the ranks have stepped since their weights were equal.
        begun: step at which the pending synchronisation began; None without a pending synchronisation.
        moved: this rank's weight difference to `base` at that step; the all-reduce replaces it by the sum over ranks.
        work: the pending all-reduce; None without.
        codec: encodes weight differences, and has the encoding error of this rank; None without compression.
        local: this rank's weights and their mean over ranks, while the parameters hold the mean; None otherwise.
    """

    number: int
    parameters: Mapping[str, Tensor]
    base: Tensor
    velocity: Tensor
    apart: bool = False
    begun: int | None = None
    moved: Tensor = field(default_factory=lambda: torch.empty(0))
    work: Any = None
    codec: Codec | None = None
    local: tuple[Tensor, Tensor] | None = None

    def wait(self) -> None:
        """Wait for the pending all-reduce, if any."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def flat(self) -> Tensor:
        """Return this rank's weights as a vector with the dtype of `base`, shape [elements]."""
        return _flat(list(self.parameters.values()), self.base.dtype)

    def set(self, values: Tensor) -> None:
        """Copy a vector of weights to the parameters.

        Args:
            values: shape [elements].
        """
        with torch.no_grad():
            for name, part in self.by_name(values).items():
                own_part(self.parameters[name]).copy_(part)

    def by_name(self, values: Tensor) -> dict[str, Tensor]:
        """Return the parts of a vector by name of the parameter, as views with its shape on this rank.

        Args:
            values: shape [elements].
        """
        parts = {name: own_part(parameter) for name, parameter in self.parameters.items()}
        views = values.split([part.numel() for part in parts.values()])
        return {name: view.view_as(part) for (name, part), view in zip(parts.items(), views, strict=True)}

    @property
    def equal_on_ranks(self) -> dict[str, Tensor]:
        """Return the vectors, without a pending all-reduce, that are equal on all ranks."""
        moved = {} if self.begun is None else {"moved": self.moved}
        return {"base": self.base, "velocity": self.velocity, **moved}


def in_fragments(
    parameters: Mapping[str, Tensor], elements: Mapping[str, int], count: int, *, momentum: bool,
    excluded: Callable[[Tensor], bool] = lambda parameter: False, compression: str | None = None,
) -> list[Fragment]:  # fmt: skip
    """Divide parameters, in their order, into fragments with similar numbers of elements, and these into blocks.

    Args:
        parameters: trained parameters by name.
        elements: elements of whole parameters by name, if they differ from those of `parameters`.
        count: fragments.
        momentum: the outer optimizer has momentum.
        excluded: returns whether a parameter is in no fragment, because this rank does not have its elements.
        compression: name of the codec of weight differences; None without.
    """
    fragments = []
    sizes = {name: elements.get(name, parameter.numel()) for name, parameter in parameters.items()}
    for number, names in enumerate(_in_parts(sizes, count)):
        for block in _in_blocks({name: p for name in names if not excluded(p := parameters[name])}):
            wide = any(parameter.dtype == torch.float64 for parameter in block.values())
            base = _flat(list(block.values()), torch.float64 if wide else torch.float32)
            fragment = Fragment(number, block, base, base.new_zeros(base.numel() if momentum else 0))
            fragment.codec = None if compression is None else make_codec(compression)
            fragments.append(fragment)
    return fragments


def _flat(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([own_part(parameter).reshape(-1).to(dtype) for parameter in parameters])


def _in_blocks(parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split parameters in their order into blocks of up to `_BLOCK` elements, or of a single larger parameter."""
    blocks: list[dict[str, Tensor]] = []
    room = 0
    for name, parameter in parameters.items():
        if not blocks or parameter.numel() > room:
            blocks.append({})
            room = _BLOCK
        blocks[-1][name] = parameter
        room -= parameter.numel()
    return blocks


def _in_parts(elements: Mapping[str, int], count: int) -> list[list[str]]:
    """Split parameters in their order into parts with similar numbers of elements; at most a part per parameter.

    Args:
        elements: number of elements, by name.
        count: parts.

    >>> _in_parts({"a": 3, "b": 1, "c": 1, "d": 1, "e": 3}, 3)
    [['a'], ['b', 'c', 'd'], ['e']]
    """
    total, done = sum(elements.values()), 0
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, size in elements.items():
        parts[min(count - 1, (done + size // 2) * count // max(1, total))].append(name)
        done += size
    return [part for part in parts if part]
