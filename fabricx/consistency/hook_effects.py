"""Checks what hooks change of a model: the same on all ranks, and where the weights are stored.

Two cases would be wrong without a word. Where servers step, weights that a worker changes are lost with the next ones
that come. And a rank without a sample of a batch has none of the hooks of that batch, so it would go on with other
weights and rates than the ranks that called them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fabricx.consistency.comparison import CHANGE_ALIKE, LIMITS, compare, of_hooks, of_optimizers
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.trainer.trainer import Trainer

_GUARDED: Final = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "train_batch_end_others",
    "train_batch_end_watching", "train_epoch_end_others", "train_epoch_end_watching",
)  # fmt: skip
FAR: Final = "other values"
ROUNDING: Final = 1e-3  # of a parameter's largest value, by which weights of ranks may differ
_ROW: Final = 4093  # 8-byte words. A prime: even strides and even counts of changed signs don't cancel


def fingerprint(t: Trainer) -> Tensor:
    """Return a digest of the parameters that this rank has, shape [bytes].

    torch's counters of versions don't notice what is written to `.data`, so the memory is read: small tensors are
    copied, of others each row and each column of a table of their words is summed as integers, at 2 to 5 times the
    speed of a norm. A changed value is seen, and so are values that change places or signs.
    """
    own = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in t.module.parameters()]
    return torch.cat([part for tensor in own for part in _digest(tensor)]) if own else torch.zeros(0)


def _digest(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the digest of a tensor in parts of bytes; parts of it may share its memory."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    each = 8 // flat.element_size()  # elements of a word
    end = flat.numel() // (each * _ROW) * (each * _ROW)
    rest = flat[end:].view(torch.uint8)
    if not end:
        return (rest,)
    aligned = flat[:end].clone() if flat.storage_offset() % each else flat[:end]
    table = aligned.view(torch.int64).view(-1, _ROW)
    return table.sum(0).view(torch.uint8), table.sum(1).view(torch.uint8), rest


# -- the same on all ranks --------------------------------------------------------------------------------------------


def own_rates(t: Trainer) -> dict[str, str]:
    """Return the hyperparameters of a rank that goes at its own pace: they are those of its newest update."""
    if t.world.size == 1 or t.strategy.dealer is None:
        return {}
    return of_optimizers(t.module, t.optimizers, ())


def compare_ranks(t: Trainer, when: str, before: Mapping[str, str] | None = None) -> None:
    """Refuse ranks on which hooks have changed different things; every rank calls it.

    Args:
        t: the trainer.
        when: for the message.
        before: `own_rates` before the hooks; None where ranks may have others by now.

    Raises:
        RanksDisagree: on every rank; the message has what differs, by rank.
    """
    if t.world.size == 1:
        return
    changed: set[str] = set()
    if before is not None and t.strategy.dealer is not None:
        now = own_rates(t)
        own = [name for name, value in now.items() if before.get(name) != value]
        changed = {name for names in t.world.gather_objects(own) for name in names}
    compare(t.world, of_hooks(t, changed), when, CHANGE_ALIKE)


def compare_weights(t: Trainer) -> None:
    """Refuse ranks that hold other weights, where all hold the same after each step; every rank calls it.

    Ranks on other hardware may round otherwise, so only what is clearly more than that is an error.

    Raises:
        RanksDisagree: on every rank; the message names the parameters.
    """
    traits = t.strategy.traits
    if t.world.size == 1 or traits.sharded or not traits.synchronous or t.strategy.weights_brought is not None:
        return
    own = hashlib.blake2b(fingerprint(t).cpu().contiguous().numpy().data, digest_size=16).hexdigest()
    if len(set(t.world.gather_objects(own))) > 1:
        far = {f"weights of {name}": _distance(t, one) for name, one in t.module.named_parameters()}
        if t.memory_checkpointer is not None and any(t.world.gather_objects([*far.values()].count(FAR))):
            t.memory_checkpointer.forget()  # nobody goes on from what is wrong
        compare(t.world, far, f"after step {t.state.step}", CHANGE_ALIKE)


def _distance(t: Trainer, parameter: Tensor) -> str:
    """Return how far a parameter is from that of rank 0, in words; every rank calls it."""
    first = t.world.broadcast(parameter.detach().clone())
    if not first.numel():
        return "alike"
    rounding = max(ROUNDING, 32 * torch.finfo(first.dtype).eps if first.dtype.is_floating_point else 0.0)
    far = float((parameter.detach() - first).abs().max()) > rounding * float(first.abs().max())
    return FAR if far else "alike"


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

    @functools.wraps(inner)
    def guarded(*args: Any) -> Any:
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
    before = fingerprint(t)
    yield
    # A checkpoint that is saved in a hook brings the newest weights.
    if t.strategy.weights_brought == brought and not torch.equal(before, fingerprint(t)):
        raise ValueError(
            f"{name} changes weights, and here the servers have them: what a worker changes is lost. Change them in "
            "on_fit_start, or in the loss, or take parameter_server with optimizer='worker' and mode='sync', or "
            "strategy=ddp"
        )


# -- hooks of some ranks only -----------------------------------------------------------------------------------------


class HookEffects:
    """Weights, hyperparameters, limits and frozen parameters, before hooks that some ranks don't call."""

    def __init__(self, t: Trainer) -> None:
        self._settings, self._weights = _settings(t), fingerprint(t)

    def changes(self, t: Trainer) -> str:
        """Return what is different now, for `take`; "" for nothing."""
        settings = _settings(t)
        weights = not torch.equal(self._weights, fingerprint(t))
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
        "limits": {name: getattr(t, name) for name in LIMITS},
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
        changes: see `HookEffects`; the same on all ranks that called them.
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
    for name, value in told["limits"].items():
        setattr(t, name, value)
    trained = set(told["trained"])
    for name, parameter in t.module.named_parameters():
        if parameter.requires_grad != (name in trained):
            parameter.requires_grad_(name in trained)
