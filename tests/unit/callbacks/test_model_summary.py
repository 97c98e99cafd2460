from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx.callbacks import ModelSummary, RichModelSummary
from fabricx.callbacks.model_summary import readable, summarize


def net() -> nn.ModuleDict:
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)), "head": nn.Linear(10, 2)})


def test_parameters_and_bytes_are_counted() -> None:
    module = net()
    module["head"].requires_grad_(False)
    summary = summarize(module)
    assert [(row.name, row.kind, row.parameters) for row in summary.rows] == [
        ("body", "Sequential", 130),
        ("head", "Linear", 22),
    ]
    assert (summary.trainable, summary.frozen, summary.total) == (130, 22, 152)
    assert summary.size == 4 * (152 + 20) + 8  # the batch norm's statistics are buffers


@pytest.mark.parametrize(("depth", "rows"), [(0, 0), (1, 2), (2, 4), (-1, 4)])
def test_max_depth_limits_the_rows_of_the_summary(depth: int, rows: int) -> None:
    assert len(summarize(net(), depth).rows) == rows


def test_shared_parameters_count_once() -> None:
    module = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    module[1].weight = module[0].weight
    assert summarize(module).total == 16 + 4 + 4


def test_lazy_modules_are_listed() -> None:
    summary = summarize(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))
    assert summary.rows[0].parameters is None
    assert summary.total == 10
    assert summary.unknown == 2
    assert "?" in str(summary)
    assert "before the first batch" in str(summary)
    with pytest.warns(UserWarning, match="2 lazy parameters have no shape"):
        assert summary.total_parameters == 10


def test_the_table_is_aligned() -> None:
    lines = str(summarize(net())).splitlines()
    assert lines[0].split(" | ")[1].strip() == "Name"
    assert lines[2].startswith("0 | body | Sequential | 130")
    assert "152        in total" in lines


def test_a_summary_has_lightnings_names() -> None:
    summary = summarize(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)))
    assert (summary.total_parameters, summary.trainable_parameters, summary.layer_names) == (13, 13, ["0", "1"])
    assert [name for name, _ in reversed(summary.named_modules)] == ["1", "0"]
    assert (len(summary.layer_types), sum(summary.param_nums)) == (2, 13)
    assert summary.model_size == pytest.approx(13 * 4 / 1e6)


def test_numbers_are_printed_with_units() -> None:
    assert [readable(n) for n in (0, 999, 1000, 2_500_000, 7 * 10**9)] == ["0", "999", "1.0 K", "2.5 M", "7.0 B"]


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_rank_prints(trainer: Any, main: bool) -> None:
    run = trainer(ModelSummary(), is_global_zero=main, module=torch.nn.Sequential(nn.Linear(4, 2))).start()
    assert ("Linear" in "".join(run.printed)) is main


def test_a_wrong_depth_is_refused() -> None:
    for depth in (-2, "all"):
        with pytest.raises(ValueError, match=f"max_depth={depth!r}"):
            ModelSummary(max_depth=depth)  # type: ignore[arg-type]


def test_lightnings_rich_summary_is_an_alias() -> None:
    assert RichModelSummary(max_depth=2, header_style="bold").max_depth == 2
