"""Checks that hooks change these settings on all ranks together: trained parameters, limits, clipping.

Ranks that train different parameters exchange different gradients: gloo ends the process, or the weights diverge. And
if a rank stops earlier, the other ranks wait for it.
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


def share_settings(trainer: Trainer) -> None:
    """Start to compare settings that hooks change, with the ranks of the present generation.

    Args:
        trainer: of a fit; receives `shared`.
    """
    compares = trainer.world.size > 1 and trainer.strategy.dealer is None and trainer.agreement is not None
    trainer.shared = SharedSettings(trainer) if compares else None


@final
class SharedSettings:
    """Compares settings that hooks have changed on a rank with those of all ranks, before gradients are exchanged.

    All ranks check at the same points. A rank with changed settings writes them to the run's store, and waits until
    each other rank has written its settings at the same check, or turns out to have passed that check. While no rank
    changes settings, the ranks exchange nothing.

    Args:
        trainer: of a fit in lockstep.
    """

    def __init__(self, trainer: Trainer) -> None:
        named = dict(trainer.module.named_parameters())
        self._names, self._parameters = [*named], [*named.values()]
        self._known = self._now(trainer, skips=False)
        self._checks = self._changes = 0
        self._read: list[str] = []  # keys of the previous comparison
        self._topic = self._next_topic(trainer)
        self._every = trainer.strategy.traits.sharded or not trainer.module.automatic_optimization

    def before_forward(self, trainer: Trainer, micro: Microbatch) -> None:
        """Compare the settings before a forward, which may communicate; every rank calls it.

        Args:
            trainer: of the fit.
            micro: the microbatch.
        """
        if self._every or micro.opens or micro.closes:
            self.check(trainer)

    def before_backward(self, trainer: Trainer, micro: Microbatch) -> None:
        """Compare the settings before gradients are exchanged, since a step may have changed them; every rank calls it.

        Args:
            trainer: of the fit.
            micro: the microbatch.
        """
        if micro.closes:
            self.check(trainer)

    def _next_topic(self, trainer: Trainer) -> Agreement:
        return Agreement(trainer.world, f"settings/{self._changes}", beside=trainer.agreement)

    def _now(self, trainer: Trainer, *, skips: bool) -> Settings:
        trainer.strategy.settle_trained()
        return list(map(_is_trained, self._parameters)), _limits_of(trainer), skips

    def check(self, trainer: Trainer, *, skips: bool = False) -> None:
        """Compare the settings, if any rank has changed them.

        Args:
            trainer: of the fit.
            skips: `on_train_batch_start` has requested to skip the rest of the epoch.

        Raises:
            RanksDisagree: ranks have made different changes, or only some ranks have made changes.
        """
        self._checks += 1
        now, topic = self._now(trainer, skips=skips), self._topic
        if now == self._known and (topic.reason is None or self._requested_ahead(trainer.world)):
            topic.pass_by(self._checks)
            return
        topic.request("changed")
        self._compare(trainer, now)
        self._known = (*now[:2], False)
        assert trainer.agreement is not None
        trainer.agreement.forget(topic)
        assert trainer.world.store is not None
        for key in self._read:
            trainer.world.store.delete_key(key)
        # All ranks will have read these keys before any rank ends the next comparison.
        self._read = [self._key(trainer.world, trainer.world.rank), *topic.local_keys()]
        self._changes += 1
        self._topic = self._next_topic(trainer)

    def _requested_ahead(self, world: World) -> bool:
        """Return whether all changed ranks made their changes at a later check; ranks may be ahead of this rank."""
        reports = [self._report_of(world, rank) for rank in range(world.size)]
        return all(report is None or report[0] > self._checks for report in reports)

    def _compare(self, trainer: Trainer, now: Settings) -> None:
        world = trainer.world
        assert world.store is not None
        world.store.set(self._key(world, world.rank), json.dumps([self._checks, self._describe(now)]))
        unchanged = [0, self._describe(self._known)]
        reports: dict[int, Any] = {}
        while len(reports) < world.size:
            for rank in range(world.size):
                # Read `passed` before the report: a rank with changes never passes the check at which it reports them.
                passed = self._topic.passed_by(rank) >= self._checks
                report = self._report_of(world, rank)
                if report is not None or passed:
                    reports[rank] = report or unchanged
            membership().check(world.generation)
            time.sleep(LOOK_S if len(reports) < world.size else 0.0)
        by_rank = [reports[rank] for rank in range(world.size)]
        if any(report != by_rank[0] for report in by_rank):
            raise RanksDisagree(self._explained(trainer, by_rank))

    def _explained(self, trainer: Trainer, by_rank: list[Any]) -> str:
        settings = [described for _, described in by_rank]
        if any(described != settings[0] for described in settings):
            what = "\n  ".join(differences(settings))
        else:
            what = "the same is changed on all ranks, but not in the same batch"
        return (
            f"step {trainer.state.step}: hooks have changed settings on some ranks only, and all ranks must share "
            f"them:\n  {what}\n"
            f"  change requires_grad, limits and clipping on all ranks in the same hook and batch, {NO_CONDITION}; "
            "where a rank has no sample, in on_train_batch_start or on_train_batch_end, whose changes that rank "
            "copies. trainer.should_stop = True stops all ranks, on whichever it is set"
        )

    def _describe(self, settings: Settings) -> dict[str, str]:
        trained, limits, skips = settings
        words = {
            name: "trained" if is_trained else "frozen"
            for name, is_trained in zip(self._names, trained, strict=True)
        }  # fmt: skip
        words |= {name: repr(value) for name, value in zip(LIMITS, limits, strict=True)}
        return words | {SKIPS: "skips the rest of the epoch" if skips else "goes on with the epoch"}

    def _report_of(self, world: World, rank: int) -> Any:
        key = self._key(world, rank)
        assert world.store is not None
        return json.loads(world.store.get(key)) if world.store.check([key]) else None

    def _key(self, world: World, rank: int) -> str:
        return world.key(f"settings/{world.generation}/{self._changes}/of/{rank}")
