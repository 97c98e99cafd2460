"""Which parameters require a gradient, where hooks have changed it since set-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricx.session.session import Session


def note_set_up(session: Session) -> None:
    """Note what requires a gradient at the end of set-up; called after `on_fit_start`, before a state is restored.

    Args:
        session: session of a fit.
    """
    session.checkpoints.trained = {name: p.requires_grad for name, p in session.module.named_parameters()}


def changed_since_set_up(session: Session) -> dict[str, bool]:
    """Return `requires_grad` of the parameters of which hooks have changed it since set-up, by name.

    Args:
        session: session of a fit.
    """
    known = session.checkpoints.trained
    return {
        name: parameter.requires_grad
        for name, parameter in session.module.named_parameters()
        if known.get(name, parameter.requires_grad) != parameter.requires_grad
    }


def restore_changes(session: Session, state: Mapping[str, Any]) -> None:
    """Set `requires_grad` to its value at set-up, or at the time of a state where hooks had changed it until then.

    Parameters of which the run of the state had changed nothing have the value of this run's set-up: a user may have
    frozen others before a resume.

    Args:
        session: session of a fit.
        state: result of `run_state`; that of an older checkpoint doesn't have the changes, and nothing is set.
    """
    if (changes := state.get("trained_since")) is None:
        return
    flags = {**session.checkpoints.trained, **changes}
    for name, parameter in session.module.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))


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
