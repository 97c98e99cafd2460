"""Joint running statistics of normalisations, if each rank has computed a share of the same steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fabricx.distributed.world import World

_Buffers = tuple[Tensor, Tensor, Tensor]  # running mean and variance, and the number of batches


@dataclass(frozen=True)
class Share:
    """Running statistics of a layer on a rank, and the data behind them since the ranks' statistics were equal.

    Attributes:
        mean, variance: running statistics, shape [channels].
        batches: batches since then.
        elements: values of each channel in these batches, or instances of an instance normalisation; 0 if they were not
            counted (compiled code).
    """

    mean: Tensor
    variance: Tensor
    batches: int
    elements: int = 0


def joint(
    start: tuple[Tensor, Tensor], before: int, shares: Sequence[Share], momentum: float | None, *,
    of_instances: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the running mean and variance of a process that has computed the steps of all ranks.

    A rank's statistics are q start + (1 - q) own, with q = (1 - momentum)^batches. The own means of the ranks are
    weighted by elements. The variance also has the differences between the means of ranks: those of a step (exact for
    one step), and for several steps their expected value, since a mean over steps varies less than that of each step.
    An instance normalisation averages the variances of instances, without the differences between their means.

    Args:
        start: mean and variance that all ranks started from.
        before: batches before the start.
        shares: shares of the ranks.
        momentum: momentum of the layer; None for a cumulative mean.
        of_instances: the layer is an instance normalisation.
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
        if of_instances:
            variance += weight * v
            continue
        averaged = 1 - _concentration(share.batches, momentum)
        variance += weight * (v + (x - mean).square() + v / size * ((1 - weight) * averaged - 1))
    whole = math.inf if math.inf in sizes else sum(counts) / steps
    if math.isfinite(whole) and not of_instances:
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


def _batches(state: Mapping[str, Any]) -> int:
    """Return the batches of a layer since the start."""
    return int(state["now"][2]) - int(state["start"][2])


@final
class JointStatistics:
    """Running statistics of the batch and instance normalisations of a module, which ranks join.

    `num_batches_tracked` of an instance normalisation never changes, so that its batches are counted here.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers: dict[str, Any] = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, (_BatchNorm, _InstanceNorm)) and isinstance(layer.running_mean, Tensor)
        }
        self._elements = dict.fromkeys(self._layers, 0)
        self._batches = dict.fromkeys(self._layers, 0)  # since `remember`
        self._hooks = [
            layer.register_forward_pre_hook(functools.partial(self._count, name))
            for name, layer in self._layers.items()
        ]
        self._start: dict[str, tuple[Tensor, Tensor, int]] = {}
        self.remember()

    def _count(self, name: str, layer: Any, inputs: Any) -> None:
        if not layer.training or torch.compiler.is_compiling():  # a counter would compile each step anew
            return
        self._batches[name] += 1
        values = inputs[0]
        if not isinstance(layer, _InstanceNorm):
            self._elements[name] += values.numel() // values.shape[1]
        else:
            self._elements[name] += 1 if values.dim() == layer._get_no_batch_dim() else values.shape[0]

    def remember(self) -> None:
        """Save the present statistics, equal on all ranks, as the start."""
        self._remember(self._layers)

    def _remember(self, names: Iterable[str]) -> None:
        for name in names:
            self._elements[name] = self._batches[name] = 0
            layer = self._layers[name]
            self._start[name] = layer.running_mean.clone(), layer.running_var.clone(), self._tracked(name)

    def _tracked(self, name: str) -> int:
        layer = self._layers[name]
        return self._batches[name] if isinstance(layer, _InstanceNorm) else int(layer.num_batches_tracked)

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
        states = world.gather_objects(self.state_dict())
        self._write(self._live(), states)
        # Without a batch since the start, the layers may have averages of statistics during a validation.
        self._remember(name for name in self._layers if any(_batches(state[name]) for state in states))

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
            start, now = self._start[name], self._tracked(name)
            # Copies of an instance normalisation have no number: that of its present values has the same effect where
            # all ranks have as many batches.
            then = now if isinstance(self._layers[name], _InstanceNorm) else int(tracked)
            elements = self._elements[name]
            if then != now:  # earlier, with batches of the same size
                elements = elements * (then - start[2]) // max(1, now - start[2])
            state[name] = {"start": list(start), "elements": elements, "now": [mean.cpu(), variance.cpu(), then]}
        return state

    def load_states(self, states: Sequence[Mapping[str, Any]], *, own: bool) -> None:
        """Restore the statistics of this rank (`own`), or the joint statistics of all former ranks.

        Args:
            states: results of `state_dict`.
            own: whether the state is this rank's.
        """
        if not own:
            self._write(self._live(), states)
            self.remember()
            return
        for name, state in states[0].items():
            mean, variance, tracked = state["start"]
            self._start[name] = mean.clone(), variance.clone(), tracked
            self._elements[name] = state["elements"]
            self._batches[name] = state["now"][2] - tracked

    @torch.no_grad()
    def _write(self, buffers: Mapping[str, _Buffers], states: Sequence[Mapping[str, Any]]) -> None:
        for name, (running_mean, running_var, num_batches_tracked) in buffers.items():
            mean, variance, before = states[0][name]["start"]
            shares = [
                Share(own_mean, own_variance, tracked - before, state[name]["elements"])
                for state in states
                for own_mean, own_variance, tracked in [state[name]["now"]]
            ]
            layer = self._layers[name]
            if of_instances := isinstance(layer, _InstanceNorm):
                momentum = layer.momentum or 0.0  # None is 0 in this layer
                if not any(share.batches for share in shares):  # compiled: not counted
                    shares = [replace(share, batches=1) for share in shares]
            else:
                momentum = layer.momentum
                num_batches_tracked.fill_(max(state[name]["now"][2] for state in states))
            joined = joint((mean.cpu(), variance.cpu()), before, shares, momentum, of_instances=of_instances)
            running_mean.copy_(joined[0])
            running_var.copy_(joined[1])

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
