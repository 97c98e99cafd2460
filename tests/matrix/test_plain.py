"""The oracle is equal to a loop in plain PyTorch, which detects mistakes common to cells and oracle."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from tests.matrix.cells import FEATURES, JOINED_WAYS, Cell, exists, single_features
from tests.matrix.fits import run_cells
from tests.matrix.oracle import run_oracle
from tests.matrix.plain import Joined, Plain, covers
from tests.matrix.rules import refusal
from tests.soak import SEED, rounds

pytestmark = pytest.mark.filterwarnings("ignore")


def known(cell: Cell) -> bool:
    """Return whether the oracle and the plain loop both support the cell."""
    return exists(cell) and refusal(cell) is None and covers(cell)


def combined(count: int) -> list[Cell]:
    """Return cells with most of their features set."""
    chance = random.Random(SEED)
    cells: list[Cell] = []
    while len(cells) < count:
        cell = Cell("single", ranks=1)
        for name in chance.sample(list(FEATURES), len(FEATURES)):
            more = dataclasses.replace(cell, **{name: chance.choice(FEATURES[name])})
            cell = more if name != "ranks" and known(more) else cell
        cells.append(cell)
    return cells


def wrong(cell: Cell, folder: Path) -> list[str]:
    """Return the differences between a single process and the plain loop."""
    result, plain = run_oracle(cell, folder), Plain(cell).train()
    assert not result.error, result.error
    # The same operations in the same order; only norms and metrics are added up otherwise, in float32 at worst.
    # The model "dtypes" has a layer in float32, and "complex" numbers of such parts; their rounding affects all weights
    # where losses are weighted differently.
    exact = cell.precision == "64" and cell.model not in ("dtypes", "complex")
    close = {"rtol": 1e-12, "atol": 1e-12} if exact else {"rtol": 1e-5, "atol": 1e-6}
    rel = 1e-6 if exact else 1e-5  # of quantities computed with these weights
    lines = []
    if result.position[0] != plain.updates:
        lines.append(f"{result.position[0]} updates, and there are {plain.updates}")
    weights = plain.averages if cell.callback == "ema" else dict(plain.module.named_parameters())
    saved = result.state["strategy"]["module"]
    for name, value in {**dict(plain.module.named_buffers()), **weights}.items():
        if not torch.allclose(saved[name], value.detach(), **close):
            lines.append(f"{name}: {saved[name].tolist()}, and has to be {value.tolist()}")
    if [rates for rates, _ in result.seen] != [rates for rates, _ in plain.seen]:
        lines.append(f"rates {result.seen}, and have to be {plain.seen}")
    if [norm for _, norm in result.seen] != pytest.approx([norm for _, norm in plain.seen], rel=rel):
        lines.append(f"gradients {result.seen}, and have to be {plain.seen}")
    for name, value in metrics(cell, plain).items():
        diverged = value > torch.finfo(torch.float32).max  # the dtype of callback_metrics
        if not diverged and result.metrics[name] != pytest.approx(value, rel=rel, abs=1e-9):
            lines.append(f"metric {name}: {result.metrics[name]}, and has to be {value}")
    return lines


def metrics(cell: Cell, plain: Plain) -> dict[str, float]:
    """Return the metrics of the last epoch, if it was complete and validated its own `Samples` once."""
    last = {} if cell.loop == "max-steps" else {"loss": plain.loss}
    return last if cell.loop in ("max-steps", "two-val", "overfit") else {**last, "val": plain.validate()}


def check(cells: list[Cell], folder: Path) -> None:
    """Fail with the problems of each cell."""
    results = {}
    for number, cell in enumerate(cells):
        cell_folder = folder / str(number)
        cell_folder.mkdir()
        results[str(cell)] = wrong(cell, cell_folder)
    assert {name: lines for name, lines in results.items() if lines} == {}


def test_each_feature_alone_is_equal_to_plain_torch(tmp_path: Path) -> None:
    check([cell for cell in single_features(1) if cell.way == "single" and known(cell)], tmp_path)


def test_outer_momentum_and_compression_errors_are_equal_to_plain_torch(tmp_path: Path) -> None:
    cells = [Cell(way, ranks=1 if way == "rounds-nesterov" else 2) for way in JOINED_WAYS]
    for ranks in (1, 2):
        some = [(cell, tmp_path / cell.way) for cell in cells if cell.ranks == ranks]
        for _, cell_folder in some:
            cell_folder.mkdir()
        for (cell, _), (results, *_) in zip(some, run_cells(some), strict=True):
            assert not results.error, results.error
            saved, plain = results.state["strategy"]["module"], Joined(cell.way, ranks).train()
            for name, weight in plain.named_parameters():
                # Servers and workers exchange float32 in some cases, and sum in a different order.
                assert torch.allclose(saved[name], weight.detach(), rtol=1e-5, atol=1e-5), (cell.way, name)


@pytest.mark.soak
def test_combinations_of_features_are_equal_to_plain_torch(tmp_path: Path) -> None:
    check(combined(rounds(30, 1000)), tmp_path)
