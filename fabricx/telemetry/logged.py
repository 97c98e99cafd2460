"""Metrics in the files of loggers, for reports of runs that recorded no telemetry."""

from __future__ import annotations

import csv
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fabricx.telemetry.reader import open_untrusted

Metrics = dict[str, dict[int, float]]
_MAX_BYTES: Final = 2**28  # of a file
_STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE = 2, 5, 1, 1, 2  # numbers of fields in event.proto and summary.proto
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # types of fields in protocol buffers


def files_of(run_dir: Path) -> list[Path]:
    """Return the files of a run's loggers that contain metrics.

    Args:
        run_dir: the run's folder.
    """
    tables = [path for name in ("metrics.csv", "metrics.jsonl") if (path := run_dir / name).is_file()]
    return tables or sorted(path for path in run_dir.glob("events.out.tfevents.*") if path.is_file())


def metrics_of(run_dir: Path) -> Metrics:
    """Return the metrics of a run by name and step; lines that no logger writes are left out.

    Args:
        run_dir: the run's folder.
    """
    readers = {".csv": _table, ".jsonl": _lines}
    metrics: Metrics = {}
    for path in files_of(run_dir):
        try:
            with open_untrusted(path) as file:
                data = file.read(_MAX_BYTES)
        except OSError:
            continue
        for step, name, value in readers.get(path.suffix, _events)(data):
            metrics.setdefault(name, {})[step] = value
    return metrics


def _table(data: bytes) -> Iterator[tuple[int, str, float]]:
    rows = csv.DictReader(io.StringIO(data.decode(errors="replace"), newline=""))
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            continue
        try:
            step = int(float(row.pop("step", "") or "nan"))
            values = [(name, float(text)) for name, text in row.items() if text]
        except (TypeError, ValueError, OverflowError):
            continue
        yield from ((step, name, value) for name, value in values)


def _lines(data: bytes) -> Iterator[tuple[int, str, float]]:
    for line in data.splitlines():
        try:
            row = json.loads(line)
            step, _ = int(row.pop("step")), row.pop("time", None)
            values = [(name, float("nan" if value is None else value)) for name, value in row.items()]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            continue
        yield from ((step, name, value) for name, value in values)


def _events(data: bytes) -> Iterator[tuple[int, str, float]]:
    """Yield the scalars of a TensorBoard file: records of a length, a checksum, an event, and a checksum."""
    begin = 12
    while begin <= len(data):
        end = begin + int.from_bytes(data[begin - 12 : begin - 4], "little")
        if end + 4 > len(data):
            return
        try:
            yield from _scalars(data[begin:end])
        except (IndexError, TypeError, ValueError, struct.error):
            return
        begin = end + 16


def _scalars(event: bytes) -> list[tuple[int, str, float]]:
    step, scalars = 0, []
    for number, value in _fields(event):
        if number == _STEP and isinstance(value, int):
            step = value
        elif number == _SUMMARY and isinstance(value, bytes):
            for kind, entry in _fields(value):
                fields = dict(_fields(entry)) if kind == _VALUE and isinstance(entry, bytes) else {}
                tag, simple = fields.get(_TAG), fields.get(_SIMPLE)
                if isinstance(tag, bytes) and isinstance(simple, float):
                    scalars.append((tag.decode(errors="replace"), simple))
    return [(step, name, value) for name, value in scalars]


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the fields of a message in the encoding of protocol buffers: number and value."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
        elif kind == _BYTES:
            size, at = _varint(message, at)
            yield number, message[at : at + size]
            at += size
        elif kind in (_FLOAT, _DOUBLE):
            size = 4 if kind == _FLOAT else 8
            yield number, struct.unpack_from("<f" if kind == _FLOAT else "<d", message, at)[0]
            at += size
        else:
            raise ValueError(f"no field has type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
