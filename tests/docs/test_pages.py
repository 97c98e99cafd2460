"""Code in the pages runs: README.md and docs/, a process per page, which executes its Python blocks in order.

In a page:

- A block whose first line is a comment with a path (`# conf/module/mine.yaml`) is also a file of the page's project.
- `<!-- not run: REASON -->` on the line before a block excludes it.
- `<!-- run` on a separate line, until `-->`, is code that the page doesn't show: a requirement of the next block,
  or a check.
- Commands `fabricx ...`, in blocks and between backticks, must compose: their groups, keys and types exist.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import diagrams, docstrings
from fabricx import config
from fabricx.cli.hydra_app import run_app
from fabricx.cli.main import COMMANDS, STAGES, _demonstration
from tests import warm

ROOT = Path(__file__).parents[2]
OWN_TESTS = {"docs/extending.md": "tests/docs/test_extending.py"}
FILE_LANGUAGES = ("python", "yaml", "toml", "json", "mermaid")
PLACEHOLDER = re.compile(r"=\.\.\.|^[A-Z]+=")
STAND_INS = {"module=mine": "module=digits", "strategy=quantized_ddp": "strategy=ddp"}  # choices of a reader's project
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- not run: (?P<reason>\S.*?) -->\n+ *)?"
    r"```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- run\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
NAMED = re.compile(r"(?:#|//) (\S+\.(?:py|yaml|toml|sh|sbatch))\n")
PYTHON = re.compile(
    r"^ {4,}(?:import \w|from \S+ import |class \w+.*:|def \w+\(|\w+ = fx\.|trainer\.\w+\()", re.MULTILINE
)


def blocks(page: str) -> Iterator[tuple[int, str, str, str | None]]:
    """Yield the line of each block of a page, its language, its text, and why it isn't run."""
    for match in FENCE.finditer(PAGES[page]):
        line = PAGES[page].count("\n", 0, match.start()) + 2
        if match["hidden"] is not None:
            yield line, "python", match["hidden"], None
        else:
            text = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            yield line, match["language"], text, match["reason"]


def lay(page: str, folder: Path) -> None:
    """Write the files that a page lists."""
    for _, _, text, _ in blocks(page):
        if named := NAMED.match(text):
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def program(page: str) -> list[tuple[int, str]]:
    return [(line, text) for line, language, text, reason in blocks(page) if language == "python" and not reason]


