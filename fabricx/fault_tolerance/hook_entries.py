"""State outside of `state_dict`: entries that `on_save_checkpoint` adds, for replacements and rollbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import fitted, overrides
from fabricx.core.module_hooks import ModuleHooks
from fabricx.distributed.membership.lost_peers import may_be_cut
from fabricx.session.callback_states import by_key
from fabricx.session.same_parameters import same_parameters
from fabricx.session.saving import entries_of_hooks, weights_as_state_dict

if TYPE_CHECKING:
    from fabricx.session.session import Session

Entries = tuple[dict[str, Any], dict[str, str]]  # values by name; errors by the name of the object
MODULE: Final = "the module"


def _hooks(session: Session, name: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return a hook of all objects that have both hooks of checkpoints, by name; the module is last.

    A hook without its counterpart restores nothing, and may have side effects. Callbacks that keep weights have their
    state in `state_dict`; their hooks exchange the weights of a checkpoint on disk.
    """
    found: dict[str, Callable[[dict[str, Any]], Any]] = {
        key: functools.partial(fitted(callback, name, Callback), session.trainer, session.module)
        for key, callback in by_key(session.callbacks).items()
        if _has_both(callback, Callback) and not callback.keeps_weights
    }
    if _has_both(session.module, ModuleHooks):
        found[MODULE] = fitted(session.module, name, ModuleHooks)
    return found


def _has_both(obj: object, contract: type) -> bool:
    return all(overrides(obj, name, contract) for name in ("on_save_checkpoint", "on_load_checkpoint"))


def hook_entries(session: Session) -> Entries:
    """Return the entries that callbacks and the module add to checkpoints, if they have both hooks of checkpoints.

    The hooks may communicate, so all ranks call this function. A hook that reads an attribute of later steps fails at
    the first steps of a process: then the result has the text of the error.

    Args:
        session: this rank's session.

    Raises:
        Exception: a connection between ranks has ended.
    """
    hooks = _hooks(session, "on_save_checkpoint")
    if not hooks:
        return {}, {}
    state: dict[str, Any] = {
        "strategy": {"module": dict(session.module.state_dict())},
        "hparams": dict(session.module.hparams),
        "state": session.state.state_dict(),
    }
    known, failed = set(state), {}
    with torch.inference_mode(False), entries_of_hooks(state):
        for name, hook in hooks.items():
            try:
                hook(state)
            except Exception as error:
                if may_be_cut(error):
                    raise
                failed[name] = f"{type(error).__name__}: {error}"
    return {name: value for name, value in state.items() if name not in known}, failed


def load_hook_entries(session: Session, state: dict[str, Any], entries: Entries) -> bool:
    """Restore entries by `on_load_checkpoint`; returns whether the hook of the module was called.

    Args:
        session: this rank's session.
        state: run state that the hooks see beside the entries; it is not changed.
        entries: result of `hook_entries`.
    """
    values, failed = entries
    weights = {"strategy": {"module": dict(session.module.state_dict())}}
    content = {**state, **weights, "hparams": dict(session.module.hparams), **values}
    hooks = _hooks(session, "on_load_checkpoint")
    called = [hook for name, hook in hooks.items() if name not in failed]
    with torch.inference_mode(False), same_parameters(session.module, keep_layers=True), weights_as_state_dict(content):
        for hook in called:
            hook(content)
    return MODULE in hooks and MODULE not in failed


def report_failed_hooks(session: Session, entries: Entries) -> None:
    """Report hooks that have failed, on the main rank: their state is lost where `load_hook_entries` is called.

    Args:
        session: this rank's session.
        entries: result of `hook_entries`.
    """
    for name, error in entries[1].items():
        session.print(
            f"on_save_checkpoint of {name} raised {error}: attributes that it saves are not restored after the death "
            "of a worker. Create in __init__ what it reads"
        )
