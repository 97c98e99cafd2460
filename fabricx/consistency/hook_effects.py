"""Checks that hooks change a model on all ranks in the same way, and only weights that the ranks own.

Two cases would otherwise be silent errors. If servers step, weights that a worker changes are overwritten by the next
weights of the servers. And a rank without a sample of a batch does not call the hooks of that batch, so it would
continue with other weights and learning rates than the ranks that called them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn

from fabricx.consistency.comparison import CHANGE_ALIKE, LIMITS, compare, of_hooks, of_optimizers
from fabricx.consistency.optimizer_changes import KnownParameters, cleared_gradients, watched_states
from fabricx.consistency.weight_changes import SavedValues, WeightChanges, digest
from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricx.core.hook_calls.hooks import Hooks
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.data.run_data import RunData

_GUARDED: Final = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "train_batch_end_others",
    "train_batch_end_watching", "train_epoch_end_others", "train_epoch_end_watching",
)  # fmt: skip
FAR: Final = "other values"
ROUNDING: Final = 1e-3  # tolerated difference of weights between ranks, relative to a parameter's largest value


def fingerprint(module: nn.Module) -> Tensor:
    """Return a digest of this rank's parameters, shape [bytes].

    torch's version counters miss writes to `.data`, so the memory is read.

    Args:
        module: the user's module.
    """
    held = (parameter for parameter in module.parameters() if not is_placeholder(parameter))
    return digest(getattr(parameter, "_local_tensor", parameter).detach() for parameter in held)


@final
class HookChecks:
    """Compares what hooks have changed on this rank with the other ranks, and applies it to ranks without a sample.

    Args:
        options: the trainer's options; hooks may change limits.
        module: the user's module.
        strategy: the run's strategy.
        state: position of the run, for messages.
        data: the run's data.
        optimizers: optimizers of the module.
        forget_copies: invalidates in-memory checkpoints whose weights differ between ranks; every rank calls it.

    Attributes:
        at_first_part: values at the first of the fixed parts of a global batch; None outside of its parts.
    """

    def __init__(
        self, options: TrainerOptions, module: Module, strategy: Strategy, state: RunState, data: RunData,
        optimizers: Sequence[Optimizer], forget_copies: Callable[[], None],
    ) -> None:  # fmt: skip
        self._options, self._module, self._strategy, self._state = options, module, strategy, state
        self._serving = as_part(strategy, HasServers)
        self._data, self._optimizers, self._forget_copies = data, optimizers, forget_copies
        self.at_first_part: SavedValues | None = None
        self._trained_at_first_part: dict[str, bool] = {}
        self._known: KnownParameters | None = None

    # -- the same on all ranks ----------------------------------------------------------------------------------

    def note_parameters(self) -> None:
        """Note the parameters at the end of set-up."""
        self._known = KnownParameters(self._module, self._optimizers)

    def local_hyperparameters(self) -> dict[str, str]:
        """Return the hyperparameters of a rank at its own pace, which are those of its newest update; else {}."""
        if self._strategy.world.size == 1 or self._strategy.traits.lockstep:
            return {}
        return of_optimizers(self._module, self._optimizers, ())

    def compare_ranks(self, when: str, before: Mapping[str, str] | None = None) -> None:
        """Raise an error if hooks have made different changes on ranks; every rank calls it.

        Args:
            when: moment of the comparison, for the message.
            before: `local_hyperparameters` before the hooks; None if ranks may have other hyperparameters by now.

        Raises:
            RanksDisagree: on every rank; the message lists the differences by rank.
        """
        world = self._strategy.world
        if world.size == 1:
            return
        if self._known is not None and world.axis("data").size > 1:
            self._known.check(self._module, self._optimizers, type(self._strategy).__name__)
        changed: set[str] = set()
        if before is not None and not self._strategy.traits.lockstep:
            now = self.local_hyperparameters()
            names = [name for name, value in now.items() if before.get(name) != value]
            changed = {name for others in world.gather_objects(names) for name in others}
        described = of_hooks(
            self._options, self._module, self._strategy, self._data.train_feed, self._optimizers, changed
        )
        compare(world.axis("data"), described, when, CHANGE_ALIKE)

    def compare_weights(self) -> None:
        """Raise an error if ranks that step together hold different weights; every rank calls it.

        Ranks on different hardware may round differently, so differences up to `ROUNDING` are tolerated.

        Raises:
            RanksDisagree: on every rank; the message names the parameters.
        """
        strategy, world = self._strategy, self._strategy.step_ranks
        if world.size == 1 or strategy.traits.joint_steps or self._serving.servers_step:
            return
        digest = hashlib.blake2b(
            fingerprint(self._module).cpu().contiguous().numpy().data, digest_size=16
        ).hexdigest()  # fmt: skip
        if len(set(world.gather_objects(digest))) > 1:
            far = {f"weights of {name}": self._distance(p) for name, p in self._module.named_parameters()}
            if any(world.gather_objects([*far.values()].count(FAR))):
                self._forget_copies()  # the copies are inconsistent
            compare(world, far, f"after step {self._state.step}", CHANGE_ALIKE)

    def _distance(self, parameter: Tensor) -> str:
        """Return whether a parameter differs from that of rank 0, as a text; every rank calls it."""
        first = self._strategy.step_ranks.broadcast(parameter.detach().clone())
        if not first.numel():
            return "alike"
        rounding = max(ROUNDING, 32 * torch.finfo(first.dtype).eps if first.dtype.is_floating_point else 0.0)
        now = parameter.detach()
        same = (now == first) | (now.isnan() & first.isnan())
        far = (now - first)[~same].abs()
        near = rounding * float(first.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return FAR if far.numel() and not float(far.max()) <= near else "alike"  # also for NaN on one of the ranks

    # -- weights that servers step ------------------------------------------------------------------------------

    def guard_weights(self, hooks: Hooks) -> None:
        """Make users' hooks raise an error if they change weights that the servers own.

        Args:
            hooks: the run's hooks; functions of users are wrapped.
        """
        if not self._serving.servers_step:
            return
        # In shared memory, another worker may step while this worker calls its hooks for the second optimizer.
        apart = self._serving.servers or len(self._optimizers) == 1
        for name in _GUARDED if apart else set(_GUARDED) - {"on_before_optimizer_step"}:
            functions = getattr(hooks, name)
            setattr(hooks, name, tuple(item if _is_ours(item) else self._guarded(item) for item in functions))

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        inner = function.func if isinstance(function, functools.partial) else function
        name = getattr(inner, "__qualname__", repr(inner))

        @functools.wraps(inner)
        def guarded(*args: Any) -> Any:
            with self.unchanged(name):
                return function(*args)

        return guarded

    @contextmanager
    def unchanged(self, name: str) -> Iterator[None]:
        """Raise an error if the code inside changes weights that the servers own, or uses their optimizer states.

        Args:
            name: name of the code, for the message.

        Raises:
            ValueError: weights have changed, or the state of an optimizer was used.
        """
        self._serving.pull_tables()
        brought = self._serving.weight_pulls
        before = fingerprint(self._module)
        with watched_states(self._optimizers) as used:
            yield
            uses_states = used()
        if self._serving.weight_pulls != brought:  # a checkpoint that is saved in a hook fetches the newest weights
            return
        if not torch.equal(before, fingerprint(self._module)):
            raise ValueError(_lost_change(name))
        if uses_states:
            raise ValueError(
                f"{name} uses the state of an optimizer, such as its momentum, which only the servers have: use "
                "parameter_server with optimizer='worker' and mode='sync', or strategy=ddp"
            )

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Context of a method of the module in the loop: `unchanged`, if servers own the weights.

        Args:
            name: name of the method.
        """
        with nullcontext() if not self._serving.servers_step else self.unchanged(name):
            yield

    @contextmanager
    def zeroes(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of the module's `optimizer_zero_grad`.

        Args:
            optimizer: optimizer of the module.

        Raises:
            ValueError: it keeps gradients, and the strategy can't.
        """
        if not isinstance(self._strategy, HasServers) and not self._strategy.traits.batch_parts:
            yield
            return
        with (
            self.guarded("optimizer_zero_grad"),
            cleared_gradients(optimizer, servers_step=self._serving.servers_step),
        ):
            yield

    @contextmanager
    def unchanged_in_step(self) -> Iterator[None]:
        """Raise an error if the module's `optimizer_step` changes weights that servers replace or don't hold.

        Raises:
            ValueError: weights have changed.
        """
        self._serving.pull_tables()
        brought = self._serving.weight_pulls
        if brought is None:
            yield
            return
        if not self._serving.overwrites:  # workers step by themselves between two rounds
            stepped = {
                id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]
            }
            frozen = [p for p in self._module.parameters() if id(p) not in stepped]
            own_changes = WeightChanges(frozen, values=True)
            yield
            if own_changes.first(frozen) is not None:
                raise ValueError(
                    "optimizer_step changes a frozen parameter that servers don't hold, so each worker would have its "
                    "own values: register it as a buffer, or use strategy=local_sgd, which averages frozen parameters"
                )
            return
        # torch's counters have the changes of this process only, and no writes to `.data`.
        changes = WeightChanges(self._module.parameters(), values=not self._serving.shares_update)
        yield
        if self._serving.weight_pulls == brought and changes.first(self._module.parameters()) is not None:
            raise ValueError(_lost_change("optimizer_step"))

    # -- parts of a global batch ----------------------------------------------------------------------------------

    def begin_parts(self) -> None:
        """Save the values with which the first of the fixed parts of a global batch is computed."""
        self.at_first_part = SavedValues(self._module)
        self._trained_at_first_part = {name: p.requires_grad for name, p in self._module.named_parameters()}

    def check_parts(self) -> None:
        """Refuse changes of weights and buffers by the parts of a global batch, before the update.

        Raises:
            ValueError: a value has changed; the message names it.
        """
        saved, self.at_first_part = self.at_first_part, None
        if saved is None:
            return
        for name, parameter in self._module.named_parameters():
            if self._trained_at_first_part.get(name, parameter.requires_grad) != parameter.requires_grad:
                raise ValueError(
                    f"requires_grad of {name} was changed between the parts of a global batch, whose number on a rank "
                    "depends on the number of ranks with deterministic='elastic': change it in on_train_epoch_start or "
                    "on_before_optimizer_step, or use strategy=ddp"
                )
        if (changed := saved.changed()) is not None:
            raise ValueError(
                f"{changed} was changed between the parts of a global batch, by training_step or a hook of each batch. "
                "With deterministic='elastic', the number of parts that a rank computes depends on the number of "
                "ranks, and so would the weights: change it in on_before_optimizer_step, once for each update; keep "
                "sums for metrics in self.log or in a metric object; or use strategy=ddp"
            )

    # -- hooks of some ranks only -------------------------------------------------------------------------------

    def effects(self) -> HookEffects:
        """Return a snapshot before hooks that some ranks don't call."""
        return HookEffects(self)

    def settings(self) -> dict[str, Any]:
        """Return the settings that hooks may change: hyperparameters, limits, trained parameters."""
        return {
            "groups": [[_values(group) for group in optimizer.param_groups] for optimizer in self._optimizers],
            "limits": {name: getattr(self._options, name) for name in LIMITS},
            "trained": [name for name, parameter in self._module.named_parameters() if parameter.requires_grad],
        }

    def fingerprint(self) -> Tensor:
        """Return a digest of this rank's parameters, shape [bytes]."""
        return fingerprint(self._module)

    @property
    def step(self) -> int:
        """Return the number of weight updates."""
        return self._state.step

    def apply_changes(self, changes: str, *, idle: bool) -> None:
        """Apply the changes by hooks of other ranks; every rank calls it if weights have changed.

        Args:
            changes: result of `HookEffects.changes`, the same on all ranks that called the hooks.
            idle: this rank has called no hooks.

        Raises:
            RanksDisagree: weights have changed, and the ranks' weights differ by design (sharded, asynchronous or
                servers).
        """
        state = json.loads(changes)
        if idle:
            self._apply_settings(state)
        if not state["weights"]:
            return
        strategy, world = self._strategy, self._strategy.world.axis("data")
        if strategy.traits.joint_steps or not strategy.traits.synchronous or self._serving.servers_step:
            raise RanksDisagree(
                f"step {self._state.step}: on_train_batch_start or on_train_batch_end changed weights at a batch of "
                "which some ranks have no sample, so they don't call it, and their part of the weights would not "
                "change. Change weights in on_train_epoch_end or on_before_optimizer_step, which all ranks call, let "
                "each global batch be whole (drop_last=True), or use strategy=ddp"
            )
        has = torch.tensor([world.size if idle else world.rank], device=world.device)
        source = int(world.all_reduce(has, "min"))
        for parameter in self._module.parameters():
            world.broadcast(parameter.data, source)

    def _apply_settings(self, state: dict[str, Any]) -> None:
        for optimizer, groups in zip(self._optimizers, state["groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                for name, value in values.items():
                    if _is_number(group.get(name)):
                        group[name].fill_(value)
                    else:
                        group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
        for name, value in state["limits"].items():
            setattr(self._options, name, value)
        trained = set(state["trained"])
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad != (name in trained):
                parameter.requires_grad_(name in trained)


@final
class HookEffects:
    """Snapshot of weights, hyperparameters, limits and frozen parameters before hooks that some ranks don't call.

    Args:
        checks: the run's checks.
    """

    def __init__(self, checks: HookChecks) -> None:
        self._checks = checks
        self._settings, self._weights = checks.settings(), checks.fingerprint()

    def changes(self) -> str:
        """Return the changes since the snapshot, for `HookChecks.apply_changes`; "" for none."""
        settings = self._checks.settings()
        weights = not torch.equal(self._weights, self._checks.fingerprint())
        if settings == self._settings and not weights:
            return ""
        return json.dumps({**settings, "weights": weights})

    def check(self) -> None:
        """Raise an error if anything has changed.

        Raises:
            RanksDisagree: weights or hyperparameters have changed.
        """
        if self.changes():
            raise RanksDisagree(
                f"step {self._checks.step}: on_after_backward changed weights or hyperparameters in a batch of "
                "which some ranks have no sample, so they don't call it. Change them in "
                "on_train_batch_end or on_before_optimizer_step"
            )


def _is_ours(function: Callable[..., Any]) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__module__", "")).startswith("fabricx.")


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters that JSON can represent."""
    plain = {name: value.item() if _is_number(value) else value for name, value in group.items() if name != "params"}
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in plain.items() if isinstance(value, kinds)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _lost_change(name: str) -> str:
    """Return the message for a change of weights that servers hold."""
    return (
        f"{name} changes weights, but servers hold the weights, so a worker's change would be lost. Change "
        "weights in on_fit_start, or add a term to the loss; or use parameter_server with optimizer='worker' "
        "and mode='sync', or strategy=ddp"
    )
