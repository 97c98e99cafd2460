"""State of a module's torchmetrics objects."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from fabricx.core.tensors.nested_items import items_of
from fabricx.distributed.world import World

_DTYPES: Final = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_LONGEST: Final = 12  # numbers that describe a state: dtype, dimensions, and up to 10 sizes
_OF_MODULES: Final = frozenset(vars(nn.Module()))  # attributes that every module has
_SEARCHED: Final = 64  # maximum items of a container that is searched: longer lists are a history of numbers
_OF_PROCESS: Final = frozenset({
    "_cache", "_computed", "_device", "_is_synced", "_update_count", "_update_signature", "compute", "dist_sync_fn",
    "distributed_available_fn", "process_group", "update",
})  # fmt: skip


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """Return the torchmetrics objects among a module's attributes, by path.

    Args:
        module: searched at any depth; its own lists and dicts are searched, too.
    """
    metrics = {name: part for name, part in module.named_modules() if hasattr(part, "_update_count")}  # not collections
    known = set(map(id, metrics.values()))
    return {**metrics, **{name: part for name, part in _in_containers(module) if id(part) not in known}}


def held_metrics(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return the torchmetrics objects in attributes of modules and callbacks, each once, by path.

    Args:
        owners: modules and callbacks by name.
    """
    metrics: dict[int, tuple[str, Any]] = {}
    for name, owner in owners.items():
        if isinstance(owner, nn.Module):
            held = metric_objects(owner)
        else:
            held = dict(itertools.chain.from_iterable(_search(key, value) for key, value in vars(owner).items()))
        for path, metric in held.items():
            metrics.setdefault(id(metric), (f"{name}.{path}", metric))
    return dict(metrics.values())


def _in_containers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key not in _OF_MODULES and not isinstance(value, nn.Module):
            yield from _search(key, value)


