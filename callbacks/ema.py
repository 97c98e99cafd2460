"""An exponential moving average of the weights, which often generalises better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from fabricx.callback import Callback

if TYPE_CHECKING:
    from fabricx.module import Module
    from fabricx.trainer import Trainer


@final
class EMA(Callback):
    """Keep a moving average of the weights (Polyak and Juditsky, 1992).

    At each update, average = decay * average + (1 - decay) * weights.

    While a fit validates, the module holds the averages. Checkpoints hold them as the module's weights, so that
    whoever loads one gets them; the weights that training goes on with are in this callback's state beside them.
    After training the module holds the averages too, unless `apply_at_end` is False.

    Args:
        decay: how much of the average stays at each update, from 0 to 1.
        every_n_steps: update after every so many weight updates.
        use_buffers: also average buffers of floating point, such as the statistics of batch normalisation; the
            module's own ones are used otherwise.
        start_step: until this many weight updates the average is a copy of the weights.
        validate_with_ema: validate the averages rather than the weights.
        apply_at_end: leave the averages in the module when training ends.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        decay: float = 0.999,
        every_n_steps: int = 1,
        use_buffers: bool = False,
        start_step: int = 0,
        validate_with_ema: bool = True,
        apply_at_end: bool = True,
    ) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"EMA(decay={decay}): it has to be from 0 (no averaging) to 1 (no change at all)")
        if every_n_steps < 1 or start_step < 0:
            raise ValueError(f"EMA(every_n_steps={every_n_steps}, start_step={start_step}): at least 1, and at least 0")
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.use_buffers = use_buffers
        self.start_step = start_step
        self.validate_with_ema = validate_with_ema
        self.apply_at_end = apply_at_end
        self.updates = 0
        self.averages: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}  # the weights, while the module holds the averages
        self._tensors: list[Tensor] = []  # the module's own tensors, in the order of `averages`; empty between runs
        self._step_seen = 0

    # -- averaging ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit":  # of whatever module; a checkpoint is restored later
            self.averages, self._live, self.updates = {}, {}, 0

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        tensors = self._averaged(module)
        if self.averages.keys() != tensors.keys():
            self.averages, self._live = {name: _precise(tensor) for name, tensor in tensors.items()}, {}
        self.averages = {name: self.averages[name].to(tensor.device) for name, tensor in tensors.items()}
        self._tensors = [tensor.detach() for tensor in tensors.values()]
        self._step_seen = trainer.global_step
        if self._live:  # a checkpoint brought the averages as the module's weights
            self._swap_out()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self._step_seen:  # in the middle of an accumulation window
            return
        self._step_seen = step
        if step % self.every_n_steps == 0:
            self._update(step)

    @torch.no_grad()
    def _update(self, step: int) -> None:
        averages, weights = _local(self.averages.values()), _local(self._tensors)
        if not averages:
            return
        if step <= self.start_step:
            torch._foreach_copy_(averages, weights)
            return
        weights = [tensor.to(average.dtype) for tensor, average in zip(weights, averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay)
        self.updates += 1

    def _averaged(self, module: Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
        if self.use_buffers:
            found |= {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        return found

    # -- changing places: by value, since optimizers and compiled code hold on to the module's tensors ----------

    @torch.no_grad()
    def _swap_in(self) -> None:
        """Let the module hold the averages."""
        if self._tensors and not self._live:
            self._live = {name: t.clone() for name, t in zip(self.averages, self._tensors, strict=True)}
            torch._foreach_copy_(_local(self._tensors), _local(self.averages.values()))

    @torch.no_grad()
    def _swap_out(self) -> None:
        """Let the module hold its own weights."""
        if self._tensors and self._live:
            torch._foreach_copy_(_local(self._tensors), _local(self._live[name] for name in self.averages))
            self._live = {}

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self.validate_with_ema:
            self._swap_in()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._swap_out()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if self.apply_at_end:
            self._swap_in()

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._swap_out()
        self._tensors = []

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._tensors, self._live = [], {}

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        if not self._tensors or self._live:  # between runs, or the module holds the averages already
            return
        weights = checkpoint["strategy"]["module"]
        mine = checkpoint.get("callbacks", {}).get(self.state_key)  # not there if only weights are saved
        for name, alias in _aliases(module, self.averages):
            if alias in weights:
                if mine is not None:
                    mine["live"][name] = weights[alias]
                weights[alias] = self.averages[name].to(weights[alias].dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self.averages), "live": dict(self._live), "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = dict(state_dict["averages"])
        self._live = dict(state_dict["live"])
        self.updates = state_dict["updates"]


def _local(tensors: Iterable[Any]) -> list[Tensor]:
    """Return what this rank holds: its shard, where a tensor is sharded. All that is done here is elementwise."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _precise(tensor: Tensor) -> Tensor:
    """Return a copy that small updates don't vanish in."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32) if half else tensor.detach().clone()


def _aliases(module: Module, averages: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Return (name of the average, name in the module) for every name: tied weights have several."""
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for alias, tensor in named:
        name = first.setdefault(id(tensor), alias)
        if name in averages:
            pairs.append((name, alias))
    return pairs
