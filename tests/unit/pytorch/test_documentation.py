"""The page of Lightning's names."""

from __future__ import annotations

from pathlib import Path

from fabricx.pytorch.documentation import page


def test_the_page_of_names_is_the_table() -> None:
    written = (Path(__file__).parents[3] / "docs" / "lightning_names.md").read_text()
    assert written == page(), "write it again: python -m fabricx.pytorch.documentation > docs/lightning_names.md"
