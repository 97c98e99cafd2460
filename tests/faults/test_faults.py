"""Cells of the fault matrix: a few in `make test`, all pairs in `make soak`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.faults import evaluation, membership
from tests.faults.cells import FEATURES, Cell, pairwise
from tests.faults.evaluation import Evaluation
from tests.faults.running import judge
from tests.soak import params, seeds, some

SHORT = (
    "strategy=ddp, moment=on_train_start, process=worker 1, step=0, draws=hooks",
    "strategy=ddp, moment=writing, process=worker 1, disk=slow",
    "strategy=fsdp, moment=on_save_checkpoint, process=worker 0, disk=slow",
    "strategy=ps2, moment=reducing, process=server 1",
    "strategy=ps0-server, moment=on_before_optimizer_step, process=worker 1",
    "strategy=ddp, moment=writing, process=supervisor, fault=kill, disk=slow",
)
MORE = (
    "strategy=ddp, moment=on_after_backward, process=worker 0, fault=kill, draws=hooks",
    "strategy=ddp, moment=on_train_end, process=worker 0, fault=term",
    "strategy=async_sgd, moment=on_train_start, process=worker 0, step=0",
)
EVALUATIONS = (Evaluation("ddp", "test", "term", 1), Evaluation("fsdp", "predict", "kill", 0))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for undisturbed runs."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.parametrize("text", params(SHORT, MORE))
def test_results_after_a_fault_equal_those_of_an_undisturbed_run(text: str, tmp_path: Path, undisturbed: Path) -> None:
    assert Cell.parse(text).possible()
    assert judge(Cell.parse(text), tmp_path / "run", undisturbed) == [], f'python -m tests.faults "{text}"'


@pytest.mark.soak
@pytest.mark.parametrize("cell", some(pairwise(1), 1, 30), ids=str)
def test_results_after_each_pair_of_features_equal_those_of_an_undisturbed_run(
    cell: Cell, tmp_path: Path, undisturbed: Path
) -> None:
    assert judge(cell, tmp_path / "run", undisturbed) == [], f'python -m tests.faults "{cell}"'


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(1, 60))
def test_joins_and_deaths_noticed_at_different_times_lose_no_sample(seed: int, tmp_path: Path) -> None:
    assert membership.judge(seed, tmp_path) == []


@pytest.mark.parametrize("cell", EVALUATIONS, ids=str)
def test_a_fault_in_an_evaluation_is_an_error_and_the_next_evaluation_is_correct(
    cell: Evaluation, tmp_path: Path
) -> None:
    assert evaluation.judge(cell, tmp_path / "run") == []


@pytest.mark.soak
@pytest.mark.parametrize("cell", some(evaluation.pairwise(1), 1, 112), ids=str)
def test_each_fault_in_an_evaluation_is_an_error_and_the_next_evaluation_is_correct(
    cell: Evaluation, tmp_path: Path
) -> None:
    assert evaluation.judge(cell, tmp_path / "run") == []


def test_the_first_cells_contain_each_value_and_are_parsed_from_their_printed_form() -> None:
    cells = list(islice(pairwise(1), 40))
    assert cells == list(islice(pairwise(1), 40))
    for name, options in FEATURES.items():
        assert {getattr(cell, name) for cell in cells} == set(options)
    for cell in cells:
        assert cell.possible()
        assert Cell.parse(str(cell)) == cell
