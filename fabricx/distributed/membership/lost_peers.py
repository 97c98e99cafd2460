"""Errors that mean a lost peer; the only module that reads the texts of torch's errors of connections.

gloo raises a plain `RuntimeError` when a connection ends. The error has no special type or code: only its text
differs from an error in the user's code. The collectives of `World`, and a backward in which torch communicates,
raise `PeerLost` in its place. fabricx does not call the collectives of FSDP's forward and of users: their errors are
recognised where the run handles errors.
"""

from __future__ import annotations

from typing import Final

from fabricx.errors import PeerLost, ServerLost

_CLOSED: Final = ("Connection closed by peer", "Connection reset by peer")
_CUT: Final = ("onnection closed", "onnection reset", "roken pipe", "ocket")


def is_peer_lost(error: BaseException | None) -> bool:
    """Return whether an error, or an error that it was raised from, reports a lost process.

    Args:
        error: error of a rank; None returns False.

    >>> is_peer_lost(RuntimeError("[gloo/transport/tcp/pair.cc:552] Connection closed by peer [127.0.0.1]:5000"))
    True
    >>> is_peer_lost(ValueError("batch_size=0"))
    False
    """
    while error is not None:
        if isinstance(error, (PeerLost, ServerLost)) or any(sign in str(error) for sign in _CLOSED):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def may_be_cut(error: BaseException) -> bool:
    """Return whether a cut connection may have caused an error; then the supervisor is asked for lost workers.

    Args:
        error: error of a rank that has received no notice of a death.
    """
    return is_peer_lost(error) or any(sign in str(error) for sign in _CUT)


def raise_peer_lost(error: Exception, operation: str) -> None:
    """Raise `PeerLost` if an error reports a lost process; else return.

    Args:
        error: torch's error.
        operation: operation that has failed, with its rank.

    Raises:
        PeerLost: from the error.
    """
    if not isinstance(error, PeerLost) and is_peer_lost(error):
        raise PeerLost(f"{operation}: the connection to another rank was lost: {error}") from error
