"""Strategies that train a module on one or several ranks; one file per strategy."""

from __future__ import annotations

if __name__ != "fabricx.strategies":
    raise ImportError(f"import this package as fabricx.strategies, not {__name__}")

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.strategies.async_sgd import AsyncSGD as AsyncSGD
    from fabricx.strategies.ddp import DDP as DDP
    from fabricx.strategies.fsdp import FSDP as FSDP
    from fabricx.strategies.local_sgd import LocalSGD as LocalSGD
    from fabricx.strategies.mesh import Mesh as Mesh
    from fabricx.strategies.mesh_presets import ContextMesh as ContextMesh
    from fabricx.strategies.mesh_presets import ExpertMesh as ExpertMesh
    from fabricx.strategies.mesh_presets import PipelineMesh as PipelineMesh
    from fabricx.strategies.mesh_presets import TensorMesh as TensorMesh
    from fabricx.strategies.parameter_server import ParameterServer as ParameterServer
    from fabricx.strategies.reproducible import Reproducible as Reproducible
    from fabricx.strategies.single import Single as Single

# Strategies are imported on first access, so that a run imports only the strategy that it uses.
_MODULES = {
    "DDP": "ddp",
    "FSDP": "fsdp",
    "AsyncSGD": "async_sgd",
    "ContextMesh": "mesh_presets",
    "ExpertMesh": "mesh_presets",
    "LocalSGD": "local_sgd",
    "Mesh": "mesh",
    "ParameterServer": "parameter_server",
    "PipelineMesh": "mesh_presets",
    "Reproducible": "reproducible",
    "Single": "single",
    "TensorMesh": "mesh_presets",
}

__all__ = [
    "DDP",
    "FSDP",
    "AsyncSGD",
    "ContextMesh",
    "ExpertMesh",
    "LocalSGD",
    "Mesh",
    "ParameterServer",
    "PipelineMesh",
    "Reproducible",
    "Single",
    "TensorMesh",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return __all__