def _search(path: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        for name, part in value.named_modules():
            if hasattr(part, "_update_count"):
                yield f"{path}.{name}" if name else path, part
    elif depth and isinstance(value, (dict, list, tuple)):
        for key, item in items_of(value, _SEARCHED):
            yield from _search(f"{path}.{key}", item, depth - 1)


def syncs_by_itself(metric: Any) -> bool:
    """Return whether a user has given a metric object a function or a process group of its own for its reduction.

    Args:
        metric: a torchmetrics object.
    """
    return metric.process_group is not None or not isinstance(metric.dist_sync_fn, (_GatherAlong, type(None)))


def reduced_metrics(module: nn.Module, callbacks: Iterable[Any], *, divided: bool) -> list[Any]:
    """Return the metric objects that `reduce_along` prepares; others reduce over all ranks, or as their user has set.

    Args:
        module: of the run.
        callbacks: of the run. Their objects reduce over all ranks, several of which may have the same samples.
        divided: several ranks compute a share of the data together.
    """
    if not divided:
        return [metric for metric in metric_objects(module).values() if not syncs_by_itself(metric)]
    return list(held_metrics({"module": module, **{str(n): each for n, each in enumerate(callbacks)}}).values())


def updating_ranks(world: World, *, fits: bool) -> World:
    """Return the ranks that update metric objects with different samples, and further stages of their pipelines.

    Args:
        world: all ranks.
        fits: in a fit; only a stage of a pipeline has the outputs of a step then, and in an evaluation all ranks have.
    """
    return world.axis("metrics" if fits else "data")


def counted_ranks(world: World, *, fits: bool) -> Sequence[int]:
    """Return the positions among `updating_ranks` whose states count.

    All stages of a pipeline call hooks, and run the step until the end of their blocks: updates before the blocks, and
    in hooks, count on the last stage only.

    Args:
        world: all ranks.
        fits: as for `updating_ranks`.
    """
    stages = world.axis("pipeline").size if fits else 1
    return range(stages - 1, updating_ranks(world, fits=fits).size, stages)


def has_first_state(world: World, *, fits: bool) -> bool:
    """Return whether this rank keeps states of metric objects that belong to no rank, such as those before a run.

    Args:
        world: all ranks.
        fits: as for `updating_ranks`.
    """
    return updating_ranks(world, fits=fits).rank == counted_ranks(world, fits=fits)[0]


def reduce_along(metric: Any, world: World, *, fits: bool) -> Callable[[], None]:
    """Make a metric object reduce its state over the ranks that update it with different samples.

    Args:
        metric: a torchmetrics object.
        world: all ranks.
        fits: as for `updating_ranks`.

    Returns:
        a function that undoes it.
    """
    from torchmetrics.utilities import data

    before = metric.dist_sync_fn, metric.distributed_available_fn
    along = updating_ranks(world, fits=fits)
    lists = data.dim_zero_cat in metric._reductions.values()
    metric.dist_sync_fn = _GatherAlong(along.group, counted_ranks(world, fits=fits), lists=lists)
    if along.size == 1:
        metric.distributed_available_fn = _alone

    def undo() -> None:
        metric.dist_sync_fn, metric.distributed_available_fn = before

    return undo


def _alone() -> bool:
    return False


def computed_together(metric: Any) -> Any:
    """Return the value of a metric object for the samples of all ranks; collective.

    torchmetrics keeps a value until the next update: a rank without a sample since would return an old value, without
    a part in the reduction.

    Args:
        metric: a torchmetrics object, or another with `compute`.
    """
    parts: list[Any] = [*metric.modules()] if hasattr(metric, "modules") else []
    for part in parts:
        if hasattr(part, "_computed"):
            part._computed = None
    return metric.compute()


def computed_alone(metric: Any) -> Any:
    """Return the value of a metric object for the samples of this rank, without communication.

    The object does not keep the value, which is not that of all ranks.

    Args:
        metric: a torchmetrics object.
    """
    parts = [part for part in metric.modules() if hasattr(part, "distributed_available_fn")]
    before = [part.distributed_available_fn for part in parts]
    try:
        for part in parts:
            part.distributed_available_fn = _alone
        return metric.compute()
    finally:
        for part, available in zip(parts, before, strict=True):
            part.distributed_available_fn, part._computed = available, None


@final
class _GatherAlong:
    """Gathers states over a process group; unlike with `Metric.process_group`, the metric can be copied and pickled."""

    def __init__(self, group: Any, counted: Sequence[int], *, lists: bool) -> None:
        self._group, self._counted, self._lists = group, counted, lists

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        gathered: list[Tensor] = gather_all_tensors(self._alike(state), self._group)
        return [gathered[rank] for rank in self._counted]

    def _alike(self, state: Tensor) -> Tensor:
        """Return a state that may be gathered with those of other ranks.

        A rank without updates has an empty float32 vector in place of a list of tensors, and a rank with one update may
        have a number. gloo and NCCL can't gather these with tensors of another dtype or number of dimensions: gloo ends
        the process.
        """
        if state.dim() == 0 and not self._lists:
            return state
        header = torch.tensor([_DTYPES.index(state.dtype), state.dim(), *state.shape], device=state.device)
        padded = torch.nn.functional.pad(header, (0, _LONGEST - len(header)))
        headers = [torch.zeros_like(padded) for _ in range(torch.distributed.get_world_size(self._group))]
        torch.distributed.all_gather(headers, padded, self._group)
        if state.dim() == 0:
            return state.reshape(1) if any(int(header[1]) for header in headers) else state
        if state.numel():
            return state
        for kind, dims, *shape in (header.tolist() for header in headers):
            if all(shape[:dims]):
                return state.new_zeros((0, *shape[1:dims]), dtype=_DTYPES[kind])
        return state

    def __deepcopy__(self, memo: Any) -> _GatherAlong:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # after unpickling, the metric uses torchmetrics' own function


def states_of(metric: Any) -> dict[str, Any]:
    """Copy the state of a metric object, whose updates change tensors in place.

    Args:
        metric: a torchmetrics object.
    """
    copies = {
        name: [_copy(item) for item in value] if isinstance(value, list) else _copy(value)
        for name, value in metric.metric_state.items()
    }
    return {"updates": int(metric._update_count), "values": copies}


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else copy.deepcopy(item)  # masks are tuples of bytes


def states_on_cpu(states: dict[str, Any]) -> dict[str, Any]:
    """Return states with their tensors in main memory.

    Args:
        states: result of `states_of`.
    """
    return {**states, "values": {name: _moved(value, torch.device("cpu")) for name, value in states["values"].items()}}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else value


def set_states(metric: Any, saved: dict[str, Any]) -> None:
    """Restore the state of a metric object.

    Args:
        metric: a torchmetrics object.
        saved: result of `states_of`.
    """
    from torchmetrics import Metric

    Metric.reset(metric)  # the method of a wrapper resets other metrics, too
    for name, value in saved["values"].items():
        setattr(metric, name, _moved(value, metric.device))
    metric._update_count = saved["updates"]


def merge_states(metric: Any, ranks: Sequence[dict[str, Any]]) -> bool:
    """Set the state of a metric object to that of all ranks, as `compute` reduces it over ranks.

    The number of updates is the largest of a rank; lists have the items of the first rank first. `merge_state` is used
    if the metric defines it: that of torchmetrics refuses most metrics.

    Args:
        metric: a torchmetrics object.
        ranks: result of `states_of` on each rank that sees different samples.

    Returns:
        whether updates may follow; False if a state now has a row for each rank (a tensor with `dist_reduce_fx=None`).
    """
    from torchmetrics import Metric

    set_states(metric, ranks[0])
    if type(metric).merge_state is not Metric.merge_state:
        for saved in ranks[1:]:
            incoming = metric.clone()
            set_states(incoming, saved)
            metric.merge_state(incoming)
        metric._update_count = max(saved["updates"] for saved in ranks)
        return True
    # Ranks without updates have no row; elsewhere their default does not change the result.
    updated = [saved for saved in ranks if saved["updates"]] or ranks[:1]
    merged: dict[str, Any] = {}
    continues = True
    for name, reduction in metric._reductions.items():
        values, rows = ([saved["values"][name] for saved in chosen] for chosen in (ranks, updated))
        merged[name], whole = _merged(reduction, values, rows)
        continues = continues and whole
    set_states(metric, {"updates": max(saved["updates"] for saved in ranks), "values": merged})
    return continues


def _merged(reduction: Any, values: list[Any], rows: list[Any]) -> tuple[Any, bool]:
    """Merge a state of all ranks; returns it, and whether updates may follow.

    Args:
        reduction: `dist_reduce_fx` of the state.
        values: of all ranks.
        rows: of the ranks with updates.
    """
    from torchmetrics.utilities import data

    if any(isinstance(value, list) for value in values):
        lists = [value if isinstance(value, list) else [value] for value in values]
        joined = [item for part in lists for item in part]
        if reduction is None or reduction is data.dim_zero_cat:
            return joined, True
        return reduction(joined), False
    if reduction is data.dim_zero_cat:
        return torch.cat(values), True
    if reduction in (data.dim_zero_sum, data.dim_zero_max, data.dim_zero_min):
        return reduction(torch.stack(values)), True
    if len(rows) == 1:
        return rows[0], True
    stacked = torch.stack(rows)
    return (stacked, False) if reduction is None else (reduction(stacked), True)


def gather_states(metrics: Mapping[str, Any], world: World, *, fits: bool) -> list[str]:
    """Merge the states of all ranks into the metric objects of the main rank; all ranks call it.

    Args:
        metrics: the same objects on all ranks, by path.
        world: all ranks.
        fits: as for `updating_ranks`.

    Returns:
        paths of the metric objects whose state permits no more updates; see `merge_states`.
    """
    local_states = {path: states_on_cpu(states_of(metric)) for path, metric in metrics.items()}
    along = updating_ranks(world, fits=fits)
    gathered = along.gather_objects(local_states)
    if along.size == 1 or not along.main_rank:
        return []
    ranks = [gathered[rank] for rank in counted_ranks(world, fits=fits)]
    return [
        path for path, metric in metrics.items()
        if not merge_states(metric, [states[path] for states in ranks if path in states])
    ]  # fmt: skip


def attributes_of_metrics(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes of metric objects, collections and wrappers that are no states, by path.

    Args:
        module: searched at any depth.
    """
    attributes = {}
    for path, part in module.named_modules():
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(part).__mro__):
            apart = _OF_MODULES | _OF_PROCESS | getattr(part, "metric_state", {}).keys()
            attributes[path] = {
                name: value.detach().cpu() if isinstance(value, Tensor) else value
                for name, value in vars(part).items() if name not in apart
            }  # fmt: skip
    return attributes
