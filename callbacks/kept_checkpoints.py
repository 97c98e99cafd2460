"""Records of the checkpoints that `ModelCheckpoint` keeps, and the files that these supersede."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from fabricx.callbacks.checkpoint_files import link_to, may_be_accessed, remove_link, remove_own
from fabricx.callbacks.checkpoint_ranking import Mode, best


@dataclass(frozen=True)
class Pending:
    """The newest checkpoint, until it is complete.

    Attributes:
        path: path of the checkpoint.
        step: weight updates.
        superseded: paths of the checkpoints that it replaces.
        old_link: path of the link before; empty without a link.
        before: records without this checkpoint, for a write that fails.
    """

    path: str
    step: int
    superseded: list[str]
    old_link: str
    before: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Pending:
        """Return the record that the state of a callback contains.

        Args:
            state: fields by name; earlier versions saved no `old_link`.
        """
        return cls(**{"old_link": "", **state})


@final
@dataclass
class KeptCheckpoints:
    """Checkpoints that a run keeps: the best or the newest, the target of the link, and permanent checkpoints.

    Attributes:
        models: scores by path, oldest first.
        best_path: of the best checkpoint, or of the newest without a metric; empty without a checkpoint.
        best_score: of the best checkpoint; None without a metric.
        link: path of the link to the newest checkpoint; its own path where links are not supported, or where it is
            the file itself.
        target: path that the link points to.
        permanent: paths that are never deleted.
        pending: the newest checkpoint, until it is complete.
    """

    models: dict[str, Tensor] = field(default_factory=dict)
    best_path: str = ""
    best_score: Tensor | None = None
    link: str = ""
    target: str = ""
    permanent: set[str] = field(default_factory=set)
    pending: Pending | None = None

    @property
    def scores(self) -> dict[str, float]:
        """Return the scores as numbers, by path."""
        return {path: float(score) for path, score in self.models.items()}

    @property
    def unranked_target(self) -> str:
        """Return the target of the link if nothing else keeps it; otherwise an empty string."""
        return "" if self.target in self.models else self.target

    @property
    def paths(self) -> list[str]:
        """Return the paths of all ranked checkpoints and of the link's target."""
        return [*self.models, *filter(None, [self.unranked_target])]

    def keep(self, models: dict[str, Tensor], mode: Mode | None) -> None:
        """Set the ranked checkpoints.

        Args:
            models: scores by path, oldest first.
            mode: "min" if smaller is better, "max" if larger is better; None if the newest is the best.
        """
        self.models = models
        if mode is None:
            self.best_path = next(reversed(models), "")
            return
        self.best_path = best(self.scores, mode)
        self.best_score = models.get(self.best_path)

    def copy(self) -> dict[str, Any]:
        """Return a copy of the records, for `begin`."""
        return {"models": dict(self.models), "last": self.link, "target": self.target}

    def begin(
        self, path: str, step: int, before: dict[str, Any], displaced: str | None, link: str | None, *, permanent: bool
    ) -> Pending:  # fmt: skip
        """Record a checkpoint that is about to be written.

        Args:
            path: path of the checkpoint.
            step: weight updates.
            before: result of `copy` before the checkpoint was ranked.
            displaced: path of the checkpoint that it displaces; None keeps all.
            link: path of the link to it; None without a link.
            permanent: the checkpoint is never deleted.
        """
        superseded = set(filter(None, [displaced]))
        old_link = ""
        if link is not None:
            superseded.update(filter(None, [self.unranked_target]))
            old_link, self.link, self.target = self.link, link, path
        if permanent:
            self.permanent.add(path)
        superseded -= {*self.permanent, path, self.link}
        self.pending = Pending(path, step, sorted(superseded), old_link, before)
        return self.pending

    def supersede(self, pending: Pending, dirpath: str | None, *, links: bool) -> None:
        """Point the link to a complete checkpoint, and delete the checkpoints that it supersedes (main rank).

        Args:
            pending: the complete checkpoint.
            dirpath: folder of the run's checkpoints; no other file is deleted.
            links: the folder supports links.
        """
        if links and self.target == pending.path:
            if self.link != pending.path:
                link_to(Path(self.link), Path(pending.path))
            if pending.old_link != self.link:
                remove_link(dirpath, pending.old_link)
        for path in pending.superseded:
            remove_own(dirpath, path)

    def undo(self, mode: Mode | None) -> None:
        """Restore the records before the pending checkpoint, which could not be written.

        Args:
            mode: mode of `keep`.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            self.link, self.target = pending.before["last"], pending.before["target"]
            self.keep(pending.before["models"], mode)

    def state(self) -> dict[str, Any]:
        """Return the records as plain data and tensors."""
        return {
            "best_model_path": self.best_path,
            "best_model_score": self.best_score,
            "best_k_models": dict(self.models),
            "last_model_path": self.link,
            "last_target": self.target,
            "for_ever": sorted(self.permanent),
            "pending": None if self.pending is None else dict(vars(self.pending)),
        }

    def load(self, state: Mapping[str, Any], dirpath: str | None) -> None:
        """Restore records, without paths that may not be accessed.

        Args:
            state: untrusted result of `state`.
            dirpath: folder of the run's checkpoints.
        """
        names = ("best_model_path", "last_model_path", "last_target")
        self.best_path, self.link, self.target = (
            state[name] if may_be_accessed(dirpath, state[name]) else "" for name in names
        )
        score: Tensor | None = state["best_model_score"]
        self.best_score = None if score is None else score.cpu()
        models = state["best_k_models"]
        self.models = {path: score.cpu() for path, score in models.items() if may_be_accessed(dirpath, path)}
        self.permanent = set(state["for_ever"])
        pending = state.get("pending")
        self.pending = None if pending is None else Pending.of(pending)
