"""Hooks that send a gradient as soon as the backward has computed it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from torch import Tensor

from fabricx.parameter_server.wire.partition import Shard

MIN_EARLY_BYTES: Final = 1 << 15  # minimum bytes of a gradient that is sent separately; others are sent together


def register_grad_hooks(
    parameters: Sequence[Tensor], shards: Sequence[Shard], put: Callable[[int, int, Tensor], None]
) -> Callable[[], None]:  # fmt: skip
    """Call a function when a large gradient is complete; returns a function that removes the hooks.

    Args:
        parameters: parameters of the model.
        shards: shards of all servers.
        put: called with (server, number of the piece, parameter).
    """
    where = pieces_by_parameter(shards)

    def put_all(places: list[tuple[int, int]], parameter: Tensor) -> None:
        for server, number in places:
            put(server, number, parameter)

    handles = [
        parameters[number].register_post_accumulate_grad_hook(functools.partial(put_all, places))
        for number, places in where.items()
        if parameters[number].requires_grad and parameters[number].nbytes >= MIN_EARLY_BYTES
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def pieces_by_parameter(shards: Sequence[Shard]) -> dict[int, list[tuple[int, int]]]:
    """Return the pieces of each parameter as (server, number of the piece).

    Args:
        shards: shards of all servers.
    """
    pieces: dict[int, list[tuple[int, int]]] = {}
    for server, shard in enumerate(shards):
        for number, piece in enumerate(shard.pieces):
            pieces.setdefault(piece.parameter, []).append((server, number))
    return pieces
