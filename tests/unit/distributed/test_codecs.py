"""Fewer bytes on the way: what arrives is near, and what is lost comes later."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from fabricx.distributed.codecs import CODECS, SUMMED, Codec, SumCompression, VectorCompression, make_codec


def sent(codec: Codec, gradient: Tensor) -> Tensor:
    room = torch.zeros(8 * len(gradient) + 8, dtype=torch.uint8)
    scale = codec.encode(gradient.clone(), room)
    return type(codec)(keep=codec.keep, feedback=False).decode(room, len(gradient), scale, gradient.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("size", [1, 7, 800])
def test_what_is_lost_is_sent_later(kind: str, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(size, dtype=dtype)
    fed, plain = make_codec(kind, keep=0.1), make_codec(kind, keep=0.1, feedback=False)
    rounds = 3000 if kind == "sign" else 200  # what is kept is bounded, and counts less the longer it goes on
    with_feedback = sum((sent(fed, gradient) for _ in range(rounds)), torch.zeros(size, dtype=dtype)) / rounds
    without = sum((sent(plain, gradient) for _ in range(rounds)), torch.zeros(size, dtype=dtype)) / rounds
    assert float((with_feedback - gradient).norm()) < 0.1 * float(gradient.norm())  # the mean of all that was sent
    if size == 800 and kind in ("topk", "sign"):
        assert float((without - gradient).abs().max()) > 0.5


@pytest.mark.parametrize(("kind", "part"), [("bf16", 2.0**-8), ("fp16", 2.0**-10)])
def test_halves_are_near_at_any_scale(kind: str, part: float) -> None:
    for scale in (1e-20, 1e-6, 1.0, 1e8):
        gradient = torch.randn(1000) * scale
        assert float((sent(make_codec(kind), gradient) - gradient).abs().max()) <= part * float(gradient.abs().max())


def test_the_largest_elements_arrive_as_they_are() -> None:
    gradient = torch.arange(100.0) - 50
    found = sent(make_codec("topk", keep=0.05), gradient)
    assert found.nonzero().flatten().tolist() == [0, 1, 2, 98, 99] or int((found != 0).sum()) == 5
    assert torch.equal(found[found != 0], gradient[found != 0])


def test_zero_stays_zero() -> None:
    for kind in CODECS:
        assert float(sent(make_codec(kind), torch.zeros(16)).abs().max()) == 0.0


def test_the_types_of_options_name_the_table() -> None:
    assert get_args(VectorCompression) == tuple(CODECS)
    assert get_args(SumCompression) == SUMMED


@pytest.mark.parametrize("kind", CODECS)
def test_nothing_is_sent_of_an_empty_vector(kind: str) -> None:
    codec, room = make_codec(kind), torch.zeros(0, dtype=torch.uint8)
    assert codec.bytes(0) == 0
    scale = codec.encode(torch.zeros(0), room)
    assert codec.decode(room, 0, scale, torch.float32).shape == (0,)
    assert codec.lost.shape == (0,)
