"""The contract of a module: a `torch.nn.Module` with its training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.hparams import HyperParameters
from fabricx.core.module_hooks import ModuleHooks
from fabricx.core.reductions import Reduction

if TYPE_CHECKING:
    from os import PathLike

    from fabricx.trainer.trainer import Trainer

_NOT_CARRIED = ("_trainer", "_log_to")  # what belongs to a running trainer and not to the module


class Module(ModuleHooks, HyperParameters, nn.Module):
    """Subclass this, write `training_step` and `configure_optimizers`, and hand it to `Trainer.fit`.

    Attributes:
        automatic_optimization: set it to False in `__init__` to call `manual_backward` and the optimizers yourself.
        example_input_array: an input of `forward`, for the summary and the graph.
    """

    automatic_optimization: bool = True
    example_input_array: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_trainer"] = None
        self.__dict__["_log_to"] = None

    # -- what users call ----------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        rank_zero_only: bool = False,
        sync_dist: bool = True,
    ) -> None:
        """Log one number under a name; it is right over all ranks without a flag.

        Means are weighted by batch size. In training steps the default is `on_step`, everywhere else `on_epoch`; with
        both, loggers get `name_step` and `name_epoch`.

        Args:
            name: what the number is called in the loggers and in `trainer.callback_metrics`.
            value: a number, a tensor of one element, or a `torchmetrics.Metric`.
            prog_bar: show it in the progress bar.
            logger: give it to the loggers.
            on_step: the value of the latest step, joined over ranks.
            on_epoch: the value over the whole epoch and all ranks.
            reduce_fx: "mean", "sum", "max" or "min".
            batch_size: samples that the value stands for; found in the batch if not given.
            add_dataloader_idx: with several loaders, put `/dataloader_idx_0` behind the name.
            rank_zero_only: only the main rank logs this; implies `sync_dist=False`.
            sync_dist: False keeps a value local to the main rank.

        Raises:
            ValueError: the value isn't one number, or the reduction isn't known.
            RuntimeError: nothing is being trained or evaluated that could log.
        """
        log_to = self.__dict__.get("_log_to")
        if log_to is None:
            if self.__dict__.get("_trainer") is None:
                raise RuntimeError(f"self.log({name!r}, ...) outside of a trainer: there is nothing that could log it")
            raise RuntimeError(f"self.log({name!r}, ...) is called where nothing is logged, such as in predict_step")
        if type(value) is Tensor and value.dim() == 0:
            value = value.detach()
        log_to.log(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx,
            sync_dist and not rank_zero_only,
        )  # fmt: skip

    def log_dict(self, metrics: Mapping[str, Any], **options: Any) -> None:
        """Log each entry of a dict; `options` are those of `log`."""
        for name, value in metrics.items():
            self.log(name, value, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main rank only, above the progress bar."""
        self.trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Bring tensors of all ranks together.

        Args:
            data: a tensor of shape [...], or a collection of tensors; the same shapes on every rank.
            sync_grads: let gradients flow back to the rank that a part came from.

        Returns:
            The same structure with tensors of shape [world_size, ...].
        """
        return self.trainer.all_gather(data, sync_grads)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of them if there are several: for manual optimization."""
        handles = self.trainer.optimizer_handles if use_pl_optimizer else self.trainer.optimizers
        return handles[0] if len(handles) == 1 else handles

    def lr_schedulers(self) -> Any:
        """Return the learning rate scheduler, the list of them if there are several, or None."""
        schedulers = [schedule.scheduler for schedule in self.trainer.lr_schedulers]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss, instead of `loss.backward()`, in manual optimization.

        With several ranks the loss is the mean over this rank's samples, and the gradient becomes the mean over the
        samples of all ranks.

        Args:
            loss: one number.
            args, kwargs: passed to `Tensor.backward`, such as `retain_graph=True`.
        """
        if self.automatic_optimization:
            raise RuntimeError("manual_backward needs self.automatic_optimization = False in __init__")
        self.trainer.manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters, as `configure_gradient_clipping` and manual loops need it.

        Args:
            optimizer: whose parameters.
            gradient_clip_val: the limit; None or 0 clips nothing.
            gradient_clip_algorithm: "norm" (default) or "value".
        """
        self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let gradients reach the parameters of this optimizer only, until `untoggle_optimizer`."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        before = self.__dict__.setdefault("_requires_grad", {})
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    before.setdefault(parameter, parameter.requires_grad)
                    parameter.requires_grad_(before[parameter] and id(parameter) in mine)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, required in self.__dict__.pop("_requires_grad", {}).items():
            parameter.requires_grad_(required)

    def freeze(self) -> None:
        """Switch off all gradients and go to evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Switch all gradients on and go to training mode."""
        self.requires_grad_(True)
        self.train()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PathLike[str],
        map_location: Any = None,
        strict: bool = True,
        **override: Any,
    ) -> Self:
        """Make a module from a checkpoint: its saved hyperparameters are the arguments, its weights are loaded.

        Args:
            checkpoint_path: the checkpoint's folder.
            map_location: the device for the weights; the CPU by default.
            strict: the weights have to fit exactly.
            override: arguments that replace saved hyperparameters, or add to them.

        Raises:
            CheckpointError: it isn't there, isn't complete, or needs arguments that it doesn't hold.
        """
        from fabricx.checkpoint import load_module

        return load_module(cls, checkpoint_path, map_location, strict, override)

    # -- what users read ----------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """Return the trainer that runs this module."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a trainer; it is while a trainer runs it")
        return trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self.__dict__["_trainer"] = trainer

    @property
    def logger(self) -> Any:
        """Return the first logger, or None."""
        return self.trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """Return all loggers."""
        return self.trainer.loggers

    @property
    def current_epoch(self) -> int:
        """Return how many epochs are completed."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        return trainer.current_epoch if trainer else 0

    @property
    def global_step(self) -> int:
        """Return how many weight updates there were."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        return trainer.global_step if trainer else 0

    @property
    def global_rank(self) -> int:
        """Return which process of all this is."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        return trainer.global_rank if trainer else 0

    @property
    def local_rank(self) -> int:
        """Return which process on this machine this is."""
        trainer: Trainer | None = self.__dict__.get("_trainer")
        return trainer.local_rank if trainer else 0

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next((tensor.device for tensor in _tensors(self)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the floating-point weights."""
        kinds = (tensor.dtype for tensor in _tensors(self) if tensor.is_floating_point())
        return next(kinds, torch.get_default_dtype())

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_CARRIED}
        return {**state, **dict.fromkeys(_NOT_CARRIED)}


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def batch_weight(module: Module, batch: Any) -> float:
    """Return what a module says of a batch.

    Raises:
        ValueError: that is no weight.
    """
    weight = float(module.batch_weight(batch))
    if not 0.0 <= weight < math.inf:
        raise ValueError(f"{type(module).__name__}.batch_weight returned {weight:g}: a number of terms, 0 or more")
    return weight
