"""Hooks of Lightning 1 and near misses of names: methods that would silently never be called, and their successors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from fabricx.errors import nearest

_OUTPUTS: Final = "which has no `outputs`: append what it needs to a list of self in the step"
_START_END: Final = "for training, validation and test each"

# Methods of modules and callbacks that Lightning 2 doesn't call either, with their replacements.
FORMER_HOOKS: Final[Mapping[str, str]] = {
    "training_epoch_end": f"on_train_epoch_end(self), {_OUTPUTS}",
    "validation_epoch_end": f"on_validation_epoch_end(self), {_OUTPUTS}",
    "test_epoch_end": f"on_test_epoch_end(self), {_OUTPUTS}",
    "predict_epoch_end": f"on_predict_epoch_end(self), {_OUTPUTS}",
    "training_end": "training_step and on_train_epoch_end(self)",
    "validation_end": f"on_validation_epoch_end(self), {_OUTPUTS}",
    "test_end": f"on_test_epoch_end(self), {_OUTPUTS}",
    "training_step_end": "training_step itself: each rank computes the loss of its own samples",
    "validation_step_end": "validation_step itself: each rank evaluates its own samples",
    "test_step_end": "test_step itself: each rank evaluates its own samples",
    "predict_step_end": "predict_step itself: each rank predicts its own samples",
    "on_epoch_start": f"on_train_epoch_start, on_validation_epoch_start, on_test_epoch_start: {_START_END}",
    "on_epoch_end": f"on_train_epoch_end, on_validation_epoch_end, on_test_epoch_end: {_START_END}",
    "on_batch_start": f"on_train_batch_start, on_validation_batch_start, on_test_batch_start: {_START_END}",
    "on_batch_end": f"on_train_batch_end, on_validation_batch_end, on_test_batch_end: {_START_END}",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_init_start": "setup(self, trainer, module, stage)",
    "on_init_end": "setup(self, trainer, module, stage)",
    "on_keyboard_interrupt": "on_exception(self, trainer, module, exception), or trainer.interrupted in on_train_end",
    "on_before_accelerator_backend_setup": "setup(self, trainer, module, stage)",
    "on_configure_sharded_model": "setup(self, trainer, module, stage)",
    "configure_sharded_model": "configure_model(self)",
    "on_hpc_save": "on_save_checkpoint(self, checkpoint)",
    "on_hpc_load": "on_load_checkpoint(self, checkpoint)",
    "on_post_move_to_device": "configure_model(self), or on_fit_start",
    "on_train_dataloader": "train_dataloader, or setup(self, stage)",
    "on_val_dataloader": "val_dataloader, or setup(self, stage)",
    "on_test_dataloader": "test_dataloader, or setup(self, stage)",
    "on_predict_dataloader": "predict_dataloader, or setup(self, stage)",
    "tbptt_split_batch": "a loop over the parts of a sequence in training_step, with automatic_optimization = False",
    "get_progress_bar_dict": "self.log(name, value, prog_bar=True)",
    "configure_apex": "Trainer(precision='bf16-mixed')",
    "configure_ddp": "Trainer(strategy=fabricx.strategies.DDP(...))",
    "init_ddp_connection": "nothing: the Trainer connects the ranks",
    "configure_sync_batchnorm": "Trainer(sync_batchnorm=True)",
}

# Hooks that a data module doesn't have, with their replacements.
FORMER_DATA_HOOKS: Final[Mapping[str, str]] = {
    **{name: FORMER_HOOKS[name] for name in FORMER_HOOKS if name.endswith("_dataloader")},
    "on_save_checkpoint": "state_dict(self), which returns the state",
    "on_load_checkpoint": "load_state_dict(self, state_dict)",
}

# Parameters of Lightning 1 in hooks and steps, with their replacements.
FORMER_PARAMETERS: Final[Mapping[str, str]] = {
    "optimizer_idx": (
        "all optimizers share one loss and step together; to train them in turn, set self.automatic_optimization = "
        "False and step them in training_step: opt_a, opt_b = self.optimizers()"
    ),
    "dataloader_iter": "fabricx passes batches, and not the iterator: define the step with (self, batch, batch_idx)",
    "hiddens": "keep the hidden state in an attribute, and loop over the parts of a sequence in training_step",
    "outputs": "append what it needs to a list of self in the step",
}

# Names that users write instead of the name of a method, beyond a slip of a letter or two.
_WRONG_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "training_step": ("train_step", "trainning_step"),
    "validation_step": ("val_step", "valid_step", "eval_step"),
    "test_step": ("testing_step",),
    "predict_step": ("prediction_step",),
    "train_dataloader": ("training_dataloader", "train_dataloaders", "train_loader"),
    "val_dataloader": ("validation_dataloader", "valid_dataloader", "val_dataloaders", "val_loader"),
    "test_dataloader": ("test_dataloaders", "test_loader"),
    "predict_dataloader": ("prediction_dataloader", "predict_dataloaders"),
    "configure_optimizers": ("configure_optimizer", "configure_optimisers", "configure_scheduler"),
    "configure_callbacks": ("configure_callback",),
    "configure_model": ("configure_models",),
    "transfer_batch_to_device": ("transfer_batch",),
}
_CLOSE: Final = 0.9  # similarity of a name with a slip of a letter or two


def renamed(names: str, successor: str) -> dict[str, str]:
    """Return a table with the same successor for several names.

    Args:
        names: separated by blanks.
        successor: the text of each.
    """
    return dict.fromkeys(names.split(), successor)


def meant_name(name: str, contract: Iterable[str]) -> str | None:
    """Return the method that a user probably meant by a name; None if the name is probably the user's own.

    Args:
        name: name of a method that is never called.
        contract: names of the methods that are called.

    >>> meant_name("val_step", ["validation_step"]), meant_name("validaton_step", ["validation_step"])
    ('validation_step', 'validation_step')
    >>> meant_name("encode", ["validation_step"])
    """
    names = list(contract)
    meant = next((right for right, wrong in _WRONG_NAMES.items() if name in wrong and right in names), None)
    return meant or nearest(name, names, _CLOSE)


def former_parameter(names: Iterable[str]) -> Any:
    """Return the first parameter of Lightning 1 among names, or None.

    Args:
        names: names of the parameters of a user's method.
    """
    return next((name for name in names if name in FORMER_PARAMETERS), None)
