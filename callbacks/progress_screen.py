"""Output of progress: a bar in a terminal, or lines in a file; and the speed that it shows."""

from __future__ import annotations

import builtins
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

_BAR = 30  # columns


@dataclass
class View:
    """Contents of the bar at a moment.

    Attributes:
        label: text before the bar.
        done: completed batches.
        total: number of batches; infinity if unknown.
        batches_per_s: speed; 0 if unknown.
        metrics: values by name.
    """

    label: str
    done: int
    total: float = math.inf
    batches_per_s: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def progress(self, *, remaining: bool = True) -> str:
        """Return the number of batches and the speed.

        Args:
            remaining: include the estimated remaining time.
        """
        parts = [f"{self.done}/{int(self.total)}" if self.total < math.inf else str(self.done)]
        if self.batches_per_s > 0:
            parts.append(f"{self.batches_per_s:{'.3g' if self.batches_per_s < 100 else '.0f'}} it/s")
            if remaining and self.done < self.total < math.inf:
                parts.append(f"{_clock((self.total - self.done) / self.batches_per_s)} left")
        return "  ".join(parts)

    def values(self) -> list[str]:
        """Return the metrics as texts."""
        return [f"{name}={_shown(value)}" for name, value in self.metrics.items()]

    def text(self, *, remaining: bool = True, width: float = math.inf) -> str:
        """Return everything as text.

        Args:
            remaining: include the estimated remaining time.
            width: maximum number of columns; metrics that don't fit are in further lines.

        >>> View("epoch 1/3", 32, 64, 8.0, {"loss": 0.12345}).text()
        'epoch 1/3  32/64  8 it/s  0:04 left  loss=0.1235'
        """
        return _folded([f"{self.label}  {self.progress(remaining=remaining)}", *self.values()], width)


def _shown(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):  # text of a user's get_metrics
        return str(value)


def _folded(parts: Sequence[str], width: float) -> str:
    """Join parts, each of which stays whole, to lines of a width; further lines are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}")
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Speed:
    """Measure recent and overall batches per second, without pauses.

    Args:
        done: batches done at the start.
        now: start time in seconds.
    """

    def __init__(self, done: int, now: float) -> None:
        self._first, self._begun = done, now
        self._done, self._time = done, now
        self._recent = 0.0

    def update(self, done: int, now: float) -> float:
        """Add a measurement and return the recent speed, an exponential average with weight 1/3.

        Args:
            done: batches done.
            now: time in seconds.
        """
        if done > self._done and now > self._time:
            fresh = (done - self._done) / (now - self._time)
            self._recent = fresh if not self._recent else self._recent + (fresh - self._recent) / 3
            self._done, self._time = done, now
        return self._recent

    def overall(self, done: int, now: float) -> float:
        """Return the average speed since the start.

        Args:
            done: batches done.
            now: time in seconds.
        """
        return (done - self._first) / (now - self._begun) if now > self._begun else 0.0

    def pause(self, seconds: float) -> None:
        """Exclude an interruption, such as a validation within a training epoch.

        Args:
            seconds: its duration.
        """
        self._begun += seconds
        self._time += seconds


class Screen(Protocol):
    """Output for progress."""

    def draw(self, view: View) -> None:
        """Replace the displayed view.

        Args:
            view: the new contents.
        """

    def keep(self, view: View) -> None:
        """Write a view that remains, of a stage that is complete.

        Args:
            view: its contents.
        """

    def close(self) -> None:
        """Remove the bar."""


@final
class Lines(Screen):
    """Write a line for each view, for log files."""

    def draw(self, view: View) -> None:
        builtins.print(view.text(), file=sys.stderr, flush=True)

    def keep(self, view: View) -> None:
        builtins.print(view.text(remaining=False), file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


@final
class Terminal(Screen):
    """Draw a bar in the last lines of a terminal; printed text appears above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        # No refresh thread is needed: `draw` is called often enough.
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
        )

    def draw(self, view: View) -> None:
        self._live.update(self._rows(view))
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

    def _rows(self, view: View) -> Any:
        """Return a row with the bar, and the metrics in further rows if they don't fit."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        width, progress, below = self._console.width, view.progress(), ""
        room = width - len(view.label) - len(progress) - 2
        values = "  ".join(view.values())
        if _BAR + 2 + len(values) <= room:
            progress = f"{progress}  {values}"
        elif values:
            below = _folded(["", *view.values()], width).lstrip("\n")
        known = view.total < math.inf
        bar = Bar(
            total=view.total if known else None, completed=view.done, width=max(1, min(_BAR, room)),
            pulse=not known, animation_time=time.monotonic(),
        )  # fmt: skip
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(view.label), bar, Text(progress))
        return Group(row, Text(below)) if below else row

    def keep(self, view: View) -> None:
        text = view.text(remaining=False, width=self._console.width)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def open_screen() -> Screen:
    """Return a screen for standard error, which is used because progress is not part of a program's results."""
    if sys.stderr.isatty():
        try:
            return Terminal()
        except ImportError:  # rich isn't installed
            pass
    return Lines()
