"""`fabricx simulate`: predicted time and memory of a transformer on meshes of many devices, without any of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from fabricx.errors import did_you_mean
from fabricx.model_parallel.pipeline.schedule import SCHEDULES
from fabricx.model_parallel.scaling.dimensions import Cluster, Layout, Transformer
from fabricx.model_parallel.scaling.search import chart, fastest, layouts, table, traffic_table

USAGE: Final = """\
fabricx simulate [KEY=VALUE ...]

Predict the step of a transformer on meshes of many devices, and print the
fastest mesh that fits in their memory. Without settings: Llama of 70 billion
parameters, on H100s. docs/scaling.md has the assumptions.

  fabricx simulate devices=64,256 sequence=8192
  fabricx simulate devices=256 between_gb_s=12 memory_gb=74
  fabricx simulate devices=256 mesh.tensor=8 mesh.pipeline=4 mesh.data=fsdp

Keys, with their values for the H100s; GB are 10^9 bytes, and speeds are per second
  devices=16,64,256,1024,4096  numbers of devices; each has a line
  batch                        sequences in a step; by default, 4.2 million tokens
  layers=80 hidden=8192 heads=64 kv_heads=8 ffn=28672 vocabulary=128256
    sequence=4096              dimensions of the transformer
  tflops=989 efficiency=0.6    peak of a device, and the part that products reach
  memory_gb=74 memory_gb_s=2500  memory of a device, and its speed
  node=8                       devices of a machine
  inside_gb_s=360 inside_us=3  speed and latency of messages within a machine
  between_gb_s=40 between_us=10  the same between machines
  precision=bf16-mixed         of products and activations; with 32-true, set
                               tflops to the peak of 32-bit products

Keys that fix a part of the mesh; others are searched for the fastest
  mesh.pipeline mesh.context mesh.tensor   ranks of an axis
  mesh.virtual mesh.microbatches           chunks of blocks of a rank, and of a batch
  mesh.schedule                            of the pipeline
  mesh.sequence mesh.recompute             true or false
  mesh.data                                ddp or fsdp
"""
DEVICES: Final = (16, 64, 256, 1024, 4096)
TOKENS: Final = 2**22  # of a step, unless batch= is set
UNITS: Final = {
    "tflops": ("flops", 1e12), "efficiency": ("efficiency", 1.0), "memory_gb": ("memory", 1e9),
    "memory_gb_s": ("memory_speed", 1e9), "inside_gb_s": ("inside", 1e9), "between_gb_s": ("between", 1e9),
    "inside_us": ("inside_latency", 1e-6), "between_us": ("between_latency", 1e-6),
}  # fmt: skip
MODEL: Final = tuple(field.name for field in fields(Transformer))
NUMBERS: Final = ("pipeline", "context", "tensor", "virtual", "microbatches")  # of a mesh
FLAGS: Final = {"true": True, "false": False}
CHOICES: Final[Mapping[str, Mapping[str, object]]] = {
    "sequence": FLAGS, "recompute": FLAGS, "data": {"ddp": False, "fsdp": True},
    "schedule": {name: name for name in SCHEDULES if name != "gpipe"},
}  # fmt: skip
PRECISIONS: Final = {"bf16-mixed": 2, "16-mixed": 2, "32-true": 4}  # bytes of an element of activations
KEYS: Final = (
    "devices",
    "batch",
    "precision",
    *MODEL,
    "node",
    *UNITS,
    *(f"mesh.{name}" for name in (*NUMBERS, *CHOICES)),
)


def main(arguments: Sequence[str]) -> int:
    """Print predictions; return the exit status.

    Args:
        arguments: arguments of the command.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    try:
        lines = simulated(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def simulated(arguments: Sequence[str]) -> list[str]:
    """Return the lines about the settings.

    Args:
        arguments: texts of the form KEY=VALUE.

    Raises:
        ValueError: a key is unknown, or a value is out of range.
    """
    settings = _settings(arguments)
    model = replace(Transformer(), **{name: _whole(name, settings[name]) for name in MODEL if name in settings})
    if model.hidden % model.heads or model.heads % model.kv_heads:
        raise ValueError(
            f"hidden={model.hidden}, heads={model.heads} and kv_heads={model.kv_heads}: heads have to divide hidden, "
            "and kv_heads have to divide heads"
        )
    speeds: dict[str, Any] = {
        field: _positive(key, settings[key]) * unit for key, (field, unit) in UNITS.items() if key in settings
    }
    cluster = replace(Cluster(), **speeds)
    if "node" in settings:
        cluster = replace(cluster, node=_whole("node", settings["node"]))
    batch = _whole("batch", settings.get("batch", str(max(1, TOKENS // model.sequence))))
    devices = [_whole("devices", text) for text in settings.get("devices", ",".join(map(str, DEVICES))).split(",")]
    fixed, precision = _mesh(settings), settings.get("precision", "bf16-mixed")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision}: must be {' or '.join(PRECISIONS)}")
    predictions = {
        number: fastest(model, cluster, layouts(model, cluster, number, batch, fixed, PRECISIONS[precision]))
        for number in devices
    }
    return [
        f"{model.parameters / 1e9:.1f} billion parameters; a step of {batch} x {model.sequence} tokens",
        f"a device: {cluster.flops / 1e12:.0f} TFLOP/s, {cluster.efficiency:.0%} of it in products, "
        f"{cluster.memory / 1e9:.0f} GB at {cluster.memory_speed / 1e9:.0f} GB/s",
        f"links of a device: {cluster.inside / 1e9:g} GB/s within a node of {cluster.node}, "
        f"{cluster.between / 1e9:g} GB/s to other nodes", "", *table(model, cluster, batch, predictions), "",
        "where the time of a device goes, and the largest part beside the products:", *chart(predictions), "",
        *traffic_table(predictions),
    ]  # fmt: skip


def _settings(arguments: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in KEYS:
            raise ValueError(f"there is no setting {key!r}.{did_you_mean(key, KEYS)}\n  known: {', '.join(KEYS)}")
        if not equals:
            raise ValueError(f"{key} has no value: write {key}=VALUE")
        if key in settings:
            raise ValueError(f"{key} is set twice: remove one of the two")
        settings[key] = value
    return settings


def _mesh(settings: Mapping[str, str]) -> dict[str, object]:
    """Return the fields of `Layout` that the command line sets."""
    fixed: dict[str, object] = {
        name: _whole(f"mesh.{name}", settings[f"mesh.{name}"]) for name in NUMBERS if f"mesh.{name}" in settings
    }
    for name, choices in CHOICES.items():
        if (text := settings.get(f"mesh.{name}")) is not None:
            if text not in choices:
                raise ValueError(f"mesh.{name}={text}: must be {' or '.join(choices)}")
            fixed["sharded" if name == "data" else name] = choices[text]
    assert fixed.keys() <= {field.name for field in fields(Layout)}
    return fixed


def _whole(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"{key}={text}: must be a whole number, 1 or more")
    return int(text)


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{key}={text}: must be a positive number")
    return value
