"""Tensors that blocks store in attributes for the positions of a shard, and that are wrong for other positions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from torch import Tensor, nn

from fabricx.model_parallel.context.sequence_shard import SequenceShard
from fabricx.model_parallel.pipeline.chain import Blocks

_Positions = tuple[int, bool]  # length of the sequence, and whether a shard of it was computed
_NOWHERE: Final[_Positions] = (0, False)


@final
class StoredPositions:
    """Finds tensors that blocks have stored since they were set up, such as a table of positions.

    Args:
        blocks: names and modules of the blocks.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._parts: Sequence[tuple[str, nn.Module]] = [
            (f"{name}.{inner}".rstrip("."), part) for name, block in blocks for inner, part in block.named_modules()
        ]
        self._now, self._local = _NOWHERE, 0
        # By `id`: the tensor, its name, and the positions for which it was stored.
        self._stored = {id(tensor): (weakref.ref(tensor), name, _NOWHERE) for name, tensor in self._tensors()}
        self._stale: list[Tensor] = []  # kept, so that no other tensor has the `id` of one of them

    def begin(self, length: int, shard: SequenceShard | None) -> dict[int, str] | None:
        """Begin a sequence.

        Args:
            length: of the whole sequence.
            shard: shard that is computed; None for the whole sequence.

        Returns:
            names of the tensors that must not be used for it, by `id`; None if the positions are the same as before.
        """
        following = (length, shard is not None)
        if following == self._now:
            return None
        stored, stale = {}, {}
        for name, tensor in self._tensors():
            key = id(tensor)
            entry = self._stored[key] if key in self._stored else None  # noqa: SIM401
            if entry is None or entry[0]() is not tensor:
                has_positions = self._local in tensor.shape and not tensor.requires_grad
                entry = weakref.ref(tensor), name, self._now if has_positions else _NOWHERE
            stored[key], stored_for = entry, entry[2]
            if stored_for not in (_NOWHERE, following) and (stored_for[1] or shard is not None):
                stale[key] = tensor
        self._stored, self._stale = stored, list(stale.values())
        self._now, self._local = following, length if shard is None else shard.local
        return {key: stored[key][1] for key in stale}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in self._parts:
            for attributes in (vars(part), part._buffers):
                for attribute, value in attributes.items():
                    yield from _tensors_of(f"{name}.{attribute}", value)


def _tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(name, item)
    elif isinstance(value, dict) and not isinstance(value, nn.Module):
        for item in value.values():
            yield from _tensors_of(name, item)
