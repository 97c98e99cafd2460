"""Compare the runs of a sweep: what differs between them, and the results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from fabricx.redaction import masked
from fabricx.telemetry.reader import open_untrusted
from fabricx.telemetry.report import CONFIG_FILES, LoadedRun, final_values

_MAX_CONFIG: Final = 20_000  # characters of a configuration
_MAX_NODES: Final = 20_000  # nodes of a configuration; a larger configuration is not compared
_MAX_LABEL: Final = 160  # characters of a run's label
_NOT_COMPARED: Final = frozenset({"run_dir", "default_root_dir"})  # differ in each run by themselves


@dataclass(frozen=True)
class Entry:
    """A run of a sweep.

    Attributes:
        loaded: the run.
        swept: values that differ between the runs, by key.
        label: these values as text.
        score: last value of the monitored metric; NaN if there is none.
        best: the run has the best score.
    """

    loaded: LoadedRun
    swept: dict[str, str]
    label: str
    score: float
    best: bool


@dataclass(frozen=True)
class Sweep:
    """Runs to be compared.

    Attributes:
        entries: the runs.
        keys: keys of the configuration whose values differ, or which only some runs have. Runs of the command and of
            scripts, which record different keys, are compared by values.
        varied: keys with at least two values.
        metrics: names of all metrics.
        monitor: metric by which the runs are ranked; "" if unknown.
        mode: "min" or "max".
    """

    entries: list[Entry]
    keys: list[str]
    varied: list[str]
    metrics: list[str]
    monitor: str
    mode: str

    @property
    def best(self) -> Entry | None:
        """Return the run with the best score; None if no run has a score."""
        return next((entry for entry in self.entries if entry.best), None)


def sweep_of(runs: Sequence[LoadedRun]) -> Sweep:
    """Compare runs.

    Args:
        runs: the runs.
    """
    configs = [_configuration(loaded.run_dir) for loaded in runs]
    flat = [flatten(config) for config in configs]
    keys = sorted({key for config in flat for key in config if key.rpartition(".")[2] not in _NOT_COMPARED})
    kinds = [(loaded.run_dir / CONFIG_FILES[0]).is_file() for loaded in runs]
    alike = [[config for config, kind in zip(flat, kinds, strict=True) if kind is wanted] for wanted in (True, False)]
    varied = [key for key in keys if len({config[key] for config in flat if key in config}) > 1]
    differ = [
        key for key in keys if key in varied or any(len({config.get(key) for config in some}) > 1 for some in alike)
    ]
    metrics = sorted({name for loaded in runs for name in loaded.run.metrics if name != "epoch"})
    monitor, mode = _monitored(configs, metrics)
    scores = [_last(loaded, monitor) for loaded in runs]
    finite = [score for score in scores if math.isfinite(score)]
    target = (max if mode == "max" else min)(finite, default=math.nan)
    winner = scores.index(target) if finite else -1
    names = short_names(varied or differ)
    entries = []
    for index, (loaded, config, score) in enumerate(zip(runs, flat, scores, strict=True)):
        swept = {key: config[key] for key in differ if key in config}
        label = ", ".join(f"{name}={swept[key]}" for key, name in names.items() if key in swept)
        if len(label) > _MAX_LABEL:
            label = f"{label[: _MAX_LABEL - 3]}..."
        entries.append(Entry(loaded, swept, label or loaded.run_dir.name, score, index == winner))
    labels = [entry.label for entry in entries]
    if len(set(labels)) < len(labels):  # repeated values: folders distinguish the runs
        entries = [Entry(e.loaded, e.swept, f"{e.loaded.run_dir.name}: {e.label}", e.score, e.best) for e in entries]
    return Sweep(entries, differ, varied, metrics, monitor, mode)


def comparison(runs: Sequence[LoadedRun]) -> tuple[list[str], list[list[str]]]:
    """Return a table of runs: configuration values that differ, last values of metrics, and state.

    Args:
        runs: the runs.

    Returns:
        (header, rows).
    """
    sweep = sweep_of(runs)
    rows = []
    for entry in sweep.entries:
        last = final_values(entry.loaded.run)
        shown = [f"{float(last[name]):.4g}" if name in last else "" for name in sweep.metrics]
        values = (entry.swept.get(key, "") for key in sweep.keys)
        rows.append([entry.loaded.run_dir.name, *values, *shown, entry.loaded.state])
    return ["run", *sweep.keys, *sweep.metrics, "state"], rows


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each key that no other key has.

    Args:
        keys: keys with dots.

    >>> short_names(["module.lr", "data.batch_size", "a.seed", "b.seed"])
    {'module.lr': 'lr', 'data.batch_size': 'batch_size', 'a.seed': 'a.seed', 'b.seed': 'b.seed'}
    """
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[begin:]) for begin in range(len(parts) - 1, -1, -1)]
        names[key] = next((end for end in ends if sum(f".{k}".endswith(f".{end}") for k in keys) == 1), key)
    return names


def _monitored(configs: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> tuple[str, str]:
    """Return the metric by which runs are ranked and its direction: `monitor` and `mode` of the configurations.

    Runs that were started in Python have no such setting: the first of their validation metrics ranks them.
    """
    for config in configs:
        monitor = config.get("monitor")
        if monitor in metrics:
            return str(monitor), "max" if config.get("mode") == "max" else "min"
    for name in metrics:
        if "val" in name.lower():
            return name, "min" if any(word in name.lower() for word in ("loss", "error", "perplexity")) else "max"
    return next(((name, "min") for name in metrics if "loss" in name.lower()), ("", "min"))


def _last(loaded: LoadedRun, metric: str) -> float:
    values = loaded.run.metrics.get(metric)
    return values[max(values)] if values else math.nan


def _configuration(run_dir: Path) -> Mapping[str, Any]:
    """Return a run's configuration, or the Trainer's arguments for a run that was started in Python."""
    texts = (_text(run_dir / name) for name in CONFIG_FILES)
    try:
        config = yaml.safe_load(next(filter(None, texts), "{}"))
        return masked(config) if isinstance(config, dict) and _has_at_most(_MAX_NODES, config) else {}
    except (yaml.YAMLError, RecursionError):
        return {}


def _has_at_most(limit: int, value: Any) -> bool:
    """Return whether a value has at most `limit` nodes, counting repeated references of YAML each time."""
    parts, count = [value], 0
    while parts and count <= limit:
        part = parts.pop()
        count += 1
        parts += [*part, *part.values()] if isinstance(part, Mapping) else part if isinstance(part, list) else []
    return count <= limit


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a nested configuration as text, by keys with dots.

    Args:
        config: the configuration.
        prefix: prefix of all keys.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _text(path: Path) -> str:
    try:
        with open_untrusted(path) as file:
            return file.read(4 * _MAX_CONFIG).decode(errors="replace")[:_MAX_CONFIG]
    except OSError:
        return ""
