"""Writes checkpoints in the background while training continues."""

from __future__ import annotations

import json
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch

from fabricx.checkpoint import files, sharded_tensors, tree
from fabricx.checkpoint.storage import Place, as_path, discard
from fabricx.distributed.generations import SAVING, membership
from fabricx.distributed.world import World
from fabricx.errors import CheckpointError, is_full


@dataclass
class _Snapshot:
    """One rank's part of a checkpoint, in memory; `rest` and `manifest` matter on the main rank only."""

    path: Path
    work: Path
    part: sharded_tensors.Part
    rest: bytes
    manifest: Mapping[str, Any]
    copied: Any  # an event on a GPU, after which the copies are there


PARTS_S: Final = 3600.0  # how long the slowest rank that is alive may write
NOTICE_S: Final = 0.05  # how soon a rank that waits for the thread notices that its generation has ended


@dataclass
class _Write:
    """A checkpoint on its way to disk, shared by the thread that writes and the rank that waits."""

    snapshot: _Snapshot
    after: Callable[[], None] | None
    repeated: bool
    done: threading.Event = field(default_factory=threading.Event)
    committing: threading.Lock = field(default_factory=threading.Lock)
    abandoned: bool = False  # set under the lock: no commit begins after that


@final
class Writer:
    """Writes checkpoints of all ranks, one at a time, in a thread.

    A snapshot is taken while everybody waits (a copy in memory); files are written while training goes on. Ranks tell
    the main rank through the store that their parts are on disk; it commits. No collective runs in the thread. There is
    one for all checkpoints: a process that a loader forks in the moment in which a thread begins or ends may hang
    (CPython 3.11 takes a lock in the child that nobody is left to give back).
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[_Write | Path | None] = queue.SimpleQueue()
        self._write: _Write | None = None  # begun last, and not waited for yet
        self._error: BaseException | None = None
        self._path = Path()
        self._room: dict[str, torch.Tensor] = {}  # of the newest snapshot, for the next one
        self._warned = False
        self._failed: Callable[[], None] | None = None

    def begin(
        self, path: Path, state: Mapping[str, Any], manifest: Mapping[str, Any],
        after: Callable[[], None] | None = None, failed: Callable[[], None] | None = None, *, repeated: bool = False,
    ) -> None:  # fmt: skip
        """Take a snapshot, and start to write it; every rank calls this at the same moment.

        Args:
            path: the folder to be.
            state: tensors (also DTensors) and plain data; all that isn't a DTensor is the same on all ranks.
            manifest: what a person wants to know of it.
            after: called in the main rank's thread once the checkpoint is committed.
            failed: called on every rank, in `finish`, if the disk was full.
            repeated: a callback writes another in its place, should it be lost with a rank.

        Raises:
            CheckpointError: something in the state is neither a tensor nor plain data, or the one before failed.
        """
        self.finish()
        rest, tensors = tree.split(dict(state))
        refused = ""
        data = b""
        try:
            data = files.serialized(rest)
        except CheckpointError as error:
            refused = str(error)
        told = self._world.gather_objects((refused, str(files.folder_to_write(path))))
        if found := [text for text, _ in told if text]:
            raise CheckpointError(found[0])
        work = as_path(told[0][1])
        part = sharded_tensors.plan(tensors, self._world, self._room)
        self._room = part.tensors
        copied = None
        if torch.cuda.is_initialized():
            copied = torch.cuda.Event()
            copied.record()
        snapshot = _Snapshot(path, work, part, data, manifest, copied)
        self._path, self._failed, self._warned = path, failed, False
        self._write = _Write(snapshot, after, repeated)
        if not repeated:
            self._tell([str(path), manifest.get("step")])
        self._tasks.put(self._write)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fabricx-checkpoint", daemon=True)
            self._thread.start()

    def poll(self) -> None:
        """Raise what went wrong in the background, as soon as that is known; costs nothing while nothing is written."""
        if self._write is not None and self._error is not None and self._write.done.is_set():
            self._raise_unless_full(self._error)

    def busy(self) -> bool:
        """Return whether the latest checkpoint is still being written on any rank; every rank asks at the same moment.

        Ranks wait for each other in the store where a checkpoint is committed, and that may be out of reach.
        """
        if self._write is None:
            return False
        own = torch.tensor(float(not self._write.done.is_set()), device=self._world.device)
        return bool(self._world.all_reduce(own, "max"))

    def finish(self) -> bool:
        """Wait until nothing is being written; every rank calls this at the same moment.

        Returns:
            whether the latest checkpoint is there; False where the disk was full.

        Raises:
            CheckpointError: it couldn't be written for another reason than a full disk.
            Broken: another rank died meanwhile, so that its part will never be written.
        """
        write = self._write
        if write is None:
            return True
        while not write.done.wait(NOTICE_S):
            membership().check(self._world.generation)
        error, self._error = self._error, None
        told = self._world.broadcast_object(None if error is None else _told(error))
        self._write = None  # not before all know of it: the main rank may have died, and left the folder
        if not write.repeated:
            self._tell(None)
        if told is None:
            return True
        self._raise_unless_full(error if error is not None and self._world.size == 1 else OSError(*told))
        if self._failed is not None:
            self._failed()
        return False

    def close(self) -> None:
        """Wait for this rank's own part; after an error, when other ranks may be gone."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join(timeout=30.0 if self._world.size == 1 else 1.0)

    def abandon(self) -> None:
        """Give up what is being written, without waiting for the disk: another rank is gone.

        From now on this rank commits nothing. `sweep` is to follow once all other ranks have given up, too.
        """
        if self._write is not None:
            with self._write.committing:
                self._write.abandoned = True

    @property
    def given_up(self) -> Path | None:
        """Return the path of a checkpoint that was given up and is not there, unless a callback writes it again."""
        write = self._write
        if write is None or write.repeated or not write.abandoned:
            return None
        path, step = write.snapshot.path, write.snapshot.manifest["step"]
        committed = files.is_committed(path) and files.read_manifest(path)["step"] == step
        return None if committed else path

    def sweep(self) -> None:
        """Let the thread delete what was abandoned, as soon as the disk lets it, and end."""
        if self._write is not None:
            self._tasks.put(self._write.snapshot.work)
        self._tasks.put(None)
        self._thread = self._write = None

    def _tell(self, saving: list[Any] | None) -> None:
        """Let the supervisor know which checkpoint is lost if all workers end now; of one that is repeated, none is."""
        if self._world.main_rank and self._world.store is not None and self._world.size > 1:
            self._world.store.set(SAVING, json.dumps(saving))

    def _raise_unless_full(self, error: BaseException) -> None:
        if not is_full(error):
            raise CheckpointError(f"the checkpoint {self._path} could not be written: {error}") from error
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the checkpoint {self._path} could not be written: the disk is full. Training goes on; the earlier "
            "checkpoints are in place, and the next one is tried as planned",
            stacklevel=3,
        )

    # -- in the thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, _Write):
                self._run(task)
                task.done.set()
            elif not files.is_committed(task):
                discard(task)
            del task

    def _run(self, write: _Write) -> None:
        snapshot = write.snapshot
        written: dict[str, Any] = {}
        try:
            if snapshot.copied is not None:
                snapshot.copied.synchronize()
            if write.abandoned:  # before its turn came
                return
            snapshot.work.mkdir(parents=True, exist_ok=True)
            file = snapshot.part.file
            written = {file: sharded_tensors.write(snapshot.work / file, snapshot.part.tensors)}
        except OSError as error:
            error.filename = error.filename or str(snapshot.work / snapshot.part.file)
            self._error = error
        except Exception as error:
            self._error = error
        try:
            everything = self._gather(write, written)
            if not self._world.main_rank:
                return
            if self._error is None:
                self._commit(write, everything)
        except Exception as error:
            self._error = self._error or error
        if self._error is not None and not write.abandoned:  # else other ranks may still write there
            discard(snapshot.work)

    def _commit(self, write: _Write, everything: dict[str, Any]) -> None:
        snapshot = write.snapshot
        files.complete(snapshot.work, snapshot.rest, snapshot.part.index, snapshot.manifest, everything)
        with write.committing:
            if write.abandoned:
                return
            files.put_in_place(snapshot.work, snapshot.path)
        if write.after is not None:
            write.after()

    def _wait(self, store: Any, keys: list[str], write: _Write) -> None:
        """Wait until all ranks have said that their parts are written, or one is gone; others use the store, too."""
        deadline = time.monotonic() + PARTS_S
        while not store.check(keys):
            membership().check(self._world.generation)
            if write.abandoned or time.monotonic() > deadline:
                raise TimeoutError("the other ranks haven't written their parts")
            time.sleep(0.005)

    def _gather(self, write: _Write, written: dict[str, Any]) -> dict[str, Any]:
        """Bring the ranks' sizes and checksums to the main rank, or their errors."""
        if self._world.size == 1 or self._world.store is None:
            return written
        store = self._world.store
        keys = [self._world.key(f"checkpoint/{write.snapshot.work.name}/{rank}") for rank in range(self._world.size)]
        error = self._error
        told = {"written": written} if error is None else {"error": _told(error)}
        store.set(keys[self._world.rank], json.dumps(told))
        everything: dict[str, Any] = {}
        if self._world.main_rank:
            self._wait(store, keys, write)
            for rank, found in enumerate(json.loads(store.get(key)) for key in keys):
                if "error" in found:
                    number, text = found["error"]
                    raise OSError(number, f"rank {rank}: {text}")
                everything |= found["written"]
        return everything


def _told(error: BaseException) -> tuple[int | None, str]:
    """Return an error as another rank can be told of it, with the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.errno, f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None, str(error)


def save(path: Place, state: Mapping[str, Any], manifest: Mapping[str, Any], world: World | None = None) -> Path:
    """Write a checkpoint, and return when it is there; see `Writer.begin`."""
    writer = Writer(world or World())
    path = as_path(path)
    writer.begin(path, state, manifest)
    try:
        if not writer.finish():
            raise CheckpointError(f"the checkpoint {path} could not be written: the disk is full")
    finally:
        writer.close()
    return path
