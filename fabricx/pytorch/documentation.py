"""The page docs/lightning_names.md, written from the tables: `python -m fabricx.pytorch.documentation`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Final

from fabricx.core.hook_calls.former_names import FORMER_DATA_HOOKS, FORMER_HOOKS
from fabricx.core.options.former_arguments import FORMER_ARGUMENTS
from fabricx.pytorch.modules import available
from fabricx.pytorch.names import TREE, names_of

# Members of Lightning's classes that fabricx does not have, and their replacements.
ABSENT_MEMBERS: Final[Mapping[str, Mapping[str, str]]] = {
    "Trainer": {
        "validate_loop": "trainer.num_val_batches, val_dataloaders",
        "test_loop": "trainer.num_test_batches, test_dataloaders",
        "predict_loop": "trainer.num_predict_batches; predict returns the outputs",
        "precision_plugin": "trainer.precision is the name",
    },
    "LightningModule": {
        "configure_sharded_model": "configure_model",
        "device_mesh": 'strategy="fsdp" shards; trainer.world has the ranks',
        "fabric": "fx.Trainer runs the module",
        "to_tensorrt": "torch_tensorrt.compile(module.eval(), ...)",
    },
    "LightningDataModule": {
        "allow_zero_length_dataloader_with_multiple_devices": "a rank may have no samples",
        "name": "type(data).__name__",
    },
    "Callback": {},
}
# Equal names with different meanings.
_DIFFERS: Final[Mapping[str, str]] = {
    "trainer.global_step, max_steps": "weight updates, for any number of optimizers",
    "step of the rows of loggers": "the number of weight updates: 1 for the first batch, in Lightning 0",
    "trainer.fit_loop": "`max_epochs` and other limits, which may be set between two fits; for reading: `batch_idx`, "
    "`max_batches`, `total_batch_idx`, progress of loops",
    "scheduler with interval epoch": "steps after the validation and `on_train_epoch_end`; in Lightning before",
    "scheduler with interval step, frequency": "counts updates of the run; in Lightning batches of each epoch",
    "optimizer_step": "runs after training_step and backward: `optimizer_closure()` returns the loss",
    "self.log(add_dataloader_idx=False)": "several loaders may share a name: the mean over all; in Lightning an error",
    "self.log of a metric object for several loaders": "an error; in Lightning values include the loaders before",
    "logger.log_metrics(values) without a step": "a row of step 0; in Lightning the rows not yet written are counted",
    "self.log twice in a batch, or with accumulation": "a step has the mean of all calls; in Lightning the last",
    "ModelCheckpoint(save_last=True) in a used folder": "replaces last.ckpt; in Lightning writes last-v1.ckpt",
    "ModelCheckpoint without dirpath": "saves in the run's folder; in Lightning in that of the first logger",
    "ModelCheckpoint(filename='{a/b}')": "`a_b=...`; in Lightning a file in a folder `a`",
    "lr_find": "equal steps of rates, unbiased mean losses; in Lightning within one epoch",
    "suggestion of lr_find": "where the loss falls fastest from step to step; in Lightning 2.6 fastest by the rate, so "
    "that noise at the least rates decides",
    "CombinedLoader": "has a length before `iter`; `limits` end the iteration in each mode; a run refuses them",
    "num_val_batches of a CombinedLoader": "of combined batches; in Lightning of each loader, in every mode",
    "a list of lists or tensors as data": "one loader, whose items are the batches; in Lightning each item is a loader",
    "self.log with a batch of several loaders": "means are weighted by all samples; in Lightning by the first loader's",
    "trainer.model": "the module; no strategy wraps it",
    "trainer.accelerator": "a name, not an object",
    "trainer.profiler": "a name; its `profile`, `start` and `stop` measure nothing",
    "trainer.is_last_batch in an evaluation": "that of the evaluation; in Lightning that of the training",
    "trainer.strategy": (
        "has `root_device`, `barrier`, `broadcast`, `reduce`, `reduce_boolean_decision`, `all_gather`, "
        "`batch_to_device` and `model`"
    ),
    "trainer.lr_schedulers, lr_scheduler_configs": "the same list of schedules",
    "trainer.logger.log_dir": "a folder of the run, by default in `runs/`",
    "fabricx.loggers.TensorBoardLogger(save_dir), CSVLogger(save_dir)": (
        "without `name`, no subfolder `lightning_logs`, which those of `fabricx.pytorch.loggers` have"
    ),
    "on_fit_start of a resumed run": (
        "precedes the checkpoint, so that the run equals one without the interruption; in Lightning it follows weights "
        "and states of callbacks"
    ),
    "on_save_checkpoint with save_last=True": "called once: last.ckpt is a copy of the other file",
    "trainer.log_dir, without a logger": "the run's folder; in Lightning `default_root_dir`, which runs share",
    "v_num in get_metrics of a progress bar": "absent for a logger without a version, as that of `logger=True`",
    "callback_metrics of several loaders": "at the end of an evaluation; in Lightning when each loader is read",
    "callback_metrics in hooks at the end of an epoch": (
        "has what these hooks have logged, on several ranks only after they have ended, as reading does not communicate"
    ),
    "on_load_checkpoint": (
        "an error if it changes `optimizer_states`, `lr_schedulers` or `loops` and the training resumes"
    ),
    "entries of a checkpoint": "`loops` is absent; `fabricx` has the state from which a run resumes",
    "train_dataloader, val_dataloader": "are called before `configure_optimizers`; in Lightning after `on_fit_start`",
    "lr in checkpoints of an epoch's end": "that of the epoch; in Lightning that of the next",
    "training_step that returns None": "is no step: `global_step` remains; in Lightning it counts",
    "training_step that returns {'loss': None}": "as None, with a warning; in Lightning an error",
    "Trainer(min_steps=)": "a stop follows after these steps; in Lightning also after the first epoch, as min_epochs=1",
    "a data module without val_dataloader": "that of the module is used; in Lightning none",
    "an empty training loader": "an error; in Lightning a warning",
    "resuming from a checkpoint of a complete run": "calls `on_train_start` and `on_train_end`, before which the run "
    "may have been interrupted; in Lightning neither",
    "a second fit after a stop in the middle of an epoch": "trains the rest of the epoch; in Lightning a new epoch",
    "results of validate and test": "also have the values of `self.log(logger=False)`",
    "ModelCheckpoint(monitor=), a metric that is not logged in a run without validation": "an error after the first "
    "epoch; in Lightning a warning at each time, and no checkpoint",
    "val_check_interval=1": "EarlyStopping and ModelCheckpoint read the metric after each validation; in Lightning, "
    "where 1 equals 1.0, at the end of the epoch",
    "test(ckpt_path='last') without a checkpoint": "an error; in Lightning a warning, and the present weights",
    "ModelCheckpoint(save_top_k=2) without monitor": "keeps the newest two; in Lightning an error",
    "ModelCheckpoint(every_n_train_steps=, every_n_epochs=)": "may be combined; in Lightning an error",
    "precision='16-mixed' on a CPU": "`trainer.precision` remains; as in Lightning, it computes in bf16",
    "configure_optimizers of a resumed run": "precedes `on_load_checkpoint`; in Lightning it follows",
    "rows of loggers, a name that a batch doesn't log": "is absent from the row; in Lightning its last value remains",
    "callback_metrics, a name that the newest batch doesn't log": "may be absent, in Lightning its last value remains: "
    "log it with `on_epoch=True` to monitor it",
    "trainer.callbacks, changed by a hook": "an error, as the run does not call other callbacks",
    "on_step of an evaluation, step": "counts the batches of all loaders; in Lightning those of each loader",
    "after_save_checkpoint of a logger": "called when the file is complete: writing continues during the training",
    'ckpt_path="last"': "the newest checkpoint, also without `save_last=True`",
    "validate, test and predict without a model": "without a checkpoint the weights of the fit; in Lightning an error",
    "ModelCheckpoint(save_last=True)": "saves at each time, in Lightning 2.6 only if one of the best is saved",
    "ModelCheckpoint(filename=)": "a number without a format has 6 digits; a metric that is absent is `nan`, not 0",
    "AcceleratorRegistry, StrategyRegistry": "keep the classes of packages; the Trainer does not select from them",
    "ModelSummary": "has no FLOPs; the size includes buffers; sizes of inputs and outputs need a single device",
    "self.log(sync_dist=)": "True by default: over the samples of all ranks; False logs the main rank's value",
    "self.log(on_step=True) in an evaluation": "a batch of the main rank, also with `sync_dist=True`",
    'self.log("step", value)': "sets the step of the rows of loggers; a resumed run removes rows of later updates",
    "self.log(enable_graph=, metric_attribute=)": "accepted, without an effect",
    "several optimizers": "allowed in automatic optimization: they share one loss and step together",
    "validation_step(dataloader_idx)": "may be missing, or have no default, with any number of loaders",
    "outputs of on_train_batch_end": 'outputs["loss"] is the loss, not divided by the accumulation',
    "on_validation_model_zero_grad": "gradients are kept unless the module overrides it",
    "optimizer.toggle_model(sync_grad=)": "gradients are averaged by each manual_backward",
    "init_module(empty_init=)": "weights are initialised",
    "Trainer(strategy=)": "ddp_spawn, ddp_fork, ddp_notebook and their variants are ddp",
    "Trainer(enable_checkpointing=False)": "removes the default only: a ModelCheckpoint in `callbacks` saves",
    "Trainer(enable_progress_bar=False)": "removes the default only, not a bar in `callbacks`; in Lightning an error",
    "Trainer(overfit_batches=)": "also the first batches of the validation loader; in Lightning of the training loader",
    "TQDMProgressBar(refresh_rate=), RichProgressBar(refresh_rate=)": "0 is off; other numbers have no effect",
    "BackboneFinetuning, an optimizer with the frozen backbone": (
        "an error; in Lightning a warning, and the rates of the backbone become those of other layers"
    ),
    "GradientAccumulationScheduler({'4': 2})": "keys and values may be text, as in YAML; in Lightning an error",
    "ModelCheckpoint(monitor=), a value that is NaN": "is never the best; in Lightning an infinite score",
    "load_from_checkpoint(hparams_file=), a file that does not exist": "an error; in Lightning a warning",
    "save_checkpoint in a training step": "an error that names hooks, as the state of the batch is incomplete",
    "lr_find(num_training=1), lr_find(min_lr=1, max_lr=0.1)": "errors; in Lightning there is no suggestion",
    "Tuner.scale_batch_size, an attribute in the module and in its `hparams`": "both are set; in Lightning a warning",
    "CSVLogger(version=) of an existing folder": "adds rows to metrics.csv; in Lightning deletes it, with a warning",
    "hyperparameters in the files of loggers": "as they are when the fit begins; in Lightning those of the constructor",
    "self.log in transfer hooks, on_validation_model_eval, lr_scheduler_step": "is logged; in Lightning an error",
    "hooks with dataloader_idx": "may lack the parameter with several loaders, and get 0 with one; in Lightning errors",
    "StochasticWeightAveraging": "also replaces schedules by step; param_groups have no `swa_lr` and `initial_lr`",
    "Trainer(plugins=)": "`TorchCheckpointIO` with another `load_checkpoint`; for others, an error names the argument",
    "Trainer(profiler=)": '"simple" and "trace"',
    "pl.__version__": "that of Lightning, whose names these are",
}


_HEAD: Final = """# Names of Lightning

