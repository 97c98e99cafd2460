"""State of a module outside of `state_dict`: entries by `on_save_checkpoint`, for replacements and rollbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabricx.core.hooks import overrides
from fabricx.core.module_hooks import ModuleHooks
from fabricx.distributed.lost_peers import may_be_cut
from fabricx.session.saving import weights_as_state_dict

if TYPE_CHECKING:
    from fabricx.session.session import Session


Entries = dict[str, Any] | str | None


def module_entries(session: Session) -> Entries:
    """Return the entries that the module's `on_save_checkpoint` adds; None without both hooks of checkpoints.

    The hook may communicate, so all ranks call this function. A hook that reads an attribute of later steps fails at
    the first steps of a process: then the result is the text of the error.

    Args:
        session: this rank's session.

    Raises:
        Exception: a connection between ranks has ended.
    """
    module = session.module
    if not all(overrides(module, name, ModuleHooks) for name in ("on_save_checkpoint", "on_load_checkpoint")):
        return None
    state: dict[str, Any] = {
        "strategy": {"module": dict(module.state_dict())},
        "hparams": dict(module.hparams),
        "state": session.state.state_dict(),
    }
    known = set(state)
    try:
        with torch.inference_mode(False), weights_as_state_dict(state):
            module.on_save_checkpoint(state)
    except Exception as error:
        if may_be_cut(error):
            raise
        return f"{type(error).__name__}: {error}"
    return {name: value for name, value in state.items() if name not in known}


def load_module_entries(session: Session, state: dict[str, Any], entries: Entries) -> bool:
    """Restore entries by the module's `on_load_checkpoint`; returns whether the hook was called.

    Args:
        session: this rank's session.
        state: run state that the hook sees beside the entries; it is not changed.
        entries: result of `module_entries`.
    """
    if isinstance(entries, str):
        session.print(
            f"on_save_checkpoint raised {entries}: attributes that it saves are not restored after the death of a "
            "worker. Create in __init__ what it reads"
        )
    if entries is None or isinstance(entries, str):
        return False
    weights = {"strategy": {"module": dict(session.module.state_dict())}}
    content = {**state, **weights, "hparams": dict(session.module.hparams), **entries}
    with torch.inference_mode(False), weights_as_state_dict(content):
        session.module.on_load_checkpoint(content)
    return True
