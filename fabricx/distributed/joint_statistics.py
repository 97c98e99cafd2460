"""Joint running statistics of batch normalisation, if each rank has computed a share of the same steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fabricx.distributed.world import World

_Buffers = tuple[Tensor, Tensor, Tensor]  # running mean and variance, and the number of batches


@dataclass(frozen=True)
class Share:
    """Running statistics of a layer on a rank, and the data behind them since the ranks' statistics were equal.

    Attributes:
        mean, variance: running statistics, shape [channels].
        batches: batches since then.
        elements: values of each channel in these batches; 0 if they were not counted (compiled code).
    """

    mean: Tensor
    variance: Tensor
    batches: int
    elements: int = 0


def joint(
    start: tuple[Tensor, Tensor], before: int, shares: Sequence[Share], momentum: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the running mean and variance of a process that has computed the steps of all ranks.

    A rank's statistics are q start + (1 - q) own, with q = (1 - momentum)^batches. The own means of the ranks are
    weighted by elements. The variance also has the differences between the means of ranks: those of a step (exact for
    one step), and for several steps their expected value, since a mean over steps varies less than that of each step.

    Args:
        start: mean and variance that all ranks started from.
        before: batches before the start.
        shares: shares of the ranks.
        momentum: momentum of the layer; None for a cumulative mean.
    """
    steps = max(share.batches for share in shares)
    first = shares[0]
    equal = all(torch.equal(s.mean, first.mean) and torch.equal(s.variance, first.variance) for s in shares)
    if steps == 0 or momentum == 0.0 or equal:  # nothing computed, or synchronised by the layers
        return first.mean, first.variance
    used = [share for share in shares if share.batches]
    sizes = [share.elements / share.batches or math.inf for share in used]  # values of a batch
    counts = [share.batches if math.inf in sizes else share.elements for share in used]
    weights = [count / sum(counts) for count in counts]
    kept = [_kept(before, share.batches, momentum) for share in used]
    begun = start[0].double(), start[1].double()
    means = [(share.mean.double() - q * begun[0]) / (1 - q) for share, q in zip(used, kept, strict=True)]
    variances = [(share.variance.double() - q * begun[1]) / (1 - q) for share, q in zip(used, kept, strict=True)]
    mean = sum((w * x for w, x in zip(weights, means, strict=True)), torch.zeros_like(begun[0]))
    variance = torch.zeros_like(mean)
    for weight, x, v, size, share in zip(weights, means, variances, sizes, used, strict=True):
        averaged = 1 - _concentration(share.batches, momentum)
        variance += weight * (v + (x - mean).square() + v / size * ((1 - weight) * averaged - 1))
    whole = math.inf if math.inf in sizes else sum(counts) / steps
    if math.isfinite(whole):
        variance *= whole / (whole - 1)
    q = _kept(before, steps, momentum)
    joined = q * begun[0] + (1 - q) * mean, q * begun[1] + (1 - q) * variance
    return joined[0].to(first.mean.dtype), joined[1].to(first.variance.dtype)


def _kept(before: int, batches: int, momentum: float | None) -> float:
    """Return the coefficient of the start in statistics after some batches."""
    return before / (before + batches) if momentum is None else float((1.0 - momentum) ** batches)


def _concentration(batches: int, momentum: float | None) -> float:
    """Return the sum of the squared weights of the batches in their mean: 1 for a batch, 1 / batches if equal."""
    if momentum is None:
        return 1.0 / batches
    rest = 1.0 - momentum
    return float(momentum**2 * (1.0 - rest ** (2 * batches)) / (1.0 - rest**2) / (1.0 - rest**batches) ** 2)


def _of_layer(name: str, buffers: Mapping[str, Tensor]) -> _Buffers | None:
    names = [f"{name}.{suffix}".removeprefix(".") for suffix in ("running_mean", "running_var", "num_batches_tracked")]
    if any(suffix not in buffers for suffix in names):  # not saved
        return None
    mean, variance, tracked = (buffers[suffix] for suffix in names)
    return mean, variance, tracked


@final
class JointStatistics:
    """Running statistics of the batch normalisations of a module, which ranks join.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers: dict[str, Any] = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and isinstance(layer.running_mean, Tensor)
        }
        self._elements = dict.fromkeys(self._layers, 0)
        self._hooks = [
            layer.register_forward_pre_hook(functools.partial(self._count, name))
            for name, layer in self._layers.items()
        ]
        self._start: dict[str, tuple[Tensor, Tensor, int]] = {}
        self.remember()

    def _count(self, name: str, layer: nn.Module, inputs: Any) -> None:
        if layer.training and not torch.compiler.is_compiling():  # a counter would compile each step anew
            self._elements[name] += inputs[0].numel() // inputs[0].shape[1]

    def remember(self) -> None:
        """Save the present statistics, equal on all ranks, as the start."""
        self._elements = dict.fromkeys(self._layers, 0)
        self._start = {
            name: (layer.running_mean.clone(), layer.running_var.clone(), int(layer.num_batches_tracked))
            for name, layer in self._layers.items()
        }

    def join(self, world: World, copies: Mapping[str, Tensor] | None = None) -> None:
        """Replace the statistics of all ranks by the joint statistics; collective.

        Args:
            world: the ranks.
            copies: earlier statistics, by names of buffers of the module, which are joined, too.
        """
        if not self._layers:
            return
        earlier = {
            name: statistics for name in self._layers if (statistics := _of_layer(name, copies or {})) is not None
        }
        if earlier:
            self._write(earlier, world.gather_objects(self._state(earlier)))
        self._set(world.gather_objects(self.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's statistics and their start."""
        return self._state(self._live())

    def _live(self) -> dict[str, _Buffers]:
        return {
            name: (layer.running_mean, layer.running_var, layer.num_batches_tracked)
            for name, layer in self._layers.items()
        }

    def _state(self, buffers: Mapping[str, _Buffers]) -> dict[str, Any]:
        state = {}
        for name, (mean, variance, tracked) in buffers.items():
            start = self._start[name]
            batches, counted = int(tracked) - start[2], int(self._layers[name].num_batches_tracked) - start[2]
            elements = self._elements[name]
            if batches != counted:  # earlier, with batches of the same size
                elements = elements * batches // max(1, counted)
            state[name] = {
                "start": list(start),
                "elements": elements,
                "now": [mean.cpu(), variance.cpu(), int(tracked)],
            }
        return state

    def load_states(self, states: Sequence[Mapping[str, Any]], *, own: bool) -> None:
        """Restore the statistics of this rank (`own`), or the joint statistics of all former ranks.

        Args:
            states: results of `state_dict`.
            own: whether the state is this rank's.
        """
        if not own:
            self._set(states)
            return
        for name, state in states[0].items():
            mean, variance, tracked = state["start"]
            self._start[name] = mean.clone(), variance.clone(), tracked
            self._elements[name] = state["elements"]

    def _set(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._write(self._live(), states)
        self.remember()

    @torch.no_grad()
    def _write(self, buffers: Mapping[str, _Buffers], states: Sequence[Mapping[str, Any]]) -> None:
        for name, (running_mean, running_var, num_batches_tracked) in buffers.items():
            mean, variance, before = states[0][name]["start"]
            shares = [
                Share(own_mean, own_variance, tracked - before, state[name]["elements"])
                for state in states
                for own_mean, own_variance, tracked in [state[name]["now"]]
            ]
            joined = joint((mean.cpu(), variance.cpu()), before, shares, self._layers[name].momentum)
            running_mean.copy_(joined[0])
            running_var.copy_(joined[1])
            num_batches_tracked.fill_(max(state[name]["now"][2] for state in states))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
