"""Ranks agree to stop at one boundary."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fabricx.distributed.generations import death_key
from fabricx.distributed.stop_consensus import Agreement
from fabricx.distributed.world import World
from fabricx.errors import PeerLost


class AnswersLate:
    """A store in which nobody asks; while it is asked, this rank asks."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement

    def check(self, keys: list[str]) -> bool:
        self.agreement.request("should_stop")
        return False


def test_a_request_of_this_rank_outlives_a_look_at_the_store_that_began_before() -> None:
    agreement = Agreement(World())
    store: Any = AnswersLate(agreement)
    agreement._read_request(store, ["requested"])
    assert agreement.reason == "should_stop"
    assert agreement.at_boundary(1)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    store = dist.HashStore()
    store.set(death_key(1), "")  # as the server of a launch's store does
    agreement = Agreement(World(rank=0, size=2, store=store))
    agreement.request("terminated")
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        agreement.at_boundary(0)
    agreement.close()
