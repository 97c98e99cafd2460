"""Run cells of the fault matrix: `python -m tests.faults "strategy=ddp, moment=writing"`, or all pairs of a seed."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.cells import Cell, pairwise
from tests.faults.running import judge

LIMIT_S = 90  # of a run and its resumption


def main() -> int:
    """Run the requested cells; return 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", help="in their printed form; omitted features have their defaults")
    parser.add_argument("--seed", type=int, help="all pairs, chosen with this seed")
    parser.add_argument("--part", default="0/1", help="K/N for each N-th cell, from the K-th on")
    args = parser.parse_args()
    cells = [Cell.parse(text) for text in args.cells]
    if args.seed is not None:
        cells += pairwise(args.seed)
    k, n = map(int, args.part.split("/"))
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


def _judged(cell: Cell, folder: Path, undisturbed: Path) -> list[str]:
    """Judge a cell within a time limit: a hanging run is wrong."""

    def raise_timeout(number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(LIMIT_S)
    try:
        return judge(cell, folder, undisturbed)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
