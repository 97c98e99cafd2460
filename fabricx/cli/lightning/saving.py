"""The callback that writes the configuration of `LightningCLI` to the folder of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fabricx.cli.lightning.parser import LightningArgumentParser
from fabricx.core.callback import Callback


class SaveConfigCallback(Callback):
    """Write the configuration to the folder of the logger, or of the run, before the run starts.

    Args:
        parser: parser of the configuration.
        config: the configuration.
        config_filename: name of the file.
        overwrite: replace a file with another configuration.
        multifile: write a file for each file that was read.
        save_to_log_dir: False only calls `save_config`, which the class has to override.

    Raises:
        ValueError: nothing would be written.
    """

    def __init__(
        self, parser: LightningArgumentParser, config: Any, config_filename: str = "config.yaml",
        overwrite: bool = False, multifile: bool = False, save_to_log_dir: bool = True,
    ) -> None:  # fmt: skip
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ValueError(
                "SaveConfigCallback(save_to_log_dir=False) writes nothing: derive a class with a method save_config, "
                "or set LightningCLI(save_config_callback=None)"
            )
        self.parser, self.config, self.config_filename = parser, config, config_filename
        self.overwrite, self.multifile, self.save_to_log_dir = overwrite, multifile, save_to_log_dir
        self.already_saved = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Write the configuration, once.

        Args:
            trainer: the trainer.
            pl_module: the module.
            stage: "fit", "validate", "test" or "predict".

        Raises:
            RuntimeError: the file exists, with another configuration.
        """
        if not self.already_saved and trainer.is_global_zero:
            if self.save_to_log_dir and trainer.log_dir is not None:
                self._write(Path(trainer.log_dir) / self.config_filename)
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def _write(self, path: Path) -> None:
        text = self.parser.dump(self.config, skip_unset=False)
        if path.exists() and not self.overwrite:
            if path.read_text() == text:  # a rank that was replaced, or another call of the trainer
                return
            raise RuntimeError(
                f"{type(self).__name__}: {path} exists, with another configuration: delete it, set "
                "LightningCLI(save_config_kwargs={'overwrite': True}) to replace it, or "
                "LightningCLI(save_config_callback=None)"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.multifile:
            self.parser.save(self.config, path, skip_unset=False, overwrite=True, multifile=True)
        else:
            path.write_text(text)

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Override to save `self.config` elsewhere, such as in a logger; called on the main rank only.

        Args:
            trainer: the trainer.
            pl_module: the module.
            stage: "fit", "validate", "test" or "predict".
        """