Written by `python -m fabricx.pytorch.documentation`. A test compares this page with the tables that fabricx uses, and
the tables with the installed Lightning. All members of `Trainer`, `LightningModule`, `LightningDataModule` and
`Callback`, and all arguments of the Trainer, are the same, except those that differ or are absent here.

## Same names at the same paths

Those of `fabric` are also at `fabricx.fabric`, as `lightning.fabric` in Lightning.

| `fabricx.pytorch` | names |
|---|---|"""


def page() -> str:
    """Return the text of the page."""
    lines: list[str] = [*_HEAD.splitlines()]
    for path in TREE:
        objects = [name for name in available(path) if names_of(f"{path}.{name}" if path else name) is None]
        if objects:
            lines.append(f"| `{path or '(root)'}` | {', '.join(objects)} |")
    lines += ["", "## Same names, another meaning", "", "| name | in fabricx |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in _DIFFERS.items()]
    lines += ["", "## Absent: an error names the successor", "", "| name | successor |", "|---|---|"]
    for owner, members in ABSENT_MEMBERS.items():
        lines += [f"| `{owner}.{name}` | {successor} |" for name, successor in members.items()]
    for name, methods in _former_methods().items():
        lines += [f"| `{name}`: {', '.join(f'`{m}`' for m in each)} | {text} |" for text, each in methods.items()]
    for path, names in TREE.items():
        absent = {name: text for name, text in names.absent.items() if name not in available(path)}
        lines += [f"| `{path}{'.' if path else ''}{name}` | {text} |" for name, text in absent.items()]
    lines += ["", "## Lightning 1: an error names the successor", "", "| hook or argument | successor |", "|---|---|"]
    lines += [f"| `{name}` | {successor} |" for name, successor in FORMER_HOOKS.items()]
    lines += [f"| `DataModule.{name}` | {successor} |" for name, successor in FORMER_DATA_HOOKS.items()]
    lines += [f"| `Trainer({name}=)` | {successor} |" for name, successor in FORMER_ARGUMENTS.items()]
    return "\n".join(lines) + "\n"


def _former_methods() -> dict[str, dict[str, list[str]]]:
    """Return methods of Lightning's callbacks that fabricx doesn't call, by the callback and the successor."""
    table: dict[str, dict[str, list[str]]] = {}
    callbacks = importlib.import_module(TREE["callbacks"].source)
    for name in callbacks.__all__:
        for method, successor in getattr(getattr(callbacks, name), "former_methods", {}).items():
            table.setdefault(name, {}).setdefault(successor, []).append(method)
    return table


if __name__ == "__main__":
    sys.stdout.write(page())
