"""Checks that hooks change a model on all ranks in the same way, and only weights that the ranks own.

Two cases would otherwise be silent errors. If servers step, weights that a worker changes are overwritten by the next
weights of the servers. And a rank without a sample of a batch does not call the hooks of that batch, so it would
continue with other weights and learning rates than the ranks that called them.
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
ROUNDING: Final = 1e-3  # tolerated difference of weights between ranks, relative to a parameter's largest value
_ROW: Final = 4093  # 8-byte words; prime, so that even strides and even counts of changed signs do not cancel


def fingerprint(trainer: Trainer) -> Tensor:
    """Return a digest of this rank's parameters, shape [bytes].

    torch's version counters miss writes to `.data`, so the memory is read: small tensors are copied; larger tensors are
    viewed as a table of 8-byte words, whose rows and columns are summed as integers, 2 to 5 times as fast as a norm.
    The digest changes if a value changes, and if values swap positions or signs.

    Args:
        trainer: with a module.
    """
    tensors = [getattr(parameter, "_local_tensor", parameter).detach() for parameter in trainer.module.parameters()]
    return torch.cat([part for tensor in tensors for part in _digest(tensor)]) if tensors else torch.zeros(0)


def _digest(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the digest of a tensor as byte tensors, which may share its memory."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    elements = 8 // flat.element_size()  # per word
    end = flat.numel() // (elements * _ROW) * (elements * _ROW)
    rest = flat[end:].view(torch.uint8)
    if not end:
        return (rest,)
    aligned = flat[:end].clone() if flat.storage_offset() % elements else flat[:end]
    table = aligned.view(torch.int64).view(-1, _ROW)
    return table.sum(0).view(torch.uint8), table.sum(1).view(torch.uint8), rest


# -- the same on all ranks --------------------------------------------------------------------------------------------


def local_hyperparameters(trainer: Trainer) -> dict[str, str]:
    """Return the hyperparameters of a rank at its own pace, which are those of its newest update; else {}.

    Args:
        trainer: of a fit.
    """
    if trainer.world.size == 1 or trainer.strategy.dealer is None:
        return {}
    return of_optimizers(trainer.module, trainer.optimizers, ())


def compare_ranks(trainer: Trainer, when: str, before: Mapping[str, str] | None = None) -> None:
    """Raise an error if hooks have made different changes on ranks; every rank calls it.

    Args:
        trainer: of a fit.
        when: moment of the comparison, for the message.
        before: `local_hyperparameters` before the hooks; None if ranks may have other hyperparameters by now.

    Raises:
        RanksDisagree: on every rank; the message lists the differences by rank.
    """
    if trainer.world.size == 1:
        return
    changed: set[str] = set()
    if before is not None and trainer.strategy.dealer is not None:
        now = local_hyperparameters(trainer)
        names = [name for name, value in now.items() if before.get(name) != value]
        changed = {name for others in trainer.world.gather_objects(names) for name in others}
    compare(trainer.world, of_hooks(trainer, changed), when, CHANGE_ALIKE)


def compare_weights(trainer: Trainer) -> None:
    """Raise an error if ranks hold different weights in synchronous training; every rank calls it.

    Ranks on different hardware may round differently, so differences up to `ROUNDING` are tolerated.

    Args:
        trainer: of a fit.

    Raises:
        RanksDisagree: on every rank; the message names the parameters.
    """
    traits = trainer.strategy.traits
    if (
        trainer.world.size == 1
        or traits.sharded
        or not traits.synchronous
        or trainer.strategy.weights_brought is not None
    ):
        return
    digest = hashlib.blake2b(fingerprint(trainer).cpu().contiguous().numpy().data, digest_size=16).hexdigest()
    if len(set(trainer.world.gather_objects(digest))) > 1:
        far = {f"weights of {name}": _distance(trainer, p) for name, p in trainer.module.named_parameters()}
        if trainer.fault_tolerance.memory is not None and any(trainer.world.gather_objects([*far.values()].count(FAR))):
            trainer.fault_tolerance.memory.forget()  # its copies are inconsistent
        compare(trainer.world, far, f"after step {trainer.state.step}", CHANGE_ALIKE)


def _distance(trainer: Trainer, parameter: Tensor) -> str:
    """Return whether a parameter differs from that of rank 0, as a text; every rank calls it."""
    first = trainer.world.broadcast(parameter.detach().clone())
    if not first.numel():
        return "alike"
    rounding = max(ROUNDING, 32 * torch.finfo(first.dtype).eps if first.dtype.is_floating_point else 0.0)
    far = float((parameter.detach() - first).abs().max()) > rounding * float(first.abs().max())
    return FAR if far else "alike"


# -- weights that servers step ----------------------------------------------------------------------------------------


def guard_weights(trainer: Trainer) -> None:
    """Make users' hooks raise an error if they change weights that the servers own.

    Args:
        trainer: of a fit; its hooks are wrapped.
    """
    if trainer.strategy.weights_brought is None:
        return
    # In shared memory, another worker may step while this worker calls its hooks for the second optimizer.
    apart = trainer.strategy.servers or len(trainer.optimizers) == 1
    for name in _GUARDED if apart else set(_GUARDED) - {"on_before_optimizer_step"}:
        hook = getattr(trainer.hooks, name)
        setattr(
            trainer.hooks,
            name,
            tuple(function if _is_ours(function) else _guarded(trainer, function) for function in hook),
        )


def _is_ours(function: Callable[..., Any]) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__module__", "")).startswith("fabricx.")


def _guarded(trainer: Trainer, function: Callable[..., Any]) -> Callable[..., Any]:
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__qualname__", repr(inner))

    @functools.wraps(inner)
    def guarded(*args: Any) -> Any:
        with unchanged(trainer, name):
            return function(*args)

    return guarded


@contextmanager
def unchanged(trainer: Trainer, name: str) -> Iterator[None]:
    """Raise an error if the code inside changes weights that the servers own.

    Args:
        trainer: of a fit.
        name: of the code, for the message.

    Raises:
        ValueError: weights have changed.
    """
    brought = trainer.strategy.weights_brought
    before = fingerprint(trainer)
    yield
    # A checkpoint that is saved in a hook fetches the newest weights.
    if trainer.strategy.weights_brought == brought and not torch.equal(before, fingerprint(trainer)):
        raise ValueError(
            f"{name} changes weights, and the servers own them: changes of a worker are lost. Change them in "
            "on_fit_start, or in the loss, or use parameter_server with optimizer='worker' and mode='sync', or "
            "strategy=ddp"
        )


# -- hooks of some ranks only -----------------------------------------------------------------------------------------


class HookEffects:
    """Snapshot of weights, hyperparameters, limits and frozen parameters before hooks that some ranks don't call.

    Args:
        trainer: of a fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._settings, self._weights = _settings(trainer), fingerprint(trainer)

    def changes(self, trainer: Trainer) -> str:
        """Return the changes since the snapshot, for `apply_changes`; "" for none.

        Args:
            trainer: of a fit.
        """
        settings = _settings(trainer)
        weights = not torch.equal(self._weights, fingerprint(trainer))
        if settings == self._settings and not weights:
            return ""
        return json.dumps({**settings, "weights": weights})

    def check(self, trainer: Trainer) -> None:
        """Raise an error if anything has changed.

        Args:
            trainer: of a fit.

        Raises:
            RanksDisagree: weights or hyperparameters have changed.
        """
        if self.changes(trainer):
            raise RanksDisagree(
                f"step {trainer.state.step}: on_after_backward changed weights or hyperparameters in a batch of "
                "which some ranks have no sample, so they don't call it. Change them in "
                "on_train_batch_end or on_before_optimizer_step"
            )


