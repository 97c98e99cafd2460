"""Properties derived from the options of a strategy with servers."""

from __future__ import annotations

from typing import Any

import pytest

from fabricx.strategies import AsyncSGD, ParameterServer

SYNC, SERVERS_STEP = ParameterServer(), ParameterServer(optimizer="server")
BOUNDED, ASYNC = ParameterServer(mode="bounded", servers=2), AsyncSGD()


@pytest.mark.parametrize(
    ("strategy", "workers_step", "whole_updates"),
    [(SYNC, True, True), (SERVERS_STEP, False, True), (BOUNDED, False, True), (ASYNC, False, False)],
)
def test_workers_step_if_servers_sum_and_all_workers_wait(
    strategy: Any, workers_step: bool, whole_updates: bool
) -> None:
    design = strategy._design
    assert (design.workers_step, design.whole_updates) == (workers_step, whole_updates)
    assert strategy.traits.replicated is workers_step


def test_a_norm_can_be_limited_where_a_process_has_the_whole_gradient() -> None:
    assert "servers=2 and mode='bounded'" in BOUNDED._design.norm_clipping_refused(2, workers=3)
    for design, servers, workers in ((SYNC, 2, 3), (BOUNDED, 1, 3), (BOUNDED, 2, 1), (ASYNC, 2, 3)):
        assert design._design.norm_clipping_refused(servers, workers) == ""


def test_batches_are_weighted_except_in_asynchronous_updates_of_several_batches() -> None:
    assert "no worker waits" in BOUNDED._design.batch_weight_refused
    assert "no worker waits" in AsyncSGD(outer="average")._design.batch_weight_refused
    assert SYNC._design.batch_weight_refused == ASYNC._design.batch_weight_refused == ""


def test_error_feedback_is_lost_with_a_worker_that_has_it_alone() -> None:
    assert AsyncSGD(compression="topk")._design.lost_with_worker == ["the error feedback of their compressed gradients"]
    assert ASYNC._design.lost_with_worker == ParameterServer(compression="topk")._design.lost_with_worker == []
