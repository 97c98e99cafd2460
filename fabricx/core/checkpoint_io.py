"""Lightning's plugin that reads the files of checkpoints: projects override `load_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_WRITES: Final = ("save_checkpoint", "remove_checkpoint", "teardown")


class TorchCheckpointIO:
    """Reads a checkpoint that is a single file; pass an instance of a subclass in `Trainer(plugins=[...])`.

    `fit`, `validate`, `test` and `predict` read files with it, as the project's class decides. fabricx writes and
    deletes checkpoints itself, so a subclass that overrides these methods is refused.
    """

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file of torch, for calls of the project.

        Args:
            checkpoint: content.
            path: path of the file.
            storage_options: not supported.
        """
        import torch

        torch.save(dict(checkpoint), path)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Return the content of a file.

        Args:
            path: path of the file.
            map_location: device of the tensors.
            weights_only: False reads objects of any class, which runs code that the file names.
        """
        import torch

        content: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=weights_only is not False)
        return content

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint file; only projects call this.

        Args:
            path: path of the file.
        """
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Do nothing."""


def reader_among(plugins: Any) -> tuple[TorchCheckpointIO | None, list[Any]]:
    """Return the plugin that reads checkpoints, and the plugins that fabricx does not support.

    Args:
        plugins: argument of the Trainer; a plugin, a list of plugins, or None.
    """
    listed = list(plugins) if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]
    readers = [plugin for plugin in listed if _only_reads(plugin)]
    return (readers[0] if readers else None), [plugin for plugin in listed if plugin not in readers[:1]]


def _only_reads(plugin: Any) -> bool:
    return isinstance(plugin, TorchCheckpointIO) and all(
        getattr(type(plugin), name) is getattr(TorchCheckpointIO, name) for name in _WRITES
    )
