"""Parts of the reference that are read from the source when the site is built.

A page has them in the place of `<!-- table: NAME -->`, where NAME is a function of this module.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from messages import all_messages
from omegaconf import DictConfig
from remedies import REMEDIES, remedy

from fabricx import config
from fabricx.cli import help, hydra_app
from fabricx.cli.main import RESUME_HELP, USAGE
from fabricx.cli.mistakes import Composition

ROOT: Final = Path(__file__).parents[1]
# Groups with a table for each choice.
_CHOSEN: Final = ("strategy", "launcher", "callbacks", "logger", "module", "data")


def configuration() -> str:
    """Return the keys of the configuration: of a run, of the Trainer, and of each choice of each group."""
    config.register()
    hydra_app._register_resolvers()
    composition = Composition("config", None)
    groups = composition.groups()
    plain = composition.compose([])
    lines = ["## Keys of a run", *_table((key, plain[key]) for key in plain if not isinstance(plain[key], DictConfig))]
    lines += ["## trainer", "Options of the [Trainer](trainer.md).", *_rows("trainer", plain, "trainer")]
    composed = _composed(composition, {group: groups[group] for group in _CHOSEN})
    for group in _CHOSEN:
        lines += [f"## {group}"]
        for choice in groups[group]:
            lines += [f"### {group}={choice}", _description(group, choice)]
            if choice != "custom":
                lines += _rows(group, composed[group, choice], _prefix(group, choice, composed[group, choice]))
    lines += ["## Experiments and debugging", ""]
    for group in ("experiment", "debug"):
        lines += [f"- `{group}={choice}`: {_description(group, choice)}" for choice in groups[group]]
    return "\n".join(lines) + "\n"


def peers() -> str:
    """Return the measured comparison with other frameworks, from the guide to performance."""
    page = (ROOT / "docs" / "guides" / "performance.md").read_text()
    [table] = re.findall(r"^\| \| GPT.*?\n(?=\n)", page, re.MULTILINE | re.DOTALL)
    return str(table)


def _composed(composition: Composition, groups: dict[str, list[str]]) -> dict[tuple[str, str], DictConfig]:
    """Return a configuration for each choice; a composition has the n-th choice of each group, to save time."""
    found = {}
    for choices in zip_longest(*groups.values()):
        chosen = {group: choice for group, choice in zip(groups, choices, strict=True) if choice}
        composed = composition.compose([f"{group}={choice}" for group, choice in chosen.items()])
        found |= dict.fromkeys(chosen.items(), composed)
    return found


def _prefix(group: str, choice: str, composed: DictConfig) -> str:
    """Return the keys that a choice adds to its group: those of the default callbacks are listed only there."""
    own = list(composed[group]) if group == "callbacks" and choice != "default" and composed[group] else []
    new = [name for name in own if name != "model_checkpoint"]
    return f"{group}.{new[0]}" if new else group


def _description(group: str, choice: str) -> str:
    file = ROOT / "conf" / group / f"{choice}.yaml"
    comments = [line for line in file.read_text().splitlines() if line.startswith("# ")] if file.is_file() else []
    if choice == "custom":
        return f"A class of your own: `{group}._target_=my_project.Mine`, and its arguments as keys."
    return next(line[2:] for line in comments if "@package" not in line)


def _rows(group: str, composed: DictConfig, prefix: str) -> list[str]:
    entries = [(key, value) for key, value in help._entries(composed) if key == prefix or key.startswith(f"{prefix}.")]
    hidden = (f"{group}.name", f"{group}._target_")
    return _table(((key, value) for key, value in entries if key not in hidden and value != {}), composed)


def _table(entries: Any, composed: DictConfig | None = None) -> list[str]:
    rows = []
    for key, value in entries:
        meaning = _cell(help._explanation(key, composed or DictConfig({})))
        rows.append(f"| <code>{key}</code> | `{help._shown(value)}` | {meaning} |")
    return ["", "| key | default | meaning |", "|---|---|---|", *rows, ""] if rows else [""]


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """Return what each command prints with `--help`."""
    texts = {**USAGE, "resume": RESUME_HELP}
    return "\n".join(f"## fabricx {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in texts.items())


def messages() -> str:
    """Return the messages of all errors, by package and exception, with a remedy for those that have none.

    Raises:
        LookupError: a remedy belongs to no message.
    """
    lines: list[str] = []
    unused = set(REMEDIES)
    for package, found in all_messages().items():
        if found:
            lines += [f"### {package}", ""]
        for name, text in found:
            row = remedy(package, name, text)
            unused.discard(row)
            lines.append(f"- **{name}** {text}" + (f"<br>→ {row[3]}" if row else ""))
        lines.append("")
    if unused:
        raise LookupError(f"docs/remedies.py has rows that belong to no message: {sorted(unused)}")
    return "\n".join(lines)
