"""Gradient compression with error feedback."""

from __future__ import annotations

from typing import Final, final

import numpy as np
import torch
from torch import Tensor

KINDS: Final = ("bf16", "fp16", "topk", "sign")
_FP16_MAX: Final = 65504.0


@final
class Codec:
    """Encodes a flat gradient in fewer bytes and decodes it.

    The encoding error is added to the next gradient (error feedback), so it is delayed, not lost.

    Sources: sign with error feedback: Karimireddy et al., ICML 2019; the largest elements: Aji & Heafield, EMNLP 2017,
    and Stich et al., "Sparsified SGD with Memory", NeurIPS 2018.

    Args:
        kind: "bf16" and "fp16" (2 bytes per element; "fp16" is scaled by the largest element), "topk" (8 bytes for each
            of the largest elements), "sign" (1 bit per element, times the mean magnitude).
        keep: fraction of the elements that "topk" sends.
        feedback: use error feedback.

    Attributes:
        lost: encoding error that will be added to the next gradient.

    >>> Codec("sign").bytes(800), Codec("topk", keep=0.01).bytes(800), Codec("bf16").bytes(800)
    (100, 64, 1600)
    """

    def __init__(self, kind: str, *, keep: float = 0.01, feedback: bool = True) -> None:
        self.kind = kind
        self.keep = keep
        self._feedback = feedback
        self.lost = torch.empty(0)

    def bytes(self, size: int) -> int:
        """Return the encoded size in bytes.

        Args:
            size: elements of the gradient.
        """
        if self.kind == "topk":
            return 8 * self._kept(size)
        return -(-size // 8) if self.kind == "sign" else 2 * size

    def encode(self, gradient: Tensor, room: Tensor) -> float:
        """Encode a gradient; returns the scale that `decode` needs.

        Args:
            gradient: flat; changed in place by error feedback.
            room: output, uint8, at least `bytes(len(gradient))` long.
        """
        size = len(gradient)
        if self._feedback and len(self.lost) == size:
            gradient.add_(self.lost)
        scale = 1.0
        raw = room[: self.bytes(size)]
        if self.kind == "bf16":
            raw.view(torch.bfloat16).copy_(gradient)
        elif self.kind == "fp16":
            scale = max(float(gradient.abs().max()) / _FP16_MAX if size else 1.0, 1e-30)
            raw.view(torch.float16).copy_(gradient / scale)
        elif self.kind == "sign":
            scale = float(gradient.abs().mean()) if size else 1.0
            raw.copy_(torch.from_numpy(np.packbits((gradient >= 0).numpy())))
        else:
            indices = gradient.abs().topk(self._kept(size), sorted=False).indices
            indices_room, values_room = raw.view(torch.int32).chunk(2) if size else (raw, raw)
            indices_room.copy_(indices)
            values_room.view(torch.float32).copy_(gradient[indices])
        if self._feedback:
            self.lost = gradient - self.decode(raw, size, scale, gradient.dtype)
        return scale

    def decode(self, room: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        """Decode a gradient, shape [size].

        Args:
            room: encoded bytes, uint8.
            size: elements of the gradient.
            scale: result of `encode`.
            dtype: of the gradient.
        """
        raw = room[: self.bytes(size)]
        if self.kind in ("bf16", "fp16"):
            halves = raw.view(torch.bfloat16 if self.kind == "bf16" else torch.float16)
            return halves.to(dtype).mul_(scale)
        if self.kind == "sign":
            bits = torch.from_numpy(np.unpackbits(raw.numpy(), count=size))
            return bits.to(dtype).mul_(2 * scale).sub_(scale)
        decoded = torch.zeros(size, dtype=dtype)
        if size:
            indices, values = raw.view(torch.int32).chunk(2)
            decoded[indices.long()] = values.view(torch.float32).to(dtype)
        return decoded

    def _kept(self, size: int) -> int:
        return min(size, max(1, round(size * self.keep)))
