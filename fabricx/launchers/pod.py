"""Main module of a pod of the Kubernetes launcher: `python -m fabricx.launchers.pod FOLDER`.

The launching process and the pods exchange files in a folder that all of them mount:

- `job`: the work of the ranks; `program.json`: their number and environment.
- `started-N`, of pod N: created when it starts, so that a pod that Kubernetes starts again is recognized. Ranks start
  when all of these files exist.
- `alive-N`: a number that changes each `ALIVE_S`.
- `signal`: number of the signal that all ranks receive.
- `output-N`: output of the ranks of pod N, in addition to the pod's log.
- `ended-N`: the end of its ranks, an `Ended`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, final

from fabricx.distributed.messages import authentication
from fabricx.launch.launcher import Ended, Program, torchrun_variables
from fabricx.launch.ranks import Ranks
from fabricx.launch.worker import Failure, failure_of

LOOK_S: Final = 0.5  # seconds between two looks for a signal
ALIVE_S: Final = 2.0  # seconds between two signs of life
GONE_S: Final = 5 * ALIVE_S  # without a sign of life, the first pod of a number is gone
LAST_S: Final = 5.0  # limit for the last output, which a process that outlives the ranks may hold open


def main(folder: Path) -> None:
    """Run the ranks of this pod, and write their end to the folder.

    Kubeflow's runtime for torch sets the number of the pod and the address of the first pod in PET_NODE_RANK,
    PET_MASTER_ADDR and PET_MASTER_PORT.

    Args:
        folder: shared by the launching process and all pods.
    """
    node = int(os.environ["PET_NODE_RANK"])
    try:
        (folder / f"started-{node}").touch(exist_ok=False)
    except FileExistsError:
        _follow(folder, node)
        return
    with _output_copied(folder / f"output-{node}"):
        try:
            ended = _run(folder, node)
        except BaseException as error:  # such as a file that belongs to another user
            ended = Ended(failures=(failure_of(node * read_program(folder)[0].processes, error, time.time()),))
    _write(folder / f"ended-{node}", ended)


def _run(folder: Path, node: int) -> Ended:
    """Run the ranks of this pod when all pods have started."""
    program, environment = read_program(folder)
    with authentication.open_private(folder / "job") as file:
        job = file.read()
    variables = torchrun_variables(program, node, os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"]))
    ranks = Ranks(job, [{**environment, **of_rank} for of_rank in variables])
    watch = _Watch(folder, node, ranks)
    while not all((folder / f"started-{number}").exists() for number in range(program.nodes)):
        if watch.signalled:
            return Ended(failures=(lost(folder, node, "was ended before all pods had started"),))
        time.sleep(LOOK_S)
    ended = ranks.run()
    if not watch.terminated or not (ended.stopping or ended.failures):
        return ended
    text = "has received SIGTERM (eviction, pre-emption, or the end of its machine)"
    return Ended(failures=(*ended.failures, lost(folder, node, text)))


def _follow(folder: Path, node: int) -> None:
    """Report that the first pod of this number was lost, unless it ends by itself, as while it saves a checkpoint."""
    alive, seen, seen_at = folder / f"alive-{node}", b"", time.monotonic()
    while time.monotonic() < seen_at + GONE_S:
        if (folder / f"ended-{node}").exists():
            return
        with contextlib.suppress(OSError):
            if (content := alive.read_bytes()) != seen:
                seen, seen_at = content, time.monotonic()
        time.sleep(LOOK_S)
    _write(folder / f"ended-{node}", Ended(failures=(lost(folder, node, "was lost; Kubernetes started it again"),)))


def write_program(folder: Path, program: Program, environment: dict[str, str]) -> None:
    """Write the files for the pods.

    Args:
        folder: only this user may read it.
        program: the program.
        environment: environment variables of the ranks.
    """
    authentication.write_private(folder / "job", program.job)
    numbers = {"nodes": program.nodes, "processes": program.processes, "stops_at_step": program.stops_at_step,
               "servers": program.servers}  # fmt: skip
    (folder / "program.json").write_text(json.dumps({**numbers, "environment": environment}))


def read_program(folder: Path) -> tuple[Program, dict[str, str]]:
    """Return the program without its job, and the environment variables of the ranks.

    Args:
        folder: of `write_program`.
    """
    written = json.loads((folder / "program.json").read_text())
    environment: dict[str, str] = written.pop("environment")
    return Program(b"", gpus=False, gpus_unused=False, **written), environment


def lost(folder: Path, node: int, text: str) -> Failure:
    """Return the report of the failure of a pod.

    Args:
        folder: of `write_program`.
        node: number of the pod.
        text: description of the failure.
    """
    program, _ = read_program(folder)
    return Failure(node * program.processes, time.time(), "death", f"pod {node} {text}", None)


def replace(file: Path, content: bytes) -> None:
    """Write a file of the folder atomically.

    Args:
        file: path of the file, which may exist.
        content: new content.
    """
    new = file.with_name(f".{file.name}-new")
    new.write_bytes(content)
    new.replace(file)


def _write(file: Path, ended: Ended) -> None:
    replace(file, pickle.dumps(ended))


@final
class _Watch:
    """Sends signs of life, and passes signals on to the ranks: those of the folder, and SIGTERM of Kubernetes.

    Args:
        folder: of the pods.
        node: number of this pod.
        ranks: ranks of this pod.
    """

    def __init__(self, folder: Path, node: int, ranks: Ranks) -> None:
        self._alive, self._signal, self._ranks = folder / f"alive-{node}", folder / "signal", ranks
        self.terminated = self.signalled = False
        replace(self._alive, _now())
        signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._run, daemon=True).start()

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminated = self.signalled = True
        threading.Thread(target=self._ranks.signal, args=(signal.SIGTERM,), daemon=True).start()

    def _run(self) -> None:
        sent, shown = b"", 0.0
        while True:
            with contextlib.suppress(OSError):  # of a network file system
                if time.monotonic() > shown + ALIVE_S:
                    shown = time.monotonic()
                    with self._alive.open("r+b") as file:  # in place, which needs no space on a full disk
                        file.write(_now())
                if self._signal.exists() and (requested := self._signal.read_bytes()) != sent:
                    sent, self.signalled = requested, True
                    self._ranks.signal(signal.Signals(int(requested.split()[0])))
            time.sleep(LOOK_S)


def _now() -> bytes:
    return b"%020d" % time.time_ns()


@contextlib.contextmanager
def _output_copied(file: Path) -> Iterator[None]:
    """Copy the output of this process and of its children to a file, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    original, (reads, writes) = os.dup(1), os.pipe()
    copier = threading.Thread(target=_copy, args=(reads, original, file), daemon=True)
    copier.start()
    for number in (1, 2):
        os.dup2(writes, number)
    os.close(writes)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):  # the copier ends when no process can write any more
            os.dup2(original, number)
        copier.join(LAST_S)


def _copy(reads: int, original: int, file: Path) -> None:
    while data := os.read(reads, 1 << 16):
        os.write(original, data)
        with contextlib.suppress(OSError), file.open("ab") as output:  # the file system is full, for example
            output.write(data)
    os.close(reads)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
