"""Properties of the process that calls the Trainer, for ranks that a launcher starts on other machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fabricx.launch.module_files import find_in_files, module_files
from fabricx.launch.process_settings import ProcessSettings


@dataclass(frozen=True)
class Caller:
    """Properties of the calling process that each rank needs before it unpickles its work.

    Attributes:
        sys_path: import path.
        argv: arguments of the command.
        cwd: working directory.
        module_files: files of modules that this path does not lead to, by name.
        settings: global settings; the environment is that of the rank.
        key: key of the run, as text.
    """

    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    cwd: str
    module_files: Mapping[str, str]
    settings: ProcessSettings
    key: str = field(repr=False)

    @classmethod
    def of_this_process(cls, key: str) -> Caller:
        """Return the properties of this process.

        Args:
            key: key of the run.
        """
        settings = replace(ProcessSettings.of_this_process(), environment={})
        return cls(tuple(sys.path), tuple(sys.argv), os.getcwd(), module_files(), settings, key)

    def enter(self) -> None:
        """Apply the properties to this process.

        Raises:
            ValueError: this machine does not have the calling process's working directory.
        """
        os.environ["FABRICX_KEY"] = self.key
        replace(self.settings, environment=dict(os.environ)).apply()
        sys.path[:] = [*self.sys_path, *(entry for entry in sys.path if entry not in self.sys_path)]
        sys.argv[:] = self.argv
        find_in_files(self.module_files)
        try:
            os.chdir(self.cwd)
        except OSError as error:
            raise ValueError(
                f"{os.uname().nodename} has no folder {self.cwd}, the working directory of the process that called "
                f"fit ({error.strerror}): start it in a folder on a file system that all machines share"
            ) from None
