"""Options that a divided module does not support, and its data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from fabricx import plugins
from fabricx.core.strategy import Strategy
from fabricx.errors import check_choice

DATA: Final = ("ddp", "fsdp", "local_sgd")


def check_options(name: str, precision: str, *, compiles: bool, synchronises_batchnorm: bool) -> None:
    """Refuse options of a run that a divided module does not support.

    Args:
        name: the strategy's name.
        precision, compiles, synchronises_batchnorm: options of the run.

    Raises:
        ValueError: names the option and the remedy.
    """
    if compiles:
        raise ValueError(f"compile with strategy={name}: a compiled module can't be divided over ranks; remove compile")
    if synchronises_batchnorm:
        raise ValueError(
            f"sync_batchnorm with strategy={name}: the ranks of a divided module may compute the same samples, which "
            "would be counted several times; remove sync_batchnorm, or use another normalisation"
        )
    if precision == "16-mixed":
        raise ValueError(
            f"precision=16-mixed with strategy={name}: an overflow would be noticed by some of the ranks only; set "
            "precision=bf16-mixed"
        )


def refuse_manual_optimization(name: str, *, pipelined: bool, divided: bool = True) -> NoReturn:
    """Refuse manual optimization of a divided module, and of islands with several data ranks.

    Args:
        name: the strategy's name.
        pipelined: the module is divided into stages of a pipeline.
        divided: the module is divided.

    Raises:
        ValueError: always; names the reason and the remedy.
    """
    if pipelined:
        raise ValueError(
            f"strategy={name} with manual optimization: a stage of a pipeline computes a part of the step, and has no "
            "loss; use automatic optimization, or strategy=ddp"
        )
    if not divided:
        raise ValueError(
            f"strategy={name} with several data ranks in an island and manual optimization: gradients of an island are "
            "averaged once per update, and a manual step may call backward several times; use automatic optimization, "
            "or replicas=1 and shard=1"
        )
    raise ValueError(
        f"strategy={name} with manual optimization: the training step is tried before there are optimizers; use "
        "automatic optimization, or strategy=ddp or fsdp"
    )


def check_axes(
    axes: Mapping[str, int | None], expert: int | None, data: str | Strategy
) -> None:  # fmt: skip
    """Refuse sizes of axes that are no numbers of ranks, and axes that exclude each other.

    Args:
        axes: ranks along "pipeline", "context" and "tensor"; None for all ranks that remain.
        expert: ranks along the expert axis; None for all data ranks.
        data: data parallelism, as a name or a strategy with options.

    Raises:
        ValueError: names the options and the remedy.
    """
    for name, size in {**axes, "expert": expert}.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(
                f"{name}={size!r}: set the number of ranks along this axis, 1 or more, or null for all ranks"
            )
    if len(rest := [f"{axis}=None" for axis, size in axes.items() if size is None]) > 1:
        raise ValueError(
            f"{' and '.join(rest)}: only one axis can have all the ranks that remain; set numbers for the others"
        )
    if expert != 1:
        _check_expert(axes, data)


def _check_expert(axes: Mapping[str, int | None], data: str | Strategy) -> None:
    """Refuse options that divided experts do not support."""
    if others := [f"{axis}=1" for axis, size in axes.items() if size != 1]:
        raise ValueError(
            f"expert with other axes of the model isn't supported: set {' and '.join(others)}, or set expert=1"
        )
    if data != "ddp":
        name = data if isinstance(data, str) else f"{type(data).__name__}(...)"
        raise ValueError(
            f"data={name} with expert isn't supported: gradients of experts are summed over other ranks than those "
            "of the other weights; set data='ddp', or expert=1"
        )


def check_island(replicas: int, shard: int, data: str | Strategy) -> None:
    """Refuse numbers of data ranks of an island that are none, that exclude each other, or without islands.

    Args:
        replicas: data ranks of an island with equal weights.
        shard: data ranks of an island that shard the weights.
        data: data parallelism, as a name or a strategy with options.

    Raises:
        ValueError: names the options and the remedy.
    """
    for option, ranks in {"replicas": replicas, "shard": shard}.items():
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"{option}={ranks!r}: set the number of data ranks of an island, 1 or more")
    name = data_name(data)
    if replicas > 1 and name != "local_sgd":
        raise ValueError(
            f"replicas={replicas} with data={name}: replicas are the data ranks of an island, which makes local steps; "
            "set data='local_sgd', or replicas=1 (then all data ranks step together)"
        )
    if shard > 1 and name != "local_sgd":
        raise ValueError(
            f"shard={shard} with data={name}: the weights are sharded within an island, which makes local steps; set "
            "data='local_sgd', or data='fsdp' and shard=1 to shard them over all data ranks"
        )
    if shard > 1 and replicas > 1:
        raise ValueError(
            f"replicas={replicas} with shard={shard}: the data ranks of an island have equal weights (replicas) or "
            "parts of them (shard); set replicas=1 or shard=1"
        )


def data_parallelism(mesh: str, data: str | Strategy | Mapping[str, Any]) -> str | Strategy:
    """Return data parallelism of a mesh as its name, or as a strategy with options.

    Args:
        mesh: name of the mesh's class, for messages.
        data: option of the user: a name, a strategy, or a name and options.

    Raises:
        ValueError: there is no such data parallelism in a mesh, or it has no such option.
    """
    if isinstance(data, Mapping):
        options = dict(data)
        name = options.pop("name", None)
        if name is None:
            raise ValueError(f"data={dict(data)}: set its name, such as {{name: local_sgd, every: 50}}")
        check_choice(mesh, "data", name, DATA)
        strategy: str | Strategy = plugins.build("strategies", name, **options) if options else name
        return strategy
    if isinstance(data, str):
        check_choice(mesh, "data", data, DATA)
    elif not data_name(data):
        raise ValueError(f"data={type(data).__name__}: data parallelism of a mesh is 'ddp', 'fsdp' or 'local_sgd'")
    return data


def data_name(data: str | Strategy) -> str:
    """Return the name of data parallelism; "" if a mesh does not support the strategy.

    Args:
        data: a name, or a strategy with options.

    >>> from fabricx.strategies import LocalSGD
    >>> data_name(LocalSGD(every=50))
    'local_sgd'
    """
    if isinstance(data, str):
        return data
    return next((name for name in DATA if isinstance(data, plugins.find("strategies", name))), "")
