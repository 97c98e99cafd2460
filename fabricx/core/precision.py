"""Dtypes of storage and computation: 32-bit, true 16- or 64-bit, and mixed precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fabricx.core.tensors.transfer import to_dtype
from fabricx.errors import did_you_mean

_ALIASES: Final = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
KNOWN: Final = ("32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
_KEPT: Final = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class Precision:
    """Storage and computation in 32-bit floats; subclasses implement the other precisions.

    Args:
        name: full name, as in `KNOWN`.
    """

    scaler: torch.amp.GradScaler | None = None  # of the loss, with 16-bit floats

    def __init__(self, name: str = "32-true") -> None:
        self.name = name

    def convert(self, module: nn.Module) -> None:
        """Convert weights and buffers to the storage dtype, in place.

        Args:
            module: module to convert.
        """

    def convert_batch(self) -> Callable[[Any], Any] | None:
        """Return a function that converts a batch to the dtype of the weights; None without a conversion."""
        return None

    def wrap_step(self, step: Callable[..., Any], *, updates_weights: bool = False) -> Callable[..., Any]:
        """Return a step that computes in this precision.

        Args:
            step: step of the module.
            updates_weights: the step may change weights between two forwards (manual optimization).
        """
        return step

    def begin(self) -> None:
        """Forget which gradients have no loss scale: those of the next backward have it."""

    def scale(self, loss: Tensor, *, between_steps: bool = False) -> Tensor:
        """Return the loss, scaled so that small gradients do not underflow.

        Args:
            loss: shape [].
            between_steps: other optimizers may step afterwards with gradients of earlier losses (manual optimization).
        """
        return loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo `scale` on the gradients.

        Args:
            optimizer: optimizer of these gradients.
        """

    def step(self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None = None) -> bool:
        """Update the weights by `step(optimizer, closure)`, unless gradients overflowed.

        Args:
            optimizer: optimizer to step.
            step: `optimizer_step` of the strategy.
            closure: recomputes the loss; None without.

        Returns:
            whether the weights were updated.
        """
        step(optimizer, closure)
        return True

    def updated(self, optimizer: Optimizer | None = None) -> None:
        """Adapt the loss scale after steps.

        Args:
            optimizer: the only optimizer that has stepped; None: all have.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state.

        Args:
            state: result of `state_dict`.
        """


