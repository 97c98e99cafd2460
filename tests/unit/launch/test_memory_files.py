"""Memory files that outlive a process and end with the run."""

from __future__ import annotations

from pathlib import Path

from fabricx.fault_tolerance import memory_checkpoint
from fabricx.launch.memory_files import MemoryFiles


def test_memory_files_are_kept_for_a_successor_until_closed(tmp_path: Path) -> None:
    files = MemoryFiles(str(tmp_path))
    links = [memory_checkpoint.path_of(str(tmp_path), worker, 0) for worker in range(2)]
    for worker in range(2):
        files.open(worker)
        links[worker].write_bytes(b"state")
    files.open(1)  # the process is started again
    assert [link.read_bytes() for link in links] == [b"state", b"state"]
    files.close_except([1])
    assert [link.is_symlink() for link in links] == [False, True]
    files.close_except(())
    assert not any(tmp_path.iterdir())
