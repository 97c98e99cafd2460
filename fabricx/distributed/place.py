"""Place of a rank among all ranks, and along the axes of parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import torch.distributed as dist

from fabricx.errors import check_choice

_ALL: Final = ("data", "metrics", "gradients", "copies")  # axes with all ranks, unless a strategy has others
# See `Place.axis`.
AXES: Final = (
    *_ALL, "islands", "replicas", "shard", "island", "island_data", "island_gradients", "pipeline", "context", "tensor",
    "model", "expert",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Number of this rank among all ranks of a run, and along each axis of parallelism.

    Attributes:
        rank, size: number of this process and number of processes.
        local_rank, local_size: the same on this machine.
        node_rank: number of this machine.
        job: number of the run in this world; part of the run's keys in the store.
        newcomer: the other ranks train already and this rank is not in their group yet. Then `rank` is its worker
            number (counted over all workers of the run), `size` is 1, and `local_size` is that of the group to join.
        group: process group of the ranks along an axis; None for all ranks of the run.
        coordinate: position of this rank along the other axes; part of the keys in the store.
        together: ranks of the run for each rank along this axis, if these are consecutive: those that compute a share.
        axes: this rank among the ranks along an axis of parallelism, by name; only axes with other ranks than the
            default of `axis`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    job: int = 0
    newcomer: bool = False
    group: dist.ProcessGroup | None = None
    coordinate: str = ""
    together: int = 1
    axes: Mapping[str, Self] = field(default_factory=dict, repr=False, compare=False)

    @property
    def main_rank(self) -> bool:
        """Return whether this rank writes files and prints messages (rank 0)."""
        return self.rank == 0

    def axis(self, name: str) -> Self:
        """Return this rank among the ranks along an axis of parallelism.

        Args:
            name: "data": ranks that train different shares of each global batch; all ranks, unless the strategy is
                model-parallel. "pipeline", "context" and "tensor": ranks that compute a share together, along one axis
                of the model's parallelism, and "model": along all of these; this rank alone by default. "metrics":
                ranks that log different values, which are those along "data" and "pipeline". "gradients": ranks whose
                gradients are averaged, which are those along "data" and "context". "island": ranks that make local
                steps together; "island_data": data ranks among them, along "replicas" (with equal weights) or "shard"
                (with parts of them); "island_gradients": those along "island_data" and "context"; this rank alone by
                default. "islands": ranks at the same place of all islands; data ranks by default. "expert": data ranks
                that divide experts; this rank alone by default. "copies": data ranks that have the same experts.

        Raises:
            ValueError: there is no such axis.
        """
        check_choice("World", "axis", name, AXES)
        if (along := self.axes.get(name)) is not None:
            return along
        if name == "islands":
            return self.axis("data")
        return self if name in _ALL else replace(self, rank=0, size=1, group=None, axes={})

    @property
    def planned(self) -> Self:
        """Return the place among all ranks that a newcomer takes when it joins; on other ranks, this place."""
        return replace(self, rank=self.local_rank, size=self.local_size) if self.newcomer else self

    @property
    def divided(self) -> bool:
        """Return whether several ranks together have a single copy of the module, along axes of parallelism."""
        return self.axis("model").size > 1 or self.axis("expert").size > 1

    def ranks_of_run(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of the run that compute the shares of data ranks.

        Args:
            ranks: along the data axis, which this place has.

        >>> Place(size=3, together=2).ranks_of_run([0, 2])
        (0, 1, 4, 5)
        """
        count = self.together
        return tuple(ranks) if count == 1 else tuple(rank * count + n for rank in ranks for n in range(count))

    @property
    def members(self) -> Sequence[int]:
        """Return the ranks of the run along this axis, in their order."""
        return range(self.size) if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def reports(self) -> bool:
        """Return whether this rank has the outputs of a step: ranks of a pipeline's last stage, and ranks without."""
        pipeline = self.axis("pipeline")
        return pipeline.rank == pipeline.size - 1

    @property
    def represents(self) -> bool:
        """Return whether a checkpoint has the metrics and random numbers of this rank: one rank for each data rank."""
        return self.reports and self.axis("tensor").rank == 0 and self.axis("context").rank == 0

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables in which torchrun has the rank."""
        numbers = {
            "RANK": self.planned.rank, "WORLD_SIZE": self.planned.size,
            "LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_size,
        }  # fmt: skip
        return {name: str(number) for name, number in numbers.items()}

    def key(self, name: str) -> str:
        """Return a store key with the prefix of this run.

        Args:
            name: key within the run.
        """
        return f"job{self.job}/{self.coordinate}{name}"
