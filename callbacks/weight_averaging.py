"""Averages of weights with the rule and the schedule of the user, under Lightning's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fabricx.callbacks.averages import Averages, local
from fabricx.core.hook_calls.former_names import renamed
from fabricx.core.strategy_parts import HasServers

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


class WeightAveraging(Averages):
    """Average the weights after the steps and epochs that `should_update` selects.

    The first update copies the weights. Validation in `fit` uses the averages, checkpoints contain them as the module's
    weights, and after training the module holds them. `EMA` averages under every strategy, and on servers.

    Args:
        device: accepted for Lightning's callers; averages are kept beside the weights.
        use_buffers: also average real and complex buffers, such as the statistics of batch normalisation.
        avg_fn: returns the new average of (average, weights, number of averaged updates); default: the mean.
        multi_avg_fn: changes a list of averages in place, with the same arguments for lists of tensors.

    Raises:
        ValueError: both functions are given; or (at set-up) ranks do not hold the weights of each update.
    """

    former_methods: ClassVar = renamed(
        "_swap_models _copy_average_to_current", "on_validation_start and on_validation_end, which call their super()"
    )

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError(f"{type(self).__name__}(avg_fn=..., multi_avg_fn=...): set one of them")
        super().__init__(use_buffers=use_buffers, validate=True, apply_at_end=True)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._newest = [0, -1]  # step and epoch of the newest update

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the averages; called after each weight update and after each epoch, on all ranks.

        Args:
            step_idx: number of the weight update, from 0; None at the end of an epoch.
            epoch_idx: number of the epoch, from 0; None after a weight update.
        """
        return step_idx is not None

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._newest = [0, -1] if stage == "fit" else self._newest
        strategy = trainer.strategy
        if stage == "fit" and (isinstance(strategy, HasServers) or not strategy.traits.synchronous):
            raise ValueError(
                f"{type(self).__name__} needs the weights of each update on the ranks, and {type(strategy).__name__} "
                "has them elsewhere: use strategy=ddp or fsdp, or the callback EMA"
            )

    def _start_averaging(self, trainer: TrainerProtocol) -> None:
        self._move_averages()

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._update()

    def on_train_epoch_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        epoch = trainer.current_epoch
        if epoch > self._newest[1] and self.should_update(epoch_idx=epoch):
            self._average()
            self._newest[1] = epoch

    def _update(self) -> None:
        trainer = self._trainer
        if trainer is None or self._live or trainer.global_step <= self._newest[0]:
            return
        self._newest[0] = trainer.global_step
        if self.should_update(step_idx=trainer.global_step - 1):
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        weights = local(self._tensors())
        averages = local(self.averages.values())
        if not averages:
            return
        same = [tensor.detach().to(average.dtype) for tensor, average in zip(weights, averages, strict=True)]
        count = torch.tensor(self.updates, device=averages[0].device)
        if self.updates == 0:
            torch._foreach_copy_(averages, same)
        elif self._multi_avg_fn is not None:
            self._multi_avg_fn(averages, same, count)
        elif self._avg_fn is not None:
            for average, tensor in zip(averages, same, strict=True):
                average.copy_(self._avg_fn(average, tensor, count))
        else:
            torch._foreach_lerp_(averages, same, 1 / (self.updates + 1))
        self.updates += 1

    def _join_ranks(self) -> None:
        self._update()
        if self._trainer is not None and not self._live and self.use_buffers and self._trainer.world.size > 1:
            self._broadcast_buffers(self._trainer)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "newest": list(self._newest)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._newest = list(state_dict["newest"])
        super().load_state_dict(state_dict)


class EMAWeightAveraging(WeightAveraging):
    """Exponential moving average of the weights with the arguments of Lightning's `EMAWeightAveraging`.

    Args:
        device, use_buffers: see `WeightAveraging`.
        decay: fraction of the average that remains after an update, from 0 to 1.
        update_every_n_steps: weight updates between two updates of the average.
        update_starting_at_step: first weight update of the average, from 0; None for the first of the run.
        update_starting_at_epoch: also update at the end of each epoch from this epoch on; None for no epoch.
        avg_fn: rule in place of the moving average.

    Raises:
        ValueError: `decay` or `update_every_n_steps` is out of range.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        *,
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
    ) -> None:
        if not 0 <= decay <= 1 or update_every_n_steps < 0:
            raise ValueError(
                f"EMAWeightAveraging(decay={decay}, update_every_n_steps={update_every_n_steps}): decay must be from 0 "
                "(no averaging) to 1 (averages never change), update_every_n_steps 0 (epochs only) or more"
            )
        super().__init__(device, use_buffers, avg_fn=avg_fn)
        self.decay, self.update_every_n_steps = decay, update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch
        if avg_fn is None:
            self._multi_avg_fn = self._follow

    def _follow(self, averages: list[Tensor], weights: list[Tensor], count: Any) -> None:
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            begun = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            return begun and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return first is not None and epoch_idx is not None and epoch_idx >= first
