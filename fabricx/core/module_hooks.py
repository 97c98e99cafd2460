"""All hooks that a module may override, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

# Attributes that are set while a trainer runs a module, and None in its pickles and copies.
RUN_ATTRIBUTES: Final = ("_trainer", "_log_to")


class ModuleHooks:
    """Hooks of a module; a hook that is not overridden costs nothing.

    `hooks.md` in this folder has the order of all hooks, which `fabricx/loop/fit.py` follows.
    """

    if TYPE_CHECKING:
        # Steps may have fewer parameters: `training_step(batch)` or `training_step(batch, batch_idx)`.
        training_step: Callable[..., Any]
        validation_step: Callable[..., Any]
        test_step: Callable[..., Any]

    # -- what has to be trained ---------------------------------------------------------------------------------

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the prediction for a batch; calls the module unless overridden.

        Args:
            batch: batch on the device; the first element of a list or tuple is the input of the module.
            batch_idx: index of the batch.
            dataloader_idx: number of the data loader.
        """
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        return self(inputs)  # type: ignore[operator]

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list, `(optimizers, schedulers)`, a dict, or None to train without updates."""
        return None

    def configure_model(self) -> None:
        """Create layers that should be created in the worker, on its device."""

    def configure_callbacks(self) -> Any:
        """Return an additional callback or a list; each replaces the trainer's callback of the same class."""
        return []

    # -- how a weight update is done ----------------------------------------------------------------------------

    def batch_weight(self, batch: Any) -> float:
        """Return the number of terms over which the loss of a batch is the mean, if these are not samples but tokens.

        The gradient is then the mean over the terms of the global batch, independent of their distribution over ranks,
        and so are logged means; this costs an all-reduce of a number in each step. With 0, the batch is ignored.
        Strategies that step without this number raise an error before training: local_sgd, mode="bounded", rounds.

        Args:
            batch: batch on the device.

        >>> import torch, fabricx as fx
        >>> class Tokens(fx.Module):
        ...     def batch_weight(self, batch):
        ...         return (batch != -100).sum()  # tokens except those of `ignore_index`
        >>> int(Tokens().batch_weight(torch.tensor([[4, 2, -100], [7, -100, -100]])))
        3
        """
        raise NotImplementedError

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients.

        Args:
            loss: scaled loss, shape [].
            args, kwargs: further arguments of `manual_backward`.
        """
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global gradient; calls `self.clip_gradients` with the trainer's settings.

        Args:
            optimizer: optimizer whose gradients are clipped.
            gradient_clip_val: the trainer's limit; None for no clipping.
            gradient_clip_algorithm: "norm" or "value"; None for "norm".
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)  # type: ignore[attr-defined]

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Update the weights; `optimizer_closure` returns the loss, and recomputes it in further calls.

        Args:
            epoch: number of the epoch.
            batch_idx: index of the batch.
            optimizer: optimizer to step.
            optimizer_closure: returns the loss of the batch; recomputes loss and gradients when it is called again.
        """
        optimizer.step(optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Reset the gradients.

        Args:
            epoch: number of the epoch.
            batch_idx: index of the batch.
            optimizer: optimizer whose gradients are reset.
        """
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance a scheduler; `metric` is the monitored value, or None.

        Args:
            scheduler: scheduler that is due.
            metric: newest value of the monitored metric; None for a scheduler without one.
        """
        scheduler.step() if metric is None else scheduler.step(metric)

    # -- data ---------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download or write files; runs on a single rank per node, so do not set attributes."""

    def train_dataloader(self) -> Any:
        """Return the training batches, if `fit` has no argument for them."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation batches, if the trainer's method has no argument for them."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test batches, if `test` has no argument for them."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the batches to predict, if `predict` has no argument for them."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch, changed before its transfer to the device.

        Args:
            batch: batch of the data loader.
            dataloader_idx: number of the data loader.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for types that fabricx doesn't support.

        Args:
            batch: result of `on_before_batch_transfer`.
            device: this rank's device.
            dataloader_idx: number of the data loader.
        """
        from fabricx.core.tensors.transfer import to_device

        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch, changed on the device.

        Args:
            batch: batch on the device.
            dataloader_idx: number of the data loader.
        """
        return batch

    # -- moments ------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before `training_step` of a batch; return -1 to skip the rest of the epoch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its epoch.
        """
        return None

    def setup(self, stage: str) -> None:
        """Create parts that depend on the data, on every rank.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def teardown(self, stage: str) -> None:
        """Release the resources of `setup`.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def on_fit_start(self) -> None:
        """The model is set up and the optimizers exist."""

    def on_fit_end(self) -> None:
        """After `on_train_end`."""

    def on_train_start(self) -> None:
        """Training begins, after the sanity check."""

    def on_train_end(self) -> None:
        """Training has ended."""

    def on_train_epoch_start(self) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self) -> None:
        """An epoch has ended."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch, and after the weight update if the batch completes an accumulation window.

        Args:
            outputs: result of `training_step` without its graph: the returned dict, or a dict with the loss under
                "loss", not divided by the accumulation. The dict is empty if the step returned None.
            batch: batch on the device.
            batch_idx: index of the batch in its epoch.
        """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before gradients are reset; they are None in the first window of a run, also of a run that resumes.

        Args:
            optimizer: optimizer whose gradients are reset.
        """

    def on_before_backward(self, loss: Tensor) -> None:
        """Before `backward`.

        Args:
            loss: loss of the microbatch, shape []; neither divided by the accumulation nor scaled for float16.
        """

    def on_after_backward(self) -> None:
        """After `backward`."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are the global mean, not yet clipped.

        Args:
            optimizer: optimizer that is about to step.
        """

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries to a checkpoint before it is written; called on every rank, and rank 0's entries are saved.

        If the module has `on_load_checkpoint`, too, both hooks also bring the entries to the replacement of a dead
        worker, and are called for in-memory checkpoints.

        Args:
            checkpoint: content of the checkpoint: `state_dict` (weights), `hyper_parameters`, `epoch`, `global_step`,
                and entries of fabricx. Add plain data and tensors under any other name.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint that is being restored.

        Args:
            checkpoint: content of the checkpoint, with the entries that `on_save_checkpoint` added.
        """

    def on_exception(self, exception: BaseException) -> None:
        """An exception was raised in this rank's process.

        Args:
            exception: error that ends the run; it is raised again after the hooks.
        """

    def on_validation_model_zero_grad(self) -> None:
        """Release the gradients before a validation within training; by default they are kept."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_validation_model_eval(self) -> None:
        """Set every submodule to evaluation mode, before validation."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Set the mode of every submodule, after validation; by default each gets its mode of before."""
        self.train()  # type: ignore[attr-defined]

    def on_validation_start(self) -> None:
        """Before validation begins."""

    def on_validation_end(self) -> None:
        """After validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first batch of validation."""

    def on_validation_epoch_end(self) -> None:
        """After the last batch of validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before `validation_step` of a batch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After `validation_step` of a batch.

        Args:
            outputs: result of `validation_step`.
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_test_model_eval(self) -> None:
        """Set every submodule to evaluation mode, before the test."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Set the mode of every submodule, after the test; by default each gets its mode of before."""
        self.train()  # type: ignore[attr-defined]

    def on_test_start(self) -> None:
        """Before the test begins."""

    def on_test_end(self) -> None:
        """After the test."""

    def on_test_epoch_start(self) -> None:
        """Before the first batch of the test."""

    def on_test_epoch_end(self) -> None:
        """After the last batch of the test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before `test_step` of a batch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After `test_step` of a batch.

        Args:
            outputs: result of `test_step`.
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_predict_model_eval(self) -> None:
        """Set every submodule to evaluation mode, before prediction."""
        self.eval()  # type: ignore[attr-defined]

    def on_predict_model_train(self) -> None:
        """Set the mode of every submodule, after prediction; by default each gets its mode of before."""
        self.train()  # type: ignore[attr-defined]

    def on_predict_start(self) -> None:
        """Before prediction begins."""

    def on_predict_end(self) -> None:
        """After prediction."""

    def on_predict_epoch_start(self) -> None:
        """Before the first batch of prediction."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch of prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before `predict_step` of a batch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After `predict_step` of a batch.

        Args:
            outputs: result of `predict_step`.
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """
