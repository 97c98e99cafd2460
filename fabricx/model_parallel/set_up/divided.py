"""A module that is divided over the model's axes of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from fabricx.distributed.point_to_point import open_channels
from fabricx.distributed.world import World
from fabricx.model_parallel.gradient_norm import total_norm
from fabricx.model_parallel.set_up.division import Division

if TYPE_CHECKING:
    from fabricx.model_parallel.context.context_parallel import ContextParallel
    from fabricx.model_parallel.experts.expert_parallel import ExpertParallel
    from fabricx.model_parallel.pipeline.stages import Pipeline
    from fabricx.model_parallel.tensor.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Settings:
    """Options of a mesh that determine how a module is divided; see `Mesh`.

    Attributes:
        name: the strategy's name, for messages.
        plan, sequence, sequence_dim, context_method, blocks, microbatches, schedule, virtual, experts: see `Mesh`.
        half: the run computes in 16 bits.
        apart: data ranks have different gradients and weights.
        sharded: data parallelism divides weights over the data ranks.
    """

    name: str
    plan: Mapping[str, str]
    sequence: bool
    sequence_dim: int
    context_method: str
    blocks: str | Sequence[str]
    microbatches: int | None
    schedule: str
    virtual: int
    experts: str | Sequence[str]
    half: bool
    apart: bool = False
    sharded: bool = False


@final
@dataclass(frozen=True, eq=False)
class Divided:
    """A module, and its parts on this rank.

    Attributes:
        settings: settings of the mesh.
        module: the module; its parameters have the names of the whole module.
        world: all ranks, with the axes of the mesh.
        tensor, context, pipeline, experts: the parts of the division; None without that axis.
    """

    settings: Settings
    module: nn.Module
    world: World
    tensor: TensorParallel | None = None
    context: ContextParallel | None = None
    pipeline: Pipeline | None = None
    experts: ExpertParallel | None = None

    @functools.cached_property
    def division(self) -> Division:
        """Return the parts of the module's tensors on this rank."""
        readers = self._gradient_world if self.settings.sharded else None
        return Division(self.module, self.world, self.tensor or self.experts, self.pipeline, readers)

    @property
    def layout(self) -> dict[str, Any]:
        """Return the division as plain data, for a resumed run and for replacements of dead workers."""
        layout: dict[str, Any] = {} if self.tensor is None else {"plan": self.tensor.plan.plain()}
        if self.context is not None:
            layout["lengths"] = self.context.lengths
        if self.pipeline is not None:
            layout["blocks"] = list(self.pipeline.chain.blocks)
            layout["cuts"] = [list(cut) for cut in self.pipeline.cuts]
        return layout

    def world_changed(self, world: World) -> Divided:
        """Use other process groups, with the same place of this rank in the mesh; all ranks call it.

        Args:
            world: all ranks, with the axes of the mesh.

        Returns:
            the same parts, with the new groups.
        """
        if self.tensor is not None:
            self.tensor.world_changed(world.axis("tensor"))
        if self.context is not None:
            self.context.world_changed(world.axis("context"))
        if self.pipeline is not None:
            self.pipeline.world_changed(world.axis("pipeline"), stage_channels(world))
        if self.experts is not None:
            self.experts.world_changed(world.axis("expert"))
        return replace(self, world=world)

    def sharded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that computes with the shards of matrices and sequences, or with divided experts.

        Args:
            step: step of the module.
        """
        step = step if self.tensor is None else self.tensor.wrap_step(step)
        step = step if self.experts is None else self.experts.wrap_step(step)
        return step if self.context is None else self.context.wrap_step(step)

    def print(self, lines: Iterable[str]) -> None:
        """Print lines on the main rank.

        Args:
            lines: the lines.
        """
        if self.world.main_rank:
            print("\n".join(lines), flush=True)

    def dtypes(self) -> set[torch.dtype]:
        """Return the data types in which the module computes."""
        dtypes = {parameter.dtype for parameter in self.module.parameters()}
        return dtypes | {torch.bfloat16} if self.settings.half else dtypes

    # -- gradients -----------------------------------------------------------------------------------------------

    def gradient_ranks(self) -> tuple[World, Callable[[Tensor], float]]:
        """Return the ranks that have the parts of a gradient, and a function of a parameter.

        The function returns the number of these ranks that have the same elements of the parameter's gradient.
        """
        world, copies = self._gradient_world, self.division.copies
        islands = self.world.size / world.size
        return world, lambda parameter: copies(parameter) / islands

    @property
    def _gradient_world(self) -> World:
        """Return the ranks that step together: all, or an island if the islands make local steps."""
        return self.world.axis("island") if self.settings.apart else self.world

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of the gradient of all ranks, or of this island's gradient if that is its own.

        Args:
            parameters: this rank's parameters, with gradients.
        """
        return total_norm(parameters, *self.gradient_ranks())

    def norm_of_data_rank(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of the gradient of this data rank's samples.

        Args:
            parameters: this rank's parameters, with gradients.
        """
        copies, shares = self.division.copies, self.world.axis("data").size
        return total_norm(parameters, self.world.axis("model"), lambda parameter: copies(parameter) / shares)


def stage_channels(world: World) -> dict[str, Any]:
    """Build the groups of the stages' transfers, where the backend needs several; all ranks call it.

    Args:
        world: all ranks, with the axes of the mesh.
    """
    if not world.silent:
        return {}
    members: dict[str, list[int]] = {}
    for rank, coordinate in enumerate(world.gather_objects(world.axis("pipeline").coordinate)):
        members.setdefault(coordinate, []).append(rank)
    return open_channels(world, list(members.values()))
