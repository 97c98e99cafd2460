"""Import time of fabricx, against torch alone."""

from __future__ import annotations

import subprocess
import sys
import time

from table import Row, interleaved, show

STATEMENTS = {
    "import torch": "import torch",
    "import fabricx": "import fabricx",
    "... and every public name": "import fabricx as fx; [getattr(fx, name) for name in fx.__all__ if name != 'main']",
}


def seconds(statement: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - begun


def main() -> None:
    values = interleaved({name: lambda s=statement: seconds(s) for name, statement in STATEMENTS.items()}, rounds=7)
    show("imports, in a fresh process", [
        Row(name, value, "s", None if name == "import torch" else 1.10) for name, value in values.items()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