@final
class TruePrecision(Precision):
    """Weights, batches and computation in the same dtype.

    Args:
        name: "64-true", "bf16-true" or "16-true".
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.dtype = _KEPT[name]

    def convert(self, module: nn.Module) -> None:
        module._apply(lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor)  # not complex

    def convert_batch(self) -> Callable[[Any], Any]:
        return lambda batch: to_dtype(batch, self.dtype)

    def wrap_step(self, step: Callable[..., Any], *, updates_weights: bool = False) -> Callable[..., Any]:
        def with_default_dtype(*args: Any) -> Any:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)  # for tensors that the step creates
            try:
                return step(*args)
            finally:
                torch.set_default_dtype(before)

        return with_default_dtype


@final
class MixedPrecision(Precision):
    """32-bit weights; matrix products and convolutions in 16 bits (Micikevicius et al., ICLR 2018).

    With 16-bit floats ("16-mixed", CUDA) the loss is scaled so that small gradients do not underflow; a step whose
    gradients overflow is skipped, and the scale reduced. "bf16-mixed" does not need loss scaling.

    Args:
        name: "16-mixed" or "bf16-mixed".
        device_type: this rank's device type, such as "cuda".
    """

    def __init__(self, name: str, device_type: str) -> None:
        super().__init__(name)
        self.dtype = torch.float16 if name == "16-mixed" else torch.bfloat16
        self._device_type = device_type
        self.scaler = torch.amp.GradScaler(device_type) if name == "16-mixed" else None
        self._unscaled: dict[int, Optimizer] = {}

    def wrap_step(self, step: Callable[..., Any], *, updates_weights: bool = False) -> Callable[..., Any]:
        def under_autocast(*args: Any) -> Any:
            # Autocast caches a 16-bit copy of each weight for the whole context: a forward after an update would use
            # the old weights, and a forward after FSDP's backward would yield no gradient.
            with torch.autocast(self._device_type, dtype=self.dtype, cache_enabled=not updates_weights):
                return step(*args)

        return under_autocast

    def begin(self) -> None:
        for key in self._unscaled:
            if self._states[key]["stage"] is not OptState.STEPPED:
                del self._states[key]
        self._unscaled.clear()

    def scale(self, loss: Tensor, *, between_steps: bool = False) -> Tensor:
        if self.scaler is None:
            return loss
        if not between_steps:
            self.begin()
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        if self.scaler is None or id(optimizer) in self._unscaled:
            return
        keys = {id(parameter) for parameter in _parameters(optimizer)}
        others = [other for other in self._unscaled.values() if not keys.isdisjoint(map(id, _parameters(other)))]
        done = {id(parameter) for other in others for parameter in _parameters(other)}
        shared = [(p, p.grad) for p in _parameters(optimizer) if id(p) in done]
        for parameter, _ in shared:
            parameter.grad = None
        self.scaler.unscale_(optimizer)
        for parameter, gradient in shared:
            parameter.grad = gradient
        overflows = self._states[id(optimizer)]["found_inf_per_device"]
        for other in others:
            for device, overflow in self._states[id(other)]["found_inf_per_device"].items():
                overflows[device] = torch.maximum(overflows[device], overflow) if device in overflows else overflow
        self._unscaled[id(optimizer)] = optimizer

    def step(self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None = None) -> bool:
        if self.scaler is None:
            return super().step(optimizer, step, closure)
        if closure is not None:  # the scaler has to see the gradients before the optimizer
            closure()
        self.unscale(optimizer)
        done: list[bool] = []

        class Stepper:  # GradScaler calls its `step` if the gradients are finite
            param_groups = optimizer.param_groups

            def step(self) -> None:
                step(optimizer, None)
                done.append(True)

        stepper = Stepper()
        states = self._states
        states[id(stepper)] = states[id(optimizer)]
        self.scaler.step(stepper)  # type: ignore[arg-type]
        states.pop(id(stepper), None)
        return bool(done)

    def updated(self, optimizer: Optimizer | None = None) -> None:
        if self.scaler is None:
            return
        if optimizer is None:
            self._unscaled.clear()
        else:
            self._unscaled.pop(id(optimizer), None)
        kept = {key: self._states.pop(key) for key in self._unscaled}
        self.scaler.update()  # clears the states
        self._states.update(kept)

    @property
    def _states(self) -> dict[int, dict[str, Any]]:
        """States of the scaler since its last update, by the ids of optimizers."""
        assert self.scaler is not None
        return self.scaler._per_optimizer_states

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_precision(precision: str | int) -> str:
    """Return the full name of a precision.

    Args:
        precision: a full name, or "32", "64", "16", "bf16" with the meaning of Lightning.

    Raises:
        ValueError: the precision is unknown.
    """
    name = _ALIASES.get(str(precision), str(precision))
    if name not in KNOWN:
        raise ValueError(
            f"precision={precision!r} isn't known.{did_you_mean(name, KNOWN)}\n  known: {', '.join(KNOWN)}"
        )
    return name


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype of floating-point weights.

    Args:
        name: full name of a precision.
    """
    return _KEPT.get(name, torch.float32)


def make_precision(name: str, device: torch.device) -> Precision:
    """Create the precision plugin of a device.

    Args:
        name: full name, from `check_precision`. On a CPU "16-mixed" is "bf16-mixed", with a warning: 16-bit floats are
            too slow and too narrow there.
        device: this rank's device.

    Raises:
        ValueError: "16-mixed" on a device that is neither CUDA nor a CPU.
    """
    if name == "16-mixed" and device.type == "cpu":
        name = "bf16-mixed"
        warnings.warn("precision='16-mixed' needs CUDA, and this device is a CPU: it is 'bf16-mixed'", stacklevel=2)
    if name == "16-mixed" and device.type != "cuda":
        raise ValueError(f"precision='16-mixed' needs a CUDA device, and this is {device.type}; use 'bf16-mixed'")
    if name in _KEPT:
        return TruePrecision(name)
    return MixedPrecision(name, device.type) if name.endswith("mixed") else Precision(name)
