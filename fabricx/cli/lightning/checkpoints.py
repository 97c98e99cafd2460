"""Hyperparameters of checkpoints as options of `LightningCLI`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fabricx.checkpoint.class_paths import check_classes, classes_named, derived
from fabricx.checkpoint.hyperparameters import CLASS_PATH, without_origin
from fabricx.checkpoint.reader import load


def hparams_of(path: str, cls: type, model: Any, *, trusted: bool) -> dict[str, Any]:
    """Return the hyperparameters of a checkpoint as options of the module; empty without hyperparameters.

    Args:
        path: path of the checkpoint.
        cls: class of the module, or its base class.
        model: options of the module in the configuration.
        trusted: classes that only the checkpoint names may be created.

    Raises:
        CheckpointError: the checkpoint names classes that the configuration does not.
    """
    hparams = load(path, "cpu", trusted=trusted).get("hparams")
    if not isinstance(hparams, dict) or not (values := without_origin(hparams)):
        return {}
    selected = str(hparams.get(CLASS_PATH, ""))
    selected_class = derived(cls, selected) if selected else cls
    if not trusted:
        named = classes_named(selected_class or cls, values) | ({selected} if selected_class is None else set())
        check_classes(named - set(_texts(model)), path, "pass --weights_only=false")
    return {"class_path": selected, "dict_kwargs": values} if selected else values


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a configuration."""
    if isinstance(value, str):
        yield value
    elif hasattr(value, "as_dict"):  # a namespace of jsonargparse
        yield from _texts(value.as_dict())
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
