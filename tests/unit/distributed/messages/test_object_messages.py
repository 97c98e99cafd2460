"""Objects exchanged by ranks: signed with the run's key, or plain data without a key."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch

from fabricx.distributed.messages import authentication
from fabricx.distributed.messages.object_messages import pack, unpack
from tests.unit.distributed.messages.test_authentication import KEY, Exploit


@pytest.mark.parametrize("secret", [b"", KEY], ids=["keyless", "key"])
def test_ranks_exchange_plain_data_and_tensors(secret: bytes) -> None:
    plain = {
        "a": [1, 2.5, float("inf"), None, True, b"\0", "text"], (0, "b"): {torch.float16, 3},
        "size": torch.Size([2, 3]), "tensor": torch.arange(3), "shared": "s",
    }  # fmt: skip
    for kind in ("gather", "broadcast"):
        message, refused = pack(secret, [kind, 0, 1], plain)
        received = unpack(secret, [kind, 0, 1], message)
        assert refused == ""
        assert torch.equal(received.pop("tensor"), plain["tensor"])  # type: ignore[arg-type]
        assert received == {name: value for name, value in plain.items() if name != "tensor"}


@pytest.mark.parametrize("secret", [b"", KEY], ids=["keyless", "key"])
def test_an_object_that_cannot_be_sent_is_an_error_of_all_ranks(secret: bytes) -> None:
    message, refused = pack(secret, ["gather", 0, 1], [lambda: None])
    assert refused
    assert ("FABRICX_KEY_FILE" in refused) is (not secret)
    with pytest.raises(TypeError, match="an object of rank 1 can't be sent to other ranks"):
        unpack(secret, ["gather", 0, 1], message)


def test_a_message_of_another_rank_or_generation_is_refused() -> None:
    message, _ = pack(KEY, ["gather", 0, 1], "weights")
    for context in (["gather", 0, 0], ["gather", 1, 1], ["broadcast", 0, 1]):
        with pytest.raises(authentication.AuthenticationError):
            unpack(KEY, context, message)


def test_a_pickle_of_a_false_rank_is_not_executed_without_a_key(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    stream = io.BytesIO()
    torch.save(("", [Exploit(marker)]), stream)
    legacy = io.BytesIO()
    torch.save(("", [Exploit(marker)]), legacy, _use_new_zipfile_serialization=False)
    exploit = pickle.dumps(("", Exploit(marker)))
    context = ["gather", 0, 1]
    for content in (exploit, stream.getvalue(), legacy.getvalue(), b"", b"\x80\x02."):
        forged = torch.frombuffer(bytearray(authentication.sign(b"", context, content)), dtype=torch.uint8)
        with pytest.raises(ValueError, match=r"would run code|can't be read|more than create plain data"):
            unpack(b"", context, forged)
    assert not marker.exists()
    pickle.loads(exploit)
    assert marker.exists()
