"""Writes checkpoints in the background while training continues."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch

from fabricx.checkpoint import files, objects, sharded_tensors, single_file, tree
from fabricx.checkpoint.storage import Place, as_path, discard
from fabricx.distributed.membership.generations import SAVING, membership
from fabricx.distributed.messages.authentication import tag
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.world import World
from fabricx.errors import CheckpointError, PeerLost, is_full


@dataclass
class _Snapshot:
    """A rank's part of a checkpoint, in memory; only the main rank uses `rest` and `manifest`."""

    path: Path
    work: Path
    token: str  # of this write, for keys of the store
    part: sharded_tensors.Part
    rest: bytes
    objects: bytes  # pickled; empty without objects
    manifest: Mapping[str, Any]
    copied: Any  # event on a GPU, after which the copies are complete
    shown: Sequence[str] | None  # for a single file: names of further entries; None for a folder


PARTS_S: Final = 3600.0  # maximum time of the slowest rank to write its part
REPORT_S: Final = 0.1  # interval at which the main rank, which waits for reports, checks its generation
NOTICE_S: Final = 0.05  # interval at which a rank that waits for the thread checks its generation


@dataclass
class _Write:
    """A checkpoint that is being written, shared by the writing thread and the waiting rank."""

    snapshot: _Snapshot
    after: Callable[[], None] | None
    repeated: bool
    done: threading.Event = field(default_factory=threading.Event)
    committing: threading.Lock = field(default_factory=threading.Lock)
    abandoned: bool = False  # set under the lock, by either; no commit begins afterwards


