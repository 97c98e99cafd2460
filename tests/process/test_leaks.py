"""The leak fixture: a run of pytest in which each test leaks a different resource."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import warm

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAKY = """
import os, signal, subprocess, threading, time
import torch, torch.distributed as dist

def test_thread(): threading.Thread(target=time.sleep, args=(60,), daemon=True, name="forgotten").start()
def test_process(): subprocess.Popen(["sleep", "60"])
def test_variable(): os.environ["FORGOTTEN"] = "1"
def test_handler(): signal.signal(signal.SIGTERM, signal.SIG_IGN)
def test_switch(): torch.set_default_dtype(torch.float64)
def test_file(): globals()["kept"] = open("forgotten.txt", "w")
def test_group(): dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def test_nothing(): pass
"""


def test_each_leak_fails_its_own_test_and_no_other(tmp_path):
    short = CONFTEST.read_text().replace("GRACE_S = 20.0", "GRACE_S = 1.0")
    (tmp_path / "conftest.py").write_text(short)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    ended = warm.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-rE",
         f"--basetemp={tmp_path}/own", "."],  # removing earlier files is slow
        cwd=tmp_path, env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(CONFTEST.parents[1])},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    output = ended.stdout
    for name, leak in {
        "test_thread": "thread forgotten",
        "test_process": "process ",
        "test_variable": "environment: FORGOTTEN was None and is '1'",
        "test_handler": "signal handlers: SIGTERM",
        "test_switch": "torch's switches: default dtype was torch.float32 and is torch.float64",
        "test_file": "an open file",
        "test_group": "a process group",
    }.items():
        assert leak in output.partition(f"teardown of {name} ")[2].partition("teardown of ")[0], output
    assert "8 passed, 7 errors" in output
