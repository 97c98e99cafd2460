"""Pages as a single file each, which needs no network: templates, data, and the scripts that a hash admits."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fabricx.telemetry.pages import LIBRARY

MAX_BYTES: Final = 990_000  # size of a page
_FOLDER: Final = Path(__file__).parent


def write_page(path: Path, template: str, facts: Callable[[float], dict[str, Any]]) -> Path:
    """Write a page that is smaller than `MAX_BYTES`.

    Args:
        path: path of the page.
        template: name of the template.
        facts: returns the values for the template, `data` for the script among them; its argument is a factor of the
            number of points and of the length of texts.

    Returns:
        path of the page.
    """
    scale = 1.0
    while len(page := _render(template, facts(scale)).encode()) > MAX_BYTES and scale > 1e-3:
        scale /= 2
    return _written(path, page)


@functools.cache
def _environment() -> Any:
    import jinja2

    loader = jinja2.FileSystemLoader(_FOLDER)
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def _render(template: str, facts: dict[str, Any]) -> str:
    scripts = [f"\n{(_FOLDER / name).read_text(encoding='utf-8')}\n" for name in (LIBRARY, "charts.js")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return _environment().get_template(template).render(  # type: ignore[no-any-return]
        made=time.strftime("%Y-%m-%d %H:%M:%S"), scripts=scripts, json=json_text(facts.pop("data")),
        policy="script-src " + " ".join(f"'sha256-{text}'" for text in hashes), **facts,
    )  # fmt: skip


def json_text(data: Any) -> str:
    """Return data as JSON that HTML can't mistake for an element.

    Args:
        data: plain data without NaN.

    >>> json_text("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _written(path: Path, page: bytes) -> Path:
    """Write a page atomically. A link at `path` is replaced, not followed: it could point to any file of the reader."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(page)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path
