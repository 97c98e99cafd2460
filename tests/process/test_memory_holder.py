"""Memory files that survive the ranks until the end of the process that has started the ranks, or of their holder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fabricx.fault_tolerance import memory_holder

NAMES = ["copy-0-0", "copy-0-1"]
# A process between this process and the holder, like the ranks between torchrun and the holder.
WORKER = """
import os, sys
from pathlib import Path
from fabricx.fault_tolerance import memory_holder
print(memory_holder.start(Path(sys.argv[1]), sys.argv[2:]))
"""


def wait_for_the_end_of(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def torchrun(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a substitute for torchrun: a process that starts processes on request."""
    code = f"""
import subprocess, sys
for line in sys.stdin:
    subprocess.run([sys.executable, "-c", {WORKER!r}, {str(tmp_path / "kept")!r}, *{NAMES!r}])
"""
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip


def started(torchrun: subprocess.Popen[str]) -> bool:
    assert torchrun.stdin is not None
    assert torchrun.stdout is not None
    torchrun.stdin.write("again\n")
    torchrun.stdin.flush()
    return torchrun.stdout.readline() == "True\n"


def test_memory_files_are_readable_by_later_processes_until_their_parent_ends(
    torchrun: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    with torchrun:
        assert started(torchrun)
        (folder / NAMES[1]).write_bytes(b"copied")
        first = (folder / "holder").read_text()
        assert started(torchrun)
        assert (folder / "holder").read_text() == first  # no second holder
        assert (folder / NAMES[1]).read_bytes() == b"copied"
        torchrun.kill()
        wait_for_the_end_of(folder)


def test_a_killed_holder_is_replaced_by_a_holder_with_empty_files(
    torchrun: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    with torchrun:
        assert started(torchrun)
        (folder / NAMES[0]).write_bytes(b"copied")
        os.kill(int((folder / "holder").read_text()), signal.SIGKILL)
        assert started(torchrun)
        assert (folder / NAMES[0]).read_bytes() == b""
        memory_holder.end(folder)
        wait_for_the_end_of(folder)
        torchrun.kill()


def test_a_folder_with_unsafe_permissions_or_a_link_is_not_used(
    torchrun: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    with torchrun:
        assert started(torchrun)
        assert memory_holder.is_kept(folder, NAMES)
        folder.chmod(0o755)
        assert not memory_holder.is_kept(folder, NAMES)
        folder.chmod(0o700)
        (tmp_path / "link").symlink_to(folder)
        assert not memory_holder.is_kept(tmp_path / "link", NAMES)
        memory_holder.end(folder)
        wait_for_the_end_of(folder)
        torchrun.kill()


def test_a_pid_in_a_folder_of_another_user_is_not_signalled(tmp_path: Path) -> None:
    folder = tmp_path / "guessed"
    folder.mkdir(mode=0o755)
    with subprocess.Popen([sys.executable, "-ISc", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        (folder / "holder").write_text(str(process.pid))
        (folder / NAMES[0]).write_text("theirs")
        assert not memory_holder.start(folder, NAMES)
        memory_holder.end(folder)
        process.stdin.close()
        assert process.wait(60) == 0  # without a signal
    assert (folder / NAMES[0]).read_text() == "theirs"


def test_no_holder_starts_if_the_folder_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not memory_holder.start(tmp_path / "file" / "kept", NAMES)
    assert not (tmp_path / "file" / "kept").exists()


def test_the_end_of_a_run_ends_no_process_with_the_number_of_a_killed_holder(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    (folder / "alive").touch()
    with subprocess.Popen(["sleep", "60"]) as other:
        (folder / "holder").write_text(str(other.pid))
        memory_holder.end(folder)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        other.kill()
