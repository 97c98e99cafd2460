"""The contract suite of codecs: a vector is encoded by an object and decoded by a second object, without processes."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from fabricx.distributed.compression.codecs import Codec
from fabricx.testing.broken import BrokenContract

SIZES: Final = (1, 7, 800)
GUARD: Final = 16  # bytes behind the encoded vector, which must not change


def check_codec(make: type[Codec], *, keep: float = 0.1, rounds: int = 3000, tolerance: float = 0.1) -> None:
    """Check that a codec decodes its encoded vectors, and that error feedback keeps the sum of the vectors.

    Vectors of 0, 1, 7 and 800 elements, in float32 and float64, of values from 1e-20 to 1e8, zeros, and vectors with
    NaN and infinity. No process is started; the duration is about a second.

    Args:
        make: the codec's class; it is called with `keep` and `feedback`.
        keep: as `compression_keep` of a strategy.
        rounds: number of equal vectors that are sent to test error feedback.
        tolerance: largest norm of the difference between the mean of `rounds` decoded vectors and the vector, relative
            to the norm of the vector. The error must not grow with the number of rounds.

    Raises:
        BrokenContract: the codec breaks the contract.
    """
    for dtype in (torch.float32, torch.float64):
        _check_empty(make, keep, dtype)
        for size in SIZES:
            vector = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
            for magnitude in (1e-20, 1.0, 1e8):
                _check_once(make, keep, vector * magnitude)
            _check_special(make, keep, vector)
    _check_feedback(make, keep, torch.randn(800, generator=torch.Generator().manual_seed(0)), rounds, tolerance)


def _check_empty(make: type[Codec], keep: float, dtype: torch.dtype) -> None:
    codec, room = make(keep=keep, feedback=True), torch.zeros(0, dtype=torch.uint8)
    if codec.bytes(0) != 0:
        raise BrokenContract(f"bytes(0) is {codec.bytes(0)}, and must be 0")
    scale = codec.encode(torch.zeros(0, dtype=dtype), room)
    if codec.decode(room, 0, scale, dtype).shape != (0,):
        raise BrokenContract("an empty vector is not decoded to an empty vector")


def _check_once(make: type[Codec], keep: float, vector: Tensor) -> None:
    """Encode and decode a vector, and check the conditions of the sender and the receiver."""
    sender, receiver = make(keep=keep, feedback=False), make(keep=keep, feedback=False)
    size, about = len(vector), f"a vector of {len(vector)} elements, {vector.dtype}"
    length = sender.bytes(size)
    if not isinstance(length, int) or length < 1 or receiver.bytes(size) != length:
        raise BrokenContract(f"{about}: bytes({size}) is {length!r}, and must be the same positive int for both ends")
    room, before = torch.full((length + GUARD,), 85, dtype=torch.uint8), vector.clone()
    scale = sender.encode(vector, room)
    if not torch.equal(vector, before):
        raise BrokenContract(f"{about}: pack changes the vector")
    if not bool((room[length:] == 85).all()):
        raise BrokenContract(f"{about}: pack writes more than bytes({size}) = {length} bytes")
    if not isinstance(scale, float):
        raise BrokenContract(f"{about}: pack returns {scale!r}, and must return a float")
    sent = room.clone()
    decoded = receiver.decode(room, size, scale, vector.dtype)
    if decoded.shape != (size,) or decoded.dtype != vector.dtype:
        raise BrokenContract(f"{about}: unpack returns shape {tuple(decoded.shape)}, {decoded.dtype}")
    if not bool(decoded.isfinite().all()):
        raise BrokenContract(f"{about}: a vector of magnitude {float(vector.abs().max()):.3g} is decoded to NaN or inf")
    room.zero_()
    again = receiver.decode(sent, size, scale, vector.dtype)
    if not torch.equal(decoded, again):
        raise BrokenContract(f"{about}: unpack returns a view of the bytes, or depends on an earlier vector")


def _check_special(make: type[Codec], keep: float, vector: Tensor) -> None:
    about = f"{len(vector)} elements, {vector.dtype}"
    if bool(_sent(make(keep=keep, feedback=False), torch.zeros_like(vector)).count_nonzero()):
        raise BrokenContract(f"{about}: zeros are not decoded to zeros")
    for value in (float("nan"), float("inf"), float("-inf")):
        wrong = vector.clone()
        wrong[-1] = value
        if bool(_sent(make(keep=keep, feedback=False), wrong).isfinite().all()):
            raise BrokenContract(
                f"{about}: a vector with {value} is decoded to finite values, so that the error in the gradient would "
                "be hidden"
            )


def _check_feedback(make: type[Codec], keep: float, vector: Tensor, rounds: int, tolerance: float) -> None:
    sender, receiver = make(keep=keep, feedback=True), make(keep=keep, feedback=False)
    total = torch.zeros_like(vector)
    for _ in range(rounds):
        total += _sent(sender, vector.clone(), receiver)
    difference = float((total / rounds - vector).norm() / vector.norm())
    if not difference <= tolerance:
        raise BrokenContract(
            f"error feedback: the mean of {rounds} decoded vectors differs by {difference:.3g} of the vector's norm, "
            f"more than tolerance={tolerance:g}. Does unpack return the values that pack has written?"
        )


def _sent(sender: Codec, vector: Tensor, receiver: Any = None) -> Tensor:
    room = torch.zeros(sender.bytes(len(vector)), dtype=torch.uint8)
    scale = sender.encode(vector, room)
    decoded: Tensor = (receiver or sender).decode(room, len(vector), scale, vector.dtype)
    return decoded
