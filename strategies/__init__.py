"""Strategies that train a module on one or several ranks; one file per strategy."""

from __future__ import annotations

if __name__ != "fabricx.strategies":
    raise ImportError(f"import this package as fabricx.strategies, not {__name__}")

from fabricx.strategies.async_sgd import AsyncSGD
from fabricx.strategies.ddp import DDP
from fabricx.strategies.fsdp import FSDP
from fabricx.strategies.local_sgd import LocalSGD
from fabricx.strategies.mesh import Mesh
from fabricx.strategies.mesh_presets import ContextMesh, ExpertMesh, PipelineMesh, TensorMesh
from fabricx.strategies.parameter_server import ParameterServer
from fabricx.strategies.reproducible import Reproducible
from fabricx.strategies.single import Single

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
