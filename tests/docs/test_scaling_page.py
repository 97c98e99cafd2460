"""The numbers of the page on thousands of devices."""

from __future__ import annotations

from pathlib import Path

from fabricx.cli.simulate import simulated

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_page_has_the_output_of_the_command() -> None:
    page = PAGE.read_text()
    for arguments in (["devices=1024"], ["devices=1024", "sequence=8192"]):  # all other numbers take seconds
        assert [line for line in simulated(arguments) if line not in page] == []
