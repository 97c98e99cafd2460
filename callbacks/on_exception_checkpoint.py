"""Save a checkpoint when a run is interrupted or fails."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from fabricx.checkpoint import remove
from fabricx.checkpoint.storage import as_path
from fabricx.core.callback import Callback

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class OnExceptionCheckpoint(Callback):
    """Save a checkpoint from which a run resumes after an interruption or an error.

    - After Ctrl-C, SIGTERM or the notice of a scheduler, all ranks save the state at which they stop.
    - After an error in a run of a single rank, its state is saved, unless the error interrupted an update of the
      weights. The resumed run repeats the batch, with later random numbers.
    - After an error with several ranks, the state of the failed rank and of the others can't be joined: the newest
      checkpoint or snapshot of the run is copied, from which the training since is repeated. `FaultRecovery`, which is
      on by default, writes the snapshots.

    Args:
        dirpath: folder of the checkpoint.
        filename: name of the checkpoint, without its extension.

    Raises:
        ValueError: the name is empty.
    """

    needs_all_ranks: ClassVar[bool] = True
    FILE_EXTENSION: ClassVar[str] = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError("OnExceptionCheckpoint(filename=''): the name must not be empty")
        self.dirpath, self.filename = str(as_path(dirpath).expanduser().absolute()), filename
        self._fitting = self._updating = False

    @property
    def ckpt_path(self) -> str:
        """Return the path of the checkpoint."""
        return str(as_path(self.dirpath) / f"{self.filename}{self.FILE_EXTENSION}")

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.fast_dev_run

    def on_train_batch_start(self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int) -> None:
        self._updating = False

    def on_before_optimizer_step(self, trainer: TrainerProtocol, pl_module: Module, optimizer: Any) -> None:
        self._updating = True  # weights may be half updated until the next batch

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._updating = False

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if trainer.interrupted and self._fitting:
            self._save(trainer)

    def on_exception(self, trainer: TrainerProtocol, pl_module: Module, exception: BaseException) -> None:
        if not self._fitting or trainer.world.size > 1:
            return
        try:
            if not self._updating:
                trainer.session.batch.abandon_step()
            self._save(trainer)
        except Exception as error:  # warn only, so that the user sees the first error
            warnings.warn(f"could not save a checkpoint after the error: {error}", stacklevel=2)

    def _save(self, trainer: TrainerProtocol) -> None:
        trainer.save_checkpoint(self.ckpt_path)
        trainer.print(f"the run ended after {trainer.global_step} steps; saved {self.ckpt_path}")

    def after_failure(self, newest: Path | None) -> None:
        if newest is None:
            print("OnExceptionCheckpoint: the run failed before its first snapshot, and no checkpoint is left")
            return
        goal: Any = as_path(self.ckpt_path)
        if str(newest.resolve()) != str(goal):
            remove(goal)
            shutil.copy2(newest, goal) if newest.is_file() else shutil.copytree(newest, goal)
        print(f"OnExceptionCheckpoint: copied the newest checkpoint of the run to {goal}")
