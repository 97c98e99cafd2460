"""Exponential moving average of the weights, which often generalises better than the weights of the last step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from fabricx.core.averaging import AverageRule
from fabricx.core.callback import Callback
from fabricx.core.strategy_parts import HasServers, as_part

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class EMA(Callback):
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
        ValueError: an argument is out of range, or the run has several EMA callbacks, or (when training starts)
            `use_buffers` is set under a strategy whose ranks train asynchronously.
    """

    needs_all_ranks: ClassVar[bool] = True
    every_batch: ClassVar[bool] = True  # a rank averages every update, also if it has no sample of the batch

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
        if every_n_steps < 1 or start_step < 0:
            raise ValueError(
                f"EMA(every_n_steps={every_n_steps}, start_step={start_step}): every_n_steps must be 1 or more, "
                "start_step 0 or more"
            )
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.use_buffers = use_buffers
        self.start_step = start_step
        self.validate_with_ema = validate_with_ema
        self.apply_at_end = apply_at_end
        self.updates = 0
        self.averages: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}  # the trained weights, while the module holds the averages
        self._tensors: list[Tensor] = []  # the module's tensors, in the order of `averages`; empty between runs
        self._rule = AverageRule(decay, every_n_steps, start_step)
        self._kept: frozenset[str] = frozenset()  # names of the parameters that servers average
        self._updates_before = 0  # updates of the averages before servers took over the averaging
        self._step_seen = 0
        self._trains = False
        self._trainer: TrainerProtocol | None = None  # None between runs

    # -- averaging ----------------------------------------------------------------------------------------------

    def check_fit(self, trainer: TrainerProtocol, module: Module, global_batch: int | None) -> None:
        if sum(isinstance(callback, EMA) for callback in trainer.callbacks) > 1:
            raise ValueError(
                "several EMA callbacks: a module and a checkpoint hold a single average; remove all but one EMA"
            )

    def setup(self, trainer: TrainerProtocol, module: Module, stage: str) -> None:
        self._trains = stage == "fit"
        if self._trains:  # discard the averages of an earlier fit; a checkpoint is restored after `setup`
            self.averages, self._live, self.updates = {}, {}, 0

    def on_train_start(self, trainer: TrainerProtocol, module: Module) -> None:
        tensors = self._averaged(module)
        self._check_buffers(trainer, module)
        if self.averages.keys() != tensors.keys():
            self.averages, self._live = {name: _precise(tensor) for name, tensor in tensors.items()}, {}
        self._tensors = [tensor.detach() for tensor in tensors.values()]
        self._trainer = trainer
        self._start_averaging(trainer)
        if self._live:  # a checkpoint was loaded, which stores the averages as the module's weights
            self._swap_out()

    def _check_buffers(self, trainer: TrainerProtocol, module: Module) -> None:
        """Refuse to average buffers under an asynchronous strategy, where no rank sees the buffers of every update."""
        asynchronous = not trainer.strategy.traits.lockstep and trainer.world.size > 1
        if self.use_buffers and asynchronous and any(map(_averageable, module.buffers())):
            raise ValueError(
                "EMA(use_buffers=True): under this strategy ranks train asynchronously with separate buffers, so that "
                "no rank sees the buffers of every update; set use_buffers=False (the module's buffers are used then), "
                "or use strategy=ddp"
            )

    def _start_averaging(self, trainer: TrainerProtocol) -> None:
        """Begin averaging from the present state: at the start of training, or after a rollback."""
        devices = zip(self.averages.items(), self._tensors, strict=True)
        self.averages = {name: average.to(tensor.device) for (name, average), tensor in devices}
        self._step_seen, self._updates_before = trainer.global_step, self.updates
        self._kept = as_part(trainer.strategy, HasServers).keep_average(self._rule, self._step_seen, self.averages)

    def on_train_batch_start(self, trainer: TrainerProtocol, module: Module, batch: Any, batch_idx: int) -> None:
        self._update()  # under asynchronous strategies, a rank receives new weights before a batch

    def on_train_batch_end(
        self, trainer: TrainerProtocol, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._update()

    def _update(self) -> None:
        """Update the averages if the module has newer weights, which may be several updates newer."""
        trainer = self._trainer
        if trainer is None or self._live:
            return
        before, step = self._step_seen, as_part(trainer.strategy, HasServers).wait_for_weights(trainer.global_step)
        if step <= before:  # in the middle of an accumulation window
            return
        self._step_seen = step
        averages, weights = _local(self.averages.values()), _local(self._tensors)
        if self._kept:
            local = [name not in self._kept for name in self.averages]
            averages, weights = list(compress(averages, local)), list(compress(weights, local))
        self.updates += self._rule.follow(averages, weights, before, step)

    def _fetch_from_servers(self) -> None:
        """Copy the servers' averages of the newest update to `averages`; all gradients must have been sent."""
        if self._kept and self._trainer is not None and not self._live:
            averages, updates = as_part(self._trainer.strategy, HasServers).read_average()
            for name, average in averages.items():
                self.averages[name].copy_(average)
            self.updates = self._updates_before + updates if averages else self.updates

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
            for average in self.averages.values():
                world.all_reduce(average).div_(world.size)
        elif self.use_buffers:
            for name, _ in trainer.session.module.named_buffers():
                if name in self.averages:
                    world.broadcast(self.averages[name])

    def _averaged(self, module: Module) -> dict[str, Tensor]:
        averaged: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if _averageable(p)}
        if self.use_buffers:
            averaged |= {name: b for name, b in module.named_buffers() if _averageable(b)}
        return averaged

    # -- swapping: by value, because optimizers and compiled code hold references to the module's tensors -------

    @torch.no_grad()
    def _swap_in(self) -> None:
        """Copy the averages into the module, and save its weights."""
        if self._tensors and not self._live:
            self._live = {name: tensor.clone() for name, tensor in zip(self.averages, self._tensors, strict=True)}
            torch._foreach_copy_(_local(self._tensors), _local(self.averages.values()))

    @torch.no_grad()
    def _swap_out(self) -> None:
        """Restore the saved weights of the module."""
        if self._tensors and self._live:
            torch._foreach_copy_(_local(self._tensors), _local(self._live[name] for name in self.averages))
            self._live = {}

    def on_validation_start(self, trainer: TrainerProtocol, module: Module) -> None:
        if self.validate_with_ema:
            self._join_ranks()
            self._swap_in()

    def on_validation_end(self, trainer: TrainerProtocol, module: Module) -> None:
        self._swap_out()

    def on_train_end(self, trainer: TrainerProtocol, module: Module) -> None:
        self._join_ranks()
        if self.apply_at_end:
            self._swap_in()

    def on_exception(self, trainer: TrainerProtocol, module: Module, exception: BaseException) -> None:
        self._swap_out()
        self._tensors, self._trainer = [], None

    def teardown(self, trainer: TrainerProtocol, module: Module, stage: str) -> None:
        self._tensors, self._live, self._trainer = [], {}, None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: TrainerProtocol, module: Module, checkpoint: dict[str, Any]) -> None:
        if not self._tensors or self._live:  # between runs, or the module holds the averages already
            return
        self._join_ranks()  # in place: the tensors that `state_dict` returned are updated too
        weights = checkpoint["strategy"]["module"]
        state = checkpoint.get("callbacks", {}).get(self.state_key)  # None if the checkpoint has only weights
        for name, alias in _aliases(module, self.averages):
            if alias in weights:
                if state is not None:
                    state["live"][name] = weights[alias]
                weights[alias] = self.averages[name].to(weights[alias].dtype)

    def on_load_checkpoint(self, trainer: TrainerProtocol, module: Module, checkpoint: dict[str, Any]) -> None:
        """Resume training from the trained weights, not the averages: servers copy the module's weights at start."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not self._trains or not state or not state["live"]:
            return
        weights, live = checkpoint["strategy"]["module"], state["live"]
        averages = {name: tensor for name, tensor in state["averages"].items() if name in live}
        for name, alias in _aliases(module, averages):
            if alias in weights:
                weights[alias] = live[name]
        state["live"] = {}

    def state_dict(self) -> dict[str, Any]:
        self._update()
        self._fetch_from_servers()
        return {"averages": dict(self.averages), "live": dict(self._live), "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = dict(state_dict["averages"])
        self._live = dict(state_dict["live"])
        self.updates = state_dict["updates"]
        if self._tensors and self._trainer is not None:  # the run rolled back to an earlier state
            self._start_averaging(self._trainer)


def _local(tensors: Iterable[Any]) -> list[Tensor]:
    """Return the local shards of sharded tensors, and other tensors unchanged: averaging is elementwise."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _averageable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _precise(tensor: Tensor) -> Tensor:
    """Return a copy, in float32 instead of half precision, which would round small updates away."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32) if half else tensor.detach().clone()


def _aliases(module: Module, averages: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Return (name of the average, name in the module) for every name; tied weights have several names."""
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for alias, tensor in named:
        name = first.setdefault(id(tensor), alias)
        if name in averages:
            pairs.append((name, alias))
    return pairs
