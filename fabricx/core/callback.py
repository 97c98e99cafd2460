"""The contract of a callback: code at each moment of a run, outside of the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fabricx.errors import NamesChecked

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from fabricx.core.module import Module
    from fabricx.trainer.trainer import Trainer


class Callback(NamesChecked):
    """Override the hooks that you need; one that nobody overrides costs nothing.

    Callbacks run before the module's hook of the same name, in list order; those with `watches_metrics` (early
    stopping, then checkpointing) run after all others and after the module, when the metrics of the epoch are complete.
    """

    watches_metrics: ClassVar[bool] = False
    needs_all_ranks: ClassVar[bool] = False  # does it change or join what ranks do, so that each needs it, made alike?
    every_batch: ClassVar[bool] = False  # is on_train_batch_end for batches of which a rank has no sample, too?
    frozen_after: float | None = None  # seconds after which the supervisor ends a worker without a sign of life
    stuck_after: float | Literal["learned"] | None = None  # and one that has come no batch further
    patience: float | None = None  # seconds that workers wait for who takes a dead one's place; None: all start again
    min_ranks: int = 1  # the fewest that go on
    copy_every_n_steps: int | None = None  # weight updates between two copies of what a rank alone holds
    traces: bool = False  # is each span of each process to be written down?
    max_restarts: int = 0  # how often in a row, without getting any further

    @property
    def state_key(self) -> str:
        """Return the name under which a checkpoint keeps this callback's state."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback, as plain data and tensors: that of rank 0."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    # the run as a whole

    def check_fit(self, trainer: Trainer, module: Module, global_batch: int | None) -> None:
        """Raise an error if something doesn't fit, before any process starts that trains.

        Args:
            trainer, module: of the run.
            global_batch: samples of one, 0 where it can't be divided over ranks, None where that isn't known yet.
        """

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called on every rank before anything else; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Called on every rank at the very end."""

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """The strategy has set up the model and the optimizers exist."""

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """After `on_train_end`."""

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Something was raised, in this rank's process."""

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint that is about to be written: every rank is called, and what rank 0 adds is kept."""

    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint that is being restored."""

    # training

    def restarts_after(self, error: Exception, step: int) -> bool:
        """Return whether workers that failed are to be started again from a checkpoint of `step`, -1 if there is none.

        Called in the process that supervises, which doesn't train.
        """
        return False

    def repeats_after(self, trainer: Trainer, error: Exception) -> bool:
        """Return whether all ranks are to begin the step again in which this rank had an error."""
        return False

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        """Before the few validation batches that are run ahead of training."""

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        """After them; metrics and random state are as if nothing had happened."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Training begins, after the sanity check and after a checkpoint was restored."""

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Training has ended, by its limits or because it was asked to stop."""

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """An epoch has ended; its metrics are in `trainer.callback_metrics`."""

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        """The batch is on the device."""

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The batch is done; `outputs["loss"]` is the loss, not divided by the accumulation."""

    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Before gradients are reset, at the first batch of an accumulation window."""

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        """Before `backward`."""

    def on_after_backward(self, trainer: Trainer, module: Module) -> None:
        """After `backward`."""

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Gradients are the global mean, unscaled and not yet clipped."""

    # validation

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Before validation begins."""

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """After validation; metrics are logged."""

    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Before the first batch of validation."""

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """After the last batch of validation."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The batch is on the device."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The batch is done."""

    # the test

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Before the test begins."""

    def on_test_end(self, trainer: Trainer, module: Module) -> None:
        """After the test; metrics are logged."""

    def on_test_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Before the first batch of the test."""

    def on_test_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """After the last batch of the test."""

    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The batch is on the device."""

    def on_test_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The batch is done."""

    # prediction

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Before prediction begins."""

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        """After prediction; metrics are logged."""

    def on_predict_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Before the first batch of prediction."""

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """After the last batch of prediction."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The batch is on the device."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """The batch is done."""
