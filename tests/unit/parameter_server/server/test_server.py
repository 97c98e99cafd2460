"""Use of gradients by a server, in every mode, for a fixed order of events."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.parameter_server.gradients import clip
from fabricx.parameter_server.optimizer_parts import part_of, sliced
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import (
    CloseSection,
    LeaseReply,
    LeaveSection,
    OpenSection,
    Pull,
    Push,
    RequestLease,
    ServerInit,
    Settings,
)
from fabricx.parameter_server.wire.partition import divide
from fabricx.testing.simulated_server import simulate

SIZE = 5
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def begin(optimizer: str = "sgd", **settings: Any) -> tuple[ServerInit, Tensor]:
    """Return the server's initial message, and its initial weights."""
    weights = torch.linspace(-1, 1, SIZE)
    parameter = nn.Parameter(weights.clone())
    [shard] = divide([[SIZE]], 1)
    copies, pieces = sliced([OPTIMIZERS[optimizer]([parameter])], [parameter], shard)
    return ServerInit(Settings(**settings), copies, pieces, shard, torch.float32, 0), weights


def gradient(lease: int, weights: Tensor) -> Tensor:
    """Return the gradient of a quadratic with a different minimum for each lease."""
    return weights - torch.full((SIZE,), lease / 10) + torch.arange(SIZE) / 7


def uneven(worker: int, lease: int) -> float:
    return (1.0, 1.7, 4.0, 0.6)[worker % 4] + 0.01 * (lease % 3)


def straight(optimizer: str, updates: int, parts: int, weights: Tensor) -> Tensor:
    """Train in a plain loop, with the sum of `per_update` gradients per update."""
    parameter = nn.Parameter(weights.clone())
    stepped = OPTIMIZERS[optimizer]([parameter])
    for update in range(updates):
        gradients = [gradient(update * parts + part, parameter.detach()) for part in range(parts)]
        parameter.grad = sum(gradients[1:], start=gradients[0])
        stepped.step()
    return parameter.detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_single_asynchronous_worker_is_bitwise_equal_to_a_plain_loop(optimizer: str) -> None:
    start, weights = begin(optimizer, workers=1, aggregate=False, damp=True)
    server, _, _ = simulate(start, 20, gradient)
    assert torch.equal(server.values, straight(optimizer, 20, 1, weights))
    assert server.counts.staleness == {0: 20}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers", [2, 4])
def test_whole_batches_without_staleness_are_equal_to_a_plain_loop(optimizer: str, workers: int) -> None:
    start, weights = begin(optimizer, workers=workers, aggregate=True, max_staleness=0)
    server, simulated, _ = simulate(start, 8 * workers, gradient, uneven)
    assert torch.allclose(server.values, straight(optimizer, 8, workers, weights), atol=1e-6)
    assert server.version == 8
    assert sorted(lease for worker in simulated for lease in worker.trained) == list(range(8 * workers))


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_the_staleness_of_whole_batches_reaches_the_bound_and_not_more(bound: int) -> None:
    start, _ = begin(workers=4, aggregate=True, max_staleness=bound)
    server, _, _ = simulate(start, 80, gradient, uneven)
    assert max(server.counts.staleness) == bound
    assert server.counts.lead == bound
    assert server.version == 20  # the number of global batches, for any assignment to workers


@pytest.mark.parametrize("bound", [0, 1, 2, 3, 5])
def test_a_bound_by_version_is_reached_and_kept(bound: int) -> None:
    start, _ = begin(workers=4, aggregate=False, max_staleness=bound, bound="version", on_stale="wait")
    server, simulated, _ = simulate(start, 80, gradient, uneven)
    assert max(server.counts.staleness) == bound
    assert server.version == 80
    assert sorted(lease for worker in simulated for lease in worker.trained) == list(range(80))


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_bound_by_clock_limits_how_far_a_worker_is_ahead(bound: int) -> None:
    start, _ = begin(workers=4, aggregate=False, max_staleness=bound, bound="clock")
    server, simulated, _ = simulate(start, 80, gradient, uneven)
    assert server.counts.lead == bound
    assert max(server.counts.staleness) <= 3 * (2 * bound + 1)  # (n - 1)(2s + 1)
    assert sum(len(worker.trained) for worker in simulated) == 80


