"""Python commands that start in milliseconds: `Popen` and `run` of `subprocess`, with torch already imported.

A template process imports common modules. Each command that begins with `sys.executable` is a clone of the template:
with the command's own arguments, environment, folder, session and files, and a child of the requesting process, like
any other command. Its fork server and its own subprocesses, such as ranks of torchrun, are clones in the same way.
Tests of the interpreter's start (`-c` with a check of `sys.modules`, another option, another executable) use
`subprocess` directly.
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

from fabricx import plugins

IMPORTED: Final = (
    "torch", "torch.distributed", "torch._dynamo", "torch.optim", "torch.utils.data", "torch.utils.tensorboard",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.run", "hydra",
    "hydra._internal.core_plugins.basic_launcher", "hydra._internal.core_plugins.basic_sweeper", "omegaconf._impl",
    "fabricx.callbacks.model_summary", "fabricx.checkpoint.direct_io", "fabricx.checkpoint.reader",
    "fabricx.checkpoint.writer", "safetensors.torch", "torch.utils.serialization.config", "torchmetrics",
    "fabricx.cli.hydra_app", "fabricx.cli.main", "fabricx.config", "fabricx.cli.doctor", "fabricx.trainer.trainer",
    *plugins.modules("strategies"), "fabricx.callbacks", "fabricx.loggers.tensorboard", "fabricx.demo.digits",
    "fabricx.testing", "fabricx.telemetry.report", "tests.process.ledgers",
    # imported by workers at their first checkpoint, update on a server, or metric, and by test modules
    "fabricx.checkpoint.sharded_tensors", "fabricx.parameter_server.server.server", "fabricx.callbacks.fault_recovery",
    "fabricx.callbacks.model_checkpoint", "fabricx.callbacks.progress_bar", "fabricx.launch.fork_server",
    "fabricx.loggers.jsonl", "multiprocessing.synchronize", "psutil", "pytest",
    "tensorboard.backend.event_processing.event_accumulator", "torch._inductor.compile_fx",
    "torch.distributed.tensor.debug", "torch.numa.binding", "torch.profiler._cupti_monitor", "yaml",
)  # fmt: skip
ROOT: Final = Path(__file__).parents[1]
CLONE: Final = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
FINALIZES: Final = "FABRICX_SOAK" in os.environ  # whether commands finalize the interpreter as outside of tests
CLONE_PARENT, CLONE_NEWNET = 0x8000, 0x40000000
HUGE, MADV_COLLAPSE = 2 << 20, 25  # bytes of a page; since Linux 6.1
COLLECTS: Final = (10_000, 10, 10)  # arguments of `gc.set_threshold`: collections took a twelfth of the tests' time
IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
with contextlib.suppress(ModuleNotFoundError):
    # torch's compiler creates progress bars if tqdm is installed; the first bar of a process starts a permanent thread
    importlib.import_module("tqdm").tqdm.monitor_interval = 0
START: Final = "from tests.warm import serve, _become; request, fds = serve({}); _become(request, fds)"


@dataclass
class Request:
    """A command, or a fork server if there are no arguments; its files are sent with it."""

    args: list[str] = field(default_factory=list)
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict)
    start_new_session: bool = False
    process_group: int = -1
    network: str | None = None  # name of a network namespace
    preload: list[str] = field(default_factory=list)
    main: dict[str, Any] = field(default_factory=dict)


class Popen(subprocess.Popen[Any]):
    """A command in a clone of the template; otherwise identical to `subprocess.Popen`.

    Args:
        network: the command's network namespace.
    """

    def __init__(self, args: Any, *more: Any, network: str | None = None, **options: Any) -> None:
        self._network = network
        super().__init__(args, *more, **options)

    def _execute_child(self, *arguments: Any) -> None:
        bound = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        args = [os.fspath(part) for part in ([bound["args"]] if isinstance(bound["args"], str) else bound["args"])]
        if not can_run(args):
            assert self._network is None
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = {name: bound[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")}
        files = [end if end != -1 else n for n, end in enumerate((ends["p2cread"], ends["c2pwrite"], ends["errwrite"]))]
        request = Request(
            args, os.fspath(bound["cwd"] or os.getcwd()), dict(os.environ if bound["env"] is None else bound["env"]),
            bool(bound["start_new_session"]), bound.get("process_group", -1), self._network,
        )  # fmt: skip
        self.pid = _template().clone(request, files)
        self._child_created = True
        self._close_pipe_fds(*ends.values())  # type: ignore[attr-defined]


def run(
    args: Any, *, timeout: float, capture_output: bool = False, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, like `subprocess.run`."""
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
    """Return whether a command is a Python command with arguments only."""
    rest = args[2:] if args[1:2] == ["-u"] else args[1:]
    return CLONE is not None and args[0] == sys.executable and bool(rest) and (
        rest[0] == "-m" or not rest[0].startswith("-")
    )  # fmt: skip


