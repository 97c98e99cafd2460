"""State of the torchmetrics objects of a module."""

from __future__ import annotations

from typing import Any

from torch import nn


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """Return the torchmetrics objects that are attributes of a module, by name."""
    return {name: one for name, one in module.named_modules() if hasattr(one, "_update_count")}  # not collections


def states_of(metric: Any) -> dict[str, Any]:
    """Return copies of the state of a metric object: it adds to its tensors in place."""
    copies = {
        name: [item.detach().clone() for item in value] if isinstance(value, list) else value.detach().clone()
        for name, value in metric.metric_state.items()
    }
    return {"updates": int(metric._update_count), "values": copies}


def set_states(metric: Any, saved: dict[str, Any]) -> None:
    """Let a metric object have the state that `states_of` returned."""
    metric.reset()
    for name, value in saved["values"].items():
        on = metric.device
        setattr(metric, name, [item.to(on) for item in value] if isinstance(value, list) else value.to(on))
    metric._update_count = saved["updates"]
