"""Actors of Ray that continue a run when the process that has started it, the driver, has died.

`python -m fabricx.launchers.ray_standby NAME` stops such a run; NAME is the namespace of its actors.

This module does not import torch, so that the actors, which wait, need little time and memory.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

from fabricx.launch.run_lock import DETACHED, exclusive_run, lock_owner

STANDBY: Final = "standby"  # names of the actors; each run has a namespace
PULSE: Final = "pulse"
MACHINE: Final = "machine"
RETRY_S: Final = 1.0  # seconds until the next request, if Ray does not answer, or the next attempt to lock the folder
LOCK_S: Final = 120.0  # longest time in which a shared file system releases the lock of a machine that was lost
START_S: Final = 120.0  # longest time in which this actor takes the place of the driver
CONTINUES: Final = "fabricx.trainer.launcher_run"  # module of `continued`


@final
class Pulse:
    """An actor that Ray ends together with the driver."""

    def wait(self) -> None:
        """Wait for ever: the call fails when this actor has ended."""
        threading.Event().wait()


@final
class Standby:
    """Waits for the death of the driver, and then takes its place until the end of the run.

    Ray restarts this actor if its process or its machine is lost; it then finds the state of the run in the actors of
    the machines.

    Args:
        launcher: launcher of the run, pickled.
        run: namespace of the run's actors, and name of its placement group.
        run_dir: folder of the run, which this actor locks after the driver.
        driver: number of the driver's process.
    """

    def __init__(self, launcher: bytes, run: str, run_dir: str, driver: int) -> None:
        self._packed, self._run = launcher, run
        self._run_dir, self._driver = Path(run_dir), driver
        self._launcher: Any = None
        self._alone = False  # the driver has died
        self._controls = threading.Event()  # the launcher waits for the ranks
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> str:
        """Stop the ranks at their next step, with a checkpoint; a second call ends them immediately.

        Returns:
            a sentence about the end of the ranks.
        """
        if not self._alone:
            return "the process that has started the run waits for it: stop it by Ctrl-C or SIGTERM"
        if not self._controls.wait(START_S):
            return "the run is not controlled yet: try again"
        self._launcher.request_stop()
        return "the ranks stop at their next step"

    def _watch(self) -> None:
        while self._driver_lives():
            pass
        self._alone = True
        try:
            with self._lock():
                self._continue()
        except BaseException:  # also the KeyboardInterrupt of a second request to stop
            traceback.print_exc()
        finally:
            release(self._run)
            _ray().kill(_ray().get_runtime_context().current_actor)

    def _driver_lives(self) -> bool:
        """Wait for the death of the driver; return True to wait again, because Ray did not answer."""
        ray = _ray()
        try:
            ray.get(ray.get_actor(PULSE, namespace=self._run).wait.remote())
        except (ValueError, ray.exceptions.ActorDiedError):  # ValueError: there is no such actor any more
            return False
        except ray.exceptions.RayError:
            time.sleep(RETRY_S)
        return True

    def _lock(self) -> contextlib.ExitStack:
        """Lock the run's folder, as soon as the system has released the lock of the driver.

        Raises:
            ValueError: another process trains in the folder by now.
        """
        deadline = time.monotonic() + LOCK_S
        while True:
            stack = contextlib.ExitStack()
            try:
                stack.enter_context(exclusive_run(self._run_dir, f"{DETACHED}{self._run}"))
            except ValueError:
                owner = (lock_owner(self._run_dir) or "").split()[:1]
                if owner not in ([], [str(self._driver)]) or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
            else:
                return stack

    def _continue(self) -> None:
        launcher = pickle.loads(self._packed)
        program = launcher.adopt(self._run)
        if program is None:  # no rank had started
            return
        with importlib.import_module(CONTINUES).continued(program) as following:
            self._launcher = launcher
            self._controls.set()
            ended = launcher.rejoin(program)
            while (program := following(ended)) is not None:
                ended = launcher.run(program)


def machines(run: str) -> dict[str, Any]:
    """Return the actors of machines of a run by name, `MACHINE`-NUMBER-ORDER, the newest of a number last.

    Args:
        run: namespace of the run.
    """
    return {name: actor for name, actor in sorted(_actors(run), key=_order) if name.startswith(MACHINE)}


def _order(named: tuple[str, Any]) -> int:
    return int(named[0].rpartition("-")[2]) if named[0].startswith(MACHINE) else 0


def _actors(run: str) -> Iterator[tuple[str, Any]]:
    ray = _ray()
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == run:
            with contextlib.suppress(ValueError):  # it has just ended
                yield actor["name"], ray.get_actor(actor["name"], namespace=run)


def release(run: str) -> None:
    """End the machines of a run, and remove its placement group.

    Args:
        run: namespace of the run.
    """
    ray = _ray()
    for actor in machines(run).values():
        with contextlib.suppress(Exception):  # it has ended: the other actors have to end, too
            ray.kill(actor)
    with contextlib.suppress(ValueError):  # it was removed
        ray.util.remove_placement_group(ray.util.get_placement_group(run))


def _ray() -> Any:
    return importlib.import_module("ray")


def stop(run: str) -> str:
    """Request the end of a run whose driver has died, and return a sentence about the end.

    Args:
        run: namespace of the run's actors.
    """
    ray = _ray()
    try:
        standby = ray.get_actor(STANDBY, namespace=run)
    except ValueError:
        return f"the cluster has no run {run}: it has ended"
    answer: str = ray.get(standby.stop.remote())
    return answer


if __name__ == "__main__":
    _ray().init(address="auto", log_to_driver=False)  # the cluster of this machine, or of RAY_ADDRESS
    print(stop(sys.argv[1]))
