"""Memory files of workers and servers, which hold their in-memory checkpoints beyond the end of a process."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fabricx.distributed.shared_memory.vectors import anonymous_file
from fabricx.fault_tolerance import memory_checkpoint


class MemoryFiles:
    """Memory files that the supervisor keeps open, by process.

    Args:
        folder: private folder of the run, in which links to the files have paths that other processes can open.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[int, list[int]] = {}

    def open(self, worker: int) -> None:
        """Create the files of a process; does nothing for the successor of a process, which uses the same files.

        Args:
            worker: number of the process.
        """
        if worker in self._files:
            return
        self._files[worker] = [anonymous_file(0) for _ in range(memory_checkpoint.NEWEST)]
        for number, file in enumerate(self._files[worker]):
            link = memory_checkpoint.path_of(self._folder, worker, number)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{file}")

    def close_except(self, workers: Iterable[int]) -> None:
        """Close the files of all processes except some; their content is lost.

        Args:
            workers: numbers of the processes whose files stay open.
        """
        for worker in self._files.keys() - set(workers):
            for number, file in enumerate(self._files.pop(worker)):
                memory_checkpoint.path_of(self._folder, worker, number).unlink(missing_ok=True)
                os.close(file)
