"""Helpers for tests of strategies, callbacks, loggers, codecs, launchers and modules, with their contract suites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fabricx.distributed.world import World
from fabricx.launch.supervisor import run_workers
from fabricx.testing.broken import BrokenContract
from fabricx.testing.callback_contract import check_callback
from fabricx.testing.codec_contract import check_codec
from fabricx.testing.faults import Fault, cut, cut_links, fail, freeze, hang, kill
from fabricx.testing.launcher_contract import check_launcher
from fabricx.testing.logger_contract import check_logger
from fabricx.testing.modules import (
    QUIET,
    LayeredModule,
    Ledger,
    SavesAtEnd,
    TinyModule,
    assert_same_state,
    layered_data,
    tiny_data,
    tiny_loader,
)
from fabricx.testing.strategy_contract import check_strategy

__all__ = [
    "QUIET", "BrokenContract", "Fault", "LayeredModule", "Ledger", "SavesAtEnd", "TinyModule", "assert_same_state",
    "check_callback", "check_codec", "check_launcher", "check_logger", "check_strategy", "cut", "cut_links", "fail",
    "freeze", "hang", "kill", "layered_data", "run_ranks", "tiny_data", "tiny_loader",
]  # fmt: skip


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` on ranks that have joined a world on gloo.

    The world is `fabricx.distributed.world.current()`. Processes are started from the fork server, which stays warm
    between calls.

    Args:
        function: any function.
        ranks: number of ranks.
        *arguments: picklable arguments.

    Returns:
        results by rank.

    Raises:
        WorkerFailed: the function raised an error on a rank.
    """
    return run_workers(_joined, (function, arguments), size=ranks)


def _joined(world: World, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    replace(world, device=torch.device("cpu")).join()
    return function(*arguments)
