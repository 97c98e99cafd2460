"""Launchers: engines that start the ranks of a run on the machines of a cluster."""

from typing import TYPE_CHECKING, Any

from fabricx import plugins

if TYPE_CHECKING:
    from fabricx.launchers.kubernetes import Kubernetes as Kubernetes
    from fabricx.launchers.ray import Ray as Ray
    from fabricx.launchers.slurm import Slurm as Slurm

__all__ = ["Kubernetes", "Ray", "Slurm"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return plugins.find("launchers", name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
