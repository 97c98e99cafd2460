"""Messages of a process without the run's key are neither accepted nor unpickled."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricx.distributed.messages import authentication
from fabricx.distributed.messages.authentication import AuthenticationError, accept, connect, listen, new_key
from fabricx.parameter_server.wire.link import Handshake

KEY = b"k" * 32


class Exploit:
    """Creates a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    folder = tmp_path / ("long" * 40)  # longer than the maximum path of a Unix socket
    folder.mkdir(mode=0o700)
    return folder


def test_a_message_is_read_only_in_its_own_context() -> None:
    signed = authentication.dumps(KEY, ["gather", 3, 1], {"step": 7})
    assert authentication.loads(KEY, ["gather", 3, 1], signed) == {"step": 7}
    for context in (["gather", 4, 1], ["gather", 3, 0], ["broadcast", 3, 1], ["gather", 31], ["gather", "3 1"]):
        with pytest.raises(AuthenticationError, match="was not signed with this run's key"):
            authentication.loads(KEY, context, signed)


def test_altered_messages_and_messages_of_another_key_are_not_unpickled(tmp_path: Path) -> None:
    marker, context = tmp_path / "marker", ["broadcast", 0, 0]
    genuine = authentication.dumps(KEY, context, [1, 2])
    forged = pickle.dumps(Exploit(marker))
    attempts = [authentication.dumps(new_key(), context, Exploit(marker)), authentication.dumps(b"", context, 1)]
    attempts += [forged, b"", genuine[:31], genuine[:-1], genuine + b"0", genuine[:32] + forged]
    attempts += [bytes([*genuine[:at], genuine[at] ^ 1, *genuine[at + 1 :]]) for at in range(len(genuine))]
    for attempt in attempts:
        with pytest.raises(AuthenticationError):
            authentication.loads(KEY, context, attempt)
    assert not marker.exists()
    pickle.loads(forged)
    assert marker.exists()  # it would have succeeded


def test_a_handshake_of_a_worker_is_valid_only_under_its_key() -> None:

    hello = Handshake(2, torch.bfloat16, 10, None, 4)
    assert Handshake.loads(KEY, "server/0/from/1", hello.dumps(KEY, "server/0/from/1")) == hello
    with pytest.raises(AuthenticationError):
        Handshake.loads(KEY, "server/0/from/2", hello.dumps(KEY, "server/0/from/1"))


def test_only_a_process_with_the_key_may_connect(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "ANSWER_S", 0.2)
    listener = listen(private, "door")
    path = str(private / "door")
    admitted: list[Connection | None] = []
    thread = threading.Thread(target=lambda: admitted.extend(accept(listener, KEY) for _ in range(4)))
    thread.start()
    with pytest.raises(OSError, match="closed"):
        connect(path, new_key())
    number = os.open(private, os.O_RDONLY)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for stranger, words in zip(strangers, (b"", b"\0" * 64), strict=True):
        stranger.connect(f"/proc/self/fd/{number}/door")
        stranger.sendall(words)  # and the first is silent
    ours = connect(path, KEY)
    thread.join()
    assert [connection is None for connection in admitted] == [True, True, True, False]
    ours.send_bytes(b"hello")
    assert admitted[3] is not None
    assert admitted[3].recv_bytes() == b"hello"
    for connection in (ours, admitted[3], listener, *strangers):
        connection.close()
    os.close(number)


def test_a_listener_without_the_key_is_refused(private: Path) -> None:
    listener = listen(private, "door")
    thread = threading.Thread(target=accept, args=(listener, new_key()))
    thread.start()
    with pytest.raises((AuthenticationError, OSError)):
        connect(str(private / "door"), KEY)
    thread.join()

    def pretend() -> None:  # no message of it is a valid proof
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"\0" * 64)
            peer.recv(1024)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(AuthenticationError, match="does not have this run's key"):
        connect(str(private / "door"), KEY)
    thread.join()
    listener.close()


def test_folders_and_files_of_other_users_are_refused(private: Path, tmp_path: Path) -> None:
    authentication.write_private(private / "key", b"secret")
    assert authentication.read_private(private / "key") == b"secret"
    with pytest.raises(FileExistsError):
        authentication.write_private(private / "key", b"other")
    link = tmp_path / "link"
    link.symlink_to(private)
    with pytest.raises(PermissionError, match="is a link"):
        authentication.check_private(link)
    (tmp_path / "key").symlink_to(private / "key")
    with pytest.raises(OSError, match="symbolic links"):
        authentication.read_private(tmp_path / "key")
    (private / "key").chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        authentication.read_private(private / "key")
    private.chmod(0o750)
    with pytest.raises(PermissionError, match="chmod 700"):
        listen(private, "door")


def test_a_folder_of_another_user_is_refused(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own_uid + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {own_uid}"):
        authentication.check_private(private)
