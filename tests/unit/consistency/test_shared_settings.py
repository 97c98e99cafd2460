"""Settings that hooks change on some ranks only are an error on all ranks; equal changes are accepted."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fabricx.consistency.comparison import LIMITS
from fabricx.consistency.shared_settings import SharedSettings
from fabricx.core.strategy import Traits
from fabricx.distributed.membership.deaths import DEATHS
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.store.client import PrivateStore
from fabricx.distributed.store.server import StoreServer
from fabricx.distributed.world import World
from fabricx.errors import PeerLost, RanksDisagree

Act = Callable[[Any, int, int], bool | None]


KEY = b"k" * 32


@contextmanager
def trainers(path: str, size: int) -> Iterator[list[Any]]:
    """Yield trainers of `size` ranks, with the parts that the comparison of settings reads."""
    created = []
    for rank in range(size):
        world = World(rank=rank, size=size, store=PrivateStore(path, KEY))
        trainer: Any = SimpleNamespace(
            world=world, agreement=Agreement(world, "stop"), module=nn.Linear(2, 1), state=SimpleNamespace(step=7),
            strategy=SimpleNamespace(world=world, traits=Traits()),
            **dict.fromkeys(LIMITS, 1),
        )  # fmt: skip
        trainer.module.automatic_optimization = True
        trainer.shared = SharedSettings(trainer, trainer.module, trainer.strategy, trainer.state, trainer.agreement)
        created.append(trainer)
    try:
        yield created
    finally:
        for trainer in created:
            trainer.agreement.close()


def train(
    act: Act, *, size: int = 2, checks: int = 6, in_lockstep: bool = True, keys: list[int] | None = None
) -> list[str]:
    """Run `checks` checks on ranks in threads; returns the error of each rank, or "".

    Without an error, a rank waits after each check for all other ranks, as in a collective.
    """
    errors, asked = [""] * size, []
    passed = threading.Barrier(size)

    def work(trainer: Any) -> None:
        try:
            for number in range(checks):
                trainer.shared.check(skips=bool(act(trainer, trainer.world.rank, number)))
                if in_lockstep:
                    passed.wait(60)
        except RanksDisagree as error:
            errors[trainer.world.rank] = str(error)
            passed.abort()
        except threading.BrokenBarrierError:
            errors[trainer.world.rank] = "waits"

    request = PrivateStore._request

    def counted(store: PrivateStore, *parts: bytes) -> bytes:
        if threading.current_thread().name.startswith("rank"):
            asked.append(parts)
        return request(store, *parts)

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(StoreServer(folder, KEY)) as server,
        trainers(server.path, size) as ranks,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(PrivateStore, "_request", counted)
        threads = [
            threading.Thread(target=work, args=(trainer,), name=f"rank {trainer.world.rank}") for trainer in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if keys is not None:
            keys.append(len(server._state._values))
    return [*errors, str(len(asked))]


def test_the_store_is_not_read_without_a_change() -> None:
    assert train(lambda trainer, rank, number: None) == ["", "", "0"]


def freeze(trainer: Any) -> None:
    trainer.module.weight.requires_grad_(False)


def change_limit(trainer: Any) -> None:
    trainer.max_steps = 3


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight: trained on rank {others}, frozen on rank {rank}": freeze,
    "max_steps: 1 on rank {others}, 3 on rank {rank}": change_limit,
    "on_train_batch_start: goes on with the epoch on rank {others}, skips the rest of the epoch on rank {rank}": bool,
}


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("message", CHANGES)
def test_a_change_on_one_rank_is_an_error_that_names_it_and_the_rank(message: str, number: int) -> None:
    change = CHANGES[message]

    def act(trainer: Any, rank: int, now: int) -> bool:
        if rank == 1 and now == number:
            change(trainer)
            return change is bool
        return False

    first, second, _ = train(act)
    assert message.format(others=0, rank=1) in second
    assert first in ("waits", second)  # the rank may already wait in a later collective
    assert "step 7: " in second


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("in_lockstep", [True, False])
def test_a_change_on_all_ranks_in_the_same_batch_is_accepted(size: int, in_lockstep: bool) -> None:
    def act(trainer: Any, rank: int, now: int) -> bool:
        trainer.module.bias.requires_grad_(now % 2 == 0)
        trainer.max_epochs = now // 3
        return now == 4

    assert train(act, size=size, in_lockstep=in_lockstep)[:-1] == [""] * size


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_same_change_in_different_batches_is_an_error(ahead: int) -> None:
    def act(trainer: Any, rank: int, now: int) -> None:
        if now == (2 if rank == ahead else 3):
            freeze(trainer)

    errors = train(act)
    assert "weight: " in errors[ahead] or "not in the same batch" in errors[ahead]


def test_a_rank_that_is_behind_continues_to_the_batch_of_the_change() -> None:
    go_on = threading.Event()

    def act(trainer: Any, rank: int, now: int) -> None:
        if now == 4:
            freeze(trainer)
        if rank == 1 and now == 0:  # read before its first check
            go_on.wait(60)
            trainer.shared._topic.reason = "changed"
        elif rank == 0 and now == 4:
            go_on.set()

    assert train(act, in_lockstep=False)[:-1] == ["", ""]


def test_changes_leave_few_keys_behind() -> None:
    keys: list[int] = []

    def act(trainer: Any, rank: int, now: int) -> None:
        trainer.module.bias.requires_grad_(now % 2 == 1)

    assert train(act, checks=30, keys=keys)[:-1] == ["", ""]
    assert keys[0] <= 14  # of two comparisons, for two ranks


def test_a_rank_that_has_ended_is_not_awaited() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(StoreServer(folder, KEY)) as server,
        trainers(server.path, 2) as ranks,
    ):
        server.push(DEATHS, b"1")  # as the server of a launch's store does
        freeze(ranks[0])
        with pytest.raises(PeerLost, match="rank 1 has ended"):
            ranks[0].shared.check()
