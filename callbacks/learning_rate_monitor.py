"""Log learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch.optim import Optimizer

from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.errors import OptionWarning

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


def rate_names(optimizers: Sequence[Optimizer], names: Sequence[str | None]) -> list[list[str]]:
    """Return a chart name for each parameter group of each scheduler's optimizer.

    A single group is named "lr-Adam", several groups "lr-Adam/pg1", "lr-Adam/pg2" (or by the group's "name" entry). A
    second scheduler, or optimizer, of the same class is named "lr-Adam-1". A scheduler's name replaces "lr-Adam".

    Args:
        optimizers: of the schedulers, in their order, and those without a scheduler.
        names: user-defined names of the schedulers; None without.

    Returns:
        for each optimizer, the names of its parameter groups.

    Raises:
        ValueError: two parameter groups of an optimizer have the same name.
    """
    of_groups: list[list[str]] = []
    taken: dict[str, int] = {}
    for optimizer, name in zip(optimizers, names, strict=True):
        stem = name or f"lr-{type(optimizer).__name__}"
        seen = taken.get(stem, 0)
        taken[stem] = seen + 1
        if seen:
            stem = f"{stem}-{seen}"
        groups = optimizer.param_groups
        if len(groups) == 1 and "name" not in groups[0]:
            of_groups.append([stem])
        else:
            group_names = [f"{group.get('name', f'pg{number}')}" for number, group in enumerate(groups, 1)]
            if twice := sorted({name for name in group_names if group_names.count(name) > 1}):
                raise ValueError(
                    f"LearningRateMonitor: {stem} has several parameter groups named {', '.join(twice)}; give each "
                    'group of an optimizer another "name"'
                )
            of_groups.append([f"{stem}/{group}" for group in group_names])
    return of_groups


def rates(
    optimizers: Sequence[Optimizer], names: Sequence[Sequence[str]], *, momentum: bool, weight_decay: bool
) -> dict[str, float]:
    """Return the learning rate of every parameter group by name.

    Args:
        optimizers: some optimizers of the module.
        names: of their parameter groups.
        momentum: also return the momentum, or the first beta, as "NAME-momentum".
        weight_decay: also return the weight decay, as "NAME-weight_decay".
    """
    values: dict[str, float] = {}
    for optimizer, of_groups in zip(optimizers, names, strict=True):
        for group, name in zip(optimizer.param_groups, of_groups, strict=True):
            values[name] = float(group["lr"])
            if momentum:
                values[f"{name}-momentum"] = float(group["betas"][0] if "betas" in group else group.get("momentum", 0))
            if weight_decay:
                values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0))
    return values


@final
class LearningRateMonitor(Callback):
    """Log the learning rate of each optimizer, in the row of the step that it is used for, and in `callback_metrics`.

    Attributes:
        lrs: learning rates that the newest fit has logged, by name.
        last_momentum_values, last_weight_decay_values: newest momenta and weight decays, by the names of their charts.

    Args:
        logging_interval: "step" (every `log_every_n_steps` of the Trainer) or "epoch"; None logs an optimizer at the
            interval of its scheduler, and at both without a scheduler.
        log_momentum: also log the momentum, or the first beta; 0 with a warning for an optimizer without either.
        log_weight_decay: also log the weight decay; 0 with a warning for an optimizer without it.
        log_key_prefix: start of each name.

    Raises:
        ValueError: `logging_interval` is invalid, or (when training starts) the run has no logger, or two parameter
            groups of an optimizer have the same name.
    """

    former_methods: ClassVar = renamed(
        "_add_prefix _add_suffix _check_duplicates_and_update_name _duplicate_param_group_names _extract_lr "
        "_extract_momentum _extract_stats _extract_weight_decay _find_names_from_optimizers "
        "_find_names_from_schedulers _get_optimizer_stats _remap_keys",
        "on_train_batch_start of a Callback, which logs the rates by trainer.logger.log_metrics",
    )

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ValueError(
                f'LearningRateMonitor(logging_interval={logging_interval!r}): must be "step", "epoch" or None'
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._every = 0
        self._logged_step = self._newest_step = -1
        self._rewinds = 0  # of the loggers, when the step was logged
        self._in_batch = False

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise ValueError(
                "LearningRateMonitor: the run has no logger (logger=False); enable a logger or remove the callback"
            )
        self._warn_of_zeros(trainer)
        names = [name for _, of_groups, _ in self._charts(trainer) for name in of_groups]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}
        self._every = 0 if self.logging_interval == "epoch" else trainer.log_every_n_steps
        self._logged_step = self._newest_step = trainer.global_step
        self._in_batch = False

    def _warn_of_zeros(self, trainer: TrainerProtocol) -> None:
        """Warn about wanted values that an optimizer does not have, for which 0 is logged."""
        for option, wanted, keys in (
            ("log_momentum", self.log_momentum, {"momentum", "betas"}),
            ("log_weight_decay", self.log_weight_decay, {"weight_decay"}),
        ):
            lacking = [type(o).__name__ for o in trainer.optimizers if keys.isdisjoint(o.param_groups[0])]
            if wanted and lacking:
                trainer.session.warn_once(
                    f"LearningRateMonitor.{option}",
                    f"LearningRateMonitor({option}=True) logs 0 for {', '.join(lacking)}, which has no "
                    + " or ".join(sorted(keys)),
                    OptionWarning,
                )

    def _charts(self, trainer: TrainerProtocol) -> list[tuple[Optimizer, list[str], str | None]]:
        """Return optimizer, names and interval of each scheduler, then of each optimizer without a scheduler."""
        known = {id(optimizer): optimizer for optimizer in trainer.optimizers}
        charts: list[tuple[Optimizer, str | None, str | None]] = []
        for schedule in trainer.lr_schedulers:
            optimizer = known.get(id(getattr(schedule.scheduler, "optimizer", None)))
            if optimizer is not None:
                charts.append((optimizer, schedule.name, schedule.interval))
        scheduled = {id(optimizer) for optimizer, _, _ in charts}
        charts += [(optimizer, None, None) for optimizer in trainer.optimizers if id(optimizer) not in scheduled]
        names = rate_names([optimizer for optimizer, _, _ in charts], [name for _, name, _ in charts])
        return [
            (optimizer, [f"{self.log_key_prefix}{name}" for name in of_groups], interval)
            for (optimizer, _, interval), of_groups in zip(charts, names, strict=True)
        ]

    def on_train_batch_start(self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int) -> None:
        # Before the step, because a scheduler may change the rate directly after it.
        self._in_batch = True
        self._log_step(trainer)

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._in_batch = False

    def on_before_optimizer_step(self, trainer: TrainerProtocol, pl_module: Module, optimizer: Any) -> None:
        if not self._in_batch:  # a rank without a sample of the batch, which may be the main rank
            self._log_step(trainer)

    def _log_step(self, trainer: TrainerProtocol) -> None:
        step, rewinds = trainer.global_step + 1, trainer.session.metrics.loggers.rewinds
        if step == self._logged_step and rewinds == self._rewinds:
            return
        # Several updates in a manual batch may pass a multiple of the interval; a rollback returns to an earlier step.
        before = min(self._logged_step, step - 1)
        if self._every and step // self._every > before // self._every:
            self._logged_step, self._rewinds = step, rewinds
            self._log(trainer, step, "step", repeated=step <= self._newest_step)
            self._newest_step = max(self._newest_step, step)

    def on_train_epoch_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        # A batch number above 0 means that the resumed run began this epoch, and logged it.
        if self.logging_interval != "step" and not trainer.state.batch:
            self._log(trainer, trainer.global_step, "epoch")

    def _log(self, trainer: TrainerProtocol, step: int, interval: str, *, repeated: bool = False) -> None:
        """Log the rates; `repeated` if `lrs` has them, and a recovery has discarded their row."""
        due = [
            (optimizer, names)
            for optimizer, names, of_schedule in self._charts(trainer)
            if self.logging_interval is not None or of_schedule in (None, interval)
        ]
        values = rates(
            [optimizer for optimizer, _ in due], [names for _, names in due],
            momentum=self.log_momentum, weight_decay=self.log_weight_decay,
        )  # fmt: skip
        for name, value in values.items():
            if name in self.last_momentum_values:
                self.last_momentum_values[name] = value
            elif name in self.last_weight_decay_values:
                self.last_weight_decay_values[name] = value
            elif not repeated:
                single = name.removesuffix("/pg1")  # its name before other groups were added
                self.lrs.setdefault(name, self.lrs.pop(single, []) if single != name else []).append(value)
        if values:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
            row = {**values, "epoch": float(trainer.current_epoch)}
            trainer.session.metrics.loggers.each(lambda logger: logger.log_metrics(row, step))
