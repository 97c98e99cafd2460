"""Freeze layers before training, and unfreeze them later as new groups of the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.core.strategy_parts import HasServers
from fabricx.core.strategy_support.optimizer_state import extend_schedule, let_groups_grow

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

Modules = nn.Module | Iterable["Modules"]


class BaseFinetuning(Callback):
    """Base class of schedules that unfreeze layers; derive from it and override both methods below.

    Layers that are frozen when the optimizers are created must not be in them: pass
    `filter(lambda p: p.requires_grad, self.parameters())` to the optimizer. A resumed run and the replacement of a
    worker that died continue with the groups that were added.

    Raises:
        ValueError: the strategy fixes the parameters of the optimizers before training.
    """

    needs_all_ranks: ClassVar[bool] = True
    former_methods: ClassVar = renamed(
        "_apply_mapping_to_param_groups _store", "finetune_function(self, module, epoch, optimizer)"
    )

    def __init__(self) -> None:
        self._newest_epoch = -1  # whose `finetune_function` was called

    def freeze_before_training(self, module: Any) -> None:
        """Freeze layers, with `self.freeze(...)`.

        Args:
            module: before its optimizers are created.
        """
        raise NotImplementedError

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze layers, with `self.unfreeze_and_add_param_group(...)`; called once for each optimizer and epoch.

        Args:
            module: module that is trained.
            epoch: epoch that begins, from 0.
            optimizer: optimizer of the module.
        """
        raise NotImplementedError

    # -- tools --------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return all modules within modules that have parameters or buffers of their own, or no children.

        Args:
            modules: a module, or nested iterables of modules.
        """
        if isinstance(modules, nn.Module):
            parts = list(modules.modules())
        else:
            parts = [part for inner in modules for part in BaseFinetuning.flatten_modules(inner)]
        return [m for m in dict.fromkeys(parts) if not list(m.children()) or m._parameters]

    @staticmethod
    def filter_params(
        modules: Modules, train_bn: bool = True, requires_grad: bool = True
    ) -> Iterator[nn.Parameter]:  # fmt: skip
        """Yield the parameters of modules.

        Args:
            modules: a module, or nested iterables of modules.
            train_bn: include those of batch normalisation.
            requires_grad: flags of the parameters.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if not isinstance(part, _BatchNorm) or train_bn:
                yield from (p for p in part.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters of modules.

        Args:
            modules: a module, or nested iterables of modules.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, _BatchNorm):
                part.track_running_stats = True
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of a module; batch normalisation keeps its statistics.

        Args:
            module: module to freeze.
        """
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters of modules.

        Args:
            modules: a module, or nested iterables of modules.
            train_bn: keep batch normalisation trainable.
        """
        for part in BaseFinetuning.flatten_modules(modules):
            if isinstance(part, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(part)
            else:
                BaseFinetuning.freeze_module(part)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that an optimizer does not have yet.

        Args:
            optimizer: optimizer of the module.
            params: parameters to add.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in known]

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to an optimizer as a group.

        Args:
            modules: a module, or nested iterables of modules.
            optimizer: optimizer of the module.
            lr: learning rate of the group; None: that of the first group, divided by `initial_denom_lr`.
            initial_denom_lr: divisor of the first group's rate.
            train_bn: also add the parameters of batch normalisation.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        params = list(BaseFinetuning.filter_params(modules, train_bn=train_bn))
        if new := BaseFinetuning.filter_on_optimizer(optimizer, params):
            optimizer.add_param_group({"params": new, "lr": float(rate)})
        elif params:
            warnings.warn(
                f"{type(optimizer).__name__} has all parameters that are unfrozen already, so they keep the rate of "
                "their group: create the optimizer with filter(lambda p: p.requires_grad, self.parameters())",
                stacklevel=2,
            )

    # -- hooks --------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        if stage != "fit":
            return
        _check_strategy(self, trainer)
        self._newest_epoch = -1
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        for optimizer in trainer.optimizers:
            let_groups_grow(optimizer, schedules=True)

    def on_train_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        epoch = trainer.current_epoch
        if epoch > self._newest_epoch:  # not if a run resumes within the epoch
            self._newest_epoch = epoch
            for optimizer in trainer.optimizers:
                self.finetune_function(pl_module, epoch, optimizer)
        for schedule in trainer.lr_schedulers:
            extend_schedule(schedule.scheduler)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._newest_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._newest_epoch = state_dict["epoch"]


def multiplicative(epoch: int) -> float:
    """Return the factor of the backbone's learning rate in each epoch.

    Args:
        epoch: number of the epoch.
    """
    return 2.0


