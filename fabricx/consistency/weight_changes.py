"""Detects changes of weights by the step, in runs that would lose them or make them several times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from fabricx.core.module_state.buffers import persistent_buffers

_ROW: Final = 4093  # 8-byte words; prime, so that even strides and even counts of changed signs do not cancel


class _State(NamedTuple):
    parameter: Tensor
    address: int
    version: int
    values: Tensor | None


@final
class WeightChanges:
    """Compares parameters with their state when this object was made.

    Args:
        parameters: in any order.
        values: compare values, too, which reads all parameters: torch's version counters miss writes to `.data`.
    """

    def __init__(self, parameters: Iterable[Tensor], *, values: bool) -> None:
        self._before = [_state(parameter, values=values) for parameter in parameters]

    def first(self, parameters: Iterable[Tensor]) -> int | None:
        """Return the position of the first parameter that was changed, replaced or moved; None without a change.

        Args:
            parameters: the parameters now, in the same order.

        >>> weights = [torch.ones(2), torch.ones(3)]
        >>> changes = WeightChanges(weights, values=True)
        >>> changes.first(weights)
        >>> _ = weights[1].data.mul_(2)
        >>> changes.first(weights)
        1
        """
        for number, (before, now) in enumerate(zip_longest(self._before, parameters)):
            if before is None or now is None:
                return number
            after = _state(now, values=before.values is not None)
            if now is not before.parameter or after[1:3] != before[1:3]:
                return number
            if before.values is not None and after.values is not None and not torch.equal(after.values, before.values):
                return number
        return None

    def first_name(self, module: nn.Module) -> str | None:
        """Return the name of the first parameter of a module that was changed, replaced or added; None if none.

        Args:
            module: the module of the parameters.
        """
        changed = self.first(module.parameters())
        names = [name for name, _ in module.named_parameters()]
        return None if changed is None else names[changed] if changed < len(names) else "the number of parameters"


def _state(parameter: Tensor, *, values: bool) -> _State:
    local = getattr(parameter, "_local_tensor", parameter)
    version = 0 if local.is_inference() else local._version
    return _State(parameter, local.data_ptr(), version, digest([local.detach()]) if values else None)


@final
class SavedValues:
    """Digests of the parameters and persistent buffers of a module, to find which values have changed since.

    Args:
        module: the module.

    >>> layer = nn.BatchNorm1d(2)
    >>> saved = SavedValues(layer)
    >>> saved.changed()
    >>> _ = layer(torch.randn(3, 2))
    >>> saved.changed()
    'running_mean'
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._digests = _digests(module)

    def changed(self) -> str | None:
        """Return the name of the first value that was changed, added or removed; None without a change."""
        now = _digests(self._module)
        for name in {**self._digests, **now}:
            before, after = self._digests.get(name), now.get(name)
            if before is None or after is None or not torch.equal(before, after):
                return name
        return None


def _digests(module: nn.Module) -> dict[str, Tensor]:
    values = [*module.named_parameters(), *persistent_buffers(module)]
    return {name: digest([value.detach()]).clone() for name, value in values}


def refused_change(name: str) -> str:
    """Return the message for a change of weights by the step of a module that ranks divide.

    Args:
        name: name of the parameter.
    """
    return (
        f"training_step changes {name}, and ranks hold parts of the module, which a trial run and each microbatch of a "
        "pipeline would change again: change weights in on_train_batch_start, on_before_optimizer_step or "
        "on_train_batch_end, compute them from parameters in each forward, or use strategy=ddp"
    )


@contextmanager
def unchanged_weights(module: nn.Module) -> Iterator[None]:
    """Context of a trial run of a whole module that ranks will divide; its step may not change weights.

    Args:
        module: the module.

    Raises:
        ValueError: a parameter was changed.
    """
    changes = WeightChanges(module.parameters(), values=True)
    yield
    if (changed := changes.first_name(module)) is not None:
        raise ValueError(refused_change(changed))


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return a digest of the values of tensors, shape [bytes].

    Small tensors are copied; larger tensors are viewed as a table of 8-byte words, whose rows and columns are summed as
    integers, 2 to 5 times as fast as a norm. The digest changes if a value changes, and if values swap positions or
    signs.

    Args:
        tensors: all on the same device.
    """
    parts = [part for tensor in tensors for part in _digest(tensor)]
    return torch.cat(parts) if parts else torch.zeros(0)


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
