"""The table of `docs/combinations.md`, from the rules: `python -m tests.matrix.table` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.matrix.cells import FEATURES, Cell
from tests.matrix.rules import KNOWN_DEFECTS, refusal

PAGE = Path(__file__).parents[2] / "docs/combinations.md"
COLUMNS = {
    "`single`": "single", "`ddp`": "ddp", "`ddp` static_graph": "ddp-static", "`ddp` compression": "ddp-bf16",
    "`fsdp`": "fsdp", "server, worker steps": "ps1", "server steps": "ps1-server", "2 servers step": "ps2-server",
    "servers=0, server steps": "ps0-server", "`bounded`": "bounded0", "`bounded`, 2 servers": "bounded0-ps2",
    "`async_sgd`": "async_sgd", "rounds": "rounds", "`local_sgd`": "local_sgd", "`reproducible`": "reproducible",
}  # fmt: skip
HEAD = """# Which features work with which strategies

Written by `python -m tests.matrix.table` from the rules that `tests/matrix` checks: each combination trains what one
process trains on the global batch ("yes"), or is refused before the first update, with an error that names what to do
instead (a number, see below). "open" is a combination with a known defect, listed at the end. Cells are for two
ranks, and each feature by itself; combinations of several features are chosen pairwise and compared as well.

"Rounds" is `async_sgd` with `every` and `outer`. Asynchronous strategies are compared with one worker, where updates
have an order; `bounded` with `max_staleness=0`.
"""


def table() -> str:
    """Return the page."""
    notes: dict[str, int] = {}
    lines = [f"| feature | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name, values in FEATURES.items():
        for value in values if name != "ranks" else ():
            cells = [_entry(way, name, value, notes) for way in COLUMNS.values()]
            lines.append(f"| {name}: {value} | {' | '.join(cells)} |")
    refused = [f"{number}. {why}" for why, number in notes.items()]
    defects = [f"- {re.sub(r'^[0-9]+: ', '', one.what)}" for one in KNOWN_DEFECTS]
    parts = [HEAD, "\n".join(lines), "", "## Refused, and what to do instead", "", *refused]
    if defects:
        parts += ["", "## Known defects, also of several features together", "", *defects]
    return "\n".join(parts) + "\n"


def _entry(way: str, name: str, value: object, notes: dict[str, int]) -> str:
    cell = Cell(way, **{"ranks": 1 if way == "single" else 2, name: value})  # type: ignore[arg-type]
    if (found := refusal(cell)) is not None:
        return str(notes.setdefault(found.why, len(notes) + 1))
    return "open" if any(one.matches(cell) for one in KNOWN_DEFECTS) else "yes"


if __name__ == "__main__":
    PAGE.write_text(table())
