"""Runs cells of the fault matrix: `python -m tests.faults "way=ddp, moment=writing"`, or all pairs of a seed."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.cells import Cell, pairwise
from tests.faults.running import judge

LIMIT_S = 90  # for a run and its resumption


def main() -> int:
    """Run the cells that were asked for; returns 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", help="as they are printed; what is left out has its default")
    parser.add_argument("--seed", type=int, help="all pairs, chosen with this seed")
    parser.add_argument("--part", default="0/1", help="K/N for each N-th cell, from the K-th on")
    asked = parser.parse_args()
    cells = [Cell.parse(text) for text in asked.cells]
    if asked.seed is not None:
        cells += pairwise(asked.seed)
    k, n = map(int, asked.part.split("/"))
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        for number, cell in enumerate(cells[k::n]):
            begun = time.monotonic()
            lines = _judged(cell, Path(name) / str(number), Path(name))
            wrong += bool(lines)
            verdict = "WRONG " + "; ".join(lines)[:600] if lines else "right"
            print(f"CELL {cell}: {verdict} ({time.monotonic() - begun:.1f} s)", flush=True)
    print(f"{len(cells[k::n])} cells, {wrong} wrong")
    return 1 if wrong else 0


def _judged(cell: Cell, folder: Path, calm: Path) -> list[str]:
    """Judge a cell, with a limit: a run that hangs is wrong, too."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        return judge(cell, folder, calm)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