@final
class Writer:
    """Writes checkpoints of all ranks in a background thread, one at a time.

    A snapshot in memory is taken while all ranks wait; files are written while training continues. Ranks report through
    the store to the main rank, which commits; no collective runs in the thread. A single thread writes all checkpoints:
    a loader process that is forked while a thread starts or ends may hang, because CPython 3.11 then copies a locked
    lock to the child.

    Args:
        world: the ranks.
        key: secret of the run, by which its restart knows objects in its checkpoints; b"" for none.
    """

    def __init__(self, world: World, key: bytes = b"") -> None:
        self._world, self._key = world, key
        self._thread: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[_Write | Path | None] = queue.SimpleQueue()
        self._write: _Write | None = None  # the newest write, until `finish` or `sweep`
        self._error: BaseException | None = None
        self._path = Path()
        self._part: sharded_tensors.Part | None = None  # of the newest snapshot, reused by the next
        self._warned = False
        self._failed: Callable[[], None] | None = None

    def begin(
        self, path: Path, state: Mapping[str, Any], manifest: Mapping[str, Any],
        after: Callable[[], None] | None = None, failed: Callable[[], None] | None = None, *, repeated: bool = False,
        shown: Sequence[str] | None = None, common: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Take a snapshot and start to write it; every rank calls this in the same step.

        Args:
            path: path of the checkpoint.
            state: tensors (also DTensors) and plain data. Plain data are those of the main rank.
            manifest: information for users.
            after: called in the main rank's thread when the checkpoint is committed.
            failed: called on every rank, in `finish`, if the disk was full.
            repeated: if this checkpoint is lost with a rank, a callback will write it again.
            shown: write a single file, with these entries of the state beside those of Lightning; None writes a folder.
            common: paths in the state below which tensors are equal on all ranks, which share the writing; None for all
                tensors. Other tensors are those of the main rank; each rank writes its shards of DTensors.

        Raises:
            CheckpointError: the state contains more than tensors and plain data, or the previous write has failed.
        """
        self.finish()
        rest, tensors = tree.split(dict(state))
        if common is not None and not self._world.main_rank:
            below = tuple(f"{path}/" for path in common)
            tensors = {path: tensor for path, tensor in tensors.items() if is_dtensor(tensor) or path.startswith(below)}
        rest, others = objects.taken(rest)
        refused = ""
        data = pickled = b""
        try:
            data = files.serialized(rest)
            if others and self._world.main_rank:
                pickled = objects.pickled(others)
        except CheckpointError as error:
            refused = str(error)
        if self._world.all_reduce(torch.tensor(float(bool(refused)), device=self._world.device), "max"):
            raise CheckpointError(next(text for text in self._world.gather_objects(refused) if text))
        work, token = self._chosen(path, hidden=shown is not None)
        self._part = part = sharded_tensors.plan(tensors, self._world, self._part)
        copied = None
        if torch.cuda.is_initialized():
            copied = torch.cuda.Event()
            copied.record()
        snapshot = _Snapshot(path, work, token, part, data, pickled, self._signed(manifest, pickled), copied, shown)
        self._path, self._failed, self._warned = path, failed, False
        self._write = _Write(snapshot, after, repeated)
        if not repeated:
            self._publish_saving([str(path), manifest.get("step")])
        self._tasks.put(self._write)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fabricx-checkpoint", daemon=True)
            self._thread.start()

    def _signed(self, manifest: Mapping[str, Any], pickled: bytes) -> Mapping[str, Any]:
        """Return the manifest with a tag by which a restart of this run knows the objects as its own."""
        if not pickled or not self._key:
            return manifest
        return {**manifest, objects.TAG: tag(self._key, [objects.TAG], pickled).hex()}

    def _chosen(self, path: Path, *, hidden: bool) -> tuple[Any, str]:
        """Return the working folder or file that the main rank chooses, and a token; collective."""
        chosen, error = ("", ""), ""
        if self._world.main_rank:
            try:
                chosen = str(files.folder_to_write(path, hidden=hidden)), secrets.token_hex(8)
            except (OSError, CheckpointError) as reason:
                error = f"{type(reason).__name__}: {reason}"
        (folder, token), error = self._world.broadcast_object((chosen, error))
        if error:
            raise CheckpointError(f"the checkpoint {path} could not be written: {error}")
        return as_path(folder), token

    def poll(self) -> None:
        """Raise an error of the background write as soon as it is known; takes no time while nothing is written.

        Raises:
            CheckpointError: the write has failed, and not because of a full disk.
        """
        if self._write is not None and self._error is not None and self._write.done.is_set():
            self._raise_unless_full(self._error)

    def busy(self) -> bool:
        """Return whether any rank is still writing the latest checkpoint; every rank calls it in the same step.

        Uses a collective, because the store to which ranks report may be unreachable.
        """
        if self._write is None:
            return False
        unfinished = torch.tensor(float(not self._write.done.is_set()), device=self._world.device)
        return bool(self._world.all_reduce(unfinished, "max"))

    def settle(self) -> None:
        """Wait until this rank has written its part of the latest checkpoint, and the main rank has completed it.

        Raises:
            PeerLost: another rank has died, so its part will never be written.
        """
        while self._write is not None and not self._write.done.wait(NOTICE_S):
            membership().check(self._world.generation)

    def finish(self) -> bool:
        """Wait until the write has ended; every rank calls this in the same step.

        Returns:
            Whether the latest checkpoint is complete; False if the disk was full.

        Raises:
            CheckpointError: the write has failed for another reason than a full disk.
            PeerLost: another rank has died, so its part will never be written.
        """
        write = self._write
        if write is None:
            return True
        self.settle()
        if write.abandoned:  # the thread has noticed the death first
            membership().check(self._world.generation)
        error, self._error = self._error, None
        reason = self._world.broadcast_object(None if error is None else _describe_error(error))
        self._write = None  # after the broadcast: the main rank may die first, and leave the working folder to sweep
        if not write.repeated:
            self._publish_saving(None)
        if reason is None:
            return True
        self._raise_unless_full(error if error is not None and self._world.size == 1 else OSError(*reason))
        if self._failed is not None:
            self._failed()
        return False

    def close(self) -> None:
        """Wait for this rank's part, but not long if there are other ranks; called after an error, too."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join(timeout=30.0 if self._world.size == 1 else 1.0)

    def abandon(self) -> None:
        """Abandon the write without waiting for the disk, because another rank has died.

        This rank commits nothing afterwards. Call `sweep` when all other ranks have abandoned the write, too.
        """
        if self._write is not None:
            with self._write.committing:
                self._write.abandoned = True

    @property
    def given_up(self) -> Path | None:
        """Return the path of an abandoned checkpoint that does not exist and that no callback will write again."""
        write = self._write
        if write is None or write.repeated or not write.abandoned:
            return None
        path, step = write.snapshot.path, write.snapshot.manifest["step"]
        committed = files.is_committed(path) and files.read_manifest(path)["step"] == step
        return None if committed else path

    def sweep(self) -> None:
        """Make the thread delete the working folder of an abandoned write and end, without waiting for it."""
        if self._write is not None:
            self._tasks.put(self._write.snapshot.work)
        self._tasks.put(None)
        self._thread = self._write = None

    def _publish_saving(self, saving: list[Any] | None) -> None:
        """Publish in the store which checkpoint is lost if all workers end now; not for repeated writes."""
        if self._world.main_rank and self._world.store is not None and self._world.size > 1:
            self._world.store.set(SAVING, json.dumps(saving))

    def _raise_unless_full(self, error: BaseException) -> None:
        if not is_full(error):
            raise CheckpointError(f"the checkpoint {self._path} could not be written: {error}") from error
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"the checkpoint {self._path} could not be written: the disk is full. Training continues, earlier "
            "checkpoints are unchanged, and later ones are written if there is space: delete files, or set "
            "ModelCheckpoint(dirpath=...) to another disk",
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
            if write.abandoned:  # before the thread has begun it
                return
            if snapshot.shown is None or self._world.size > 1:
                snapshot.work.mkdir(parents=True, exist_ok=True)
                file = snapshot.part.file
                if snapshot.part.tensors or self._world.main_rank:
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
        except PeerLost:  # no error of this checkpoint: this rank begins it again when it joins the next generation
            with write.committing:
                write.abandoned = True
        except Exception as error:
            self._error = self._error or error
        if self._error is not None and not write.abandoned:  # if abandoned, other ranks may still write to the folder
            discard(snapshot.work)

    def _commit(self, write: _Write, everything: dict[str, Any]) -> None:
        with self._written(write.snapshot, everything) as put_in_place:
            with write.committing:
                if write.abandoned:
                    return
                put_in_place()
            if write.after is not None:
                write.after()

    @contextlib.contextmanager
    def _written(self, snapshot: _Snapshot, everything: dict[str, Any]) -> Iterator[Callable[[], None]]:
        """Complete a folder or a file beside the checkpoint's path; yields a function that moves it to the path."""
        if snapshot.shown is None:
            files.complete(
                snapshot.work, snapshot.rest, snapshot.part.index, snapshot.manifest, everything, snapshot.objects
            )
            yield functools.partial(files.put_in_place, snapshot.work, snapshot.path)
            return
        tensors = snapshot.part.tensors
        if self._world.size > 1:  # the ranks have written their parts into a folder, which becomes a file
            tensors = sharded_tensors.read(snapshot.work, snapshot.part.index, tree.like({}, "cpu"))
        state = tree.join(files.deserialized(snapshot.rest, snapshot.work), tensors)
        if snapshot.objects:  # as they were at the snapshot
            state = objects.put(state, objects.unpickled(snapshot.objects), snapshot.path)
        with single_file.written(
            snapshot.path, state, snapshot.manifest, snapshot.shown, snapshot.objects
        ) as put_in_place:
            yield put_in_place
        discard(snapshot.work)

    def _wait(self, store: PrivateStore, count: str, write: _Write) -> None:
        """Wait for the reports of all ranks."""
        deadline = time.monotonic() + PARTS_S
        while not store.reach({count: self._world.size}, REPORT_S):
            membership().check(self._world.generation)
            if write.abandoned or time.monotonic() > deadline:
                raise TimeoutError("the other ranks haven't written their parts")

    def _gather(self, write: _Write, written: dict[str, Any]) -> dict[str, Any]:
        """Gather sizes and checksums of all parts on the main rank, or raise the error of a rank."""
        if self._world.size == 1 or self._world.store is None:
            return written
        store = self._world.store
        assert isinstance(store, PrivateStore)
        name = self._world.key(f"checkpoint/{write.snapshot.token}")
        keys, count = [f"{name}/{rank}" for rank in range(self._world.size)], f"{name}/count"
        error = self._error
        report = {"written": written} if error is None else {"error": _describe_error(error)}
        store.set(keys[self._world.rank], json.dumps(report))
        store.add(count, 1)
        everything: dict[str, Any] = {}
        if self._world.main_rank:
            self._wait(store, count, write)
            reports = store.values(keys)
            store.delete_key(*keys, count)
            for rank, received in enumerate(map(json.loads, reports)):
                if "error" in received:
                    number, text = received["error"]
                    raise OSError(number, f"rank {rank}: {text}")
                everything |= received["written"]
        return everything


def _describe_error(error: BaseException) -> tuple[int | None, str]:
    """Return an error as (errno, text with the file name), to send to another rank."""
    if isinstance(error, OSError) and error.strerror:
        return error.errno, f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None, str(error)


def save(path: Place, state: Mapping[str, Any], manifest: Mapping[str, Any], world: World | None = None) -> Path:
    """Write a checkpoint and wait until it is complete.

    Args:
        path: folder of the checkpoint.
        state, manifest: see `Writer.begin`.
        world: the ranks; None for this process only.

    Returns:
        The path.

    Raises:
        CheckpointError: the checkpoint could not be written.
    """
    writer = Writer(world or World())
    path = as_path(path)
    writer.begin(path, state, manifest)
    try:
        if not writer.finish():
            raise CheckpointError(
                f"the checkpoint {path} could not be written: the disk is full; delete files, or choose a path on "
                "another disk"
            )
    finally:
        writer.close()
    return path
