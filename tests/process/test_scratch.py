"""Files of a run in TMPDIR: any path works, and no file remains after any end of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import warm

SCRIPT = """
import sys, time
import fabricx as fx
from torch.utils.data import DataLoader
from fabricx.testing import QUIET, TinyModule, tiny_loader

class Net(TinyModule):
    def on_train_batch_end(self, *arguments):
        print("step\\n", end="", flush=True)  # one write, which those of another rank are not mixed with
        time.sleep(float(sys.argv[1]))

if __name__ == "__main__":
    loader = DataLoader(tiny_loader().dataset, batch_size=8, num_workers=1)
    fx.Trainer(devices=2, strategy="ddp", max_steps=2, **QUIET).fit(Net(), loader)
"""


def start(folder: Path, seconds: float, popen: type[subprocess.Popen[Any]]) -> subprocess.Popen[Any]:
    folder.mkdir()
    (folder.parent / "script.py").write_text(SCRIPT)
    variables = {**os.environ, "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "script.py", str(seconds)]
    return popen(command, cwd=folder.parent, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache


def test_a_long_tmpdir_works_and_loaders_leave_no_files(own_folder: Path) -> None:
    folder = own_folder / ("x" * 120)
    run = start(folder, 0.0, warm.Popen)
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output
    assert left_in(folder) == []


def test_a_killed_supervisor_leaves_no_files(own_folder: Path) -> None:
    folder = own_folder / "temporary"
    run = start(folder, 60.0, subprocess.Popen)  # the template of a clone would survive it
    assert run.stdout is not None
    for line in run.stdout:
        if line == "step\n":
            break
    assert any((path / "job").is_file() for path in folder.iterdir())
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 60
    while left_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    run.stdout.close()
    assert left_in(folder) == []
