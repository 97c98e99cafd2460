"""State of a module's torchmetrics objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn

from fabricx.distributed.world import World


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """Return the torchmetrics objects among a module's attributes, by path.

    Args:
        module: searched at any depth.
    """
    return {name: part for name, part in module.named_modules() if hasattr(part, "_update_count")}  # not collections


def reduce_along(metric: Any, world: World) -> Callable[[], None]:
    """Make a metric object reduce its state over the ranks that update it with different samples.

    Args:
        metric: a torchmetrics object.
        world: these ranks.

    Returns:
        a function that undoes it.
    """
    before = metric.dist_sync_fn, metric.distributed_available_fn
    metric.dist_sync_fn = _GatherAlong(world.group)
    if world.size == 1:
        metric.distributed_available_fn = _alone

    def undo() -> None:
        metric.dist_sync_fn, metric.distributed_available_fn = before

    return undo


def _alone() -> bool:
    return False


@final
class _GatherAlong:
    """Gathers states over a process group; unlike with `Metric.process_group`, the metric can be copied and pickled."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        from torchmetrics.utilities.distributed import gather_all_tensors

        gathered: list[Tensor] = gather_all_tensors(state, self._group)
        return gathered

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
        name: [item.detach().clone() for item in value] if isinstance(value, list) else value.detach().clone()
        for name, value in metric.metric_state.items()
    }
    return {"updates": int(metric._update_count), "values": copies}


def set_states(metric: Any, saved: dict[str, Any]) -> None:
    """Restore the state of a metric object.

    Args:
        metric: a torchmetrics object.
        saved: result of `states_of`.
    """
    metric.reset()
    for name, value in saved["values"].items():
        device = metric.device
        setattr(metric, name, [item.to(device) for item in value] if isinstance(value, list) else value.to(device))
    metric._update_count = saved["updates"]
