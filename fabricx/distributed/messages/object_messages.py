"""Objects as signed messages between ranks: a port or an address in a store may belong to a foreign program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fabricx.distributed.messages import authentication

KEYLESS: Final = (
    "\n  without a key, processes on several machines exchange plain data and tensors only, because other objects "
    "could run code. To create a key: umask 077; openssl rand -hex 32 > key. Then set FABRICX_KEY_FILE=key (a path) "
    "for all processes (docs/security.md)"
)


def pack(secret: bytes, context: Sequence[Any], obj: Any) -> tuple[Tensor, str]:
    """Serialise and sign an object.

    Args:
        secret: key of the run; b"" without a key.
        context: kind of message, generation and rank of the sender, which are signed too.
        obj: anything that can be pickled; without a key, plain data and tensors.

    Returns:
        the message, uint8 of shape [bytes], and an empty string. If the object can't be sent, the message contains the
        reason, which all receivers raise, and the reason is returned, too.
    """
    rank, refused = context[-1], ""
    try:
        signed = authentication.dumps(secret, list(context), ("", obj))
    except Exception as error:
        refused = f"an object of rank {rank} can't be sent to other ranks: {error}" + ("" if secret else KEYLESS)
        signed = authentication.dumps(secret, list(context), (refused, None))
    return torch.frombuffer(bytearray(signed), dtype=torch.uint8), refused


def unpack(secret: bytes, context: Sequence[Any], message: Tensor) -> Any:
    """Verify and deserialise the object of a rank.

    Args:
        secret: key of the run; b"" without a key.
        context: kind of message, generation and rank of the sender.
        message: message of `pack`, on the CPU.

    Raises:
        TypeError: the sender could not send the object.
        AuthenticationError: the message was not sent by a process of this run.
        ValueError: there is no key, and the message is not plain data; it was not executed.
    """
    refused, obj = authentication.loads(secret, list(context), message.numpy().tobytes())
    if refused:
        raise TypeError(refused)
    return obj
