"""Find a learning rate before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fabricx.callbacks.trials import check_tried
from fabricx.core.callback import Callback

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


class LearningRateFinder(Callback):
    """Find a learning rate before `fit` begins, and set it in the module: see `fabricx.Tuner.lr_find`.

    A fit that resumes from a checkpoint keeps its learning rate.

    Attributes:
        optimal_lr: result of the newest search, with `suggestion()`, `results` and `plot()`; None before.

    Args:
        min_lr, max_lr: first and last rate.
        num_training_steps: weight updates of the search.
        mode: "exponential" or "linear" rise of the rate.
        early_stop_threshold: the search ends when the loss exceeds the least loss by this factor, unless the least loss
            is negative; None: never.
        update_attr: set the suggested rate in the module.
        attr_name: attribute of the module or its `hparams`; default: "lr" or "learning_rate".

    Raises:
        ValueError: an argument is invalid (most are checked when a search begins), or the module created the callback.
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        if mode not in ("exponential", "linear"):
            raise ValueError(f"LearningRateFinder(mode={mode!r}): must be 'exponential' or 'linear'")
        self.min_lr, self.max_lr, self.num_training_steps, self.mode = min_lr, max_lr, num_training_steps, mode
        self.early_stop_threshold, self.update_attr, self.attr_name = early_stop_threshold, update_attr, attr_name
        self.optimal_lr: Any = None
        self._tried = False

    def before_fit(self, tuner: Any, call: Mapping[str, Any]) -> None:
        self._tried = True
        if tuner.resumes(call["ckpt_path"]):
            return
        self.optimal_lr = tuner.lr_find(
            call["module"], call["train_dataloaders"], datamodule=call["datamodule"], min_lr=self.min_lr,
            max_lr=self.max_lr, num_training=self.num_training_steps, mode=self.mode,
            early_stop_threshold=self.early_stop_threshold, update_attr=self.update_attr, attr_name=self.attr_name,
        )  # fmt: skip

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        check_tried(self, stage, tried=self._tried)

    def lr_find(self, trainer: Any, pl_module: Any) -> None:
        """Raise an error: a search within a run is not supported.

        Args:
            trainer: the run's trainer.
            pl_module: the run's module.
        """
        raise ValueError(
            "LearningRateFinder.lr_find can't search within a run: call fx.Tuner(trainer).lr_find(module, ...) "
            "between two fits"
        )