def test_without_a_bound_a_slow_worker_does_not_delay_other_workers() -> None:
    duration = lambda worker, lease: 4.0 if worker == 0 else 1.0  # noqa: E731
    free, _ = begin(workers=4, aggregate=False)
    _, simulated, seconds = simulate(free, 325, gradient, duration)
    assert seconds == pytest.approx(100.0, abs=4.0)  # 3.25 leases a second
    assert len(simulated[0].trained) == 25
    together, _ = begin(workers=4, aggregate=True, max_staleness=0)
    _, _, seconds = simulate(together, 100, gradient, duration)
    assert seconds == pytest.approx(100.0)  # 4 leases in the time of the slowest


def test_gradients_beyond_the_bound_are_dropped_and_their_data_trained_again() -> None:
    start, _ = begin(workers=4, aggregate=False, max_staleness=2, bound="version", on_stale="drop")
    server, _, _ = simulate(start, 60, gradient, uneven)
    assert server.counts.dropped > 0
    assert max(server.counts.staleness) == 2
    assert server.version == sum(server.counts.staleness.values()) == 60
    assert (server.counts.dealt, server.counts.used, server.counts.repeated) == (server.trained, server.trained, 0)


def test_an_update_uses_the_first_gradients_and_late_gradients_are_trained_again() -> None:
    slow = lambda worker, lease: 5.0 if worker == 0 else 1.0 + 0.01 * worker  # noqa: E731
    start, _ = begin(workers=4, backup=1)
    server, simulated, seconds = simulate(start, 60, gradient, slow)
    assert server.version == 20  # of three gradients each
    assert set(server.counts.staleness) == {0}
    assert server.counts.dropped == len(simulated[0].trained) > 0  # each gradient of the slow worker is late
    assert sorted(lease for worker in simulated[1:] for lease in worker.trained) == list(range(60))
    assert seconds < 25.0  # and would be 100 with the slow worker


