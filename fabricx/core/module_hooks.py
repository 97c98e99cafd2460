"""All hooks that a module may override, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from fabricx.core.callback import Callback


class ModuleHooks:
    """Override what you need; a hook that nobody overrides costs nothing.

    `hooks.md` beside this file has the order of all hooks, which `fabricx/loop/fit.py` follows.
    """

    if TYPE_CHECKING:
        # The steps take what they name: `training_step(batch)` is as good as `training_step(batch, batch_idx)`.
        training_step: Callable[..., Any]
        validation_step: Callable[..., Any]
        test_step: Callable[..., Any]

    # -- what has to be trained ---------------------------------------------------------------------------------

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the prediction for a batch; calls the module unless overridden."""
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        return self(inputs)  # type: ignore[operator]

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a list, `(optimizers, schedulers)`, a dict, or None to train nothing."""
        return None

    def configure_model(self) -> None:
        """Build layers here if they should be built on the worker's device."""

    def configure_callbacks(self) -> Callback | list[Callback]:
        """Return callbacks that this module brings along; one of a class replaces the trainer's of that class."""
        return []

    # -- how a weight update is done ----------------------------------------------------------------------------

    def batch_weight(self, batch: Any) -> float:
        """Return of how many terms the loss of a batch is the mean, where that aren't samples: tokens, say.

        The gradient is then the mean over the terms of the whole global batch, whichever rank had how many, and so are
        logged means; that takes one number to be summed over the ranks each step. With 0, the batch is left out.
        Strategies that step without that number refuse it before training: local_sgd, mode="bounded", rounds.

        >>> import torch, fabricx as fx
        >>> class Tokens(fx.Module):
        ...     def batch_weight(self, batch):
        ...         return (batch != -100).sum()  # what `ignore_index` leaves
        >>> int(Tokens().batch_weight(torch.tensor([[4, 2, -100], [7, -100, -100]])))
        3
        """
        raise NotImplementedError

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global gradient; calls `self.clip_gradients` with the trainer's settings."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)  # type: ignore[attr-defined]

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Update the weights; `optimizer_closure` gives the loss, and computes it anew when called again."""
        optimizer.step(optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Forget the gradients."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance a scheduler; `metric` is the monitored value, or None."""
        scheduler.step() if metric is None else scheduler.step(metric)

    # -- data ---------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Download or write files; runs on one rank per node, so keep no state here."""

    def train_dataloader(self) -> Any:
        """Return the training batches, if none are given to `fit`."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation batches, if none are given."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test batches, if none are given."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the batches to predict, if none are given."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Bring a batch to the device; override for types that fabricx doesn't know."""
        from fabricx.core.transfer import to_device

        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    # -- moments ------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """The batch is on the device; return -1 to skip the rest of the epoch."""
        return None

    def setup(self, stage: str) -> None:
        """Build what depends on the data, on every rank; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Give back what `setup` took."""

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
        """The batch is done; `outputs["loss"]` is the loss, not divided by the accumulation."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before gradients are reset."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before `backward`."""

    def on_after_backward(self) -> None:
        """After `backward`."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are the global mean, not yet clipped."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint that is about to be written: every rank is called, and what rank 0 adds is kept."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint that is being restored."""

    def on_exception(self, exception: BaseException) -> None:
        """Something was raised, in this rank's process."""

    def on_validation_model_eval(self) -> None:
        """Go to evaluation mode, before validation; sets every submodule to it unless overridden."""

    def on_validation_model_train(self) -> None:
        """Go back, after validation; gives every submodule its own mode again unless overridden."""

    def on_validation_start(self) -> None:
        """Before validation begins."""

    def on_validation_end(self) -> None:
        """After validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the first batch of validation."""

    def on_validation_epoch_end(self) -> None:
        """After the last batch of validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The batch is on the device."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The batch is done."""

    def on_test_model_eval(self) -> None:
        """Go to evaluation mode, before the test; sets every submodule to it unless overridden."""

    def on_test_model_train(self) -> None:
        """Go back, after the test; gives every submodule its own mode again unless overridden."""

    def on_test_start(self) -> None:
        """Before the test begins."""

    def on_test_end(self) -> None:
        """After the test."""

    def on_test_epoch_start(self) -> None:
        """Before the first batch of the test."""

    def on_test_epoch_end(self) -> None:
        """After the last batch of the test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The batch is on the device."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The batch is done."""

    def on_predict_model_eval(self) -> None:
        """Go to evaluation mode, before prediction; sets every submodule to it unless overridden."""

    def on_predict_model_train(self) -> None:
        """Go back, after prediction; gives every submodule its own mode again unless overridden."""

    def on_predict_start(self) -> None:
        """Before prediction begins."""

    def on_predict_end(self) -> None:
        """After prediction."""

    def on_predict_epoch_start(self) -> None:
        """Before the first batch of prediction."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch of prediction."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The batch is on the device."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """The batch is done."""
