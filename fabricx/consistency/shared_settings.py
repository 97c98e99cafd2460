"""Settings that hooks may change on all ranks together only: trained parameters, limits, clipping.

Ranks that train other parameters exchange other gradients: gloo ends the process, or the weights drift apart. The
others wait for a rank that has stopped earlier.
"""

from __future__ import annotations

import json
import operator
import time
from typing import TYPE_CHECKING, Any, Final, final

from fabricx.consistency.comparison import LIMITS, NO_CONDITION, differences
from fabricx.distributed.generations import membership
from fabricx.distributed.stop_consensus import Agreement
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.data import Microbatch
    from fabricx.distributed.world import World
    from fabricx.trainer.trainer import Trainer

SKIPS: Final = "on_train_batch_start"
LOOK_S: Final = 0.0005
_limits_of: Final = operator.attrgetter(*LIMITS)
_is_trained: Final = operator.attrgetter("requires_grad")
Settings = tuple[list[bool], tuple[Any, ...], bool]


def share_settings(t: Trainer) -> None:
    """Begin to compare what hooks change, with the ranks of this generation."""
    compares = t.world.size > 1 and t.strategy.dealer is None and t.agreement is not None
    t.shared = SharedSettings(t) if compares else None


@final
class SharedSettings:
    """Compares settings that hooks have changed on some rank with those of the others, before gradients travel.

    All ranks check at the same places. A rank whose settings have changed writes them to the run's store, and waits
    until each other rank has done so at the same check, or turns out to have passed that. While no rank changes
    anything, nothing is exchanged.

    Args:
        t: the trainer; its ranks take the same steps.
    """

    def __init__(self, t: Trainer) -> None:
        named = dict(t.module.named_parameters())
        self._names, self._parameters = [*named], [*named.values()]
        self._known = self._now(t, skips=False)
        self._checks = self._changes = 0
        self._read: list[str] = []  # keys of the comparison before
        self._topic = self._next_topic(t)
        self._each = t.strategy.traits.sharded or not t.module.automatic_optimization

    def before_forward(self, t: Trainer, micro: Microbatch) -> None:
        """Compare the settings before a forward, which may communicate; every rank calls it."""
        if self._each or micro.opens or micro.closes:
            self.check(t)

    def before_backward(self, t: Trainer, micro: Microbatch) -> None:
        """Compare the settings before gradients travel: a step may have changed them; every rank calls it."""
        if micro.closes:
            self.check(t)

    def _next_topic(self, t: Trainer) -> Agreement:
        return Agreement(t.world, f"settings/{self._changes}", beside=t.agreement)

    def _now(self, t: Trainer, *, skips: bool) -> Settings:
        t.strategy.settle_trained()
        return list(map(_is_trained, self._parameters)), _limits_of(t), skips

    def check(self, t: Trainer, *, skips: bool = False) -> None:
        """Compare the settings, if some rank has changed them.

        Args:
            t: the trainer.
            skips: `on_train_batch_start` has asked to skip the rest of the epoch.

        Raises:
            RanksDisagree: ranks have changed different things, or some have changed nothing.
        """
        self._checks += 1
        now, topic = self._now(t, skips=skips), self._topic
        if now == self._known and (topic.reason is None or self._asked_ahead(t.world)):
            topic.pass_by(self._checks)
            return
        topic.request("changed")
        self._compare(t, now)
        self._known = (*now[:2], False)
        assert t.agreement is not None
        t.agreement.forget(topic)
        assert t.world.store is not None
        for key in self._read:
            t.world.store.delete_key(key)
        # All ranks will have read these before any of them comes to the end of the next comparison.
        self._read = [self._key(t.world, t.world.rank), *topic.keys_of_mine()]
        self._changes += 1
        self._topic = self._next_topic(t)

    def _asked_ahead(self, world: World) -> bool:
        """Return whether the ranks that have changed something did so at a later check; they may be ahead."""
        told = [self._told(world, rank) for rank in range(world.size)]
        return all(one is None or one[0] > self._checks for one in told)

    def _compare(self, t: Trainer, now: Settings) -> None:
        world = t.world
        assert world.store is not None
        world.store.set(self._key(world, world.rank), json.dumps([self._checks, self._in_words(now)]))
        known = [0, self._in_words(self._known)]
        found: dict[int, Any] = {}
        while len(found) < world.size:
            for rank in range(world.size):
                # Asked for first: a rank that has changed something never passes the check at which it says so.
                passed = self._topic.passed_by(rank) >= self._checks
                told = self._told(world, rank)
                if told is not None or passed:
                    found[rank] = told or known
            membership().check(world.generation)
            time.sleep(LOOK_S if len(found) < world.size else 0.0)
        by_rank = [found[rank] for rank in range(world.size)]
        if any(one != by_rank[0] for one in by_rank):
            raise RanksDisagree(self._explained(t, by_rank))

    def _explained(self, t: Trainer, by_rank: list[Any]) -> str:
        settings = [one[1] for one in by_rank]
        if any(one != settings[0] for one in settings):
            what = "\n  ".join(differences(settings))
        else:
            what = "the same is changed on all ranks, but not in the same batch"
        return (
            f"step {t.state.step}: hooks have changed on some ranks what all ranks have to do alike:\n  {what}\n"
            f"  change requires_grad, limits and clipping on all ranks in the same hook and batch, {NO_CONDITION}; "
            "where a rank has no sample, in on_train_batch_start or on_train_batch_end, which that rank follows. "
            "trainer.should_stop = True stops all ranks, on whichever it is set"
        )

    def _in_words(self, settings: Settings) -> dict[str, str]:
        trained, limits, skips = settings
        words = {
            name: "trained" if is_trained else "frozen"
            for name, is_trained in zip(self._names, trained, strict=True)
        }  # fmt: skip
        words |= {name: repr(value) for name, value in zip(LIMITS, limits, strict=True)}
        return words | {SKIPS: "skips the rest of the epoch" if skips else "goes on with the epoch"}

    def _told(self, world: World, rank: int) -> Any:
        key = self._key(world, rank)
        assert world.store is not None
        return json.loads(world.store.get(key)) if world.store.check([key]) else None

    def _key(self, world: World, rank: int) -> str:
        return world.key(f"settings/{world.generation}/{self._changes}/of/{rank}")
