"""Tensors that blocks store in attributes for the positions of a shard, and that are wrong for other positions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from torch import Tensor, nn

from fabricx.model_parallel.context.sequence_shard import SequenceShard
from fabricx.model_parallel.nested import leaves, named
from fabricx.model_parallel.pipeline.chain import Blocks

_Positions = tuple[int, int]  # length of the sequence, and of the shard that was computed; 0 without a shard
_NOWHERE: Final[_Positions] = (0, 0)


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
        self._objects: list[tuple[str, weakref.ref[Any]]] = []  # arguments that may store tensors, such as a cache
        # By `id`: the tensor, its name, and the positions for which it was stored.
        self._stored = {id(tensor): (weakref.ref(tensor), name, _NOWHERE) for name, tensor in self._tensors()}
        self._stale: list[Tensor] = []  # kept, so that no other tensor has the `id` of one of them

    def begin(self, length: int, shard: SequenceShard | None, inputs: Any = ()) -> dict[int, str] | None:
        """Begin a sequence.

        Args:
            length: of the whole sequence.
            shard: shard that is computed; None for the whole sequence.
            inputs: arguments of the first block; an object among them, such as a cache of keys, may store tensors.

        Returns:
            names of the tensors that must not be used for it, by `id`; None if the positions are the same as before.
        """
        following = (length, 0 if shard is None else shard.local)
        if following == self._now:
            self._hold(inputs)
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
        self._hold(inputs)
        return {key: stored[key][1] for key in stale}

    def _hold(self, inputs: Any) -> None:
        """Replace the objects of the previous sequence."""
        self._objects = [
            (named(path), weakref.ref(leaf))
            for path, leaf in leaves(inputs)
            if hasattr(leaf, "__dict__") and type(leaf).__weakrefoffset__ and not isinstance(leaf, (Tensor, nn.Module))
        ]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in self._parts:
            for attributes in (vars(part), part._buffers):
                for attribute, value in attributes.items():
                    yield from _tensors_of(f"{name}.{attribute}", value)
        for name, reference in self._objects:
            yield from _tensors_of(name, reference(), objects=3)


def _tensors_of(name: str, value: Any, objects: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in containers, and in attributes of objects, to a depth of `objects`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(name, item, objects)
    elif isinstance(value, nn.Module):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_of(name, item, objects)
    elif objects and hasattr(value, "__dict__"):
        for attribute, item in list(vars(value).items()):
            yield from _tensors_of(f"{name}.{attribute}", item, objects - 1)