class _Template:
    """The cloned process, as seen by the process whose children are the clones."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.channel, self.pid = channel, pid

    def clone(self, request: Request, files: list[int]) -> int:
        """Start a clone with these files as its descriptors 0, 1, ...; return its PID."""
        message = pickle.dumps(request)
        self.channel.sendmsg([len(message).to_bytes(4, "little")], [_rights(files)])
        self.channel.sendall(message)
        answer = self.channel.recv(4)
        if not answer:
            raise RuntimeError("the template of warm commands has ended; see what it has printed")
        return int.from_bytes(answer, "little")


_TEMPLATES: list[_Template] = []


def templates() -> set[int]:
    """Return the processes that are kept for later commands."""
    return {template.pid for template in _TEMPLATES}


def _template() -> _Template:
    if not _TEMPLATES:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environment["GOMP_SPINCOUNT"] = "0"  # waiting threads leave the cores to other threads
        process = subprocess.Popen(
            [sys.executable, "-c", START.format(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment,
            cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        process.returncode = 0  # it ends with this process and isn't awaited
        theirs.close()
        atexit.register(ours.close)
        _TEMPLATES.append(_Template(ours, process.pid))
    return _TEMPLATES[0]


def _rights(files: list[int]) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files).tobytes()


def serve(channel_fd: int) -> tuple[Request, list[int]]:
    """Serve as the template; return in each clone, with its request."""
    gc.disable()  # `_serve` excludes all objects from collections, which take a fifth of the imports' time
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # other versions of torch have other modules
            __import__(name)
    importlib.import_module("fabricx.trainer.provenance").versions()  # read once from files of the packages
    if not FINALIZES:
        for kept in weakref.finalize._registry:  # type: ignore[attr-defined]
            kept.atexit = False  # a clone ends without the exit functions of torch's modules
    os.environ.clear()
    return _serve(socket.socket(fileno=channel_fd), huge=True)


def _serve(channel: socket.socket, *, huge: bool = False) -> tuple[Request, list[int]]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    gc.collect()
    gc.set_threshold(*COLLECTS)
    gc.enable()
    gc.freeze()  # the collector of a clone would touch, and therefore copy, every page
    if huge:  # a template that is a clone shares such pages; collapsing them would copy them all
        _use_huge_pages()
    while True:
        size, files, _, _ = socket.recv_fds(channel, 4, 8)
        if not size:
            os._exit(0)  # the parent process of the clones has ended
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
    """Move the memory of this process to huge pages where Linux supports it, which halves the cost of a clone.

    The page tables, which are copied for each clone and removed at its end, then have fewer entries.
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
    """Fork a process whose parent is this process's parent; return 0 in it."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid


def _become(request: Request, files: list[int]) -> NoReturn:
    """Run the request as if this interpreter had just started; errors are left to the interpreter."""
    try:
        (_be_command if request.args else _be_fork_server)(request, files)
        status: Any = 0
    except SystemExit as error:
        status = error.code or 0
    if FINALIZES or not isinstance(status, int):
        raise SystemExit(status)
    _end(status)


def _end(status: int) -> NoReturn:
    """End like an interpreter, but without destroying all modules: this takes 0.4 s, and copies their pages."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for file in (sys.stdout, sys.stderr):
            if file is not None and not file.closed:
                file.flush()
    except OSError:  # the reader has ended
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
    """Set session, network namespace, folder and environment."""
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
    """Make the fork server of this process a clone."""
    mp_forkserver.ForkServer.ensure_running = _ensure_running  # type: ignore[method-assign]


def _use_clones() -> None:
    """Make the fork server of this command and subprocesses of torchrun clones of a dedicated process."""
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
    # torchrun checks each second whether all nodes have joined.
    dynamic_rendezvous._delay = lambda seconds: time.sleep(0.1)
    # torchrun determines names of its callers by searching all modules, which takes most of its time in a clone
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


_start_fork_server: Final = mp_forkserver.ForkServer.ensure_running


def _ensure_running(server: Any) -> None:
    """Replaces `ForkServer.ensure_running`; starts a clone instead of a new interpreter."""
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
    fork_server.prepare()  # as on import in a fork server
    sys.orig_argv = [sys.executable, "-c", "from multiprocessing.forkserver import main"]
    sys.path.insert(0, "")
    mp_forkserver.main(*files, request.preload, **request.main)
