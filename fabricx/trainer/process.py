"""The parts of a run that belong to a process: device, process group, signals, a server's work."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from fabricx.distributed.world import World
from fabricx.errors import CheckpointError, MissingCheckpoint
from fabricx.launch.signals import announce_stop, call_own, stop_now

if TYPE_CHECKING:
    from fabricx.core.options.trainer_options import TrainerOptions

T = TypeVar("T")
_KINDS = (MissingCheckpoint, CheckpointError, ValueError)  # errors of decisions, the most special first


def device_of(number: int, accelerator: str) -> torch.device:
    """Return a device of this machine.

    Args:
        number: index of the device among those of its kind.
        accelerator: "cpu", "cuda" or "mps".
    """
    return torch.device("cuda", number) if accelerator == "cuda" else torch.device(accelerator)


def enter(options: TrainerOptions, world: World) -> World:
    """Select the device of a rank and join its process group.

    Args:
        options: devices and accelerator of the run.
        world: has a store; a newcomer joins later.

    Returns:
        the world, with device and backend.
    """
    ids = options.device_ids
    number = world.local_rank if world.device_number is None else world.device_number
    number = ids[number] if number < len(ids) else number
    device = device_of(number, options.accelerator)
    world = replace(world, device=device, backend="nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.newcomer:  # joins when the membership changes
        return world
    world.join()
    return world


def serve(
    world: World, number: int, folder: str | None = None, *, network: bool, records: tuple[Path, bool] | None = None
) -> None:  # fmt: skip
    """Run a server of a job, until its workers have finished.

    Args:
        world: world of the workers; has a store, and the rank of this process.
        number: the server's number.
        folder: folder for snapshots, from which a server that died is restarted; None: it is not restarted.
        network: workers connect over gloo, not only over Unix sockets.
        records: folder of the server's records, and whether each gradient is recorded; None for no records.
    """
    from fabricx.parameter_server.server.process import serve

    assert world.store is not None
    prefix = world.key("exchange")
    run_dir, traces = records or (None, False)
    serve(
        world.store, prefix, world.secret, number, world.size, network=network, folder=folder,
        generation=world.generation, run_dir=run_dir, traces=traces, slot=world.rank,
    )  # fmt: skip


def decided_by_main_rank(here: World | None, decide: Callable[[], T]) -> T:
    """Return the decision of the main rank on every rank.

    Args:
        here: the ranks; None if this process is not a rank.
        decide: called on the main rank; returns plain data.

    Raises:
        ValueError, CheckpointError, MissingCheckpoint: raised by the decision, on all ranks.
    """
    if here is None or here.size == 1:
        return decide()
    decided: T | None = None
    error: Exception | None = None
    if here.main_rank:
        try:
            decided = decide()
        except (ValueError, CheckpointError) as caught:
            error = caught
    kind = next((number for number, kind in enumerate(_KINDS) if isinstance(error, kind)), None)
    decided, kind, text = here.broadcast_object((decided, kind, str(error)))  # plain data, also without a secret
    if kind is not None:
        raise error or _KINDS[kind](text)
    return cast(T, decided)


@contextlib.contextmanager
def interruptible(
    stage: str, request_stop: Callable[[str], None], signals: tuple[signal.Signals, ...]
) -> Iterator[None]:  # fmt: skip
    """Handle signals during a job: stop training at the next step boundary, and an evaluation immediately.

    An evaluation has no state to save. The program's own handler of the signal is called first. A second signal is
    handled as it was before the job. Forked processes leave SIGINT and SIGUSR1 to this process, because schedulers and
    terminals send them to all processes of a rank. SIGTERM has the effect there that it had before the job.

    Args:
        stage: "fit", "validate", "test" or "predict".
        request_stop: called with the reason, "interrupted" or "terminated".
        signals: signals to handle.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, process = {number: signal.getsignal(number) for number in signals}, os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        for previous, handler in before.items():
            signal.signal(previous, handler)
        if os.getpid() != process:
            if number == signal.SIGTERM:  # such as of a pool of processes that ends; loaders block it
                os.kill(os.getpid(), number)
            return
        call_own(before[signal.Signals(number)], number, frame)
        if stage != "fit":
            stop_now(number)
        request_stop("interrupted" if number == signal.SIGINT else "terminated")
        announce_stop()

    for number in signals:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
