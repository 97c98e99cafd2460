"""Trials before a run: they find a learning rate and a batch size, and leave the module and the Trainer unchanged."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import Sampler

from fabricx.core.datamodule import DataModule
from fabricx.core.module_state.rng import random_kept
from fabricx.core.state import RunState
from fabricx.data.combined import CombinedLoader
from fabricx.data.data_state import (
    copied_state,
    find_generators,
    put_back_sampler,
    sampler_values,
    set_generators,
    states_of_generators,
)
from fabricx.data.order import Balance
from fabricx.errors import MissingAttribute, WorkerFailed, did_you_mean
from fabricx.launch import cluster
from fabricx.lightning import adapt_data, adapt_module
from fabricx.session.status import FailureLog
from fabricx.trainer.lr_finder import SWEEPS, LRFinder, RateSweep, Sweep
from fabricx.trainer.run_dir import newest_checkpoints
from fabricx.trainer.run_records import RunRecords
from fabricx.trainer.sessions import LoaderMethods, Sessions

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.module import Module
    from fabricx.trainer.interface import TrainerInterface

Stage = Literal["fit", "validate", "test", "predict"]
_LOG: Final = logging.getLogger(__name__)
_STAGES: Final = ("fit", "validate", "test", "predict")
_OUT_OF_MEMORY: Final = (
    "out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "MemoryError",
)  # fmt: skip
_KILLED: Final = -signal.SIGKILL  # exit code of a process that the system has ended for want of memory


@final
class Tuner:
    """Finds a learning rate or a batch size for a Trainer with short trials.

    A trial trains a copy of the module, on the ranks and under the strategy of the Trainer. The module, the position of
    the Trainer, random states, the position of samplers, and the state of the data module (`state_dict`) are as before;
    only the attribute that was searched for is set, and the Trainer has the module and the data module, as after a
    run. Under torchrun, each process makes the same calls.

    Args:
        trainer: its options are those of the trials, without its callbacks and loggers.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Literal["fit"] = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: Sweep = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> LRFinder | None:
        """Raise the learning rate at each step of a trial, and record the loss.

        Args:
            model: its optimizers are used, all with the same rate.
            train_dataloaders, datamodule: data, as for `fit`.
            val_dataloaders, dataloaders: not used.
            method: "fit".
            min_lr, max_lr: first and last rate.
            num_training: weight updates.
            mode: "exponential" or "linear" rise of the rate.
            early_stop_threshold: the trial ends when the smoothed loss exceeds the least loss by this factor, unless
                the least loss is negative; None: never.
            update_attr: set the suggested rate in the model.
            attr_name: attribute of the model or of its `hparams` to set; default: "lr" or "learning_rate".
            weights_only: without an effect: a trial reads no checkpoint.

        Returns:
            rates and losses, with `suggestion()` and `plot()`; None under `fast_dev_run`, without a trial.

        Raises:
            ValueError: an argument is invalid, the model has no such attribute, or the strategy doesn't support it.
        """
        if method != "fit" or mode not in SWEEPS or not 0 < min_lr < max_lr or num_training < 2:
            raise ValueError(
                f"lr_find(method={method!r}, mode={mode!r}, min_lr={min_lr}, max_lr={max_lr}, "
                f"num_training={num_training}): the method must be 'fit', the mode 'exponential' or 'linear', "
                "0 < min_lr < max_lr, and num_training 2 or more"
            )
        model, train_dataloaders, datamodule = _passed(model, train_dataloaders, datamodule)
        owners = _owners(model)
        name = _attribute(owners, [attr_name] if attr_name else ["lr", "learning_rate"]) if update_attr else ""
        if self._skips("lr_find", name or "the learning rate"):
            return None
        sweep = RateSweep(LRFinder(mode, min_lr, max_lr, num_training), early_stop_threshold)
        trial = self._trial([sweep], max_steps=num_training, limit_val_batches=0)
        with _as_before(model, train_dataloaders, datamodule):
            trial.fit(_copied(model), train_dataloaders, datamodule=datamodule)
        self._trainer.attach(model, datamodule)
        rate = sweep.finder.suggestion()
        if update_attr and rate is not None:
            _set(owners, name, rate)
            self._trainer.print(f"lr_find: {name} = {rate:.3g}")
        elif update_attr:
            self._trainer.print(
                f"lr_find: no suggestion after {len(sweep.finder.results['lr'])} steps; {name} is unchanged. Set a "
                "larger num_training, or a smaller max_lr"
            )
        return sweep.finder

    def scale_batch_size(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Stage = "fit",
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size that fits in the memory of the devices.

        Args:
            model: creates its loaders from the attribute, if there is no data module.
            train_dataloaders, val_dataloaders, dataloaders: must be None: a loader has its batch size already.
            datamodule: creates its loaders from the attribute.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles the size until it doesn't fit, "binsearch" then searches between the last two sizes.
            steps_per_trial: batches of a trial.
            init_val: first size.
            max_trials: maximum number of trials.
            batch_arg_name: attribute of the model, the data module, or their `hparams`.
            margin: part of the size by which "binsearch" reduces its result.
            max_val: largest size.

        Returns:
            the size, which is set in the model and the data module; None under `fast_dev_run`, without a trial.

        Raises:
            ValueError: an argument is invalid, or there is no such attribute.
        """
        if method not in _STAGES or mode not in ("power", "binsearch") or not 0 <= margin < 1 or init_val < 1:
            raise ValueError(
                f"scale_batch_size(method={method!r}, mode={mode!r}, margin={margin}, init_val={init_val}): the method "
                f"must be one of {', '.join(_STAGES)}, the mode 'power' or 'binsearch', the margin from 0 to less than "
                "1, and init_val 1 or more"
            )
        model, train_dataloaders, datamodule = _passed(model, train_dataloaders, datamodule)
        if any(loaders is not None for loaders in (train_dataloaders, val_dataloaders, dataloaders)):
            raise ValueError(
                "scale_batch_size changes an attribute from which loaders are created: define train_dataloader in the "
                f"module or in a DataModule with batch_size=self.{batch_arg_name}, instead of passing loaders"
            )
        owners = _owners(model, datamodule)
        _attribute(owners, [batch_arg_name])
        if self._skips("scale_batch_size", batch_arg_name):
            return None

        def fits(size: int) -> tuple[bool, bool]:
            _set(owners, batch_arg_name, size)
            return self._try(model, datamodule, method, max(2, steps_per_trial))  # 2 show whether there is more data

        having = [owner for owner in owners if _has(owner, batch_arg_name)]
        before = [o[batch_arg_name] if isinstance(o, dict) else getattr(o, batch_arg_name) for o in having]
        try:
            size = largest_fitting(fits, mode, init_val, max_trials, max_val)
        except BaseException:
            for owner, value in zip(having, before, strict=True):
                _set([owner], batch_arg_name, value)
            raise
        if mode == "binsearch":
            size = max(1, int(size * (1 - margin)))
        _set(owners, batch_arg_name, size)
        self._trainer.attach(model, datamodule)
        self._trainer.show_loaders(LoaderMethods(method, *(o for o in (datamodule, model) if o is not None)))
        self._trainer.print(f"scale_batch_size: {batch_arg_name} = {size}")
        return size

    def resumes(self, ckpt_path: str | Path | None) -> bool:
        """Return whether a fit continues from a checkpoint, so that a trial would change nothing.

        Args:
            ckpt_path: of `fit`. There may be no last checkpoint yet. Ranks of a launcher do not look for it, because
                they may see different files: "last" then counts as a checkpoint.
        """
        if ckpt_path != "last":
            return ckpt_path is not None
        trainer = self._trainer
        if (launched := cluster.detect()) is not None and launched.size > 1:
            trainer.print("ckpt_path='last' under a launcher: no search, also if there is no checkpoint yet")
            return True
        root, run_dir = Path(trainer.default_root_dir), trainer.records.run_dir
        return bool(newest_checkpoints(trainer.checkpoint_callback, run_dir, root, trains=True))

    def _skips(self, search: str, name: str) -> bool:
        """Return whether the Trainer only looks for errors, for which a search would take too long."""
        if self._trainer.fast_dev_run:
            warnings.warn(
                f"{search}: no search, because fast_dev_run={self._trainer.fast_dev_run}; {name} is unchanged",
                stacklevel=3,
            )
        return bool(self._trainer.fast_dev_run)

    def _try(self, model: Module, datamodule: DataModule | None, method: Stage, steps: int) -> tuple[bool, bool]:
        """Return whether a trial fits in memory, and whether a larger batch would have more samples."""
        limits = {f"limit_{word}_batches": steps for word in ("train", "test", "predict")}
        if method == "validate" or self._trainer.limit_val_batches:
            limits["limit_val_batches"] = steps
        if method == "fit":
            limits["limit_train_batches"] = steps * self._trainer.accumulate_grad_batches
        trial = self._trial([], max_epochs=1, val_check_interval=1.0, check_val_every_n_epoch=1, **limits)
        options: dict[str, Any] = {} if method == "fit" else {"verbose": False}
        options = {"return_predictions": False} if method == "predict" else options
        gc.collect()
        torch.cuda.empty_cache()
        try:
            with _as_before(model, None, datamodule):
                getattr(trial, method)(_copied(model), datamodule=datamodule, **options)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return False, True
        if any(signal.SIGKILL.name in failure for failure in trial.failures):  # asynchronous strategies went on
            return False, True
        if method == "fit":
            return True, trial.batches.training > 1
        return True, any(batches > 1 for of_word in trial.batches.evaluation.values() for batches in of_word)

    def _trial(self, callbacks: list[Callback], **options: Any) -> Any:
        """Return a Trainer with the same options and ranks, that writes and prints nothing."""
        trial = copy.copy(self._trainer)
        vars(trial).update(
            callbacks=callbacks, _loggers=[], records=RunRecords(RunState(seed=self._trainer.state.seed)),
            failure_log=FailureLog(), balance=Balance(), configuration=None, module=None, datamodule=None,
            _sessions=Sessions(), _chosen_ckpt_path=None,
            max_epochs=-1, max_steps=-1, min_epochs=0, min_steps=0, max_time=None, num_sanity_val_steps=0,
            enable_telemetry=False, enable_checkpointing=False, fast_dev_run=False,
        )  # fmt: skip
        vars(trial).update(options)
        return trial


def largest_fitting(
    fits: Callable[[int], tuple[bool, bool]], mode: str, size: int, max_trials: int, max_val: int
) -> int:  # fmt: skip
    """Search for the largest size that fits.

    >>> tried = []
    >>> def fits(size):
    ...     tried.append(size)
    ...     return size <= 11, True
    >>> largest_fitting(fits, "binsearch", 2, 25, 8192), tried
    (11, [2, 4, 8, 16, 12, 10, 11])

    Args:
        fits: returns whether a size fits, and whether a larger size can differ from it.
        mode: "power" or "binsearch".
        size: initial size.
        max_trials: maximum number of calls of `fits`; 0 returns the initial size.
        max_val: largest size.

    Raises:
        ValueError: no size fits.
    """
    low, high, size = 0, None, min(size, max_val)
    if max_trials < 1:
        return size
    for trial in range(max_trials):
        if trial:
            _LOG.info("scale_batch_size: trying batch size %d", size)
        good, more = fits(size)
        if good:
            low = size
            if not more:
                _LOG.info("scale_batch_size: %d is greater or equal than the length of the data", size)
            if not more or size >= max_val:
                break
        else:
            high = size
        if high is None:
            size = min(2 * size, max_val)
        elif (low and mode == "power") or high - low <= 1:
            break
        else:
            size = (low + high) // 2
    if not low:
        raise ValueError(
            f"scale_batch_size: not even a batch of {high} fits in memory: set a smaller init_val or model"
        )
    return low


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error, of this process or of a worker, means that memory is exhausted.

    Args:
        error: error of a trial.
    """
    if isinstance(error, WorkerFailed) and error.exit_code == _KILLED:
        return True
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = f"{error}\n{error.traceback if isinstance(error, WorkerFailed) else ''}"
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def _passed(model: Any, loaders: Any, datamodule: Any) -> tuple[Any, Any, Any]:
    """Return the module, the loaders and the data module of a call, whose loaders may be a data module."""
    loaders, datamodule = adapt_data(loaders), adapt_data(datamodule)
    if isinstance(loaders, DataModule):
        loaders, datamodule = None, loaders
    return adapt_module(model), loaders, datamodule


def _owners(*objects: Any) -> list[Any]:
    """Return objects and their hyperparameters, whose attributes a trial may set."""
    present = [owner for owner in objects if owner is not None]
    return [*present, *(owner.hparams for owner in present)]


def _attribute(owners: list[Any], names: list[str]) -> str:
    """Return the first name that an owner has.

    Raises:
        ValueError: no owner has it.
    """
    for name in names:
        if any(_has(owner, name) for owner in owners):
            return name
    cls = type(owners[0]).__name__
    known = [name for owner in owners for name in ([*owner] if isinstance(owner, dict) else vars(owner))]
    raise MissingAttribute(
        f"{cls} has no attribute {' or '.join(names)}, in itself or in hparams, that can be set: define "
        f"self.{names[0]} and use it.{did_you_mean(names[0], known)}"
    )


def _has(owner: Any, name: str) -> bool:
    return name in owner if isinstance(owner, dict) else hasattr(owner, name)


def _set(owners: list[Any], name: str, value: Any) -> None:
    for owner in owners:
        if isinstance(owner, dict) and name in owner:
            owner[name] = value
        elif not isinstance(owner, dict) and hasattr(owner, name):
            setattr(owner, name, value)


def _copied(model: Module) -> Module:
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"a trial trains a copy of {type(model).__name__}, and copy.deepcopy fails with "
            f"{type(error).__name__}: {error}. Create what can't be copied in configure_model or setup, or define "
            "__deepcopy__"
        ) from error
    vars(copied)["configure_callbacks"] = _no_callbacks  # they would save checkpoints, or stop the trial
    return copied