@pytest.mark.parametrize("count", [7, 8, 9, 10])
def test_the_mean_is_right_if_the_last_batch_has_fewer_parts(count: int) -> None:
    start, weights = begin(workers=4, backup=1)
    server, _, _ = simulate(start, count, gradient, uneven)
    assert server.version == -(-count // 3)
    assert sum(server.counts.staleness.values()) == count
    same, weights = begin(workers=4, backup=1)
    parts = lambda lease: min(3, count - lease // 3 * 3)  # noqa: E731
    server, _, _ = simulate(same, count, lambda lease, now: torch.full((SIZE,), 1 / parts(lease)), uneven)
    assert torch.allclose(server.values, weights - 0.1 * server.version)


@pytest.mark.parametrize("deaths", [[(5.05, 2)], [(3.3, 0), (7.7, 3)], [(2.5, 1), (2.6, 2), (9.0, 3)]])
def test_updates_continue_with_fewer_workers_than_gradients_per_update(deaths: list[tuple[float, int]]) -> None:
    start, _ = begin(workers=4, backup=1)
    server, simulated, _ = simulate(start, 40, gradient, uneven, deaths=deaths)
    assert sum(server.counts.staleness.values()) == 40
    assert {lease for worker in simulated for lease in worker.trained} == set(range(40))


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [{"backup": 1}, {"max_staleness": 0}, {"aggregate": False, "max_staleness": 0}, {"aggregate": False}],
    ids=["backup", "whole batches", "clock", "no bound"],
)
def test_a_worker_does_not_wait_for_a_worker_that_closes_the_section_without_training(
    settings: dict[str, Any], trained: int
) -> None:
    start, _ = begin(workers=3, **settings)
    server, nothing = Server(2), torch.zeros(SIZE)
    server.handle(0, start, nothing, nothing)

    def train(most: int) -> int:
        """Train on worker 1 until a message has to wait; returns the number of its leases."""
        for number in range(most):
            if not server.ready(1, RequestLease(0, True)):
                return number
            granted: Any = server.handle(1, RequestLease(0, True), nothing, nothing)
            assert isinstance(granted, LeaseReply)
            if granted.lease is None:
                assert granted.over
                assert granted.count == sum(server.counts.staleness.values()) == server.counts.used
                return number
            server.handle(1, Pull(to_train=True, rows={}), nothing, nothing)
            server.handle(1, Push(granted.clock, granted.parts, (granted.lease,), confirm=True), nothing, nothing)
        return most

    if not trained:
        server.handle(0, CloseSection(0), nothing, nothing)
    server.handle(1, OpenSection(0, 20, workers=(0, 1)), nothing, nothing)
    train(trained)
    if trained:
        server.handle(0, CloseSection(0), nothing, nothing)
    assert train(9) < 9
    assert server.ready(1, RequestLease(0, True))
    assert server.state.ledger.leases.over
    server.handle(1, OpenSection(1, 20, workers=(0, 1)), nothing, nothing)
    assert not server.state.ledger.leases.over


def test_a_worker_at_the_end_of_its_data_does_not_bound_other_clocks() -> None:
    start, _ = begin(workers=2, aggregate=False, max_staleness=0)
    server, nothing = Server(2), torch.zeros(SIZE)
    for message in (start, OpenSection(0, 9), RequestLease(0, True), Push(0, 1, (0,))):
        server.handle(1, message, nothing, nothing)
    assert not server.ready(1, RequestLease(0, True))
    server.handle(0, LeaveSection(0), nothing, nothing)
    assert server.ready(1, RequestLease(0, True))
    server.handle(1, OpenSection(1, 9, workers=(0, 1)), nothing, nothing)
    assert set(server.state.ledger.workers) == {0, 1}


@pytest.mark.parametrize("settings", [{"aggregate": False}, {"aggregate": True, "max_staleness": 1}])
def test_leases_of_a_dead_worker_are_trained_by_another_worker(settings: dict[str, Any]) -> None:
    start, _ = begin(workers=3, **settings)
    server, simulated, _ = simulate(start, 30, gradient, uneven, deaths=[(5.05, 2), (12.3, 0)])
    assert sorted(lease for worker in simulated for lease in worker.trained) == list(range(30))
    assert server.version == (10 if settings["aggregate"] else 30)


def test_a_stale_gradient_has_a_smaller_weight() -> None:
    start, weights = begin(workers=2, aggregate=False, damp=True)
    server, _, _ = simulate(start, 2, gradient, lambda worker, lease: 1.0 + worker)
    first = weights - 0.1 * gradient(0, weights)
    assert torch.allclose(server.values, first - 0.1 * gradient(1, weights))  # staleness 1: divided by 1
    start, weights = begin(workers=3, aggregate=False, damp=True)
    server, _, _ = simulate(start, 3, gradient, lambda worker, lease: 1.0 + worker)
    second = weights - 0.1 * (gradient(0, weights) + gradient(1, weights))
    assert torch.allclose(server.values, second - 0.05 * gradient(2, weights))


@pytest.mark.parametrize("kind", ["dc", "dc-adaptive"])
def test_delays_are_compensated_as_in_the_paper(kind: Any) -> None:
    start, weights = begin(workers=2, aggregate=False, compensation=kind, dc_lambda=0.5, dc_momentum=0.9)
    server, _, _ = simulate(start, 2, gradient, lambda worker, lease: 1.0 + worker)
    first_gradient, two = gradient(0, weights), gradient(1, weights)
    first = weights - 0.1 * first_gradient
    strength: Any = 0.5
    if kind == "dc-adaptive":
        strength = 0.5 / (0.9 * 0.1 * first_gradient**2 + 0.1 * two**2 + 1e-7).sqrt()
    wanted = first - 0.1 * (two + strength * two * two * (first - weights))
    assert torch.allclose(server.values, wanted, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_pieces_of_a_model_step_like_the_whole_model(optimizer: str) -> None:
    def train(pieces: int) -> list[Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(1))]
        chosen = OPTIMIZERS[optimizer](parameters)
        gradients = [torch.randn_like(parameter) for parameter in parameters]
        values = [parameter.detach().reshape(-1).clone() for parameter in parameters]
        for shard in divide([parameter.shape for parameter in parameters], pieces):
            packed, made = sliced([chosen], parameters, shard)
            copies = packed.unpack(made)
            for _ in range(3):
                for part, piece in zip(made, shard.pieces, strict=True):
                    part.grad = part_of(gradients[piece.parameter], piece)
                copies[0].step()
            for part, piece in zip(made, shard.pieces, strict=True):
                values[piece.parameter][piece.start : piece.stop] = part.detach().reshape(-1)
        assert all(int(state.get("step", 0)) == 0 for state in chosen.state.values())  # the user's own stays as it is
        return values

    whole = train(1)
    for pieces in (2, 3, 5):
        assert all(torch.equal(a, b) for a, b in zip(train(pieces), whole, strict=True))


def test_every_element_is_on_a_single_server() -> None:
    sizes = [3, 1, 20, 7, 1]
    for whole in (False, True):
        for servers in (1, 2, 3, 7):
            shards = divide([[size] for size in sizes], servers, whole=whole)
            pieces = [piece for shard in shards for piece in shard.pieces]
            for number, size in enumerate(sizes):
                covered = sorted((p.start, p.stop) for p in pieces if p.parameter == number)
                assert covered[0][0] == 0
                assert covered[-1][1] == size
                assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    assert max(shard.dense for shard in divide([[size] for size in sizes], 4)) == 8


@pytest.mark.parametrize("settings", [{"aggregate": False}, {"aggregate": True, "max_staleness": 2}])
def test_a_server_restarts_from_a_snapshot_of_any_time(settings: dict[str, Any]) -> None:
    start, _ = begin("momentum", workers=3, **settings)
    moments: list[bytes] = []

    def noting(lease: int, weights: Tensor) -> Tensor:
        file = io.BytesIO()
        torch.save(server.snapshot(), file)
        moments.append(file.getvalue())
        return gradient(lease, weights)

    server, none = Server(3), torch.zeros(SIZE)
    server.handle(0, start, none, none)
    simulate(start, 30, noting, uneven, server=server)
    for moment in moments:
        again = Server(3)
        again.restore(torch.load(io.BytesIO(moment), weights_only=False))
        for worker in range(3):  # its leases are granted again
            again.remove_worker(worker)
            again.add_worker(worker, resumes=True)
        finished, simulated, _ = simulate(start, 30, gradient, uneven, server=again)
        assert finished.version == server.version
        assert len({lease for worker in simulated for lease in worker.trained}) == sum(
            len(w.trained) for w in simulated
        )


def test_a_global_batch_without_a_gradient_is_no_update() -> None:
    start, weights = begin(workers=1, max_staleness=0)
    server, inbox, outbox = Server(1), torch.ones(SIZE), torch.empty(SIZE)
    server.handle(0, start, inbox, outbox)
    server.handle(0, OpenSection(0, 3), inbox, outbox)
    replies = []
    for empty in (False, True, False):
        granted = server.handle(0, RequestLease(0, True), inbox, outbox)
        server.handle(0, Push(granted.clock, granted.parts, (granted.lease,), empty), inbox, outbox)
        replies.append(server.handle(0, Pull(), inbox, outbox))
    assert [(reply.version, reply.skipped) for reply in replies] == [(1, 0), (2, 1), (3, 1)]
    assert torch.equal(server.values, weights - 0.1 - 0.1)
    assert (server.counts.dealt, server.counts.used) == (3, 3)


@pytest.mark.parametrize(("rate", "conflicts"), [(0.1, 0), (0.2, 1)])
def test_updates_whose_parts_have_different_hyperparameters_are_counted(rate: float, conflicts: int) -> None:
    start, weights = begin(workers=2)
    server = Server(2)
    server.handle(0, start, torch.empty(0), torch.empty(0))
    for worker, lr in enumerate((0.1, rate)):
        groups = [[{"lr": lr}]]
        push = Push(clock=0, parts=2, leases=(worker,), groups=groups)
        server.handle(worker, push, gradient(worker, weights), torch.empty(SIZE))
    assert (server.version, server.counts.conflicts) == (1, conflicts)


@pytest.mark.parametrize(("kind", "limit"), [("value", 0.5), ("norm", 0.0)])
def test_a_server_without_a_parameter_of_an_optimizer_clips_nothing(kind: str, limit: float) -> None:
    kept = torch.ones(SIZE)
    clip(kept, kind, [], limit)
    assert kept.tolist() == [1.0] * SIZE
