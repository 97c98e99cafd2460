"""A page as a file: its library, its policy, its size."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

from fabricx.telemetry import pages
from fabricx.telemetry.pages import render
from fabricx.telemetry.pages.run_page import write_page
from fabricx.telemetry.report import load_run
from tests.unit.telemetry.written import Page, a_run

FOLDER = Path(pages.__file__).parent


def test_the_chart_library_has_its_stated_version_and_license() -> None:
    text = (FOLDER / pages.LIBRARY).read_text()
    [version] = re.findall(r"uPlot-([\d.]+)\.min\.js", pages.LIBRARY)
    assert text.startswith(f"/*! https://github.com/leeoniya/uPlot (v{version}) */")
    # as published, sha256 of dist/uPlot.iife.min.js of that version
    digest = hashlib.sha256((FOLDER / pages.LIBRARY).read_bytes()).hexdigest()
    assert digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    assert "MIT" in (FOLDER / "uPlot-LICENSE.txt").read_text()
    assert version in (FOLDER / "README.md").read_text()


def test_the_policy_admits_the_two_scripts_of_the_page_and_no_other(tmp_path: Path) -> None:
    page = Page(write_page(load_run(a_run(tmp_path))).read_text())
    assert len(page.scripts) == 2
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts]
    allowed = re.findall(r"script-src ([^;]+)", page.policy)
    assert allowed == [" ".join(f"'sha256-{text}'" for text in hashes)]
    assert "default-src 'none'" in page.policy
    assert not any("</script" in text or "<!--" in text for text in page.scripts)
    # no way from data to markup or code
    script = (FOLDER / "charts.js").read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|fetch\(|XMLHttp", script
    )


def test_data_cannot_end_its_element() -> None:
    hostile = {"a": "</script><script>alert(1)</script><!--&amp;\u2028"}
    text = render.json_text(hostile)
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == hostile


def test_a_page_that_is_too_large_is_rendered_again_with_less_data(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(render, "MAX_BYTES", 120_000)
    scales = []

    def facts(scale: float) -> dict:
        scales.append(scale)
        rows = ["x" * int(40_000 * scale)] * 5
        return {
            "data": {}, "title": "a", "upright": True, "header": [{"name": "run", "number": False}], "rows": [
                {"cells": [row], "best": False, "number": 0} for row in rows
            ], "monitor": "loss", "best": None, "sections": [],
        }  # fmt: skip

    path = render.write_page(tmp_path / "report.html", "sweep.html.j2", facts)
    assert path.stat().st_size <= 120_000
    assert scales[:2] == [1.0, 0.5]
