"""Copying of the output of the main rank."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import final


@final
class MainOutput:
    """Copies the output of the main rank to the output of this process.

    Args:
        file: file with the output; it may not exist yet.
        without: prefix of lines to omit.
    """

    def __init__(self, file: Path, without: str | None = None) -> None:
        self._file, self._without, self._position = file, without, 0

    def copy(self, *, ended: bool = False) -> None:
        """Print the new complete lines.

        Args:
            ended: the main rank has ended, so that its last line is complete.
        """
        with contextlib.suppress(OSError), self._file.open("rb") as output:
            output.seek(self._position)
            content = output.read()
            if not ended:  # the rest of a line or of a character may follow
                content = content[: max(content.rfind(b"\n"), content.rfind(b"\r")) + 1]
            self._position += len(content)
            lines = content.decode(errors="replace").splitlines(keepends=True)
            shown = lines if self._without is None else [line for line in lines if not line.startswith(self._without)]
            encoding = sys.stdout.encoding or "utf-8"  # perhaps of fewer characters than the ranks use
            print("".join(shown).encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
