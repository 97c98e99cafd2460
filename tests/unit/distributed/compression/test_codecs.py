"""Compressed vectors are close to the originals, and the error is sent later."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from fabricx import plugins
from fabricx.distributed.compression.codecs import CODECS, SUMMED, Codec, SumCompression, check_codec, make_codec
from fabricx.testing import BrokenContract, codec_contract
from fabricx.testing import check_codec as check_contract


def sent(codec: Codec, gradient: Tensor) -> Tensor:
    return codec_contract._sent(codec, gradient.clone())


@pytest.mark.parametrize("kind", CODECS)
def test_every_codec_keeps_the_contract(kind: str) -> None:
    check_contract(CODECS[kind])


class Whole(Codec):
    """Sends float32 unchanged."""

    def bytes(self, size: int) -> int:
        return 4 * size

    def pack(self, vector: Tensor, raw: Tensor) -> float:
        raw.view(torch.float32).copy_(vector)
        return 1.0

    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        return raw.view(torch.float32).to(dtype, copy=True)


class Clipped(Whole):
    def pack(self, vector: Tensor, raw: Tensor) -> float:
        return super().pack(vector.nan_to_num(), raw)


class InPlace(Whole):
    def pack(self, vector: Tensor, raw: Tensor) -> float:
        return super().pack(vector.mul_(0.5), raw)


class View(Whole):
    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        return raw.view(torch.float32).to(dtype)


class Lossy(Whole):
    def bytes(self, size: int) -> int:
        return 4 * (size - size // 8)

    def pack(self, vector: Tensor, raw: Tensor) -> float:
        return super().pack(vector[: len(raw) // 4], raw)

    def unpack(self, raw: Tensor, size: int, scale: float, dtype: torch.dtype) -> Tensor:
        kept = super().unpack(raw, size, scale, dtype)
        return torch.cat([kept, kept.new_zeros(size - len(kept))])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Clipped, "is decoded to finite values"), (InPlace, "pack changes the vector"),
        (View, "returns a view of the bytes"), (Lossy, "is decoded to finite values"),
    ],
)  # fmt: skip
def test_a_codec_that_breaks_the_contract_is_named(broken: type[Codec], message: str) -> None:
    check_contract(Whole, rounds=3)
    with pytest.raises(BrokenContract, match=message):
        check_contract(broken)


def test_error_feedback_that_loses_elements_is_named() -> None:
    with pytest.raises(BrokenContract, match="error feedback: the mean of 200 decoded vectors differs by"):
        codec_contract._check_feedback(Lossy, 0.1, torch.ones(800), 200, 0.1)


def test_a_class_of_another_package_is_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "theirs"

        @staticmethod
        def load() -> type[Codec]:
            return Whole

    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [Entry] if group == "fabricx.codecs" else [])
    check_codec("AsyncSGD", "compression", "theirs")
    assert isinstance(make_codec("theirs"), Whole)
    path = "fabricx.distributed.compression.codecs.Sign"
    check_codec("AsyncSGD", "compression", path)
    assert make_codec(path, keep=0.2).keep == 0.2


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("topq", ValueError, r"Did you mean 'topk'\?\n  known: bf16.*\n  your own: its dotted path"),
        ("torch.nn.Linear", ValueError, "is not a codec: derive the class from fabricx.Codec"),
        ("nowhere.Codec", LookupError, "pull_compression=nowhere.Codec can't be imported"),
        ("__main__.Mine", ValueError, "move it into a module"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_name(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_codec("AsyncSGD", "pull_compression", name)


@pytest.mark.parametrize(
    ("kind", "part"), [("bf16", 2.0**-8), ("fp16", 2.0**-10), ("int8", 1 / 253), ("int4", 1 / 13.9)]
)
def test_fewer_bits_are_accurate_at_any_scale(kind: str, part: float) -> None:
    for scale in (1e-20, 1e-6, 1.0, 1e8):
        gradient = torch.randn(1000) * scale
        assert float((sent(make_codec(kind), gradient) - gradient).abs().max()) <= part * float(gradient.abs().max())


@pytest.mark.parametrize(("kind", "size"), [("int8", 1000 + 4 * 4), ("int4", 500 + 4 * 4)])
def test_integers_have_a_scale_for_each_block(kind: str, size: int) -> None:
    gradient, codec = torch.full((1000,), 1e-6), make_codec(kind)
    gradient[300] = 1e6
    assert codec.bytes(1000) == size
    received = sent(codec, gradient)
    assert torch.allclose(received[512:], gradient[512:], rtol=1e-6)
    assert float(received[300]) == pytest.approx(1e6)
    assert not bool(received[301:512].any())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_number_beyond_the_scales_leaves_the_others_of_its_block_finite(kind: str) -> None:
    gradient, codec = torch.ones(300, dtype=torch.float64), make_codec(kind)
    gradient[0] = 1e42
    received = sent(codec, gradient)
    assert bool(received.isfinite().all())
    assert float(codec.lost[0] + received[0]) == pytest.approx(1e42)  # error feedback has the rest
    assert float(codec.lost[1]) == 1.0
    assert torch.allclose(received[256:], gradient[256:])


def test_the_largest_elements_are_sent_unchanged() -> None:
    gradient = torch.arange(100.0) - 50
    received = sent(make_codec("topk", keep=0.05), gradient)
    assert received.nonzero().flatten().tolist() == [0, 1, 2, 98, 99] or int((received != 0).sum()) == 5
    assert torch.equal(received[received != 0], gradient[received != 0])


def test_the_types_of_options_name_the_table() -> None:
    assert get_args(SumCompression) == SUMMED


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_gradient_does_not_change_the_error_feedback(kind: str, bad: float) -> None:
    codec, room = make_codec(kind), torch.zeros(80_000, dtype=torch.uint8)
    spoilt = torch.randn(1000)
    spoilt[0] = bad
    scale = codec.encode(spoilt.clone(), room)
    assert not bool(codec.decode(room, 1000, scale, torch.float32).isfinite().all())
    codec.encode(torch.randn(1000), room)
    assert bool(codec.lost.isfinite().all())


@pytest.mark.parametrize("kind", CODECS)
def test_the_error_of_an_absent_span_waits_for_the_next_vector(kind: str) -> None:
    codec, room = make_codec(kind), torch.zeros(800, dtype=torch.uint8)
    for number in range(3):
        before = codec.lost[2:4].clone() if number else torch.zeros(2)
        codec.encode(torch.tensor([1.1, -2.3, 0.0, 0.0, 0.7]), room, [(2, 4)])
        assert torch.equal(codec.lost[2:4], before)
        codec.encode(torch.tensor([0.3, 0.2, 0.13, -0.19, 0.5]), room)


def test_no_codec_needs_more_bytes_than_the_vector() -> None:
    for kind in CODECS:
        assert all(make_codec(kind, keep=0.5).bytes(size) <= 4 * size for size in (0, *range(2, 1000)))
