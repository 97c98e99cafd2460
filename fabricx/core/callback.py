"""The contract of a callback: code that runs at the hooks of a run, outside of the module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fabricx.errors import NamesChecked

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from fabricx.core.module import Module


# The trainer of a hook is a `fabricx.core.trainer.TrainerProtocol`; Any, so that an override may annotate its own type,
# such as fx.Trainer.
AnyTrainer = Any


@dataclass(frozen=True)
class RecoveryPolicy:
    """How a run recovers from lost workers.

    Attributes:
        patience: seconds that workers wait for the replacement of a dead worker.
        min_ranks: fewest ranks that continue without a replacement.
        max_restarts: consecutive restarts without progress before the run fails.
        frozen_after: seconds without a heartbeat after which the supervisor ends a worker; None: its default.
        stuck_after: seconds without a new batch after which the supervisor ends a worker; "learned" from the run; None:
            never.
        copy_every_n_steps: weight updates between two in-memory checkpoints of unreplicated state; None: adapted.
        snapshots: checkpoints for restarts are written to disk.
    """

    patience: float = 10.0
    min_ranks: int = 1
    max_restarts: int = 3
    frozen_after: float | None = 30.0
    stuck_after: float | Literal["learned"] | None = None
    copy_every_n_steps: int | None = None
    snapshots: bool = True


def recovery_policy_of(callbacks: Iterable[Callback]) -> RecoveryPolicy | None:
    """Return the recovery policy of the first callback that has one; None without recovery.

    Args:
        callbacks: a run's callbacks.
    """
    return next((policy for callback in callbacks if (policy := callback.recovery_policy) is not None), None)


class _Attached:
    """A reference to the module of the present run; a copy, and a pickle, refers to none."""

    def __init__(self, module: Module | None = None) -> None:
        self.module = (lambda: None) if module is None else weakref.ref(module)

    def __reduce__(self) -> tuple[type[_Attached], tuple[()]]:
        return _Attached, ()


def attach(callback: Callback, module: Module) -> None:
    """Set the module whose `log` a callback calls.

    Args:
        callback: callback of a run that begins.
        module: the run's module.
    """
    vars(callback)["_attached"] = _Attached(module)


class Callback(NamesChecked):
    """Base class of callbacks; a hook that is not overridden costs nothing.

    Callbacks run before the module's hook of the same name, in list order. Callbacks with `watches_metrics` (early
    stopping, then checkpointing) run after all other callbacks and the module, when the metrics are complete.

    Arguments of all hooks:

    - `trainer`: this rank's trainer.
    - `pl_module`: the run's module.
    """

    watches_metrics: ClassVar[bool] = False
    needs_all_ranks: ClassVar[bool] = False  # whether every rank needs it with equal arguments (it affects all ranks)
    every_batch: ClassVar[bool] = False  # whether on_train_batch_end runs also on a rank without a sample of the batch
    keeps_weights: ClassVar[bool] = False  # whether its state has tensors of weights, by the names of parameters
    sees_whole_weights: ClassVar[bool] = False  # a callback of fabricx that sees weights as hooks of users do
    trainer_role: ClassVar[Literal["checkpoint", "early_stopping", "progress_bar"] | None] = None  # use by the Trainer
    needs_telemetry: ClassVar[bool] = False  # whether it reads what the run records; else a run may write no files
    traces: bool = False  # whether each process records all spans in a trace
    # Methods of Lightning's callback of the same name that fabricx does not call, with their successors.
    former_methods: ClassVar[Mapping[str, str]] = {}

    @property
    def recovery_policy(self) -> RecoveryPolicy | None:
        """Return how the run recovers from lost workers; the first callback with a policy counts, None has none."""
        return None

    @property
    def meeting_interval(self) -> int:
        """Return the weight updates between two points at which asynchronous ranks meet for this callback; 0: none."""
        return 0

    @property
    def accumulates(self) -> int:
        """Return the most batches per weight update that this callback sets in `accumulate_grad_batches`; 1: none."""
        return 1

    def accumulates_at(self, epoch: int) -> int:
        """Return the batches per weight update that this callback sets in an epoch; 0 if it sets none.

        Args:
            epoch: epoch, counted from 0.
        """
        return 0

    @property
    def state_key(self) -> str:
        """Return the key of this callback's state in checkpoints."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints as plain data and tensors; only rank 0's state is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Args:
            state_dict: result of `state_dict`.
        """

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a number as `self.log` of the module, in hooks in which the module can log.

        Args:
            name: name of the metric.
            value: a number, a tensor with a single element, or a `torchmetrics.Metric`.
            args, options: of `Module.log`.

        Raises:
            RuntimeError: there is no run.
        """
        module = self._attached_module()
        if module is None:
            raise RuntimeError(
                f"{type(self).__name__}.log({name!r}, ...) was called outside of a run; call it in a hook"
            )
        module.log(name, value, *args, **options)

    def _attached_module(self) -> Module | None:
        attached: _Attached | None = vars(self).get("_attached")
        return None if attached is None else attached.module()

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log each entry of a dict.

        Args:
            dictionary: values by name.
            args, options: of `Module.log`, after the value.
        """
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    # the run as a whole

    def check_fit(self, trainer: AnyTrainer, pl_module: Module, global_batch: int | None) -> None:
        """Raise an error if the callback doesn't support the run, before worker processes start.

        Args:
            trainer: the run's trainer.
            pl_module: the run's module.
            global_batch: samples of a global batch; 0 if it can't be divided over ranks, None if it is unknown yet.
        """

    def before_fit(self, tuner: Any, call: Mapping[str, Any]) -> None:
        """Make trials before a fit, in the process that calls `fit`.

        Args:
            tuner: a `fabricx.Tuner` of the Trainer.
            call: arguments of `fit`, by name.
        """

    def setup(self, trainer: AnyTrainer, pl_module: Module, stage: str) -> None:
        """First hook of every rank.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def teardown(self, trainer: AnyTrainer, pl_module: Module, stage: str) -> None:
        """Last hook of every rank.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def on_fit_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """The strategy has set up the model and the optimizers exist."""

    def on_fit_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After `on_train_end`."""

    def on_exception(self, trainer: AnyTrainer, pl_module: Module, exception: BaseException) -> None:
        """An exception was raised in this rank's process.

        Args:
            exception: error that ends the run; it is raised again after the hooks.
        """

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Add entries to a checkpoint before it is written; called on every rank, and rank 0's entries are saved.

        If the callback has `on_load_checkpoint`, too, both hooks also bring the entries to the replacement of a dead
        worker, and are called for in-memory checkpoints.

        Args:
            checkpoint: content of the checkpoint: `state_dict` (weights), `hyper_parameters`, `epoch`, `global_step`,
                and entries of fabricx. Add plain data and tensors under any other name.
        """

    def on_load_checkpoint(self, trainer: AnyTrainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Read from a checkpoint that is being restored.

        Args:
            checkpoint: content of the checkpoint, with the entries that `on_save_checkpoint` added.
        """

    # training

    def restarts_after(self, error: Exception, step: int) -> bool:
        """Return whether failed workers are restarted; called in the supervisor.

        Args:
            error: a worker's error.
            step: weight updates of the checkpoint to resume from; -1 without a checkpoint.
        """
        return False

    def trained_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the module has its trained weights, while a checkpoint collects them.

        Callbacks that replace the weights during a validation override it.
        """
        return nullcontext()

    def restore_weights(self) -> None:
        """Give the module its trained weights: a worker has died in a validation, which is repeated or comes later.

        Callbacks that replace the weights during a validation override it.
        """

    def after_failure(self, newest: Path | None) -> None:
        """Use the newest checkpoint of a run that has failed for good; called in the supervisor of the workers.

        Args:
            newest: from which the run can resume; None without a checkpoint.
        """

    def repeats_after(self, trainer: AnyTrainer, error: Exception) -> bool:
        """Return whether all ranks repeat the step in which this rank raised an error.

        Args:
            trainer: the run's trainer.
            error: this rank's error.
        """
        return False

    def on_sanity_check_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Before the validation batches that precede training."""

    def on_sanity_check_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After the validation batches that precede training; metrics and random states have been restored."""

    def on_train_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Training begins, after the sanity check and after a checkpoint was restored."""

    def on_train_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Training has ended by its limits or by a request to stop."""

    def on_train_epoch_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """An epoch has ended; its metrics are in `trainer.callback_metrics`."""

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: Module, batch: Any, batch_idx: int) -> None:
        """Before `training_step` of a batch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its epoch.
        """

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a batch, and after the weight update if the batch completes an accumulation window.

        Args:
            outputs: result of `training_step` without its graph: the returned dict, or a dict with the loss under
                "loss", not divided by the accumulation. The dict is empty if the step returned None.
            batch: batch on the device.
            batch_idx: index of the batch in its epoch.
        """

    def on_before_zero_grad(self, trainer: AnyTrainer, pl_module: Module, optimizer: Optimizer) -> None:
        """Before gradients are reset, at the first batch of an accumulation window.

        Gradients are None in the first window of a run, also of a run that resumes: checkpoints contain no gradients.

        Args:
            optimizer: optimizer whose gradients are reset.
        """

    def on_before_backward(self, trainer: AnyTrainer, pl_module: Module, loss: Tensor) -> None:
        """Before `backward`.

        Args:
            loss: loss of the microbatch, shape []; neither divided by the accumulation nor scaled for float16.
        """

    def on_after_backward(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After `backward`."""

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: Module, optimizer: Optimizer) -> None:
        """Gradients are the global mean, unscaled and not yet clipped.

        Args:
            optimizer: optimizer that is about to step.
        """

    # validation

    def on_validation_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Before validation begins."""

    def on_validation_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After validation; metrics are logged."""

    def on_validation_epoch_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Before the first batch of validation."""

    def on_validation_epoch_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After the last batch of validation."""

    def on_validation_batch_start(
        self, trainer: AnyTrainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before `validation_step` of a batch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_validation_batch_end(
        self, trainer: AnyTrainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `validation_step` of a batch.

        Args:
            outputs: result of `validation_step`.
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    # the test

    def on_test_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Before the test begins."""

    def on_test_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After the test; metrics are logged."""

    def on_test_epoch_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Before the first batch of the test."""

    def on_test_epoch_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After the last batch of the test."""

    def on_test_batch_start(
        self, trainer: AnyTrainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before `test_step` of a batch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_test_batch_end(
        self, trainer: AnyTrainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `test_step` of a batch.

        Args:
            outputs: result of `test_step`.
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    # prediction

    def on_predict_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Before prediction begins."""

    def on_predict_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After prediction; metrics are logged."""

    def on_predict_epoch_start(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """Before the first batch of prediction."""

    def on_predict_epoch_end(self, trainer: AnyTrainer, pl_module: Module) -> None:
        """After the last batch of prediction."""

    def on_predict_batch_start(
        self, trainer: AnyTrainer, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before `predict_step` of a batch.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """

    def on_predict_batch_end(
        self, trainer: AnyTrainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After `predict_step` of a batch.

        Args:
            outputs: result of `predict_step`.
            batch: batch on the device.
            batch_idx: index of the batch in its data loader.
            dataloader_idx: index of the data loader; 0 for a single loader.
        """
