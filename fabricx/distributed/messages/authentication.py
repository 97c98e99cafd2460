"""Authentication of messages between the processes of a run, with a secret key per run."""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import socket
import stat
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, Final, final

from fabricx import by_value

KEY_BYTES: Final = 32
TAG_BYTES: Final = hashlib.sha256().digest_size
ANSWER_S: Final = 20.0  # time for a connecting process to prove that it has the key
LARGEST: Final = 1 << 30  # maximum bytes of a message over a network
# TCP keep-alive: seconds of silence before the first probe, seconds between two probes, number of probes.
PATIENT: Final = (15, 5, 3)  # the other machine is lost after 30 s without an answer
SHORT: Final = (3, 1, 3)  # after 6 s


class AuthenticationError(Exception):
    """Data was sent by a process without the run's key, or was altered in transit."""


def new_key() -> bytes:
    """Return a random key of `KEY_BYTES` bytes."""
    return secrets.token_bytes(KEY_BYTES)


def tag(key: bytes, context: Sequence[object], data: bytes) -> bytes:
    """Return the HMAC-SHA256 of data and its context, `TAG_BYTES` bytes.

    Args:
        key: secret of the run.
        context: where and when the data is valid, such as a name and a generation. Data signed in one context is
            refused in any other, so that a recorded message can't be replayed.
        data: any bytes.
    """
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in (*(str(part).encode() for part in context), data):
        code.update(len(part).to_bytes(8, "little"))  # distinguishes ("ab", "c") from ("a", "bc")
        code.update(part)
    return code.digest()


def sign(key: bytes, context: Sequence[object], data: bytes) -> bytes:
    """Return the tag followed by the data.

    Args:
        key: secret of the run.
        context: where and when the data is valid; see `tag`.
        data: data to sign.
    """
    return tag(key, context, data) + data


def verify(key: bytes, context: Sequence[object], signed: bytes) -> bytes:
    """Return the data that was signed with the same key in the same context.

    Args:
        key: secret of the run.
        context: see `tag`.
        signed: result of `sign`.

    Raises:
        AuthenticationError: the tag does not match.
    """
    received, data = signed[:TAG_BYTES], signed[TAG_BYTES:]
    if not hmac.compare_digest(received, tag(key, context, data)):
        what = " ".join(map(str, context))
        raise AuthenticationError(
            f"{what!r} was not signed with this run's key: another program has written it, or processes of the run "
            "have different keys (set the same FABRICX_KEY_FILE on all machines)"
        )
    return data


def dumps(key: bytes, context: Sequence[object], message: Any) -> bytes:
    """Serialise and sign a message: with pickle, or as plain data if there is no key that would prove its origin.

    Args:
        key: secret of the run; b"" for none.
        context: see `tag`.
        message: any object; without a key, plain data and tensors.

    Raises:
        TypeError: there is no key, and the message is not plain data and tensors.
    """
    if key:
        return sign(key, context, by_value.dumps_for_peer(message))
    from fabricx.distributed.messages import plain_data  # here: the host process of a launch's store has no torch

    return sign(key, context, plain_data.dumps(message))


def loads(key: bytes, context: Sequence[object], signed: bytes) -> Any:
    """Verify and deserialise a message of `dumps`; without a key, no code of the message can run.

    Args:
        key: secret of the run; b"" for none.
        context: see `tag`.
        signed: result of `dumps`.

    Raises:
        AuthenticationError: the message was not signed with the same key in the same context; it was not unpickled.
        ValueError: there is no key, and the message is not plain data and tensors.
    """
    data = verify(key, context, signed)
    if key:
        return pickle.loads(data)
    from fabricx.distributed.messages import plain_data

    return plain_data.loads(data)


# -- connections --------------------------------------------------------------------------------------------------


