"""Choose paths for new checkpoints, so that no checkpoint that is kept is overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from fabricx.callbacks.checkpoint_files import Suffixes, is_of_run, versioned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricx.callbacks.kept_checkpoints import KeptCheckpoints
    from fabricx.core.trainer import TrainerProtocol


@final
@dataclass(frozen=True)
class CheckpointPaths:
    """Paths of a `ModelCheckpoint`. The main rank chooses, because it may create a path before other ranks check it.

    Attributes:
        folder: folder of the checkpoints.
        suffixes: of names that exist already, and of files.
        versions: append a version to a name that exists, rather than overwrite that checkpoint.
        records: checkpoints that the callback keeps.
        others: those that other callbacks of the run keep.
    """

    folder: Path
    suffixes: Suffixes
    versions: bool
    records: KeptCheckpoints
    others: Sequence[KeptCheckpoints]

    def free(self, trainer: TrainerProtocol, name: str, displaced: str | None = None) -> str:
        """Return a path that does not exist, or that holds a checkpoint to be replaced. Collective.

        A checkpoint is replaced if it is about to be superseded, or if this run saved the same step before a rollback
        and no callback keeps it.

        Args:
            trainer: the trainer.
            name: of the checkpoint, without the extension.
            displaced: path of the checkpoint that the new checkpoint displaces, if any.
        """
        superseded = {displaced, self.records.unranked_target}
        of_others = {path for other in self.others for path in (*other.paths, *other.permanent)}
        kept = {*of_others, *self.records.paths, *self.records.permanent}

        def may_replace(path: Path) -> bool:
            if str(path) in superseded or not self.versions:
                return str(path) not in of_others
            unused = str(path) not in kept and not path.is_symlink()
            return unused and is_of_run(path, trainer.state.run, trainer.run_dir, trainer.global_step)

        path = versioned(self.folder, name, self.suffixes, may_replace)
        return str(trainer.world.broadcast_object(path))

    def link(self, trainer: TrainerProtocol, name: str) -> str:
        """Return the path of the link to the newest checkpoint. Collective.

        Args:
            trainer: the trainer.
            name: of the link, without the extension.
        """
        of_others = {other.link for other in self.others}

        def may_replace(path: Path) -> bool:
            if str(path) in of_others:
                return False
            newest = str(path) == self.records.link  # also of the run that this one continues
            return newest or path.is_symlink() or is_of_run(path, trainer.state.run, trainer.run_dir)

        path = versioned(self.folder, name, self.suffixes, may_replace)
        return str(trainer.world.broadcast_object(path))