def _settings(trainer: Trainer) -> dict[str, Any]:
    return {
        "groups": [[_values(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        "limits": {name: getattr(trainer, name) for name in LIMITS},
        "trained": [name for name, parameter in trainer.module.named_parameters() if parameter.requires_grad],
    }


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters that JSON can represent."""
    plain = {name: value.item() if _is_number(value) else value for name, value in group.items() if name != "params"}
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in plain.items() if isinstance(value, kinds)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def apply_changes(trainer: Trainer, changes: str, *, idle: bool) -> None:
    """Apply the changes by hooks of other ranks; every rank calls it if weights have changed.

    Args:
        trainer: of a fit.
        changes: result of `HookEffects.changes`, the same on all ranks that called the hooks.
        idle: this rank has called no hooks.

    Raises:
        RanksDisagree: weights have changed, and the ranks' weights differ by design (sharded, asynchronous or servers).
    """
    state = json.loads(changes)
    if idle:
        _apply_settings(trainer, state)
    if not state["weights"]:
        return
    traits = trainer.strategy.traits
    if traits.sharded or not traits.synchronous or trainer.strategy.weights_brought is not None:
        raise RanksDisagree(
            f"step {trainer.state.step}: on_train_batch_start or on_train_batch_end changed weights at a batch of "
            "which some ranks have no sample, so they don't call it, and their part of the weights would not change. "
            "Change weights in on_train_epoch_end or on_before_optimizer_step, which all ranks call, let each "
            "global batch be whole (drop_last=True), or use strategy=ddp"
        )
    has = torch.tensor([trainer.world.size if idle else trainer.world.rank], device=trainer.world.device)
    source = int(trainer.world.all_reduce(has, "min"))
    for parameter in trainer.module.parameters():
        trainer.world.broadcast(parameter.data, source)


def _apply_settings(trainer: Trainer, state: dict[str, Any]) -> None:
    for optimizer, groups in zip(trainer.optimizers, state["groups"], strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            for name, value in values.items():
                if _is_number(group.get(name)):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
    for name, value in state["limits"].items():
        setattr(trainer, name, value)
    trained = set(state["trained"])
    for name, parameter in trainer.module.named_parameters():
        if parameter.requires_grad != (name in trained):
            parameter.requires_grad_(name in trained)
