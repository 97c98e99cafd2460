"""Exponential moving average of the weights, which often generalises better than the weights of the last step."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any, final

import torch

from fabricx.callbacks.averages import Averages, averageable, local
from fabricx.core.strategy_parts import HasServers, as_part
from fabricx.core.strategy_support.averaging import AverageRule

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class EMA(Averages):
    """Maintain an exponential moving average of the weights (Polyak and Juditsky, 1992).

    At each update, average = decay * average + (1 - decay) * weights. The strategy determines the weights:

    - Strategies whose ranks hold equal weights after an update, including `fsdp`: each rank averages these weights (its
      shard of them).
    - Strategies whose servers step the optimizer, so that a rank does not see the weights of every update
      (`mode="bounded"`, `mode="async"`, `async_sgd`, sparse embeddings, `pull_compression`): the servers average the
      weights of every update, in order. The servers need memory for a second copy of the weights.
    - Strategies whose ranks train separate weights (`local_sgd`, `async_sgd` with `every`): each rank averages the
      weights that it trains. The mean over ranks is computed for validation, for checkpoints and at the end.

    During validation in `fit`, the module holds the averages. Checkpoints store the averages as the module's weights,
    so that a loaded checkpoint contains them; the weights to resume training from are in this callback's state.
    After training the module holds the averages too, unless `apply_at_end` is False.

    Args:
        decay: fraction of the average that remains after an update, from 0 to 1.
        every_n_steps: weight updates between two updates of the average.
        use_buffers: also average real and complex buffers, such as the statistics of batch normalisation; False uses
            the buffers of the module. The main rank's averages of buffers are used.
        start_step: weight updates during which the average is a copy of the weights.
        validate_with_ema: validate the averages rather than the weights.
        apply_at_end: copy the averages into the module when training ends.

    Raises:
        ValueError: an argument is out of range, or the run has several averages of weights, or (when training starts)
            `use_buffers` is set under a strategy whose ranks train asynchronously.
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
            raise ValueError(f"EMA(decay={decay}): must be from 0 (no averaging) to 1 (averages never change)")
        whole = isinstance(every_n_steps, int) and isinstance(start_step, int)
        if not whole or every_n_steps < 1 or start_step < 0:
            raise ValueError(
                f"EMA(every_n_steps={every_n_steps}, start_step={start_step}): must be whole numbers, every_n_steps 1 "
                "or more, start_step 0 or more"
            )
        super().__init__(use_buffers=use_buffers, validate=validate_with_ema, apply_at_end=apply_at_end)
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.validate_with_ema = validate_with_ema
        self._rule = AverageRule(decay, every_n_steps, start_step)
        self._kept: frozenset[str] = frozenset()  # names of the parameters that servers average
        self._step_seen = 0

    # -- averaging ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._check_buffers(trainer, pl_module)
        super().on_train_start(trainer, pl_module)

    def _check_buffers(self, trainer: TrainerProtocol, module: Module) -> None:
        """Refuse to average buffers under an asynchronous strategy, where no rank sees the buffers of every update."""
        asynchronous = not trainer.strategy.traits.lockstep and trainer.world.size > 1
        if self.use_buffers and asynchronous and any(map(averageable, module.buffers())):
            raise ValueError(
                "EMA(use_buffers=True): under this strategy ranks train asynchronously with separate buffers, so that "
                "no rank sees the buffers of every update; set use_buffers=False (the module's buffers are used then), "
                "or use strategy=ddp"
            )

    def _start_averaging(self, trainer: TrainerProtocol) -> None:
        self._move_averages()
        self._step_seen = trainer.global_step
        servers = as_part(trainer.strategy, HasServers)
        self._kept = servers.keep_average(self._rule, self._step_seen, self.averages, self.updates)

    def on_train_batch_start(self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int) -> None:
        self._update()  # under asynchronous strategies, a rank receives new weights before a batch

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._update()

    @torch.no_grad()
    def _update(self) -> None:
        """Update the averages if the module has newer weights, which may be several updates newer."""
        trainer = self._trainer
        if trainer is None or self._live:
            return
        before, step = self._step_seen, as_part(trainer.strategy, HasServers).wait_for_weights(trainer.global_step)
        if step <= before:  # in the middle of an accumulation window
            return
        self._step_seen = step
        weights = local(self._tensors())
        averages = local(self.averages.values())
        if self._kept:
            followed = [name not in self._kept for name in self.averages]
            averages, weights = list(compress(averages, followed)), list(compress(weights, followed))
        self.updates += self._rule.follow(averages, weights, before, step)

    def _fetch_from_servers(self) -> None:
        """Copy the servers' averages of the newest update to `averages`; all gradients must have been sent."""
        if self._kept and self._trainer is not None and not self._live:
            averages, updates = as_part(self._trainer.strategy, HasServers).read_average()
            for name, average in averages.items():
                self.averages[name].copy_(average)
            self.updates = updates if averages else self.updates

    def _join_ranks(self) -> None:
        """Make the averages equal on all ranks: collective, called when all ranks hold equal weights."""
        self._update()
        trainer = self._trainer
        if trainer is None or self._live:
            return
        self._fetch_from_servers()
        world = trainer.world
        if world.size == 1:
            return
        if not self._kept and not trainer.strategy.traits.synchronous:  # each rank averaged the weights that it trains
            islands = world.axis("islands")
            for average in local(self.averages.values()):
                islands.all_reduce(average).div_(islands.size)
        elif self.use_buffers:
            self._broadcast_buffers(trainer)

    def state_dict(self) -> dict[str, Any]:
        self._update()
        self._fetch_from_servers()
        return super().state_dict()
