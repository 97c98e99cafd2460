"""Output of a screen: a bar on a terminal, or lines."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest

from fabricx.callbacks import ProgressBar
from fabricx.callbacks.progress_screen import Lines, Speed, Terminal, View, open_screen


def test_a_view_is_printed_as_a_single_line() -> None:
    view = View("epoch 1/3", 32, 64, 8.0, {"loss": 0.12345, "accuracy": 1.0})
    assert view.text() == "epoch 1/3  32/64  8 it/s  0:04 left  loss=0.1235  accuracy=1"
    assert View("epoch 2", 7).text() == "epoch 2  7"
    assert View("test", 64, 64, 1234.5).text() == "test  64/64  1234 it/s"
    assert View("e", 0, 10_000, 1.0).text() == "e  0/10000  1 it/s  2:46:40 left"


def test_the_speed_excludes_pauses() -> None:
    speed = Speed(0, now=0.0)
    assert speed.update(10, now=1.0) == 10
    speed.pause(100)
    assert speed.update(20, now=102.0) == 10
    assert speed.overall(20, now=102.0) == 10


def test_output_appears_above_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen_text = Tty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen_text)
    monkeypatch.setattr(sys, "stdout", screen_text)
    screen = open_screen()
    assert isinstance(screen, Terminal)
    screen.draw(View("epoch 1/2", 3, 10, 5.0, {"loss": 0.5}))
    ProgressBar().print("a line of the user's")
    screen.draw(View("epoch 1/2", 4, 10, 5.0))
    screen.close()
    screen.keep(View("epoch 1/2", 10, 10))
    assert sys.stdout is screen_text
    text = screen_text.getvalue()
    assert "a line of the user's\n" in text
    assert "3/10" in text
    assert "loss=0.5" in text
    assert text.index("3/10") < text.index("a line of") < text.index("4/10")
    assert text.endswith("epoch 1/2  10/10\n")


@pytest.mark.parametrize("columns", [40, 80])
def test_no_line_of_a_terminal_is_wrapped_or_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen_text = io.StringIO()
    screen_text.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", screen_text)
    screen = open_screen()
    metrics = {f"a_metric_with_a_long_name_{number}": 1 / 3 for number in range(4)}
    for total in (10, math.inf):
        screen.draw(View("epoch 1/2", 3, total, 5.0, metrics))
    screen.close()
    screen.keep(View("epoch 1/2", 10, 10, 5.0, metrics))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen_text.getvalue())
    lines = re.split(r"[\r\n]+", text)
    assert max(map(len, lines)) <= columns
    for number in range(4):
        assert text.count(f"a_metric_with_a_long_name_{number}=0.3333") >= 3
    assert text.count("epoch 1/2") >= 3
    assert "…" not in text


def test_without_a_terminal_the_bar_is_printed_as_lines() -> None:
    assert isinstance(open_screen(), Lines)
