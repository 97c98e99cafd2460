"""An exponential moving average of the weights, which often generalises better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from fabricx.core.averaging import AverageRule
from fabricx.core.callback import Callback

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


@final
class EMA(Callback):
    """Keep a moving average of the weights (Polyak and Juditsky, 1992).

    At each update, average = decay * average + (1 - decay) * weights. Which weights those are:

    - Of all strategies whose ranks have the same weights after an update, including `fsdp`: those.
    - Where servers step and a rank does not see the weights of each update (`mode="bounded"`, `mode="async"`,
      `async_sgd`, sparse embeddings, `pull_compression`), the servers keep the average, of each update in its order.
      That takes room for the weights on the servers once more.
    - Where each rank steps weights of its own (`local_sgd`, `async_sgd` with `every`), each rank averages its own, and
      the average is the mean over ranks, joined for validation, checkpoints and the end.

    While a fit validates, the module holds the averages. Checkpoints hold them as the module's weights, so that
    whoever loads one gets them; the weights that training goes on with are in this callback's state beside them.
    After training the module holds the averages too, unless `apply_at_end` is False.

    Args:
        decay: how much of the average stays at each update, from 0 to 1.
        every_n_steps: update after every so many weight updates.
        use_buffers: also average real and complex buffers, such as the statistics of batch normalisation; the
            module's own ones are used otherwise. Averages of buffers are the main rank's.
        start_step: until this many weight updates the average is a copy of the weights.
        validate_with_ema: validate the averages rather than the weights.
        apply_at_end: leave the averages in the module when training ends.

    Raises:
        ValueError: an argument is out of its range; when training starts: buffers are to be averaged, and each of
            several ranks goes at its own pace.
    """

    needs_all_ranks: ClassVar[bool] = True
    every_batch: ClassVar[bool] = True  # each rank averages each update

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
        self._rule = AverageRule(decay, every_n_steps, start_step)
        self._kept: frozenset[str] = frozenset()  # parameters whose averages servers keep
        self._updates_before = 0  # updates of the averages before servers began to keep them
        self._step_seen = 0
        self._trains = False
        self._trainer: Trainer | None = None  # between the beginning and the end of a run

    # -- averaging ----------------------------------------------------------------------------------------------

    def check_fit(self, trainer: Trainer, module: Module, global_batch: int | None) -> None:
        if sum(isinstance(callback, EMA) for callback in trainer.callbacks) > 1:
            raise ValueError("several EMA callbacks: the module, and a checkpoint, can hold one average; give one EMA")

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._trains = stage == "fit"
        if self._trains:  # of whatever module; a checkpoint is restored later
            self.averages, self._live, self.updates = {}, {}, 0

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        tensors = self._averaged(module)
        self._check_buffers(trainer, module)
        if self.averages.keys() != tensors.keys():
            self.averages, self._live = {name: _precise(tensor) for name, tensor in tensors.items()}, {}
        self._tensors = [tensor.detach() for tensor in tensors.values()]
        self._trainer = trainer
        self._go_on_from(trainer)
        if self._live:  # a checkpoint brought the averages as the module's weights
            self._swap_out()

    def _check_buffers(self, trainer: Trainer, module: Module) -> None:
        """Refuse averages of buffers of which no rank sees each update."""
        apart = trainer.strategy.dealer is not None and trainer.world.size > 1
        if self.use_buffers and apart and any(map(_averageable, module.buffers())):
            raise ValueError(
                "EMA(use_buffers=True): each of several ranks goes at its own pace and has buffers of its own, so no "
                "rank sees those of each update: say use_buffers=False (the module's own buffers are used), or take "
                "strategy=ddp"
            )

    def _go_on_from(self, trainer: Trainer) -> None:
        """Average from where the run is: at its start, or at an earlier state after a failure."""
        devices = zip(self.averages.items(), self._tensors, strict=True)
        self.averages = {name: average.to(tensor.device) for (name, average), tensor in devices}
        self._step_seen, self._updates_before = trainer.global_step, self.updates
        self._kept = trainer.strategy.keep_average(self._rule, self._step_seen, self.averages)

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        self._look()  # where ranks go at their own pace, new weights have come just now

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._look()

    def _look(self) -> None:
        """Average, if the module has weights of later updates than before; those of several may come at once."""
        trainer = self._trainer
        if trainer is None or self._live:
            return
        before, step = self._step_seen, trainer.strategy.weights_step(trainer.global_step)
        if step <= before:  # in the middle of an accumulation window
            return
        self._step_seen = step
        averages, weights = _local(self.averages.values()), _local(self._tensors)
        if self._kept:
            here = [name not in self._kept for name in self.averages]
            averages, weights = list(compress(averages, here)), list(compress(weights, here))
        self.updates += self._rule.follow(averages, weights, before, step)

    def _fetch(self) -> None:
        """Take over what servers keep: averages of the newest update that all ranks' gradients have made."""
        if self._kept and self._trainer is not None and not self._live:
            averages, updates = self._trainer.strategy.kept_average()
            for name, average in averages.items():
                self.averages[name].copy_(average)
            self.updates = self._updates_before + updates if averages else self.updates

    def _meet(self) -> None:
        """Let all ranks have the same averages; every rank calls it, and the weights are those of all."""
        self._look()
        trainer = self._trainer
        if trainer is None or self._live:
            return
        self._fetch()
        world = trainer.world
        if world.size == 1:
            return
        if not self._kept and not trainer.strategy.traits.synchronous:  # each rank has averaged weights of its own
            for average in self.averages.values():
                world.all_reduce(average).div_(world.size)
        elif self.use_buffers:
            for name, _ in trainer.module.named_buffers():
                if name in self.averages:
                    world.broadcast(self.averages[name])

    def _averaged(self, module: Module) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if _averageable(p)}
        if self.use_buffers:
            found |= {name: b for name, b in module.named_buffers() if _averageable(b)}
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
            self._meet()
            self._swap_in()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._swap_out()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._meet()
        if self.apply_at_end:
            self._swap_in()

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._swap_out()
        self._tensors, self._trainer = [], None

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._tensors, self._live, self._trainer = [], {}, None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        if not self._tensors or self._live:  # between runs, or the module holds the averages already
            return
        self._meet()  # in place: what `state_dict` has returned is the same
        weights = checkpoint["strategy"]["module"]
        mine = checkpoint.get("callbacks", {}).get(self.state_key)  # not there if only weights are saved
        for name, alias in _aliases(module, self.averages):
            if alias in weights:
                if mine is not None:
                    mine["live"][name] = weights[alias]
                weights[alias] = self.averages[name].to(weights[alias].dtype)

    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Let training go on with the weights, also those that servers get: they take the module's when it starts."""
        mine = checkpoint.get("callbacks", {}).get(self.state_key)
        if not self._trains or not mine or not mine["live"]:
            return
        weights, live = checkpoint["strategy"]["module"], mine["live"]
        averages = {name: tensor for name, tensor in mine["averages"].items() if name in live}
        for name, alias in _aliases(module, averages):
            if alias in weights:
                weights[alias] = live[name]
        mine["live"] = {}

    def state_dict(self) -> dict[str, Any]:
        self._look()
        self._fetch()
        return {"averages": dict(self.averages), "live": dict(self._live), "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = dict(state_dict["averages"])
        self._live = dict(state_dict["live"])
        self.updates = state_dict["updates"]
        if self._tensors and self._trainer is not None:  # the run has gone back to an earlier state
            self._go_on_from(self._trainer)


def _local(tensors: Iterable[Any]) -> list[Tensor]:
    """Return what this rank holds: its shard, where a tensor is sharded. All that is done here is elementwise."""
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def _averageable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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
