"""Python commands that start in milliseconds: `Popen` and `run` of `subprocess`, with torch imported already.

A template process imports what commands import. Each command that begins with `sys.executable` is a clone of it: with
the command's own arguments, environment, folder, session and files, and a child of the process that asked for it, as
any other. Its fork server and what it starts by `subprocess`, such as ranks of torchrun, are clones in the same way.
Whatever tests how an interpreter starts (`-c` with a check of `sys.modules`, another option, another executable) uses
`subprocess` itself.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import os
import pickle
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from dataclasses import dataclass, field
from multiprocessing import connection, process, resource_tracker, spawn
from multiprocessing import forkserver as mp_forkserver
from pathlib import Path
from typing import Any, Final, NoReturn

IMPORTED: Final = (
    "torch", "torch.distributed", "torch._dynamo", "torch.optim", "torch.utils.data", "torch.utils.tensorboard",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.run", "hydra",
    "hydra._internal.core_plugins.basic_launcher", "hydra._internal.core_plugins.basic_sweeper", "omegaconf._impl",
    "fabricx.callbacks.model_summary", "fabricx.checkpoint.direct_io", "fabricx.checkpoint.reader",
    "fabricx.checkpoint.writer", "safetensors.torch", "torch.utils.serialization.config", "torchmetrics",
    "fabricx.cli.hydra_app", "fabricx.cli.main", "fabricx.config", "fabricx.cli.doctor", "fabricx.trainer.trainer",
    "fabricx.strategies", "fabricx.callbacks", "fabricx.loggers.tensorboard", "fabricx.demo.digits", "fabricx.testing",
    "fabricx.telemetry.report", "tests.process.ledgers",
    # what workers import at their first checkpoint, update on a server, or metric, and what test modules import
    "fabricx.checkpoint.sharded_tensors", "fabricx.parameter_server.server.server", "fabricx.callbacks.fault_recovery",
    "fabricx.callbacks.model_checkpoint", "fabricx.callbacks.progress_bar", "fabricx.launch.fork_server",
    "fabricx.loggers.jsonl", "multiprocessing.synchronize", "psutil", "pytest",
    "tensorboard.backend.event_processing.event_accumulator", "torch._inductor.compile_fx",
    "torch.distributed.tensor.debug", "torch.numa.binding", "torch.profiler._cupti_monitor", "yaml",
)  # fmt: skip
ROOT: Final = Path(__file__).parents[1]
CLONE: Final = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
FINALIZES: Final = "FABRICX_SOAK" in os.environ  # whether commands end as they do outside of tests
CLONE_PARENT, CLONE_NEWNET = 0x8000, 0x40000000
HUGE, MADV_COLLAPSE = 2 << 20, 25  # bytes of a page; of Linux 6.1
COLLECTS: Final = (10_000, 10, 10)  # of `gc.set_threshold`: collections took a twelfth of the tests' time
IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
with contextlib.suppress(ModuleNotFoundError):
    # torch's compiler makes progress bars where tqdm is installed; the first bar of a process starts a thread for good
    importlib.import_module("tqdm").tqdm.monitor_interval = 0
START: Final = "from tests.warm import serve, _become; request, fds = serve({}); _become(request, fds)"


@dataclass
class Request:
    """A command, or a fork server where there are no arguments; its files travel beside it."""

    args: list[str] = field(default_factory=list)
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)
    start_new_session: bool = False
    process_group: int = -1
    network: str | None = None  # name of a network namespace
    preload: list[str] = field(default_factory=list)
    main: dict[str, Any] = field(default_factory=dict)


class Popen(subprocess.Popen[Any]):
    """A command in a clone of the template; everything else is what `subprocess.Popen` does.

    Args:
        network: the network namespace that the command runs in.
    """

    def __init__(self, args: Any, *more: Any, network: str | None = None, **options: Any) -> None:
        self._network = network
        super().__init__(args, *more, **options)

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        args = [os.fspath(part) for part in ([given["args"]] if isinstance(given["args"], str) else given["args"])]
        if not can_run(args):
            assert self._network is None
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = {name: given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")}
        files = [own if own != -1 else n for n, own in enumerate((ends["p2cread"], ends["c2pwrite"], ends["errwrite"]))]
        request = Request(
            args, os.fspath(given["cwd"] or os.getcwd()), dict(os.environ if given["env"] is None else given["env"]),
            bool(given["start_new_session"]), given.get("process_group", -1), self._network,
        )  # fmt: skip
        self.pid = _template().clone(request, files)
        self._child_created = True
        self._close_pipe_fds(*ends.values())  # type: ignore[attr-defined]


def run(
    args: Any, *, timeout: float, capture_output: bool = False, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, as `subprocess.run` does."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def can_run(args: list[str]) -> bool:
    """Return whether a command is one of Python's that needs nothing but arguments."""
    rest = args[2:] if args[1:2] == ["-u"] else args[1:]
    return CLONE is not None and args[0] == sys.executable and bool(rest) and (
        rest[0] == "-m" or not rest[0].startswith("-")
    )  # fmt: skip


