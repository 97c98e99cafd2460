"""Names of the states of callbacks in checkpoints."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.hook_calls.hooks import overrides
from fabricx.data.data_state import equal_states, tensor_bytes

_LARGE: Final = 1 << 24  # bytes of tensors


def by_key(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return callbacks by the names of their states; callbacks with the same `state_key` are numbered in order.

    Args:
        callbacks: a run's callbacks.
    """
    named: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.state_key, 2
        while key in named:
            key, number = f"{callback.state_key}/{number}", number + 1
        named[key] = callback
    return named


def with_shards(callbacks: Sequence[Callback]) -> list[str]:
    """Return the names of the states that have shards of weights: those of fabricx's callbacks, which average weights.

    Args:
        callbacks: a run's callbacks.
    """
    return [
        key
        for key, callback in by_key(callbacks).items()
        if callback.keeps_weights or type(callback).state_dict.__module__.partition(".")[0] == "fabricx"
    ]


def states_before(callbacks: Sequence[Callback], datamodule: DataModule | None) -> dict[str, Any]:
    """Return copies of the states of callbacks and the data module before work that a resumed run repeats.

    Callbacks that keep weights change only with an update, and those that write checkpoints have the present files. A
    state with more than 16 MiB of tensors is not copied, since copies are made at each update.

    Args:
        callbacks: a run's callbacks.
        datamodule: of the run, if any.

    Returns:
        entries of `run_state` to replace; without a state that can't be copied.
    """
    with_state = {
        key: callback
        for key, callback in by_key(callbacks).items()
        if overrides(callback, "state_dict", Callback)
        and not callback.keeps_weights
        and callback.trainer_role != "checkpoint"
    }
    states: dict[str, Any] = {"callbacks": {}}
    for key, callback in with_state.items():
        _add_copy(states["callbacks"], key, callback.state_dict())
    if datamodule is not None:
        _add_copy(states, "datamodule", datamodule.state_dict())
    return states


def restore_changed(callbacks: Sequence[Callback], datamodule: DataModule | None, before: Mapping[str, Any]) -> None:
    """Restore states that hooks have changed once more than in a run without interruption.

    Callbacks of fabricx decide themselves what a repeated hook changes.

    Args:
        callbacks, datamodule: of the run.
        before: result of `states_before`.
    """
    for key, callback in by_key(callbacks).items():
        of_user = not type(callback).state_dict.__module__.startswith("fabricx.")
        if of_user and key in before["callbacks"] and not equal_states(callback.state_dict(), before["callbacks"][key]):
            callback.load_state_dict(before["callbacks"][key])
    saved = before.get("datamodule")
    if datamodule is not None and saved is not None and not equal_states(datamodule.state_dict(), saved):
        datamodule.load_state_dict(saved)


def _add_copy(copies: dict[str, Any], key: str, state: Any) -> None:
    """Add a copy of a state, if it is not large and can be copied."""
    if tensor_bytes(state) <= _LARGE:
        with contextlib.suppress(Exception):
            copies[key] = copy.deepcopy(state)


def constructed(callback: Callback) -> str:
    """Return the values with which a callback was given to the Trainer.

    Args:
        callback: a run's callback.
    """
    return str(vars(callback).get("_constructed", ""))


def as_saved(callbacks: Sequence[Callback], saved: Mapping[str, str]) -> dict[str, Callback]:
    """Return callbacks by the names of their states in a checkpoint.

    Callbacks with the same `state_key` are distinguished by their values, so that their order may change; if these are
    equal or have changed, the order counts.

    Args:
        callbacks: this run's callbacks.
        saved: values of the callbacks of the checkpoint, by the names of their states.
    """
    known = by_key(callbacks)
    for key in {callback.state_key for callback in callbacks}:
        names = [name for name in known if _is_numbered(name, key) and known[name].state_key == key]
        of_values = {constructed(known[name]): known[name] for name in names}
        values = [saved[name] for name in names if name in saved]
        if len(names) > 1 and len(of_values) == len(names) and sorted(values) == sorted(of_values):
            known |= {name: of_values[saved[name]] for name in names}
    return known


def check_same_number(known: Mapping[str, Callback], saved: Mapping[str, Any]) -> None:
    """Refuse states of callbacks that can't be assigned: several share a key, and their number has changed.

    Args:
        known: callbacks of this run, by the names of their states.
        saved: states by name.

    Raises:
        ValueError: names the callback.
    """
    for key, callback in known.items():
        before = sum(bool(state) for name, state in saved.items() if _is_numbered(name, callback.state_key))
        now = sum(other.state_key == callback.state_key for other in known.values())
        if key == callback.state_key and before and before != now and max(before, now) > 1:
            raise ValueError(
                f"the checkpoint has the states of {before} callbacks with state_key={key!r}, and this run has {now} "
                "such callbacks, so it is unknown which state belongs to which callback: pass as many callbacks as "
                "before, or define the property `state_key` in their class, with a different value for each"
            )


def _is_numbered(name: str, key: str) -> bool:
    """Return whether `by_key` assigns the name to a callback with this state key."""
    return name == key or (name.startswith(f"{key}/") and name[len(key) + 1 :].isdigit())