class BackboneFinetuning(BaseFinetuning):
    """Train with a frozen `module.backbone`, and unfreeze it at an epoch with a small, rising learning rate.

    Args:
        unfreeze_backbone_at_epoch: epoch, from 0; a fit that begins after it unfreezes in its first epoch.
        lambda_func: returns the factor of the backbone's rate in an epoch.
        backbone_initial_ratio_lr: first rate of the backbone, relative to that of the first group.
        backbone_initial_lr: first rate of the backbone; None: by the ratio.
        should_align: the rate stays at that of the first group once it is reached.
        initial_denom_lr: not used, because the backbone's first rate is given by the other arguments.
        train_bn: train the batch normalisation of the backbone.
        verbose: print the rates.
        rounding: decimal places of printed rates.

    Raises:
        ValueError: the epoch is negative, the module has no `backbone`, the optimizer has the frozen backbone already,
            or the strategy fixes the parameters of the optimizers.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        if not isinstance(unfreeze_backbone_at_epoch, int) or unfreeze_backbone_at_epoch < 0:
            raise ValueError(
                f"BackboneFinetuning(unfreeze_backbone_at_epoch={unfreeze_backbone_at_epoch!r}): must be a whole "
                "number, 0 or more"
            )
        super().__init__()
        self.unfreeze_backbone_at_epoch, self.lambda_func = unfreeze_backbone_at_epoch, lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.initial_denom_lr, self.train_bn = should_align, initial_denom_lr, train_bn
        self.verbose, self.rounding = verbose, rounding
        self.previous_backbone_lr: float | None = None
        self._first_epoch = 0  # of the fit, at whose start the backbone is frozen

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(pl_module, "backbone", None), nn.Module):
            raise ValueError(
                f"BackboneFinetuning: {type(pl_module).__name__} has no `backbone`: assign the layers to self.backbone "
                "in __init__, or derive from BaseFinetuning"
            )
        if stage == "fit":
            self.previous_backbone_lr, self._first_epoch = None, 0
        super().setup(trainer, pl_module, stage)

    def on_train_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._newest_epoch < 0:  # the backbone is frozen; otherwise the run resumes
            self._first_epoch = trainer.current_epoch
        super().on_train_epoch_start(trainer, pl_module)

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=self.train_bn)

    def finetune_function(self, module: Any, epoch: int, optimizer: Optimizer) -> None:
        rate = float(optimizer.param_groups[0]["lr"])
        unfreezes = max(self.unfreeze_backbone_at_epoch, self._first_epoch)
        if epoch == unfreezes:
            first = rate * self.backbone_initial_ratio_lr
            self.previous_backbone_lr = first if self.backbone_initial_lr is None else self.backbone_initial_lr
            self.unfreeze_and_add_param_group(
                module.backbone, optimizer, self.previous_backbone_lr, train_bn=self.train_bn
            )
        elif epoch > unfreezes and self.previous_backbone_lr is not None:
            risen = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            self.previous_backbone_lr = min(risen, rate) if self.should_align else risen
            optimizer.param_groups[-1]["lr"] = self.previous_backbone_lr
        else:
            return
        if self.verbose:
            shown = f"{round(rate, self.rounding)}, of the backbone {round(self.previous_backbone_lr, self.rounding)}"
            module.print(f"epoch {epoch}: learning rate {shown}")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def on_fit_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        super().on_fit_start(trainer, pl_module)
        backbone: Any = pl_module.backbone
        frozen = {id(p): f"backbone.{name}" for name, p in backbone.named_parameters() if not p.requires_grad}
        for optimizer in trainer.optimizers:
            known = [frozen[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in frozen]
            if known:
                raise ValueError(
                    f"BackboneFinetuning: {type(optimizer).__name__} has {known[0]} of the frozen backbone already, so "
                    "that the rates of the backbone would be those of other layers: create the optimizer with "
                    "filter(lambda p: p.requires_grad, self.parameters())"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]


def _check_strategy(callback: Callback, trainer: TrainerProtocol) -> None:
    strategy = trainer.strategy
    if isinstance(strategy, HasServers) or not strategy.traits.synchronous or strategy.traits.batch_parts:
        raise ValueError(
            f"{type(callback).__name__} adds parameters to the optimizers during training, but "
            f"{type(strategy).__name__} exchanges those at its start only: use strategy=ddp or fsdp; or put all "
            "parameters into the optimizer, and change their requires_grad in a hook"
        )
