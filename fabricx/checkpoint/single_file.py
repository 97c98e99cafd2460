"""A checkpoint as a single file that `torch.load` and Lightning read, with the state from which a run resumes.

The file is an archive of `torch.save` with Lightning's entries (`state_dict`, `hyper_parameters`, `epoch`, ...), the
state of fabricx as the entry `fabricx`, whose tensors are stored once, and the manifest as a further record.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from fabricx.checkpoint import tree
from fabricx.checkpoint.archive import add_record
from fabricx.checkpoint.files import dated, put_in_place
from fabricx.checkpoint.foreign import torch_load
from fabricx.checkpoint.hyperparameters import Form
from fabricx.checkpoint.optimizer_numbers import numbered
from fabricx.checkpoint.storage import is_local
from fabricx.errors import CheckpointError
from fabricx.scratch import private_folder

ENTRY: Final = "fabricx"
OF_HOOKS: Final = "entries_of_hooks"  # in the state: entries of `on_save_checkpoint` with names of fabricx's own
_LIGHTNING: Final = "2.6.6"  # version of Lightning whose entries these are
_EACH: Final = "kwargs"  # hparams_name of Lightning: each hyperparameter is an argument


class ReadsFiles(Protocol):
    """A plugin that reads files of checkpoints in its own way."""

    @property
    def load_checkpoint(self) -> Callable[..., dict[str, Any]]:
        """Return the function that reads the file at a path."""
        ...


def read_state(
    path: Path, map_location: Any, *, mapped: bool = False, trusted: bool = False,
    plugin: ReadsFiles | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the state in a single-file checkpoint; no code of the file is executed unless it is trusted.

    Args:
        path: path of the file.
        map_location: device of the tensors.
        mapped: map tensors of a local file into memory, so that only the used parts are read.
        trusted: see `torch_load`.
        plugin: reads the file in its own way.

    Raises:
        CheckpointError: the file holds more than tensors and plain data, or no state.
    """
    if plugin is None:
        content = torch_load(path, map_location, mapped=mapped, trusted=trusted)
    else:
        rest, tensors = tree.split(_read_by(plugin, path, trusted=trusted))
        content = tree.join(rest, {name: tensor.to(map_location) for name, tensor in tensors.items()})
    state = content.get(ENTRY) if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is damaged: it holds no state of fabricx")
    return state


@contextlib.contextmanager
def written(
    path: Path, state: Mapping[str, Any], manifest: Mapping[str, Any], shown: Iterable[str] = (), objects: bytes = b"",
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """Write a single-file checkpoint beside its path.

    Args:
        path: path of the file.
        state: tensors, plain data and objects.
        manifest: information for users; format, versions and time are added.
        shown: names of entries of the state that are also entries of the file.
        objects: the objects of the state, pickled apart, for readers that verify them; empty without.

    Returns:
        context with a function that moves the file to its path, or uploads it, and replaces an existing file.
    """
    of_hooks = {**state.get(OF_HOOKS, {}), **{name: state[name] for name in shown}}
    content = {**_entries(state, manifest), **of_hooks, ENTRY: dict(state)}
    if not is_local(path):
        with private_folder() as folder:
            file = Path(folder) / "archive"
            _write_archive(file, content, manifest, objects)
            yield functools.partial(_upload, file, path)
        return
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write_archive(work, content, manifest, objects)
        yield functools.partial(put_in_place, work, path)
    finally:
        work.unlink(missing_ok=True)


def _upload(file: Path, path: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.fs.put_file(str(file), path.path)


def _save(content: dict[str, Any], file: Path) -> None:
    try:
        torch.save(content, file)
    except RuntimeError:  # torch's writer hides the reason, such as a full disk
        with file.open("wb") as stream:
            try:
                torch.save(content, stream)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


def _write_archive(file: Path, content: Mapping[str, Any], manifest: Mapping[str, Any], objects: bytes) -> None:
    _save(dict(content), file)
    add_record(file, dated(manifest), objects)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _entries(state: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of Lightning, which share their tensors with the state of fabricx."""
    strategy, form = state.get("strategy"), Form.read(state.get("hparams_form"))
    of_data, data_form = manifest.get("datamodule_hparams"), Form.read(manifest.get("datamodule_hparams_form"))
    training: dict[str, Any] = {}
    if "schedules" in state and isinstance(strategy, Mapping):
        training = {
            "callbacks": {key: of_callback for key, of_callback in state.get("callbacks", {}).items() if of_callback},
            "optimizer_states": [numbered(saved) for saved in strategy.get("optimizers", [])],
            "lr_schedulers": state["schedules"],
        }
    return {
        **training,
        **({"hparams_name": form.argument or _EACH} if state.get("hparams") else {}),
        **({"datamodule_hyper_parameters": state.get("datamodule_hparams", of_data)} if of_data else {}),
        **({"datamodule_hparams_name": data_form.argument or _EACH} if of_data else {}),
        "epoch": manifest.get("epoch", 0),
        "global_step": manifest.get("step", 0),
        "pytorch-lightning_version": _LIGHTNING,
        "state_dict": strategy.get("module", {}) if isinstance(strategy, Mapping) else {},
        **({"hyper_parameters": state["hparams"]} if state.get("hparams") else {}),
    }


def _read_by(plugin: ReadsFiles, path: Path, *, trusted: bool) -> Any:
    """Return the content of a file as a plugin reads it.

    Args:
        plugin: reads the file.
        path: path of the file.
        trusted: the caller has passed `weights_only=False`.
    """
    parameters = inspect.signature(plugin.load_checkpoint).parameters
    takes = "weights_only" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return plugin.load_checkpoint(path, **({"weights_only": False if trusted else None} if takes else {}))
