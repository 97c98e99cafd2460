"""Stochastic weight averaging: the mean of the weights of the last epochs, at a constant learning rate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fabricx.callbacks.averages import Averages, precise, warn_of_averages
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.core.strategy_parts import HasServers

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


def annealed(begin: float, end: float, part: float, strategy: str) -> float:
    """Return a learning rate on its way to the constant rate.

    >>> annealed(1.0, 0.0, 0.5, "cos"), annealed(1.0, 0.0, 0.25, "linear")
    (0.5, 0.75)

    Args:
        begin, end: rates at the ends of the way.
        part: of the way, from 0 to 1.
        strategy: "cos" or "linear".
    """
    weight = (1 - math.cos(math.pi * part)) / 2 if strategy == "cos" else part
    return begin + (end - begin) * weight


class StochasticWeightAveraging(Callback):
    """Average the weights at the beginnings of the last epochs (Izmailov et al., 2018) at a constant learning rate.

    From `swa_epoch_start` on, the learning rate moves to `swa_lrs` within `annealing_epochs`, in place of the schedules
    of the module. After the last epoch, the module holds the mean of the weights with which these epochs began. Epochs,
    rates and averages are those of Lightning's callback: the weights after the last epoch are not a part of the mean,
    and a run that ends before its last epoch (early stopping, `max_steps`) keeps the trained weights. A resumed run
    continues the average. `EMA` averages at each step, under every strategy.

    Args:
        swa_lrs: final learning rate, or a rate for each parameter group of all optimizers.
        swa_epoch_start: first epoch of the average, from 1; a fraction is that of `max_epochs`.
        annealing_epochs: epochs until the rate is constant, beginning with the rate before; 0 sets it at once.
        annealing_strategy: "cos" or "linear".
        avg_fn: returns the new average of (average, weights, number of averaged epochs); default: the mean.
        device: must be None or that of the weights; averages are kept beside the weights.

    Raises:
        ValueError: an argument is out of range; or (at set-up) there is no limit by epochs, the module has batch
            normalisation, ranks hold different weights, or another callback averages weights, too.
    """

    needs_all_ranks: ClassVar[bool] = True
    former_methods: ClassVar = renamed(
        "avg_fn update_parameters transfer_weights swa_end reset_momenta reset_batch_norm_and_save_state "
        "pl_module_contains_batch_norm _clear_schedulers _load_average_model_state",
        "the argument avg_fn, or a subclass of WeightAveraging",
    )

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        fraction = isinstance(swa_epoch_start, float)
        if not rates or not all(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            raise ValueError(
                f"StochasticWeightAveraging(swa_lrs={swa_lrs!r}): must be a positive learning "
                "rate, or a list with a rate for each parameter group"
            )
        if not (0 <= swa_epoch_start <= 1 if fraction else swa_epoch_start >= 1):
            raise ValueError(
                f"StochasticWeightAveraging(swa_epoch_start={swa_epoch_start}): must be an epoch from 1, or a fraction "
                "from 0.0 to 1.0"
            )
        if annealing_epochs < 0 or annealing_strategy not in ("cos", "linear"):
            raise ValueError(
                f"StochasticWeightAveraging(annealing_epochs={annealing_epochs}, annealing_strategy="
                f'{annealing_strategy!r}): must be 0 or more epochs, and "cos" or "linear"'
            )
        if avg_fn is not None and not callable(avg_fn):
            raise ValueError(f"StochasticWeightAveraging(avg_fn={avg_fn!r}): must be a function, or None for the mean")
        self.swa_lrs, self.swa_epoch_start, self.annealing_epochs = swa_lrs, swa_epoch_start, annealing_epochs
        self.annealing_strategy, self.avg_fn = annealing_strategy, avg_fn
        self.averages: dict[str, Tensor] = {}
        self.n_averaged = 0
        self._later: dict[str, int] = {}  # epochs in the average before a parameter was added to the module
        self._newest_epoch = -1  # that is in the average
        self._first_rates: list[float] = []
        self._rates: list[float] = []  # of this epoch, for each group; empty before `swa_epoch_start`
        self._ended = False  # the module holds the averages
        self._trains = False  # within a fit
        self._trained: list[tuple[Tensor, Tensor]] = []  # parameters and their weights before, until the run has ended

    def swa_start(self, max_epochs: int) -> int:
        """Return the first epoch of the average, from 0.

        Args:
            max_epochs: of the run.
        """
        start = self.swa_epoch_start
        return max(0, (int(max_epochs * start) if isinstance(start, float) else start) - 1)

    def check_fit(self, trainer: TrainerProtocol, pl_module: Module, global_batch: int | None) -> None:
        others = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, Averages)]
        if others:
            raise ValueError(
                f"StochasticWeightAveraging and {others[0]} both set the module's weights at the end of training, so "
                "that one of the averages would be lost: remove one of them"
            )

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._trains = stage == "fit"
        if not self._trains:
            return
        strategy = trainer.strategy
        if isinstance(strategy, HasServers) or not strategy.traits.synchronous:
            raise ValueError(
                f"StochasticWeightAveraging needs the weights and the learning rate of each update on the ranks, and "
                f"{type(strategy).__name__} has them elsewhere: use strategy=ddp or fsdp, or the callback EMA"
            )
        if trainer.world.divided:
            raise ValueError(
                f"StochasticWeightAveraging with strategy={type(strategy).__name__}: the averages of weights that are "
                "divided over ranks aren't supported; use the callback EMA"
            )
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            raise ValueError("StochasticWeightAveraging averages the last epochs: set max_epochs")
        if any(isinstance(part, _BatchNorm) for part in pl_module.modules()):
            raise ValueError(
                "StochasticWeightAveraging: the statistics of batch normalisation belong to the weights of the last "
                "step and not to the average; use EMA(use_buffers=True), or GroupNorm"
            )
        if not self.swa_start(trainer.max_epochs):
            warnings.warn(
                f"StochasticWeightAveraging(swa_epoch_start={self.swa_epoch_start}) with max_epochs="
                f"{trainer.max_epochs}: the average has the weights before training; set swa_epoch_start to 2 or more",
                stacklevel=2,
            )
        if self._ended and trainer.current_epoch >= trainer.max_epochs:
            return  # the module holds the averages, and nothing is left to train
        self.averages, self.n_averaged, self._later, self._newest_epoch = {}, 0, {}, -1
        self._first_rates, self._rates, self._ended = [], [], False

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        start, epoch = self.swa_start(trainer.max_epochs or 0), trainer.current_epoch
        # A run that resumes within an epoch has its rates from the checkpoint, where schedules may have changed them.
        if epoch < start or epoch <= self._newest_epoch:
            return
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        # Other callbacks may have added groups since.
        self._first_rates += [float(group["lr"]) for group in groups[len(self._first_rates) :]]
        final = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * len(groups)
        if len(final) != len(groups):
            raise ValueError(
                f"StochasticWeightAveraging(swa_lrs={self.swa_lrs}): {len(groups)} parameter groups need as many rates"
            )
        part = min(1.0, (epoch - start) / self.annealing_epochs) if self.annealing_epochs else 1.0
        self._rates = [
            annealed(begin, end, part, self.annealing_strategy)
            for begin, end in zip(self._first_rates, final, strict=True)
        ]
        self._set_rates(groups)
        self._newest_epoch = epoch
        self._add(pl_module)

    def on_before_optimizer_step(self, trainer: TrainerProtocol, pl_module: Module, optimizer: Any) -> None:
        # At each step, since schedules change the rates, and on all ranks, also without a sample of the batch.
        if self._rates:
            self._set_rates([group for other in trainer.optimizers for group in other.param_groups])

    def _set_rates(self, groups: list[dict[str, Any]]) -> None:
        for group, rate in zip(groups, self._rates, strict=False):  # a group may have been added in this epoch
            group["lr"] = rate

    def _add(self, module: Module) -> None:
        """Add the weights to the average."""
        for name, parameter in module.named_parameters():
            averaged = self.n_averaged - self._later.get(name, 0)
            if name not in self.averages:
                self.averages[name], self._later[name] = precise(parameter), self.n_averaged
            elif self.avg_fn is not None:
                # A copy: the function may return the weights, which training changes.
                self.averages[name].copy_(self.avg_fn(self.averages[name], parameter.detach(), averaged))
            else:
                self.averages[name].add_(parameter.detach() - self.averages[name], alpha=1 / (averaged + 1))
        self.n_averaged += 1

    @torch.no_grad()
    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if trainer.interrupted:  # the checkpoint of an interrupted run has the trained weights
            return
        epochs = trainer.max_epochs or 0
        if trainer.current_epoch < epochs:
            trainer.print(
                f"StochasticWeightAveraging: the run has ended after {trainer.current_epoch} of {epochs} epochs, so "
                f"the module keeps the trained weights; the mean of {self.n_averaged} epochs is in callback.averages"
            )
            return
        self._ended = True
        averaged = [(p, self.averages[name]) for name, p in pl_module.named_parameters() if name in self.averages]
        self._trained = [(parameter, parameter.clone()) for parameter, _ in averaged]
        for parameter, average in averaged:
            parameter.copy_(average)

    @torch.no_grad()
    def restore_weights(self) -> None:
        for parameter, weights in self._trained:
            parameter.copy_(weights)
        self._trained, self._ended = [], self._ended and not self._trained

    def teardown(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._trained = []

    def on_load_checkpoint(self, trainer: TrainerProtocol, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("callbacks", {}).get(self.state_key) or {}
        if self._trains and state.get("ended"):
            warn_of_averages(trainer, self.state_key)

    def state_dict(self) -> dict[str, Any]:
        return {
            "averages": dict(self.averages), "n_averaged": self.n_averaged, "later": dict(self._later),
            "epoch": self._newest_epoch,
            "first_rates": list(self._first_rates), "rates": list(self._rates), "ended": self._ended,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages, self.n_averaged = dict(state_dict["averages"]), state_dict["n_averaged"]
        self._later = dict(state_dict.get("later", {}))  # earlier versions saved none
        self._newest_epoch = state_dict["epoch"]
        self._first_rates, self._rates = list(state_dict["first_rates"]), list(state_dict["rates"])
