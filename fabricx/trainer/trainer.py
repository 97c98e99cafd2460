"""The Trainer: the calls with which users start runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Never

from torch import nn

from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module
from fabricx.core.options.trainer_options import DEFAULT_EPOCHS
from fabricx.errors import WrongArgument
from fabricx.trainer.call_arguments import check_names
from fabricx.trainer.dispatch import dispatch
from fabricx.trainer.interface import TrainerInterface
from fabricx.trainer.run_request import Job
from fabricx.trainer.tuner import Tuner


class Trainer(TrainerInterface):
    """Trains and evaluates a `Module`, on any number of ranks; see `TrainerOptions` for its arguments."""

    def fit(
        self,
        model: Module | None = None,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        module: Module | None = None,
        **unknown: Never,
    ) -> None:
        """Train a module.

        Args:
            model, module: the module, under either name; it has the trained weights afterwards, also if worker
                processes trained it.
            train_dataloaders: a `DataLoader`, any iterable of batches, or a dict or list of loaders (see
                `CombinedLoader`); or a `DataModule`.
            val_dataloaders: a `DataLoader`, an iterable of batches, or a list of them.
            datamodule: creates the loaders of both kinds.
            ckpt_path: checkpoint to resume from: its path, "last" (the newest checkpoint, or newer snapshot for
                recovery, of this run or of the newest run in `runs`; starts from the beginning without either), or
                "best".
            weights_only: False also reads objects of any class from the checkpoint, which runs code that it names;
                pass it for a file that you trust. Otherwise, objects are read only if their classes are allowed by
                `torch.serialization.add_safe_globals`.
            unknown: none; another keyword is an error that names the right keyword.

        Raises:
            ValueError: an argument or a method of the module is invalid; raised before any process starts if possible.
            WorkerFailed: a worker process failed; the message contains its traceback.
            SystemExit: with code 143, after SIGTERM or the notice of a scheduler, when the run is stopped and saved.
        """
        check_names(self.fit, unknown)
        chosen = self._module_of(model, module, "fit")
        if chosen is None:
            raise WrongArgument("trainer.fit() has no module: pass an instance of a subclass of fabricx.Module")
        path = self._chosen_ckpt_path if ckpt_path is None else ckpt_path
        if self.max_epochs is None:
            self.max_epochs = -1 if self.length_given else DEFAULT_EPOCHS
        call = {
            "module": chosen, "train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders,
            "datamodule": datamodule, "ckpt_path": path,
        }  # fmt: skip
        for callback in self.callbacks:
            if type(callback).before_fit is not Callback.before_fit:
                callback.before_fit(Tuner(self), call)
        _check_source(train_dataloaders, val_dataloaders, datamodule, "fit")
        job = Job("fit", chosen, train_dataloaders, val_dataloaders, datamodule, path, trusted=weights_only is False)
        dispatch(self, job)

    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        module: Module | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Validate a module.

        Args:
            model, module: the module, under either name; None for that of the previous call, with the best checkpoint
                of its run, if any.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".
            verbose: print the metrics.
            datamodule: creates the loaders.
            weights_only: False also reads objects of any class from the checkpoint, which runs code that it names;
                pass it for a file that you trust. Otherwise, objects are read only if their classes are allowed by
                `torch.serialization.add_safe_globals`.
            unknown: none; another keyword is an error that names the right keyword.

        Returns:
            the metrics of each loader over the samples of all ranks, with each sample counted once.

        Raises:
            ValueError: an argument is invalid.
            WorkerFailed: a worker process failed.
        """
        check_names(self.validate, unknown)
        chosen = self._module_of(model, module, "validate")
        trusted = weights_only is False
        return self._evaluate("validate", chosen, dataloaders, datamodule, ckpt_path, verbose, trusted=trusted)

    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        module: Module | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Test a module; see `validate` for the arguments, the result and the errors.

        Args:
            model, module: the module, under either name; None for that of the previous call.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".
            verbose: print the metrics.
            datamodule: creates the loaders.
            weights_only: False also reads objects of any class from the checkpoint, which runs code that it names;
                pass it for a file that you trust. Otherwise, objects are read only if their classes are allowed by
                `torch.serialization.add_safe_globals`.
            unknown: none; another keyword is an error that names the right keyword.
        """
        check_names(self.test, unknown)
        chosen = self._module_of(model, module, "test")
        trusted = weights_only is False
        return self._evaluate("test", chosen, dataloaders, datamodule, ckpt_path, verbose, trusted=trusted)

    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        module: Module | None = None,
        **unknown: Never,
    ) -> list[Any]:
        """Run `predict_step` on all batches.

        Args:
            model, module: the module, under either name; None for that of the previous call, with the best checkpoint
                of its run, if any.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            datamodule: creates the loaders.
            return_predictions: False discards the outputs.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".
            weights_only: False also reads objects of any class from the checkpoint, which runs code that it names;
                pass it for a file that you trust. Otherwise, objects are read only if their classes are allowed by
                `torch.serialization.add_safe_globals`.
            unknown: none; another keyword is an error that names the right keyword.

        Returns:
            the outputs in the order of the data set; a list for each loader if there are several. None with
            `return_predictions=False`.

        Raises:
            ValueError: an argument is invalid.
            WorkerFailed: a worker process failed.
        """
        check_names(self.predict, unknown)
        chosen, keep = self._module_of(model, module, "predict"), return_predictions is not False
        trusted = weights_only is False
        outputs = self._evaluate("predict", chosen, dataloaders, datamodule, ckpt_path, keep, trusted=trusted)
        return outputs if keep else None  # type: ignore[return-value]  # as in Lightning

    def _evaluate(
        self, stage: str, module: Module | None, loaders: Any, data: DataModule | None, path: Any, flag: bool, *,
        trusted: bool,
    ) -> list[Any]:  # fmt: skip
        if isinstance(path, DataModule):  # the third argument was the data module in the first versions
            raise ValueError(
                f"trainer.{stage}: the third argument is ckpt_path: pass datamodule={type(path).__name__}(...)"
            )
        _check_source(loaders, None, data, stage)
        path = self._chosen_ckpt_path if path is None else path
        if module is None:
            module = self.module
            if module is None:
                raise WrongArgument(f"trainer.{stage}() has no module: pass a module, or call fit first")
            saved = self.checkpoint_callback
            if path is None and saved is not None and saved.best_model_path:
                path = "best"
                warnings.warn(
                    f"trainer.{stage}() without a model uses the best checkpoint of the fit; pass ckpt_path='best' to "
                    "confirm this, or the model for its present weights",
                    stacklevel=3,
                )
            data = data or self.datamodule
        results: list[Any] = dispatch(self, Job(stage, module, None, loaders, data, path, flag, trusted))
        return results

    def _module_of(self, model: Module | None, module: Module | None, call: str) -> Module | None:
        """Return the module of a call, which has two names; set `compile` for a module within `torch.compile(...)`."""
        if model is not None and module is not None:
            raise ValueError(
                f"trainer.{call}(model=..., module=...): these are two names of one argument; pass one of them"
            )
        chosen: Any = module if model is None else model
        compiled = getattr(chosen, "_orig_mod", None)
        if not isinstance(compiled, nn.Module):
            return chosen  # type: ignore[no-any-return]
        if not self.compile:
            self.compile = True
            self.print(
                f"the module is torch.compile({type(compiled).__name__}): each rank compiles it, as with "
                'Trainer(compile=True). Pass options of torch.compile as Trainer(compile={"mode": ...})'
            )
        return compiled  # type: ignore[return-value]


def _check_source(first: Any, second: Any, datamodule: Any, call: str) -> None:
    """Refuse loaders beside a data module, which has loaders of its own."""
    if datamodule is not None and not (first is None and second is None):
        raise ValueError(f"trainer.{call}: there are loaders and a data module; pass either loaders or datamodule=...")
