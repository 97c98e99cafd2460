"""Meshes with a single axis besides data parallelism, under names of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from fabricx.core.strategy import Strategy
from fabricx.strategies.mesh import Data, Mesh


@final
class PipelineMesh(Mesh):
    """A mesh of ranks that compute consecutive blocks of the module, as stages of a pipeline.

    Args:
        pipeline: number of stages; None for all ranks.
        data, blocks, microbatches, schedule, virtual: see `Mesh`.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self, *, data: Data | Strategy = "ddp", pipeline: int | None = None, blocks: str | Sequence[str] = "auto",
        microbatches: int | None = None, schedule: str = "1f1b", virtual: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            data=data, pipeline=pipeline, blocks=blocks, microbatches=microbatches, schedule=schedule, virtual=virtual
        )


@final
class TensorMesh(Mesh):
    """A mesh of ranks that divide the matrices of each layer, and compute the same samples.

    Args:
        tensor: ranks over which matrices are divided; None for all ranks.
        data, plan, sequence: see `Mesh`.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self, *, data: Data | Strategy = "ddp", tensor: int | None = None, plan: Mapping[str, str] | None = None,
        sequence: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(data=data, tensor=tensor, plan=plan, sequence=sequence)


@final
class ContextMesh(Mesh):
    """A mesh of ranks that divide the sequence, for long sequences, and compute the same samples.

    Args:
        context: ranks over which the sequence is divided; None for all ranks.
        data, sequence_dim, context_method, blocks: see `Mesh`.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self, *, data: Data | Strategy = "ddp", context: int | None = None, sequence_dim: int = 1,
        context_method: str = "all_gather", blocks: str | Sequence[str] = "auto",
    ) -> None:  # fmt: skip
        super().__init__(
            data=data, context=context, sequence_dim=sequence_dim, context_method=context_method, blocks=blocks
        )


@final
class ExpertMesh(Mesh):
    """A mesh of data ranks that divide the experts of mixtures, and exchange the tokens of these experts.

    Args:
        expert: data ranks over which experts are divided; None for all ranks.
        experts: see `Mesh`.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    def __init__(self, *, expert: int | None = None, experts: str | Sequence[str] = "auto") -> None:
        super().__init__(expert=expert, experts=experts)
