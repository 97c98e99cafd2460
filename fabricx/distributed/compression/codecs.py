"""Compression of gradients: the table of codecs, which all strategies use, with error feedback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from fabricx import plugins
from fabricx.errors import check_choice

_FP16_MAX: Final = 65504.0
_SMALLEST: Final = 1e-38  # of scales: a block of zeros is not divided by zero
BLOCK: Final = 256  # elements with a common scale, of 4 bytes


class Codec(ABC):
    """Encodes a flat vector in fewer bytes, and decodes it. Subclasses implement `bytes`, `pack` and `unpack`.

    `encode` adds the encoding error of a vector to the next vector (error feedback), so it is delayed, not lost. Sender
    and receiver each have a codec object.

    Args:
        keep: fraction of the elements that "topk" sends (`compression_keep` of a strategy).
        feedback: use error feedback.

    Attributes:
        lost: encoding error that will be added to the next vector, shape [elements]; empty before the first vector.
        sum_dtype: dtype in which collectives can add encoded vectors; None if vectors must be decoded first.
    """

    sum_dtype: ClassVar[torch.dtype | None] = None

    def __init__(self, *, keep: float = 0.01, feedback: bool = True) -> None:
        self.keep = keep
        self.lost = torch.empty(0)
        self._feedback = feedback

    @abstractmethod
    def bytes(self, size: int) -> int:
        """Return the encoded size in bytes, which depends on `size` and `keep` only: both ends compute it.

        Args:
            size: elements of the vector.
        """

    def encode(self, vector: Tensor, room: Tensor, absent: Sequence[tuple[int, int]] = ()) -> float:
        """Encode a vector.

        Args:
            vector: shape [elements]; changed in place by error feedback.
            room: output, uint8, at least `bytes(elements)` long.
            absent: spans (start, stop) of zeros that the receiver ignores: their errors wait for the next vector.

        Returns:
            The scale that `decode` needs.
        """
        size, before = len(vector), self.lost
        if self._feedback:
            before = before if len(before) == size else torch.zeros_like(vector)
            vector.add_(before)
            for start, stop in absent:
                vector[start:stop].zero_()
        raw = room[: self.bytes(size)]
        scale = self.pack(vector, raw) if size else 1.0
        if self._feedback:  # no error of NaN and infinity: all later vectors would contain it
            self.lost = (vector - self.decode(raw, size, scale, vector.dtype)).nan_to_num_(0.0, 0.0, 0.0)
            for start, stop in absent:
                self.lost[start:stop] = before[start:stop]
        return scale

    def decode(self, room: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        """Decode a vector.

        Args:
            room: encoded bytes, uint8.
            size: elements of the vector.
            scale: result of `encode`.
            dtype: data type of the vector.

        Returns:
            The vector, shape [size].
        """
        return self.unpack(room[: self.bytes(size)], size, scale, dtype) if size else torch.zeros(0, dtype=dtype)

    @abstractmethod
    def pack(self, vector: Tensor, raw: Tensor) -> float:
        """Write a vector of one or more elements into exactly as many bytes as needed.

        Args:
            vector: float32 or float64 on the CPU, shape [elements]; must not be changed.
            raw: output, uint8, shape [`bytes(elements)`].

        Returns:
            A factor, passed to `unpack`; 1.0 if the bytes need none. NaN and infinity must not become finite.
        """

    @abstractmethod
    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        """Return the vector of one or more elements that `pack` wrote.

        Args:
            raw: uint8, shape [`bytes(size)`]; must not be changed.
            size: elements of the vector.
            scale: result of `pack`.
            dtype: data type of the vector.

        Returns:
            The vector, shape [size], in new memory.
        """


@final
class BFloat16(Codec):
    """Sends each element in 2 bytes, with the range of float32 and 8 significant bits."""

    sum_dtype = torch.bfloat16

    def bytes(self, size: int) -> int:
        return 2 * size

    def pack(self, vector: Tensor, raw: Tensor) -> float:
        raw.view(torch.bfloat16).copy_(vector)
        return 1.0

    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        return raw.view(torch.bfloat16).to(dtype)


@final
class Float16(Codec):
    """Sends each element in 2 bytes with 11 significant bits, relative to the largest element.

    A collective that adds vectors of several ranks adds them without this scale, which differs per rank.
    """

    sum_dtype = torch.float16

    def bytes(self, size: int) -> int:
        return 2 * size

    def pack(self, vector: Tensor, raw: Tensor) -> float:
        scale = max(float(vector.abs().max()) / _FP16_MAX, 1e-30)
        raw.view(torch.float16).copy_(vector / scale)
        return scale

    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        return raw.view(torch.float16).to(dtype).mul_(scale)


@final
class TopK(Codec):
    """Sends the fraction `keep` of the elements with the largest magnitudes, 8 bytes each, at least one element.

    Values are sent in float32, so larger numbers of float64 become infinity.

    Sources: Aji & Heafield, EMNLP 2017; Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.
    """

    def bytes(self, size: int) -> int:
        return 8 * self._kept(size)

    def pack(self, vector: Tensor, raw: Tensor) -> float:
        indices = vector.abs().topk(self._kept(len(vector)), sorted=False).indices
        indices_room, values_room = raw.view(torch.int32).chunk(2)
        indices_room.copy_(indices)
        values_room.view(torch.float32).copy_(vector[indices])
        return 1.0

    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        indices, values = raw.view(torch.int32).chunk(2)
        decoded = torch.zeros(size, dtype=dtype)
        decoded[indices.long()] = values.view(torch.float32).to(dtype)
        return decoded

    def _kept(self, size: int) -> int:
        return min(size, max(1, min(round(size * self.keep), size // 2)))  # not more bytes than the vector


@final
class Sign(Codec):
    """Sends the sign of each element in 1 bit, times the mean magnitude.

    Source: with error feedback: Karimireddy et al., ICML 2019.
    """

    def bytes(self, size: int) -> int:
        return -(-size // 8)

    def pack(self, vector: Tensor, raw: Tensor) -> float:
        raw.copy_(torch.from_numpy(np.packbits((vector >= 0).numpy())))
        return float(vector.abs().mean())

    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        bits = torch.from_numpy(np.unpackbits(raw.numpy(), count=size))
        return bits.to(dtype).mul_(2 * scale).sub_(scale)


class Integers(Codec):
    """Sends each element as a signed integer, relative to the largest magnitude of its block of `BLOCK` elements.

    A block with NaN or infinity becomes NaN. Of a larger number than float32 can scale, error feedback sends the rest.

    With error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014. 4 bits for the weight
    differences of rounds: Douillard et al., arXiv 2501.18512.

    Attributes:
        largest: largest integer; -largest is the smallest.
    """

    largest: ClassVar[int]

    @staticmethod
    @abstractmethod
    def _packed(integers: Tensor) -> Tensor:
        """Return integers as bytes; both are int8 or uint8 vectors."""

    @staticmethod
    @abstractmethod
    def _unpacked(raw: Tensor, size: int) -> Tensor:
        """Return the integers in bytes."""

    @staticmethod
    @abstractmethod
    def _data_bytes(size: int) -> int:
        """Return the number of bytes of the integers."""

    def bytes(self, size: int) -> int:
        return 4 * -(-size // BLOCK) + self._data_bytes(size)

    def pack(self, vector: Tensor, raw: Tensor) -> float:
        blocks = _in_blocks(vector)
        largest = blocks.abs().amax(1)
        scales = (largest / self.largest).clamp_(_SMALLEST, torch.finfo(torch.float32).max)
        scales = torch.where(largest.isfinite(), scales, largest).to(torch.float32)
        integers = (blocks / scales[:, None].to(blocks.dtype)).round_().clamp_(-self.largest, self.largest)
        raw[: 4 * len(scales)].copy_(scales.view(torch.uint8))
        raw[4 * len(scales) :].copy_(self._packed(integers.flatten()[: len(vector)].to(torch.int8)))
        return 1.0

    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        count = -(-size // BLOCK)
        scales = raw[: 4 * count].clone().view(torch.float32).to(dtype)
        integers = self._unpacked(raw[4 * count :], size).to(dtype)
        return _in_blocks(integers).mul(scales[:, None]).flatten()[:size]


@final
class Int8(Integers):
    """Sends each element in 1 byte."""

    largest = 127

    @staticmethod
    def _packed(integers: Tensor) -> Tensor:
        return integers.view(torch.uint8)

    @staticmethod
    def _unpacked(raw: Tensor, size: int) -> Tensor:
        return raw.view(torch.int8)

    @staticmethod
    def _data_bytes(size: int) -> int:
        return size


@final
class Int4(Integers):
    """Sends two elements in 1 byte."""

    largest = 7

    @staticmethod
    def _packed(integers: Tensor) -> Tensor:
        pairs = nn.functional.pad(integers + 8, (0, len(integers) % 2)).view(-1, 2).view(torch.uint8)
        return pairs[:, 0] * 16 + pairs[:, 1]

    @staticmethod
    def _unpacked(raw: Tensor, size: int) -> Tensor:
        return torch.stack([raw // 16, raw % 16], 1).flatten()[:size].to(torch.int8) - 8

    @staticmethod
    def _data_bytes(size: int) -> int:
        return -(-size // 2)


def _in_blocks(vector: Tensor) -> Tensor:
    """Return a vector as blocks of `BLOCK` elements, the last of which ends with zeros."""
    return nn.functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)


SumCompression = Literal["bf16", "fp16", "powersgd"]

CODECS: Final[Mapping[str, type[Codec]]] = {
    "bf16": BFloat16, "fp16": Float16, "int8": Int8, "int4": Int4, "topk": TopK, "sign": Sign,
}  # fmt: skip
POWERSGD: Final = "powersgd"  # no codec of a vector: ranks add factors of matrices twice, see `powersgd`
SUMMED: Final = (*(name for name, codec in CODECS.items() if codec.sum_dtype is not None), POWERSGD)


def check_codec(owner: str, option: str, name: str | None, *others: str) -> None:
    """Check that an option names a codec: one of the table, a registered codec, or the dotted path of a class.

    Args:
        owner: name of the object with the option, for the message.
        option: name of the option.
        name: value of the option; None for no compression.
        *others: further valid values.

    Raises:
        ValueError: the value is not a codec; the message suggests the nearest valid value.
        LookupError: the dotted path is not the path of a class.

    >>> check_codec("AsyncSGD", "compression", "topq")
    Traceback (most recent call last):
    ValueError: compression='topq' isn't known to AsyncSGD. Did you mean 'topk'?
      known: bf16, fp16, int8, int4, topk, sign, None
      your own: its dotted path, such as my_project.codec.Mine
    """
    if name is None or name in others or name in CODECS:
        return
    if not isinstance(name, str) or "." not in name:
        known = (*CODECS, *plugins.registered("codecs"), *others, None)
        check_choice(owner, option, name, known, "its dotted path, such as my_project.codec.Mine")
    if name.startswith("__main__."):
        raise ValueError(
            f"{option}={name!r}: servers import the class, and can't import it from the script; move it into a module"
        )
    codec = _class(name, option)
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise ValueError(f"{option}={name!r} is not a codec: derive the class from fabricx.Codec")


def make_codec(name: str, *, keep: float = 0.01, feedback: bool = True) -> Codec:
    """Return a new codec.

    Args:
        name: key of `CODECS`, registered name, or dotted path of a class.
        keep, feedback: see `Codec`.

    >>> make_codec("sign").bytes(800), make_codec("topk", keep=0.01).bytes(800), make_codec("bf16").bytes(800)
    (100, 64, 1600)
    """
    return _class(name, "compression")(keep=keep, feedback=feedback)


def _class(name: str, option: str) -> type[Codec]:
    if name in CODECS:
        return CODECS[name]
    codec: type[Codec] = plugins.load(option, name) if "." in name else plugins.registered("codecs")[name].load()
    return codec