def listen(folder: str | os.PathLike[str], name: str, backlog: int = 64) -> socket.socket:
    """Return a listening Unix socket in a private folder, whose mode restricts access to this user.

    A socket address holds 107 bytes only, so long paths are bound relative to the open folder.

    Args:
        folder: private folder; see `check_private`.
        name: file name of the socket.
        backlog: backlog of `socket.listen`.

    Raises:
        PermissionError: the folder is not private.
    """
    check_private(folder)
    listener = socket.socket(socket.AF_UNIX)
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{number}/{name}" if _is_long(folder, name) else os.path.join(folder, name))
    finally:
        os.close(number)
    listener.listen(backlog)
    return listener


def listen_on_network(backlog: int = 128) -> socket.socket:
    """Return a socket that listens at a free port of all interfaces; call `admit` for each accepted connection.

    Args:
        backlog: backlog of `socket.listen`.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=both)


def accept(listener: socket.socket, key: bytes) -> Connection | None:
    """Accept the next connection; returns None if its process has not proved within `ANSWER_S` that it has the key.

    Args:
        listener: listener of `listen`.
        key: secret of the run.

    Raises:
        OSError: the listener was closed.
    """
    peer, _ = listener.accept()
    return None if _proof_of(peer, key) is None else Connection(peer.detach())


def admit(peer: socket.socket, key: bytes) -> Connection | SignedConnection | None:
    """Authenticate an accepted connection; returns None, and closes it, without proof of the key.

    Args:
        peer: accepted socket.
        key: secret of the run.
    """
    if (numbers := _proof_of(peer, key)) is None:
        return None
    if peer.family == socket.AF_UNIX:
        return Connection(peer.detach())
    return SignedConnection(peer, tag(key, ["session"], numbers), "server", "client")


def _proof_of(peer: socket.socket, key: bytes) -> bytes | None:
    """Return the random numbers of both sides after a connecting process has proved that it has the key.

    Otherwise close the connection and return None.
    """
    try:
        peer.settimeout(ANSWER_S)
        ours = secrets.token_bytes(KEY_BYTES)
        peer.sendall(ours)
        theirs, proof = _read(peer, KEY_BYTES), _read(peer, TAG_BYTES)
        if hmac.compare_digest(proof, tag(key, ["client"], ours + theirs)):
            peer.sendall(tag(key, ["server"], ours + theirs))
            peer.settimeout(None)
            return ours + theirs
    except OSError:  # the process has ended, or the timeout has passed
        pass
    peer.close()
    return None


def connect(path: str, key: bytes) -> Connection:
    """Connect to a listening process of this machine that has the same key.

    Args:
        path: path of its Unix socket.
        key: secret of the run.

    Raises:
        AuthenticationError: the process does not have the key.
        OSError: no process listens at the path, or it has closed the connection.
    """
    folder, name = os.path.split(path)
    peer = socket.socket(socket.AF_UNIX)
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            peer.connect(f"/proc/self/fd/{number}/{name}" if _is_long(folder, name) else path)
        finally:
            os.close(number)
        _prove(peer, key, path)
    except BaseException:
        peer.close()
        raise
    return Connection(peer.detach())


def connect_to(address: tuple[str, int], key: bytes) -> SignedConnection:
    """Connect to a process of another machine; each message of the connection is signed.

    Args:
        address: host name and port at which the process listens.
        key: secret that both processes have.

    Raises:
        AuthenticationError: the process does not have the key.
        OSError: no process listens there, or it can't be reached within `ANSWER_S`.
    """
    peer = socket.create_connection(address, ANSWER_S)
    try:
        numbers = _prove(peer, key, f"{address[0]}:{address[1]}")
        peer.settimeout(None)
    except BaseException:
        peer.close()
        raise
    return SignedConnection(peer, tag(key, ["session"], numbers), "client", "server")


def _prove(peer: socket.socket, key: bytes, address: str) -> bytes:
    """Authenticate both sides of a connection to a listening process; returns the random numbers of both sides."""
    theirs, ours = _read(peer, KEY_BYTES), secrets.token_bytes(KEY_BYTES)
    peer.sendall(ours + tag(key, ["client"], theirs + ours))
    if not hmac.compare_digest(_read(peer, TAG_BYTES), tag(key, ["server"], theirs + ours)):
        raise AuthenticationError(f"the process that listens at {address} does not have this run's key")
    return theirs + ours


@final
class SignedConnection:
    """A network connection that detects altered, omitted and repeated messages; the messages are not encrypted.

    Args:
        peer: connected socket.
        key: secret of this connection only.
        ours, theirs: names of both sides, part of the signed context.
    """

    def __init__(self, peer: socket.socket, key: bytes, ours: str, theirs: str) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(peer, PATIENT)
        self._connection = Connection(peer.detach())
        self._key, self._ours, self._theirs = key, ours, theirs
        self._sent = self._received = 0

    def detect_loss_soon(self) -> None:
        """Let this connection end with an error when the other machine has not answered for 6 s, not 30 s (`SHORT`)."""
        with socket.socket(fileno=os.dup(self.fileno())) as duplicate:
            _keep_alive(duplicate, SHORT)

    def send_bytes(self, data: bytes) -> None:
        """Send a message.

        Args:
            data: content of the message, which is sent with its signature.
        """
        self._connection.send_bytes(self.signed(data))

    def recv_bytes(self) -> bytes:
        """Wait for the next message.

        Raises:
            AuthenticationError: it is not the next message of the other side.
            OSError: the connection was lost, or the message is larger than `LARGEST`.
            EOFError: the other side has closed the connection.
        """
        return self.verified(self._connection.recv_bytes(LARGEST))

    def signed(self, data: bytes) -> bytes:
        """Return the next message to send, which has to be sent before any other.

        Args:
            data: content of the message.
        """
        message = sign(self._key, [self._ours, self._sent], data)
        self._sent += 1
        return message

    def verified(self, message: bytes) -> bytes:
        """Return the content of the next message that was received.

        Args:
            message: the message with its signature.

        Raises:
            AuthenticationError: it is not the next message of the other side.
        """
        data = verify(self._key, [self._theirs, self._received], message)
        self._received += 1
        return data

    def poll(self) -> bool:
        """Return whether a message, or the end of the connection, can be read."""
        return self._connection.poll()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _keep_alive(peer: socket.socket, limits: tuple[int, int, int]) -> None:
    """Detect a machine that has vanished, also while it has not acknowledged data."""
    idle, interval, probes = limits
    options = {
        "TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": (idle + interval * probes) * 1000,
    }  # fmt: skip
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_long(folder: str | os.PathLike[str], name: str) -> bool:
    return len(os.fsencode(os.path.join(folder, name))) > 100


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("the other process has closed the connection")
        data += part
    return data


# -- folders and files --------------------------------------------------------------------------------------------


def check_private(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that another user could have made or could write to.

    Args:
        folder: path.

    Raises:
        PermissionError: it is a link, belongs to another user, or its mode admits other users.
        OSError: it does not exist.
    """
    _check(Path(folder), os.lstat(folder), stat.S_IFDIR, 0o700)


def read_private(path: Path) -> bytes:
    """Return the content of a file that only this user can access; errors are those of `open_private`.

    Args:
        path: path of the file.
    """
    with open_private(path) as file:
        return file.read()


def open_private(path: Path) -> BinaryIO:
    """Open a file that only this user can read and write.

    Args:
        path: path of the file.

    Raises:
        PermissionError: it is a link, belongs to another user, or its mode admits other users.
        OSError: it can't be read.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(number), stat.S_IFREG, 0o600)
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "rb")


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only this user can read and write.

    Args:
        path: must not exist.
        data: content.

    Raises:
        FileExistsError: the path exists.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _check(path: Path, status: os.stat_result, kind: int, mode: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind:
        wanted = "folder" if kind == stat.S_IFDIR else "regular file"
        raise PermissionError(f"{path} is a link, or is not a {wanted}: remove it")
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}: choose another path")
    if status.st_mode & 0o077:
        raise PermissionError(f"{path} admits other users: chmod {mode:o} {path}")
