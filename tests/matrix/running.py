"""Runs a list of cells and returns their problems."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from fabricx import checkpoint
from fabricx.distributed.world import World
from tests.matrix.cells import FEATURES, Cell, exists
from tests.matrix.fits import Found, fit, run_cells
from tests.matrix.oracle import oracle_of, problems, run_oracle
from tests.matrix.rules import excused, refusal


def judge(cells: Sequence[Cell], folder: Path) -> dict[Cell, list[str]]:
    """Run cells, in a launch per number of ranks; returns the problems of each cell."""
    oracles: dict[Cell, Found] = {}
    places: dict[Cell, Path] = {}
    for number, cell in enumerate(cells):
        places[cell] = cell_folder = folder / f"cell-{number}"
        cell_folder.mkdir(parents=True)
        wanted = oracle_of(cell)
        if wanted not in oracles and refusal(cell) is None:
            at = folder / f"oracle-{number}"
            at.mkdir()
            oracles[wanted] = run_oracle(wanted, at)
            if wanted.save == "from-single" and (at / "mid.ckpt").exists():
                shutil.copytree(at / "mid.ckpt", folder / f"shared-{len(oracles)}")
                oracles[wanted].shared = folder / f"shared-{len(oracles)}"
        if cell.save == "from-single" and wanted in oracles and oracles[wanted].shared is not None:
            shutil.copytree(oracles[wanted].shared, cell_folder / "single.ckpt")
    problems_of: dict[Cell, list[str]] = {}
    for ranks in sorted({cell.ranks for cell in cells}):
        some = [cell for cell in cells if cell.ranks == ranks]
        for cell, by_rank in zip(some, run_cells([(cell, places[cell]) for cell in some]), strict=True):
            oracle = oracles.get(oracle_of(cell), Found())
            wrong = [*problems(cell, by_rank, oracle), *_on_one_process(cell, by_rank, oracle, places[cell])]
            problems_of[cell] = [line for line in wrong if not excused(cell, line)]
    return problems_of


def _on_one_process(cell: Cell, results: Sequence[Found], oracle: Found, folder: Path) -> list[str]:
    """Continue a cell's checkpoint on a single process, if the cell has "to-single"."""
    if cell.save != "to-single" or results[0].error or refusal(cell) is not None:
        return []
    (folder / "one").mkdir()
    single = dataclasses.replace(cell, way="single", ranks=1)
    resumed = fit(single, World(), folder / "one", resume=folder / "mid.ckpt", began=cell.data_ranks)
    if (folder / "one/end.ckpt").exists():
        resumed.state = checkpoint.load(folder / "one/end.ckpt")
    like = dataclasses.replace(cell, save="from-single")  # values before the checkpoint are not included
    return [f"one process, from its checkpoint: {problem}" for problem in problems(like, [resumed], oracle)]


def report(cell: Cell, wrong: Sequence[str]) -> str:
    """Return the description of a failing cell, and how to run it alone."""
    return (
        f"{cell}\n" + "".join(f"    {line}\n" for line in wrong[:6]) + f"    rerun: python -m tests.matrix '{cell}'\n"
    )


def shrink(cell: Cell, folder: Path) -> tuple[Cell, list[str]]:
    """Return the simplest cell with a problem, and its problems: features are removed in sequence."""
    wrong: list[str] = []
    for number in itertools.count():
        names = [name for name in FEATURES if name != "ranks"]
        simpler = [dataclasses.replace(cell, **{name: FEATURES[name][0]}) for name in names]
        tried = [
            simpler_cell
            for simpler_cell in dict.fromkeys(simpler)
            if simpler_cell != cell and exists(simpler_cell) and refusal(simpler_cell) is None
        ]
        failing = {simpler_cell: lines for simpler_cell, lines in judge(tried, folder / str(number)).items() if lines}
        if not failing:
            return cell, wrong or judge([cell], folder / "itself")[cell]
        cell, wrong = next(iter(failing.items()))
    raise AssertionError
