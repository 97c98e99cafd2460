"""Go on when processes die: from the newest snapshot, with nothing of the run lost."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

from fabricx.callback import Callback

if TYPE_CHECKING:
    from fabricx.module import Module
    from fabricx.trainer import Trainer


@final
class FaultRecovery(Callback):
    """Start all workers again when one dies or fails, from the newest snapshot or checkpoint of the run.

    Snapshots are checkpoints in the folder `recovery` of the run's folder, written while training goes on; only the
    newest is kept, and none once the run is complete. What was trained since is trained again, with the same samples
    and the same random numbers: the weights are those of a run in which nothing has happened. A failure that comes
    again before there is a newer snapshot isn't tried for ever.

    Works where fabricx starts the workers (several devices, or servers, from one script).

    Args:
        max_restarts: how often in a row, without getting any further.
        every_n_train_steps: weight updates between two snapshots.
    """

    watches_metrics: ClassVar[bool] = True  # a snapshot holds the position after the batch

    def __init__(self, max_restarts: int = 3, every_n_train_steps: int = 200) -> None:
        if max_restarts < 0:
            raise ValueError(f"FaultRecovery(max_restarts={max_restarts}): 0 or more")
        if every_n_train_steps < 1:
            raise ValueError(f"FaultRecovery(every_n_train_steps={every_n_train_steps}): 1 or more weight updates")
        self.max_restarts = max_restarts
        self.every_n_train_steps = every_n_train_steps
        self._step_saved = -1
        self._step_reached = -1  # from where it was started again last
        self._tries = 0  # from there

    # -- in the process that supervises ---------------------------------------------------------------------------

    def restarts_after(self, error: Exception, step: int) -> bool:
        if step > self._step_reached:
            self._step_reached, self._tries = step, 0
        self._tries += 1
        return self._tries <= self.max_restarts

    # -- in the workers ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._step_saved = -1
        if trainer.failures:
            self._step_saved = trainer.global_step  # it was begun from there
            text = f"started again from step {trainer.global_step}: {trainer.failures[-1]}"
            trainer.scribe.event("recovery", text, trainer.global_step)
        else:
            self._save(trainer)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every_n_train_steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        trainer.finish_checkpoint()
        if trainer.interrupted or trainer.fast_dev_run:
            return
        if trainer.is_global_zero:
            shutil.rmtree(self._folder(trainer), ignore_errors=True)  # with what a killed process had begun to write
        if trainer.failures:
            times = f"{len(trainer.failures)} time{'s' if len(trainer.failures) > 1 else ''}"
            trainer.print(f"recovered {times}; each sample of an epoch was trained once")

    def _save(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step == self._step_saved or trainer.fast_dev_run:
            return
        self._step_saved = step
        path = self._folder(trainer) / f"step={step}"
        trainer.save_checkpoint(path, wait=False, after=functools.partial(self._drop_others, path))

    @staticmethod
    def _folder(trainer: Trainer) -> Path:
        return Path(trainer.run_dir or trainer.default_root_dir) / "recovery"

    def _drop_others(self, kept: Path) -> None:
        """Delete all snapshots but one, which is complete."""
        from fabricx import checkpoint

        for path in checkpoint.list_committed(kept.parent):
            if path != kept.absolute():
                checkpoint.remove(path)
