"""The contract of a data module: all data of a project in a reusable class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sized
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabricx.core.hparams import HyperParameters, of_class

if TYPE_CHECKING:
    from os import PathLike

    from fabricx.core.trainer import TrainerProtocol


class DataModule(HyperParameters):
    """Download, split and load data; pass an instance to `trainer.fit(module, datamodule=...)`.

    `prepare_data` runs on a single rank of each node (download, write to disk, keep no state); `setup(stage)` runs on
    every rank, with `stage` "fit", "validate", "test" or "predict".

    Attributes:
        CHECKPOINT_HYPER_PARAMS_KEY: key of the hyperparameters in a checkpoint of a single file.
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    trainer: TrainerProtocol | None = None
    prepare_data_per_node: bool = True  # False runs `prepare_data` on the main rank only

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **arguments: Any,
    ) -> Self:
        """Create a data module from data sets.

        Args:
            train_dataset: read in random order; a mapping or list for several loaders.
            val_dataset, test_dataset, predict_dataset: a data set, or a mapping or list of them.
            batch_size: samples of a batch of a rank.
            num_workers: processes of each loader.
            arguments: of the constructor, which also gets `batch_size` and `num_workers` if it has them.
        """
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        known = inspect.signature(cls.__init__).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        data = cls(**arguments, **{name: value for name, value in sizes.items() if takes_all or name in known})
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for word, dataset in datasets.items():
            if dataset is not None:
                loader = functools.partial(_loader, dataset, shuffle=word == "train", **sizes)
                setattr(data, f"{word}_dataloader", loader)
        return data

    @of_class
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PathLike[str] | IO[bytes],
        map_location: Any = None,
        hparams_file: str | PathLike[str] | None = None,
        weights_only: bool | None = None,
        **override: Any,
    ) -> Self:
        """Create a data module with the hyperparameters and the state (`state_dict`) of a checkpoint.

        Args:
            checkpoint_path: folder of the checkpoint; or a file of Lightning, also an open file.
            map_location: without an effect; hyperparameters and state are plain data.
            hparams_file: YAML file with arguments, in the place of the saved hyperparameters.
            weights_only: False also reads objects of any class, which runs code that the file names; pass it for a file
                that you trust. Otherwise, objects are read only if their classes are allowed by
                `torch.serialization.add_safe_globals`.
            override: arguments that replace or complete the saved hyperparameters.

        Raises:
            CheckpointError: the checkpoint does not exist, is incomplete, or lacks arguments of the constructor.
        """
        from fabricx.checkpoint import as_file, data_state, load_data

        trusted = weights_only is False
        with as_file(checkpoint_path) as path:
            data: Any = load_data(cls, path, override, hparams_file, trusted=trusted)
            restores = cls.load_state_dict is not DataModule.load_state_dict
            if restores and (state := data_state(cls, path, trusted=trusted)):
                data.load_state_dict(state)
        return data  # type: ignore[no-any-return]

    def prepare_data(self) -> None:
        """Download or write files; runs on a single rank per node, so do not set attributes."""

    def setup(self, stage: str) -> None:
        """Load and split the data; runs on every rank.

        Args:
            stage: "fit", "validate", "test" or "predict".
        """

    def teardown(self, stage: str) -> None:
        """Release the resources of `setup`.

        Args:
            stage: as in `setup`.
        """

    def train_dataloader(self) -> Any:
        """Return the training batches."""
        return None

    def val_dataloader(self) -> Any:
        """Return the validation batches: an iterable, or a list of iterables."""
        return None

    def test_dataloader(self) -> Any:
        """Return the test batches: an iterable, or a list of iterables."""
        return None

    def predict_dataloader(self) -> Any:
        """Return the batches to predict: an iterable, or a list of iterables."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch, changed before its transfer to the device.

        Args:
            batch: from the loader.
            dataloader_idx: index of the loader.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to the device; override for types that fabricx doesn't support.

        Args:
            batch: from `on_before_batch_transfer`.
            device: device of this rank.
            dataloader_idx: index of the loader.
        """
        from fabricx.core.tensors.transfer import to_device

        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch, changed on the device.

        Args:
            batch: on the device.
            dataloader_idx: index of the loader.
        """
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """Clean up after a failed run.

        Args:
            exception: the error.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this data module for checkpoints, as plain data."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Args:
            state_dict: result of `state_dict`.
        """

    def __str__(self) -> str:
        """Return the number of samples of each loader, as far as they are known before or after `setup`."""
        lines = []
        for word in ("train", "val", "test", "predict"):
            title = {"val": "Validation"}.get(word, word.capitalize())
            lines.append(f"{{{title} dataloader: {_sizes(getattr(self, f'{word}_dataloader'))}}}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("trainer", "_in_workers")}

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            missing = f"{type(self).__name__!r} object has no attribute {name!r}"
            if reason := self.__dict__.get("_in_workers", {}).get(name):
                missing += f": it remains in the workers, which have set it ({reason}); read it in hooks, or call setup"
            elif name in getattr(getattr(type(self).prepare_data, "__code__", None), "co_names", ()):
                missing += (
                    ". prepare_data runs in one process of a machine, and its attributes are lost: assign it in setup"
                )
            raise AttributeError(missing, name=name, obj=self)


def _sizes(loaders_of: Callable[[], Any]) -> str:
    """Return the number of samples of each loader of a method; "None" for a loader that does not exist yet."""
    try:
        loaders = loaders_of()
    except Exception:  # before setup, which creates the data sets
        return "None"
    if loaders is None or isinstance(loaders, DataLoader):
        return _size(loaders)
    if isinstance(loaders, Mapping):
        return " ; ".join(f"{name}. {_size(loader)}" for name, loader in loaders.items())
    if isinstance(loaders, (list, tuple)):
        return " ; ".join(f"{number}. {_size(loader)}" for number, loader in enumerate(loaders, 1))
    return _size(loaders)


def _size(loader: Any) -> str:
    if loader is None:
        return "None"
    dataset = getattr(loader, "dataset", None)
    return f"size={len(dataset) if isinstance(dataset, Sized) else 'NA'}"


def _loader(dataset: Any, *, shuffle: bool, **sizes: Any) -> Any:
    """Return the loader of a data set; a mapping or a list of loaders for one of data sets."""
    if isinstance(dataset, Mapping):
        return {name: _loader(part, shuffle=shuffle, **sizes) for name, part in dataset.items()}
    if isinstance(dataset, (list, tuple)):
        return [_loader(part, shuffle=shuffle, **sizes) for part in dataset]
    return DataLoader(dataset, shuffle=shuffle and not isinstance(dataset, IterableDataset), **sizes)