def _no_callbacks() -> list[Callback]:
    return []


@contextlib.contextmanager
def _as_before(model: Module, loaders: Any, datamodule: DataModule | None) -> Iterator[None]:
    """Restore random states, samplers, positions of loaders, and the state of the data module after a trial.

    Raises:
        ValueError: a loader can be read only once.
    """
    flat = loaders.flattened if isinstance(loaders, CombinedLoader) else tree_flatten(loaders)[0]
    kept = [*flat, *(vars(datamodule).values() if datamodule is not None else ())]
    samplers = [sampler for loader in kept for sampler in _samplers(loader)]
    values = [sampler_values(sampler) for sampler in samplers]
    positions = [(loader, copy.deepcopy(loader.state_dict())) for loader in kept if _has_position(loader)]
    for loader in flat:
        if isinstance(loader, Iterator) and not _has_position(loader):
            raise ValueError(
                f"a trial would read batches of the {type(loader).__name__}, which can be read only once: pass a "
                "DataLoader, a list, or an object whose __iter__ restarts"
            )
    generators = find_generators(flat, "data") | find_generators(datamodule, "datamodule")
    states = states_of_generators(generators)
    trainer = None if datamodule is None else datamodule.trainer
    of_data = copied_state(datamodule)
    try:
        with random_kept():
            yield
    finally:
        for sampler, value in zip(samplers, values, strict=True):
            put_back_sampler(sampler, value)
        set_generators(generators, states)
        for loader, position in positions:
            loader.load_state_dict(position)
        if datamodule is not None:
            datamodule.trainer = trainer
            if of_data is not None:
                datamodule.load_state_dict(of_data)


def _samplers(loader: Any) -> list[Any]:
    if isinstance(loader, Sampler):  # an attribute of a data module
        return [loader]
    parts = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    return [part for part in parts if part is not None]


def _has_position(loader: Any) -> bool:
    """Return whether a loader saves and restores its position."""
    names = ("__iter__", "state_dict", "load_state_dict")
    return not isinstance(loader, type) and all(hasattr(loader, name) for name in names)
