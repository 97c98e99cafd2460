"""The same task in plain PyTorch, fabricx and other frameworks: speed, memory, start, and lines of code.

Each framework is a script `way_NAME.py` with its defaults, which trains a task of `tasks.py`; missing frameworks are
omitted. The scripts run in turn, in alternating order. The table is Markdown: ratios to plain
PyTorch in the same round, as medians.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tasks import TASKS

HERE = Path(__file__).parent
# name of the script: (package, started by torchrun with several ranks)
WAYS = {
    "plain": ("torch", True),
    "fabricx": ("fabricx", False),
    "lightning": ("lightning", False),
    "accelerate": ("accelerate", True),
    "ignite": ("pytorch-ignite", True),
    "transformers": ("transformers", True),
}


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def lines_of(way: str) -> int:
    """Count the lines of a script that hold code, without docstrings, comments and empty lines."""
    text = (HERE / f"way_{way}.py").read_text()
    document = ast.parse(text).body[0]
    code = text.splitlines()[document.end_lineno :]
    return sum(1 for line in code if line.strip() and not line.strip().startswith("#"))


def measure(way: str, task: str, ranks: int, steps: int) -> dict[str, float]:
    """Run a script; return seconds until the first step is done, seconds of a step, and peak memory in MiB of rank 0.

    Raises:
        SystemExit: the script failed; its output is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable]
        if ranks > 1 and WAYS[way][1]:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(HERE / f"way_{way}.py"), "--task", task, "--ranks", str(ranks), "--steps", str(steps)]
        environment = {"BENCH_OUT": str(out), "BENCH_BEGIN": str(time.time()), "BENCH_STEPS": str(steps),
               "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}  # fmt: skip
        settings = {**os.environ, **environment}
        done = subprocess.run(command, check=False, cwd=folder, env=settings, capture_output=True, text=True)
        if done.returncode or not out.exists():
            sys.exit(f"{way}, {task}, {ranks} ranks: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    args = parser.parse_args()

    versions = {way: version_of(package) for way, (package, _) in WAYS.items()}
    ways = [way for way, version in versions.items() if version is not None]
    for way in WAYS.keys() - set(ways):
        print(f"{way} is not installed, and is left out: pip install {WAYS[way][0]}")
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, "
          + ", ".join(f"{WAYS[way][0]} {versions[way]}" for way in ways))  # fmt: skip
    for ranks in args.ranks:
        for task in args.tasks:
            results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for number in range(args.rounds):
                for way in ways if number % 2 == 0 else ways[::-1]:
                    results[way].append(measure(way, task, ranks, args.steps))
            show(task, ranks, results)


def show(task: str, ranks: int, results: dict[str, list[dict[str, float]]]) -> None:
    """Print the table of a task."""
    samples = TASKS[task][1] * ranks
    step = statistics.median(result["step"] for result in results["plain"])
    print(f"\n{task}, {ranks} rank{'s' if ranks > 1 else ''}, {samples} samples a step, plain {1e3 * step:.1f} ms\n")
    print("| | time of a step | to the end of the first step | peak memory of a rank | lines |\n|---|---|---|---|---|")
    for way, rounds in results.items():
        cells = []
        for quantity in ("step", "first", "memory"):
            ratios = [result[quantity] / base[quantity] for result, base in zip(rounds, results["plain"], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"| {way} | {' | '.join(cells)} | {lines_of(way)} |", flush=True)


if __name__ == "__main__":
    main()
