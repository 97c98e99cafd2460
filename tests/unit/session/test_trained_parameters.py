"""Parameters that hooks have frozen or unfrozen since set-up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from fabricx.session import trained_parameters as trained


def of_layers(*frozen: int) -> Any:
    """Return a session of three layers, after a set-up that has frozen some of them."""
    lines: list[str] = []
    module = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)])
    for layer in frozen:
        module[layer].requires_grad_(False)
    session: Any = SimpleNamespace(
        module=module, checkpoints=SimpleNamespace(trained={}), print=lines.append, lines=lines
    )
    trained.note_set_up(session)
    return session


def flags(session: Any) -> list[bool]:
    return [parameter.requires_grad for parameter in session.module.parameters()]


def test_changes_are_restored_and_other_parameters_keep_the_choice_of_set_up() -> None:
    first = of_layers(0)
    assert trained.changed_since_set_up(first) == {}
    first.module[0].requires_grad_(True)
    first.module[1].requires_grad_(False)
    changes = trained.changed_since_set_up(first)
    assert changes == {"0.weight": True, "1.weight": False}

    resumed, state = of_layers(0, 2), {"trained_since": changes}
    trained.report_changes(resumed, state)
    trained.restore_changes(resumed, state)
    assert flags(resumed) == [True, False, False]
    assert trained.changed_since_set_up(resumed) == changes
    assert "hooks had unfrozen 0.weight, and frozen 1.weight: training continues so" in resumed.lines[0]
    trained.report_changes(resumed, state)
    assert len(resumed.lines) == 1  # nothing differs any more


def test_a_state_before_a_change_undoes_it() -> None:
    session = of_layers(0)
    norm = session.module.append(nn.BatchNorm1d(1, affine=False))[3]
    trained.note_set_up(session)
    norm.track_running_stats = False
    assert trained.changed_since_set_up(session) == {"3.track_running_stats": False}
    trained.restore_changes(session, {"trained_since": {}})
    assert norm.track_running_stats is True
    session.module[0].requires_grad_(True)
    trained.restore_changes(session, {"trained_since": {}})
    assert flags(session) == [False, True, True]


def test_a_state_of_an_earlier_version_and_names_of_other_modules_set_nothing() -> None:
    session = of_layers(0)
    for state in ({}, {"trained_since": {"other.weight": False}}):
        trained.report_changes(session, state)
        trained.restore_changes(session, state)
    assert (flags(session), session.lines) == ([False, True, True], [])
