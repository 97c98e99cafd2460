"""Find the largest batch size that fits in memory before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fabricx.callbacks.trials import check_tried
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


class BatchSizeFinder(Callback):
    """Find the largest batch size before `fit` begins, and set it: see `fabricx.Tuner.scale_batch_size`.

    A fit that resumes from a checkpoint makes no search, and has the batch size of the module: pass the size that was
    found, which a message names if it differs. For an evaluation, call
    `fabricx.Tuner(trainer).scale_batch_size(module, method="test")`.

    Attributes:
        optimal_batch_size: result of the newest search; None before.

    Args:
        mode: "power" doubles the size until it doesn't fit, "binsearch" then searches between the last two sizes.
        steps_per_trial: batches of a trial.
        init_val: first size.
        max_trials: maximum number of trials.
        batch_arg_name: attribute of the module, the data module, or their `hparams`.
        margin: part of the size by which "binsearch" reduces its result.
        max_val: largest size.

    Raises:
        ValueError: an argument is invalid (most are checked when a search begins), or the module created the callback.
    """

    former_methods: ClassVar = renamed("scale_batch_size", "on_fit_start, which calls its super()")

    def __init__(
        self,
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode not in ("power", "binsearch"):
            raise ValueError(f"BatchSizeFinder(mode={mode!r}): must be 'power' or 'binsearch'")
        self.optimal_batch_size: int | None = None
        self._arguments: dict[str, Any] = {
            "mode": mode, "steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials,
            "batch_arg_name": batch_arg_name, "margin": margin, "max_val": max_val,
        }  # fmt: skip
        self._tried = False

    def before_fit(self, tuner: Any, call: Mapping[str, Any]) -> None:
        self._tried = True
        if not tuner.resumes(call["ckpt_path"]):
            self.optimal_batch_size = tuner.scale_batch_size(
                call["module"], call["train_dataloaders"], datamodule=call["datamodule"], **self._arguments
            )

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        check_tried(self, stage, tried=self._tried)
