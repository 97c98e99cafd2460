"""What hooks change of a model: on all ranks the same, and where the weights are; else it is an error.

Two cases would be wrong without a word. Where servers step, weights that a worker changes are lost with the next ones
that come. And a rank without a sample of a batch has none of the hooks of that batch, so it would go on with other
weights and rates than the ranks that called them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.trainer import Trainer

_GUARDED: Final = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "train_batch_end_others",
    "train_batch_end_watching", "train_epoch_end_others", "train_epoch_end_watching",
)  # fmt: skip
_EACH_CALL: Final = 1_000_000  # elements that are looked at around each call; of more, around every so many calls


def sizes(t: Trainer) -> Tensor:
    """Return the sum of the absolute values of each parameter of the module that this rank has, shape [parameters]."""
    own = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in t.module.parameters()]
    found = [part for part in own if part.numel() and not part.is_complex()]
    return torch.stack([norm.double() for norm in torch._foreach_norm(found, 1)]) if found else torch.zeros(0)


# -- weights that servers step ----------------------------------------------------------------------------------------


def guard_weights(t: Trainer) -> None:
    """Let hooks of the user raise an error that change weights, where servers have them."""
    if t.strategy.weights_brought is None:
        return
    # In one memory another worker may step already while this one shows its hooks the second optimizer.
    apart = t.strategy.servers or len(t.optimizers) == 1
    for name in _GUARDED if apart else set(_GUARDED) - {"on_before_optimizer_step"}:
        hook = getattr(t.hooks, name)
        setattr(t.hooks, name, tuple(function if _is_ours(function) else _guarded(t, function) for function in hook))


def _is_ours(function: Callable[..., Any]) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__module__", "")).startswith("fabricx.")


def _guarded(t: Trainer, function: Callable[..., Any]) -> Callable[..., Any]:
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__qualname__", repr(inner))
    every = 1 + sum(parameter.numel() for parameter in t.module.parameters()) // _EACH_CALL
    calls = 0

    @functools.wraps(inner)
    def guarded(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3 and calls % every:
            return function(*args)
        with unchanged(t, name):
            return function(*args)

    return guarded


@contextmanager
def unchanged(t: Trainer, name: str) -> Iterator[None]:
    """Raise an error if what is called inside changes weights that servers have.

    Raises:
        ValueError: it has.
    """
    brought = t.strategy.weights_brought
    before = sizes(t)
    yield
    # A checkpoint that is saved in a hook brings the newest weights.
    if t.strategy.weights_brought == brought and not _same(before, sizes(t)):
        raise ValueError(
            f"{name} changes weights, and here the servers have them: what a worker changes is lost. Change them in "
            "on_fit_start, or in the loss, or take parameter_server with optimizer='worker' and mode='sync', or "
            "strategy=ddp"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


# -- hooks of some ranks only -----------------------------------------------------------------------------------------


class Noted:
    """Weights, hyperparameters and frozen parameters, before hooks that some ranks don't call."""

    def __init__(self, t: Trainer) -> None:
        self._settings, self._sizes = _settings(t), sizes(t)

    def changes(self, t: Trainer) -> str:
        """Return what is different now, for `take`; "" for nothing."""
        settings = _settings(t)
        weights = not _same(self._sizes, sizes(t))
        if settings == self._settings and not weights:
            return ""
        return json.dumps({**settings, "weights": weights})

    def check(self, t: Trainer) -> None:
        """Raise an error if anything has changed.

        Raises:
            RanksDisagree: it has.
        """
        if self.changes(t):
            raise RanksDisagree(
                f"step {t.state.step}: on_after_backward changed weights or hyperparameters in a batch of "
                "which some ranks have no sample, so that they don't call it. Change them in "
                "on_train_batch_end or on_before_optimizer_step"
            )


def _settings(t: Trainer) -> dict[str, Any]:
    return {
        "groups": [[_values(group) for group in optimizer.param_groups] for optimizer in t.optimizers],
        "trained": [name for name, parameter in t.module.named_parameters() if parameter.requires_grad],
    }


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters that can be told."""
    plain = {name: value.item() if _is_number(value) else value for name, value in group.items() if name != "params"}
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in plain.items() if isinstance(value, kinds)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def take(t: Trainer, changes: str, *, idle: bool) -> None:
    """Have what the hooks of other ranks have changed; every rank calls it where weights have changed.

    Args:
        t: the trainer.
        changes: see `Noted`; the same on all ranks that called them.
        idle: this rank called none.

    Raises:
        RanksDisagree: weights have changed, and each rank has a part of them, or weights of its own.
    """
    told = json.loads(changes)
    if idle:
        _take_settings(t, told)
    if not told["weights"]:
        return
    traits = t.strategy.traits
    if traits.sharded or not traits.synchronous or t.strategy.weights_brought is not None:
        raise RanksDisagree(
            f"step {t.state.step}: on_train_batch_start or on_train_batch_end changed weights at a batch of which "
            "some ranks have no sample, so that they don't call it, and their part of the weights would stay as it "
            "was. Change weights in on_train_epoch_end or on_before_optimizer_step, which all ranks call, let each "
            "global batch be whole (drop_last=True), or take strategy=ddp"
        )
    has = torch.tensor([t.world.size if idle else t.world.rank], device=t.world.device)
    source = int(t.world.all_reduce(has, "min"))
    for parameter in t.module.parameters():
        t.world.broadcast(parameter.data, source)


def _take_settings(t: Trainer, told: dict[str, Any]) -> None:
    for optimizer, groups in zip(t.optimizers, told["groups"], strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            for name, value in values.items():
                if _is_number(group.get(name)):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
    trained = set(told["trained"])
    for name, parameter in t.module.named_parameters():
        if parameter.requires_grad != (name in trained):
            parameter.requires_grad_(name in trained)