class _Template:
    """The process that is cloned, as seen by the process whose children its clones are."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.channel, self.pid = channel, pid

    def clone(self, request: Request, files: list[int]) -> int:
        """Start a clone with these files, which are 0, 1, ... there; returns its process id."""
        message = pickle.dumps(request)
        self.channel.sendmsg([len(message).to_bytes(4, "little")], [_rights(files)])
        self.channel.sendall(message)
        answer = self.channel.recv(4)
        if not answer:
            raise RuntimeError("the template of warm commands has ended; see what it has printed")
        return int.from_bytes(answer, "little")


_TEMPLATES: list[_Template] = []


def templates() -> set[int]:
    """Return the processes that are kept for further commands."""
    return {template.pid for template in _TEMPLATES}


def _template() -> _Template:
    if not _TEMPLATES:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment["GOMP_SPINCOUNT"] = "0"  # threads that wait for work leave the cores to others
        process = subprocess.Popen(
            [sys.executable, "-c", START.format(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        process.returncode = 0  # it ends with this process; nobody waits for it
        theirs.close()
        atexit.register(ours.close)
        _TEMPLATES.append(_Template(ours, process.pid))
    return _TEMPLATES[0]


def _rights(files: list[int]) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files).tobytes()


def serve(channel_fd: int) -> tuple[Request, list[int]]:
    """Be the template: returns in each clone, with what that is to be."""
    gc.disable()  # until `_serve` keeps all of it out of collections, which take a fifth of the imports' time
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # another version of torch has other modules
            __import__(name)
    importlib.import_module("fabricx.trainer.provenance").versions()  # read once, of files of the packages
    if not FINALIZES:
        for kept in weakref.finalize._registry:  # type: ignore[attr-defined]
            kept.atexit = False  # a clone ends without what modules of torch have registered
    os.environ.clear()
    return _serve(socket.socket(fileno=channel_fd), huge=True)


def _serve(channel: socket.socket, *, huge: bool = False) -> tuple[Request, list[int]]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    gc.collect()
    gc.set_threshold(*COLLECTS)
    gc.enable()
    gc.freeze()  # the collector of a clone would touch, and so copy, every page
    if huge:  # a template that is a clone shares such pages; to collapse them would copy them all
        _use_huge_pages()
    while True:
        size, files, _, _ = socket.recv_fds(channel, 4, 8)
        if not size:
            os._exit(0)  # the process has ended whose children the clones are
        request: Request = pickle.loads(_exactly(channel, int.from_bytes(size, "little")))
        pid = _clone()
        if pid == 0:
            channel.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            return request, files
        for file in files:
            os.close(file)
        channel.sendall(pid.to_bytes(4, "little"))


def _use_huge_pages() -> None:
    """Move the memory of this process to huge pages where Linux can: a clone then costs half of the time to make.

    It has fewer entries in the tables of pages, which are copied for each clone and removed at its end.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else ():
        addresses, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
        if access.startswith("rw") and inode == "0" and begin < end:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)  # it may be refused


def _exactly(channel: socket.socket, size: int) -> bytes:
    message = b""
    while len(message) < size:
        message += channel.recv(size - len(message))
    return message


