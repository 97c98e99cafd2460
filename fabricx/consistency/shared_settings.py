"""Checks that hooks change settings on all ranks at the same point: trained parameters, limits, clipping.

Ranks that train different parameters exchange different gradients: gloo ends the process, or the weights diverge. And
if a rank stops earlier, the other ranks wait for it.
"""

from __future__ import annotations

import json
import operator
import time
from typing import TYPE_CHECKING, Any, Final, final

from fabricx.consistency.comparison import LIMITS, NO_CONDITION, differences
from fabricx.core.strategy_parts import ShardsWeights, as_part
from fabricx.distributed.stop_consensus import Agreement
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.data import Microbatch

SKIPS: Final = "on_train_batch_start"
LOOK_S: Final = 0.0005
_limits_of: Final = operator.attrgetter(*LIMITS)
_is_trained: Final = operator.attrgetter("requires_grad")
Settings = tuple[list[bool], tuple[Any, ...], bool]


class OwnSettings:
    """Settings of a rank that no other rank waits for: nothing is compared."""

    def before_forward(self, micro: Microbatch) -> None:
        """Compare the settings before a forward, which may communicate; every rank calls it.

        Args:
            micro: the microbatch.
        """

    def before_backward(self, micro: Microbatch) -> None:
        """Compare the settings before gradients are exchanged, since a step may have changed them; every rank calls it.

        Args:
            micro: the microbatch.
        """

    def check(self, *, skips: bool = False) -> None:
        """Compare the settings, if any rank has changed them.

        Args:
            skips: `on_train_batch_start` has requested to skip the rest of the epoch.

        Raises:
            RanksDisagree: ranks have made different changes, or only some ranks have made changes.
        """


@final
class SharedSettings(OwnSettings):
    """Compares settings that hooks have changed on a rank with those of all ranks, before gradients are exchanged.

    All ranks check at the same points. A rank with changed settings writes them to the run's store, and waits until
    each other rank has written its settings at the same check, or turns out to have passed that check. While no rank
    changes settings, the ranks exchange nothing.

    Args:
        options: the trainer's options.
        module: the user's module.
        strategy: strategy of a run in lockstep.
        state: position of the run, for messages.
        agreement: the run's agreement, whose thread also serves these checks.
    """

    def __init__(
        self, options: TrainerOptions, module: Module, strategy: Strategy, state: RunState, agreement: Agreement
    ) -> None:  # fmt: skip
        named = dict(module.named_parameters())
        self._options, self._strategy, self._state, self._agreement = options, strategy, state, agreement
        self._sharding = as_part(strategy, ShardsWeights)
        # Of one generation: after a change of the ranks, the settings are shared anew.
        self._world = strategy.world.axis("data")
        self._names, self._parameters = [*named], [*named.values()]
        self._known = self._now(skips=False)
        self._checks = self._changes = 0
        self._read: list[str] = []  # keys of the previous comparison
        self._topic = self._next_topic()
        self._every = strategy.traits.joint_steps or not module.automatic_optimization

    def before_forward(self, micro: Microbatch) -> None:
        if self._every or micro.opens or micro.closes:
            self.check()

    def before_backward(self, micro: Microbatch) -> None:
        if micro.closes:
            self.check()

    def _next_topic(self) -> Agreement:
        return Agreement(self._world, f"settings/{self._changes}", beside=self._agreement)

    def _now(self, *, skips: bool) -> Settings:
        self._sharding.apply_requires_grad()
        return list(map(_is_trained, self._parameters)), _limits_of(self._options), skips

    def check(self, *, skips: bool = False) -> None:
        self._checks += 1
        now, topic = self._now(skips=skips), self._topic
        if now == self._known and (topic.reason is None or self._requested_ahead()):
            topic.pass_by(self._checks)
            return
        topic.request("changed")
        self._compare(now)
        self._known = (*now[:2], False)
        self._agreement.forget(topic)
        assert self._world.store is not None
        for key in self._read:
            self._world.store.delete_key(key)
        # All ranks will have read these keys before any rank ends the next comparison.
        self._read = [self._key(self._world.rank), *topic.local_keys()]
        self._changes += 1
        self._topic = self._next_topic()

    def _requested_ahead(self) -> bool:
        """Return whether all changed ranks made their changes at a later check; ranks may be ahead of this rank."""
        reports = [self._report_of(rank) for rank in range(self._world.size)]
        return all(report is None or report[0] > self._checks for report in reports)

    def _compare(self, now: Settings) -> None:
        world = self._world
        assert world.store is not None
        world.store.set(self._key(world.rank), json.dumps([self._checks, self._describe(now)]))
        unchanged = [0, self._describe(self._known)]
        reports: dict[int, Any] = {}
        while len(reports) < world.size:
            for rank in range(world.size):
                # Read `passed` before the report: a rank with changes never passes the check at which it reports them.
                passed = self._topic.passed_by(rank) >= self._checks
                report = self._report_of(rank)
                if report is not None or passed:
                    reports[rank] = report or unchanged
            self._topic.check_peers()
            time.sleep(LOOK_S if len(reports) < world.size else 0.0)
        by_rank = [reports[rank] for rank in range(world.size)]
        if any(report != by_rank[0] for report in by_rank):
            raise RanksDisagree(self._explained(by_rank))

    def _explained(self, by_rank: list[Any]) -> str:
        settings = [described for _, described in by_rank]
        if any(described != settings[0] for described in settings):
            what = "\n  ".join(differences(settings))
        else:
            what = "all ranks have made the same change, but not in the same batch"
        return (
            f"step {self._state.step}: hooks have changed settings on some ranks only, and all ranks must share "
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

    def _report_of(self, rank: int) -> Any:
        key = self._key(rank)
        assert self._world.store is not None
        return json.loads(self._world.store.get(key)) if self._world.store.check([key]) else None

    def _key(self, rank: int) -> str:
        return self._world.key(f"settings/{self._world.generation}/{self._changes}/of/{rank}")
