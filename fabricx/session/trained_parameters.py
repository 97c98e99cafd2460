"""Which parameters require a gradient, and which normalisations track statistics, where hooks have changed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fabricx.session.session import Session

_TRACKS: Final = ".track_running_stats"  # after the name of a layer


def note_set_up(session: Session) -> None:
    """Note the flags at the end of set-up; called after `on_fit_start`, before a state is restored.

    Args:
        session: session of a fit.
    """
    session.checkpoints.trained = _flags(session)


def _flags(session: Session) -> dict[str, bool]:
    """Return `requires_grad` of each parameter, and `track_running_stats` of each normalisation, by name."""
    flags = {name: parameter.requires_grad for name, parameter in session.module.named_parameters()}
    return flags | {f"{name}{_TRACKS}": layer.track_running_stats for name, layer in _norms(session)}


def _norms(session: Session) -> Iterator[tuple[str, Any]]:
    for name, layer in session.module.named_modules():
        if isinstance(getattr(layer, "track_running_stats", None), bool):
            yield name, layer


def changed_since_set_up(session: Session) -> dict[str, bool]:
    """Return the flags that hooks have changed since set-up, by name.

    Args:
        session: session of a fit.
    """
    known = session.checkpoints.trained
    return {name: flag for name, flag in _flags(session).items() if known.get(name, flag) != flag}


def restore_changes(session: Session, state: Mapping[str, Any]) -> None:
    """Set the flags to their values at set-up, or at the time of a state where hooks had changed them until then.

    Where the run of the state had changed nothing, flags have the value of this run's set-up: a user may have frozen
    other parameters before a resume.

    Args:
        session: session of a fit.
        state: result of `run_state`; that of an older checkpoint doesn't have the changes, and nothing is set.
    """
    if (changes := state.get("trained_since")) is None:
        return
    flags = {**session.checkpoints.trained, **changes}
    for name, parameter in session.module.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))
    for name, layer in _norms(session):
        layer.track_running_stats = flags.get(f"{name}{_TRACKS}", layer.track_running_stats)


def report_changes(session: Session, state: Mapping[str, Any]) -> None:
    """Print that a resumed run trains other parameters than its set-up has determined.

    Args:
        session: session of a fit, before `restore_changes`.
        state: as in `restore_changes`.
    """
    now = {name: parameter.requires_grad for name, parameter in session.module.named_parameters()}
    changes = {name: flag for name, flag in state.get("trained_since", {}).items() if now.get(name, flag) != flag}
    parts = []
    for word, wanted in (("unfrozen", True), ("frozen", False)):
        if names := [name for name, flag in changes.items() if flag is wanted]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{word} {', '.join(names[:3])}{more}")
    if parts:
        session.print(
            f"before the checkpoint, hooks had {', and '.join(parts)}: training continues so; for another choice, set "
            "requires_grad in on_train_start"
        )