def commands(page: str) -> list[str]:
    """Return the commands of fabricx on a page, without comments."""
    indented = [line for line in FENCE.sub("", PAGES[page]).splitlines() if line.startswith("    ")]
    shell = "\n".join([*indented, *(text for _, language, text, _ in blocks(page) if language not in FILE_LANGUAGES)])
    lines = re.findall(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*(fabricx [a-z][^\n]*)", shell.replace("\\\n", " "), re.MULTILINE)
    lines += re.findall(r"`(fabricx [a-z][^`\n]*)`", PAGES[page])
    return [re.split(r"\s{2,}(?=\S)| #|;|&|\||\s[.…]{3}", re.sub(r" {2,}(?=[\w+.]+=)", " ", line))[0] for line in lines]


RUN = [page for page in PAGES if page not in OWN_TESTS and program(page)]
COMMANDED = [page for page in PAGES if commands(page)]


def test_no_python_block_is_outside_of_the_tested_pages():
    """Code of four spaces has no language, and nothing runs it."""
    outside = {page: FENCE.sub("", text) for page, text in PAGES.items()}
    assert {page: blocks_found for page, text in outside.items() if (blocks_found := PYTHON.findall(text))} == {}
    languages = {language for page in PAGES for _, language, _, _ in blocks(page)}
    assert languages <= {"", "python", "bash", "sh", "yaml", "toml", "text", "json", "mermaid", "console", "dockerfile"}
    for page, test in OWN_TESTS.items():
        assert program(page)
        assert Path(page).name in (ROOT / test).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_that_are_not_run_compile(page):
    for line, language, text, reason in blocks(page):
        if language == "python" and reason:
            ast.parse(text, f"{page}:{line}")


@pytest.mark.parametrize("page", RUN)
def test_the_programs_of_a_page_run(page, own_folder):
    lay(page, own_folder)
    (own_folder / "_page.py").write_text(
        f"blocks = {program(page)!r}\n"
        "for line, text in blocks:\n"
        f"    exec(compile('\\n' * line + text, {page!r}, 'exec'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{own_folder}", "OMP_NUM_THREADS": "1"}
    ended = warm.run(
        [sys.executable, "_page.py"], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]


@pytest.mark.parametrize("page", COMMANDED)
def test_the_commands_of_a_page_compose(page, own_folder, capsys):
    lay(page, own_folder)
    (own_folder / "conf").mkdir(exist_ok=True)
    for command in dict.fromkeys(commands(page)):
        _, name, *arguments = shlex.split(command)
        assert name in COMMANDS, command
        settings = [STAND_INS.get(argument, argument) for argument in arguments if not PLACEHOLDER.search(argument)]
        if name not in (*STAGES, "plan", "resume") or not any("=" in setting for setting in settings):
            continue
        try:
            settings = settings[name == "resume" :]
            run_app(_check, [*_demonstration(settings), *settings], None, "config")
        except SystemExit:
            raise AssertionError(f"{page}: {command}\n{capsys.readouterr().err}") from None


def _check(cfg):
    config.check_settings(config.plain(cfg))


def test_the_figure_of_the_first_page_is_reproduced_by_two_runs(own_folder):
    program = ROOT / "docs" / "figures" / "kill_a_worker.py"
    ended = warm.run(
        [sys.executable, str(program), "--steps", "6", "--file", "drawn.svg"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "6 losses and all weights are equal to the bit" in ended.stdout, (ended.stdout + ended.stderr)[-3000:]
    assert "a replacement joins" in Path("drawn.svg").read_text()


def test_each_entry_of_the_reference_has_an_example():
    bare = {
        f"{page}: {entry}"
        for page, text in PAGES.items()
        if page.startswith("docs/reference/")
        and page not in ("docs/reference/errors.md", "docs/reference/configuration.md")
        for entry, rest in re.findall(r"^::: (\S+)\n(.*?)(?=^:::|\Z)", text, re.MULTILINE | re.DOTALL)
        if "```python" not in rest
    }
    assert bare == set()  # of errors and of commands, a single example is enough


@pytest.mark.parametrize("package", ["", ".callbacks", ".checkpoint", ".loggers", ".strategies", ".testing"])
def test_each_public_name_is_in_the_reference(package):
    module = importlib.import_module(f"fabricx{package}")
    pages = "".join(text for page, text in PAGES.items() if page.startswith("docs/reference/"))
    listed = set(re.findall(rf"^::: fabricx{re.escape(package)}\.(\w+)$", pages, re.MULTILINE))
    listed |= set(re.findall(r"`(?:fx\.)?(\w+)` is (?:the same|another)", pages))
    constants = {name for name in module.__all__ if name.isupper() and not inspect.isclass(getattr(module, name))}
    assert set(module.__all__) - listed - constants == set()
    if package == ".callbacks":  # the guide has an example of each
        assert [name for name in module.__all__ if name not in PAGES["docs/guides/callbacks.md"]] == []


def test_diagrams_are_drawn_completely():
    for page, text in PAGES.items():
        drawings = diagrams.FENCE.findall(text)
        assert len(drawings) == text.count("```mermaid"), page  # the site draws no other kind
        for kind, lines in drawings:
            texts = ElementTree.fromstring(diagrams.drawn(kind, lines)).findall("{*}svg/{*}text")
            # A name, or the text of a step; the lines of the labels, and the answers.
            labels = sum(1 + label.count("<br>") for label in re.findall(r'"(.+?)"', lines))
            shown = lines.count("\n") + (labels if kind == "flowchart TD" else 0)
            assert len(texts) == shown, page
    for kind, first in (("sequenceDiagram", "participant A as a"), ("flowchart TD", 'a{"A?"} -->|yes| b["B"]')):
        with pytest.raises(ValueError, match="loop over nothing"):
            diagrams.drawn(kind, f"{first}\nloop over nothing")


def test_a_decision_chart_has_yes_on_the_right_and_no_below():
    chart = 'a{"A?"} -->|yes| b{"B?"}\nb -->|yes| c["C"]\nb -->|no| d["D"]\na -->|no| e["E"]\n'
    drawn = ElementTree.fromstring(diagrams.drawn("flowchart TD", chart))
    boxes, texts = drawn.findall("{*}svg/{*}rect"), drawn.findall("{*}svg/{*}text")
    at = {
        text.text: (float(box.get("x", 0)), float(box.get("y", 0)))
        for box, text in zip(boxes, [text for text in texts if text.text not in ("yes", "no")], strict=True)
    }
    assert at["A?"][1] == at["B?"][1] == at["C"][1] < at["D"][1] < at["E"][1]
    assert at["A?"][0] == at["E"][0] < at["B?"][0] == at["D"][0] < at["C"][0]


def test_examples_in_docstrings_become_code():
    assert docstrings.fenced("Add.\n\n>>> 1 + 1\n2\n\nEnd.") == "Add.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nEnd."


@pytest.mark.parametrize("name", ["docstrings", "hooks", "messages", "remedies"])
def test_examples_in_the_programs_of_the_site_are_right(name):
    tested = doctest.testmod(importlib.import_module(f"docs.{name}"))
    assert (tested.failed, tested.attempted > 0) == (0, True)
