"""Strategies and a schedule of kills for tests of recovery."""

from __future__ import annotations

from typing import Any

from fabricx.strategies import DDP, FSDP, LocalSGD, ParameterServer
from fabricx.testing import kill

from .aborted import silent

IN_PLACE = [  # survivors continue in place; the replacement of the first dead worker dies as well
    kill(rank=1).during("backward", step=3),
    kill(rank=2).during("start"),
    kill(rank=0).during("optimizer", step=5, attempt=1),
    kill(rank=0).during("validation", step=8, attempt=2),
    kill(rank=1).during("checkpoint", step=8, attempt=3),
    kill(rank=1).during("batch end", step=11, attempt=4),
]


STRATEGIES: dict[str, Any] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "local_sgd": lambda: LocalSGD(every=2),
    "parameter_server": lambda: ParameterServer(servers=2),
    "optimizer in shared memory": lambda: ParameterServer(servers=0, optimizer="server"),
    "optimizer on servers": lambda: ParameterServer(optimizer="server"),
    "compressed both ways": lambda: ParameterServer(
        compression="topk", compression_keep=0.2, pull_compression="bf16", servers=2
    ),
    "powersgd": lambda: ParameterServer(compression="powersgd"),
    "ddp, powersgd": lambda: DDP(compression="powersgd"),
    "compressed pulls": lambda: ParameterServer(optimizer="server", pull_compression="topk", servers=2),
    "ddp, backend without errors": lambda: silent(DDP()),
    "fsdp, backend without errors": lambda: silent(FSDP()),
}