def _clone() -> int:
    """Fork, but let the new process be a child of this one's parent; returns 0 in it."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(request: Request, files: list[int]) -> NoReturn:
    """Be what was asked for, as if this interpreter had just been started; an error is left to the interpreter."""
    try:
        (_be_command if request.args else _be_fork_server)(request, files)
        status: Any = 0
    except SystemExit as error:
        status = error.code or 0
    if FINALIZES or not isinstance(status, int):
        raise SystemExit(status)
    _end(status)


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but without taking all modules apart: that takes 0.4 s, and copies their pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for file in (sys.stdout, sys.stderr):
            if file is not None and not file.closed:
                file.flush()
    except OSError:  # whoever read it has ended
        status = 120
    os._exit(status & 0xFF)


def _be_command(request: Request, files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _enter(request)
    _open_output(unbuffered="-u" in request.args[:2] or "PYTHONUNBUFFERED" in request.env)
    import torch

    torch.set_num_threads(int(request.env.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    if "PYTHONWARNINGS" in request.env:
        for kind in reversed(request.env["PYTHONWARNINGS"].split(",")):
            warnings.simplefilter(kind)  # type: ignore[arg-type]
    rest = request.args[2:] if request.args[1] == "-u" else request.args[1:]
    paths = request.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [path for path in paths if path] + [path for path in sys.path if path not in ("", str(ROOT))]
    sys.orig_argv = request.args
    _use_clones()
    main = sys.modules["__main__"]
    for name in ("serve", "_become", "request", "fds"):
        vars(main).pop(name, None)
    if rest[0] == "-m":
        sys.path.insert(0, request.cwd)
        sys.argv = ["-m", *rest[2:]]
        runpy._run_module_as_main(rest[1])  # type: ignore[attr-defined]
    else:
        _run_script(main, rest)


def _enter(request: Request) -> None:
    """Take over session, network, folder and environment."""
    if request.start_new_session:
        os.setsid()
    elif request.process_group >= 0:
        os.setpgid(0, request.process_group)
    if request.network is not None:
        with Path(f"/run/netns/{request.network}").open() as namespace:
            if ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(f"network namespace {request.network} can't be entered")
    os.chdir(request.cwd)
    process.ORIGINAL_DIR = request.cwd  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(request.env)


def _open_output(*, unbuffered: bool) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw: Any = os.fdopen(number, "wb", closefd=False, buffering=0)
        below = raw if unbuffered else io.BufferedWriter(raw)
        file = io.TextIOWrapper(
            below, "utf-8", "backslashreplace" if number == 2 else "strict", line_buffering=number == 2,
            write_through=unbuffered,
        )  # fmt: skip
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _run_script(main: types.ModuleType, args: list[str]) -> None:
    script = Path(args[0])
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = args
    vars(main).update(__file__=str(script), __spec__=None, __cached__=None)
    exec(compile(script.read_bytes(), str(script), "exec"), vars(main))


def use_clone_as_fork_server() -> None:
    """Let the fork server of this process be a clone, too."""
    mp_forkserver.ForkServer.ensure_running = _ensure_running  # type: ignore[method-assign]


def _use_clones() -> None:
    """Let the fork server of this command, and what torchrun starts, be clones, too; of a process of its own."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become(*_serve(theirs))
    theirs.close()
    _TEMPLATES[:] = [_Template(ours, pid)]
    mp_forkserver.ForkServer.ensure_running = _ensure_running  # type: ignore[method-assign]
    subprocess.Popen = subprocess_handler.Popen = Popen  # type: ignore[misc]
    dynamic_rendezvous._delay = lambda seconds: time.sleep(0.1)  # torchrun asks each second whether all nodes are there
    # torchrun asks for its callers' names all the time, by looking through all modules: most of its time in a clone
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


_start_fork_server: Final = mp_forkserver.ForkServer.ensure_running


def _ensure_running(server: Any) -> None:
    """Do what the method of this name does, with a clone in the place of a new interpreter."""
    with server._lock:
        resource_tracker.ensure_running()
        if server._forkserver_pid is not None:
            if not os.waitpid(server._forkserver_pid, os.WNOHANG)[0]:
                return
            os.close(server._forkserver_alive_fd)  # it was killed
        with socket.socket(socket.AF_UNIX) as listener:
            address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
            listener.bind(address)
            listener.listen()
            alive_r, alive_w = os.pipe()
            main = {name: value for name, value in spawn.get_preparation_data("").items() if name == "main_path"}
            request = Request([], os.getcwd(), dict(os.environ), preload=server._preload_modules, main=main)
            server._forkserver_pid = _template().clone(request, [listener.fileno(), alive_r])
            os.close(alive_r)
        server._forkserver_address, server._forkserver_alive_fd = address, alive_w


def _be_fork_server(request: Request, files: list[int]) -> None:
    from fabricx.launch import fork_server

    mp_forkserver.ForkServer.ensure_running = _start_fork_server  # type: ignore[method-assign]
    _enter(request)
    fork_server.prepare()  # as it does by itself when a fork server imports it
    sys.orig_argv = [sys.executable, "-c", "from multiprocessing.forkserver import main"]
    sys.path.insert(0, "")
    mp_forkserver.main(*files, request.preload, **request.main)
