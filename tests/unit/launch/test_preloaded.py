"""The fork server and Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SLOW = """
import pathlib, time
pathlib.Path("importing").touch()
time.sleep(0.5)
"""
PROGRAM = """
import os, signal, time
from multiprocessing import forkserver
from fabricx.launch import preloaded

preloaded.PRELOAD[1:] = ["slow", "fabricx.launch.fork_server"]
preloaded.start()
server = forkserver._forkserver._forkserver_pid
while not os.path.exists("importing"):
    time.sleep(0.01)
os.kill(server, signal.SIGINT)
process = preloaded.context().Process(target=exec, args=("import signal; print(signal.getsignal(signal.SIGINT))",))
process.start()
process.join()
assert forkserver._forkserver._forkserver_pid == server
"""


def test_ctrl_c_does_not_end_a_fork_server_that_imports_modules(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(tmp_path)])}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "default_int_handler" in ended.stdout  # processes that it starts handle Ctrl-C as usual
