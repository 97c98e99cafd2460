"""The division of a module's tensors over the model axes of a mesh, and whole states of a divided module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.activity import collective_trace, heartbeat
from fabricx.distributed.activity.collective_trace import Route
from fabricx.distributed.collective_guard import check_joined
from fabricx.distributed.membership.generations import membership
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.sharding.fsdp_internals import shard_like
from fabricx.distributed.world import World
from fabricx.errors import RanksApart
from fabricx.model_parallel.pipeline.stage_states import of_all_stages, without
from fabricx.model_parallel.placement import replace_data

if TYPE_CHECKING:
    from fabricx.model_parallel.pipeline.stages import Pipeline
    from fabricx.model_parallel.placement import Placement


class DividesTensors(Protocol):
    """Divides parameters over ranks by rows or columns: matrices of layers, or experts."""

    placements: dict[str, Placement]

    @property
    def ranks(self) -> int:
        """Return the number of ranks over which each parameter of `placements` is divided."""
        ...

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Return the whole tensor of a parameter or moment; collective.

        Args:
            name: name of the parameter.
            local: part of this rank.
        """
        ...

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor.

        Args:
            name: name of the parameter.
            whole: whole tensor of the parameter or moment.
        """
        ...

    def undo(self) -> None:
        """Give the module whole parameters again; collective."""
        ...


_MEET_S: Final = 300.0  # longer than a plot or a file that a single rank makes in a hook
_SHOWN_S: Final = 1.0  # seconds of waiting, after which the wait is shown to the supervisor


@final
class Division:
    """The parts of a module's tensors on this rank.

    In a state, each tensor below the name of a divided parameter, and with the shape of this rank's part, belongs to
    that parameter: its weight, moments of optimizers, and averages of callbacks.

    Args:
        module: divided; its parameters have the names of the whole module.
        world: all ranks, with the axes of the mesh.
        parts: divides matrices over the tensor axis, or experts over the expert axis; None without these axes.
        pipeline: divides blocks over the pipeline axis; None without that axis.
        readers: ranks that have the parts of a weight, and read it together; None: the ranks of the expert or model
            axis.
    """

    def __init__(
        self, module: nn.Module, world: World, parts: DividesTensors | None, pipeline: Pipeline | None,
        readers: World | None = None,
    ) -> None:  # fmt: skip
        self._module, self._world, self._parts, self._pipeline = module, world, parts, pipeline
        self._names: dict[int, str] = {}
        expert = world.axis("expert")
        self._readers = readers or (expert if expert.size > 1 else world.axis("model"))
        self._met = 0  # weights that hooks have gathered
        self.changes: Counter[str] = Counter()  # of weights, by hooks

    def copies(self, parameter: Tensor) -> float:
        """Return the number of ranks that hold each element of this rank's gradient of a parameter.

        Args:
            parameter: parameter of the module; a DTensor if data parallelism shards it.
        """
        copies, name = float(self._world.size), self._name(parameter)
        if self._parts is not None and name in self._parts.placements:
            copies /= self._parts.ranks
        if self._pipeline is not None and name in self._pipeline.owners:
            copies *= len(self._pipeline.owners[name]) / self._world.axis("pipeline").size
        for size, placement in _placements(parameter):
            copies = copies / size if placement.is_shard() else copies
        return copies

    def divided(self) -> Iterator[nn.Parameter]:
        """Yield parameters with a part of the whole gradient, or of all gradients, on this rank."""
        sharded = () if self._parts is None else self._parts.placements
        for name, parameter in self._module.named_parameters():
            if self._pipeline is not None or name in sharded:
                yield parameter

    def trained_elsewhere(self) -> Iterator[nn.Parameter]:
        """Yield parameters with gradients from other stages, not from this stage."""
        if self._pipeline is not None:
            held, uses = self._pipeline.own_names, self._pipeline.chain.uses
            for name, parameter in self._module.named_parameters():
                if parameter.requires_grad and uses[name] and name not in held:
                    yield parameter

    def gradient_elsewhere(self, parameter: Tensor) -> bool:
        """Return whether other stages presumably have a gradient of a parameter now, as this stage has some gradients.

        Args:
            parameter: parameter of the module.
        """
        trains = any(p.grad is not None for p in self._module.parameters())
        return trains and any(p is parameter for p in self.trained_elsewhere())

    def _name(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:  # fsdp has replaced the parameters
            self._names = {id(p): name for name, p in self._module.named_parameters()}
        return self._names.get(id(parameter), "")

    @property
    def absent(self) -> frozenset[str]:
        """Return the names of the parameters and buffers of other stages."""
        if self._pipeline is None:
            return frozenset()
        first = {id(tensor): name for name, tensor in reversed([*self._named(duplicates=False)])}
        owners, held = self._pipeline.owners, self._pipeline.own_names
        names = {name: first[id(tensor)] for name, tensor in self._named(duplicates=True)}
        return frozenset(alias for alias, name in names.items() if name in owners and name not in held)

    def _named(self, *, duplicates: bool) -> Iterator[tuple[str, Tensor]]:
        yield from self._module.named_parameters(remove_duplicate=not duplicates)
        yield from self._module.named_buffers(remove_duplicate=not duplicates)

    # -- weights in hooks ----------------------------------------------------------------------------------------

    @property
    def divides(self) -> bool:
        """Return whether a rank has a part of some weights."""
        return self._parts is not None or self._pipeline is not None

    @property
    def staged(self) -> bool:
        """Return whether these ranks are stages of a pipeline."""
        return self._pipeline is not None

    @property
    def ends_early(self) -> bool:
        """Return whether steps end on this rank before the code after the blocks: it is not the last stage."""
        return self._pipeline is not None and not self._pipeline.last

    def divided_tensors(self, *, also_shared: bool = False) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield parameters and buffers that not all ranks hold whole: name, part, whether it belongs to another stage.

        Args:
            also_shared: also yield tensors that all stages of a pipeline hold.
        """
        sharded = () if self._parts is None else self._parts.placements
        absent = self.absent
        for name, tensor in self._named(duplicates=False):
            shared = also_shared and self._pipeline is not None
            if shared or name in sharded or self._source(name) is not None or is_dtensor(tensor):
                yield name, tensor, name in absent

    def _source(self, name: str) -> int | None:
        """Return the stage that sends a tensor to stages without it; None if all stages have it."""
        if self._pipeline is None or name not in self._pipeline.owners:
            return None
        owners = self._pipeline.owners[name]
        return owners[0] if 0 < len(owners) < self._world.axis("pipeline").size else None

    def empty(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor without elements in memory, with the shape of a whole tensor.

        Args:
            name: of the parameter or buffer.
            local: part of this rank.
        """
        placement = None if self._parts is None else self._parts.placements.get(name)
        shape = local.shape if placement is None else placement.shape
        return torch.empty(shape, dtype=local.dtype, device="meta")

    def whole_weight(self, name: str, local: Tensor) -> Tensor:
        """Return a copy of a whole tensor; all ranks of the model call it.

        Args:
            name: of the parameter or buffer.
            local: part of this rank, or a moment with its shape.

        Raises:
            RanksApart: other ranks do not call it, or for a different tensor.
        """
        self.meet(name)
        if name in self.absent:
            whole = torch.empty(self.empty(name, local).shape, dtype=local.dtype, device=local.device)
        else:
            whole = self._whole(name, local).detach().clone()
        source = self._source(name)
        return whole if source is None else self._world.axis("pipeline").broadcast(whole, source)

    def part_of(self, name: str, local: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, without communication.

        Args:
            name: of the parameter or buffer.
            local: present part, or a moment with its shape.
            whole: on all ranks.
        """
        part = whole if self._parts is None else self._parts.part(name, whole)
        return shard_like(part, local) if is_dtensor(local) else part

    @torch.no_grad()
    def write(self, name: str, local: Tensor, whole: Tensor, *, absent: bool = False) -> None:
        """Write a whole tensor, which all ranks have, to the parts.

        Args:
            name: of the parameter or buffer.
            local: part of this rank, or a moment with its shape.
            whole: new elements.
            absent: another stage has the tensor.
        """
        if not absent:
            local.copy_(self.part_of(name, local, whole))

    @torch.no_grad()
    def from_first(self, whole: Tensor) -> None:
        """Write the elements of the first rank that reads a weight to the copies on all reading ranks; collective.

        Args:
            whole: copy of a whole tensor.
        """
        self._readers.broadcast(whole)

    def meet(self, name: str) -> None:
        """Wait for all ranks that have parts of a weight, which otherwise would wait in a collective without end.

        Args:
            name: of the parameter or buffer.

        Raises:
            RanksApart: other ranks do not call it, or for a different tensor.
        """
        world = self._readers
        if world.store is None or world.size == 1:
            return
        check_joined(world.group)  # ranks of the data axis have different data, and some may have no sample
        self._met += 1
        awaited = _reads_of(world)
        prefix = f"hook/{self._world.generation}"
        world.store.set(world.key(f"{prefix}/{self._met}/{world.rank}"), name)
        if self._met > 2:
            world.store.delete_key(world.key(f"{prefix}/{self._met - 2}/{world.rank}"))
        keys = [world.key(f"{prefix}/{self._met}/{rank}") for rank in range(world.size)]
        began = time.monotonic()
        try:
            while not world.store.check(keys):
                waited = time.monotonic() - began
                if membership().is_broken(self._world.generation):  # the collective reports the rank that has died
                    return
                if waited > _MEET_S:
                    raise RanksApart(
                        f"a hook on rank {world.rank} of {world.size} reads {name}, which is divided over "
                        f"ranks, and other ranks have not read it within {_MEET_S:g} s: read weights on all ranks, "
                        "outside of `if trainer.is_global_zero`, for example with weight.detach().cpu()"
                    )
                if waited > _SHOWN_S:  # the supervisor finds ranks that wait for each other
                    heartbeat.waits_for(f"a read of {name}, which is divided over ranks")
                    missing = [awaited[rank] for rank in awaited if not world.store.check([keys[rank]])]
                    collective_trace.awaits(next(iter(missing), None))
                time.sleep(0.0005 if waited < _SHOWN_S else 0.1)
        finally:
            heartbeat.waits_for("")
            collective_trace.awaits(None)
        names = {world.store.get(key).decode() for key in keys}
        if names != {name}:
            raise RanksApart(
                f"hooks of different ranks read different weights at the same moment: {', '.join(sorted(names))}. "
                "They are divided over ranks, so all ranks have to read them, in the same order"
            )

    # -- states --------------------------------------------------------------------------------------------------

    def whole_state(self, state: Any) -> Any:
        """Return a state with whole tensors; all ranks call it.

        Args:
            state: nested dicts, lists and tuples, with this rank's parts.
        """
        absent = self.absent
        of_stage = _mapped(without(state, absent) if absent else state, "", self._parameters(), self._whole)
        return of_all_stages(of_stage, absent, self._world.axis("pipeline"))

    def own_state(self, state: Any) -> Any:
        """Return a state with this rank's parts; the inverse of `whole_state`, without communication.

        Args:
            state: nested dicts, lists and tuples, with whole tensors.
        """
        absent = self.absent
        return _mapped(without(state, absent) if absent else state, "", self._parameters(), self._part)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def _whole(self, name: str, value: Any) -> Tensor:
        local: Tensor = value.full_tensor() if is_dtensor(value) else value
        return local if self._parts is None else self._parts.whole(name, local)

    def _part(self, name: str, value: Tensor) -> Any:
        part = value if self._parts is None else self._parts.part(name, value)
        like: Any = self._parameters()[name]
        return shard_like(part, like) if is_dtensor(like) and part.shape == like.shape else part

    @torch.no_grad()
    def restore(self, optimizers: Sequence[Optimizer], unshard: Callable[[], None]) -> None:
        """Restore whole tensors in the module and the optimizers; all ranks call it.

        Args:
            optimizers: optimizers of the module.
            unshard: reverses the sharding of data parallelism, if any; values may be lost.
        """
        tensors = {name: tensor.detach() for name, tensor in self._named(duplicates=False)}
        states = [
            {name: values for p, values in optimizer.state.items() if (name := self._name(p))}
            for optimizer in optimizers
        ]
        whole = self.whole_state({"module": tensors, "optimizers": states})
        unshard()
        if self._parts is not None:
            self._parts.undo()
        if self._pipeline is not None:
            self._pipeline.undo(whole["module"])
        parameters = dict(self._module.named_parameters())
        for name, parameter in parameters.items():
            parameter.grad = None
            replace_data(parameter, whole["module"][name].to(parameter.device))
        for optimizer, by_name in zip(optimizers, whole["optimizers"], strict=True):
            for name, values in by_name.items():
                device = parameters[name].device
                optimizer.state[parameters[name]] = {
                    key: value.to(device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in values.items()
                }


def _mapped(value: Any, name: str, known: Mapping[str, Any], convert: Callable[[str, Tensor], Any]) -> Any:
    """Return a nested state with converted tensors below the names of parameters; others are the same objects."""
    if isinstance(value, Tensor):
        return convert(name, value) if name else value
    if isinstance(value, Mapping):
        below = {key: key if isinstance(key, str) and key in known else name for key in value}
        mapped = {key: _mapped(child, below[key], known, convert) for key, child in value.items()}
        return mapped if any(mapped[key] is not child for key, child in value.items()) else value
    if type(value) in (list, tuple):
        items = [_mapped(child, name, known, convert) for child in value]
        return type(value)(items) if any(item is not child for item, child in zip(items, value, strict=True)) else value
    return value


def _placements(parameter: Any) -> Iterator[tuple[int, Any]]:
    """Return (number of ranks, placement) of each dim of the mesh over which a DTensor is placed."""
    if is_dtensor(parameter):
        yield from zip(parameter.device_mesh.shape, parameter.placements, strict=True)


def _reads_of(world: World) -> dict[int, tuple[str, Route, int]]:
    """Record that this rank begins to read a weight with the other ranks, as a message to and from each.

    Args:
        world: the ranks that read weights together.

    Returns:
        the message from each other rank, by rank in the world.
    """
    members, awaited = world.members, {}
    for rank in range(world.size):
        if rank != world.rank:
            sent, received = (
                Route(members[source], members[to], "weights in hooks", 0)
                for source, to in ((world.rank, rank), (rank, world.rank))
            )
            collective_trace.begins("send", sent)
            awaited[rank] = "receive", received, collective_trace.begins("receive", received)
    return awaited
