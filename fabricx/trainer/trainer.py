"""The Trainer: the calls with which users start runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fabricx.core.datamodule import DataModule
from fabricx.core.module import Module
from fabricx.trainer.dispatch import dispatch
from fabricx.trainer.interface import TrainerInterface
from fabricx.trainer.run_request import Job


class Trainer(TrainerInterface):
    """Trains and evaluates a `Module`, on any number of ranks; see `TrainerOptions` for its arguments."""

    def fit(
        self,
        module: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train a module.

        Args:
            module: has the trained weights afterwards, also if worker processes trained it.
            train_dataloaders: a `DataLoader` or any iterable of batches; or a `DataModule`.
            val_dataloaders: a `DataLoader`, an iterable of batches, or a list of them.
            datamodule: creates the loaders of both kinds.
            ckpt_path: checkpoint to resume from: its path, "last" (starts from the beginning without a checkpoint), or
                "best".

        Raises:
            ValueError: an argument or a method of the module is invalid; raised before any process starts if possible.
            WorkerFailed: a worker process failed; the message contains its traceback.
            SystemExit: with code 143, after SIGTERM or the notice of a scheduler, when the run is stopped and saved.
        """
        dispatch(self, Job("fit", module, train_dataloaders, val_dataloaders, datamodule, ckpt_path))

    def validate(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Validate a module.

        Args:
            module: None for that of the previous call, with the best checkpoint of its run, if any.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            datamodule: creates the loaders.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".
            verbose: print the metrics.

        Returns:
            the metrics of each loader over the samples of all ranks, with each sample counted once.

        Raises:
            ValueError: an argument is invalid.
            WorkerFailed: a worker process failed.
        """
        return self._evaluate("validate", module, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Test a module; see `validate` for the arguments, the result and the errors.

        Args:
            module: None for that of the previous call.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            datamodule: creates the loaders.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".
            verbose: print the metrics.
        """
        return self._evaluate("test", module, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> list[Any]:
        """Run `predict_step` on all batches.

        Args:
            module: None for that of the previous call, with the best checkpoint of its run, if any.
            dataloaders: a `DataLoader`, an iterable of batches, or a list of them; or a `DataModule`.
            datamodule: creates the loaders.
            return_predictions: False discards the outputs.
            ckpt_path: checkpoint whose weights are loaded: its path, "last" or "best".

        Returns:
            the outputs in the order of the data set; a list for each loader if there are several.

        Raises:
            ValueError: an argument is invalid.
            WorkerFailed: a worker process failed.
        """
        return self._evaluate("predict", module, dataloaders, datamodule, ckpt_path, return_predictions)

    def _evaluate(
        self, stage: str, module: Module | None, loaders: Any, data: DataModule | None, path: Any, flag: bool
    ) -> list[Any]:
        if module is None:
            module = self.module
            if module is None:
                raise ValueError(f"trainer.{stage}() has no module: pass a module, or call fit first")
            saved = self.checkpoint_callback
            if path is None and saved is not None and saved.best_model_path:
                path = "best"
            data = data or self.datamodule
        results: list[Any] = dispatch(self, Job(stage, module, None, loaders, data, path, flag))
        return results
