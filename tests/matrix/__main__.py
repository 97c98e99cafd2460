"""Runs cells from the command line: `python -m tests.matrix 'ddp ranks=2 clip=norm'`, or `--seed 3`."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from tests.matrix.cells import Cell, pairwise, single_features, triples
from tests.matrix.rules import known_defect, refusal
from tests.matrix.running import judge, report, shrink


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("cells", nargs="*", help="cells, as they are printed")
    parser.add_argument("--seed", type=int, help="all cells of a pairwise list")
    parser.add_argument("--triples", help="SEED:N for the first N cells of a list with each triple of values")
    parser.add_argument("--part", default="0/1", help="k/n: the k-th of n parts of it")
    parser.add_argument("--alone", type=int, help="each feature by itself, on so many ranks")
    parser.add_argument("--shrink", action="store_true", help="find the simplest cell that is wrong, too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cells = [Cell.parse(text) for text in asked.cells]
    if asked.seed is not None:
        cells += pairwise(asked.seed, lambda cell: refusal(cell) or known_defect(cell))
    if asked.alone is not None:
        cells += single_features(asked.alone)
    if asked.triples is not None:
        seed, number = map(int, asked.triples.split(":"))
        cells += itertools.islice(triples(seed, lambda cell: refusal(cell) or known_defect(cell)), number)
    k, n = map(int, asked.part.split("/"))
    cells = [cell for cell in cells if asked.cells or not known_defect(cell)][k::n]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        wrong = {cell: lines for cell, lines in judge(cells, Path(folder)).items() if lines}
        for cell, lines in wrong.items():
            print(report(cell, lines))
            if asked.shrink:
                with tempfile.TemporaryDirectory(prefix="matrix-") as scratch:
                    print("simplest:", report(*shrink(cell, Path(scratch))), flush=True)
    print(f"{len(cells)} cells, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
