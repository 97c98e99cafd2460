"""Finds the part of an object that cannot be pickled, or a script that cannot be imported again."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fabricx.errors import NotPicklable


def check_picklable(named: Mapping[str, object], error: BaseException | None = None) -> None:
    """Raise an error that names the smallest part of the objects that can't be pickled; return if all can.

    Raises:
        NotPicklable: with the way to it, such as `module.net.activation`.
    """
    for name, value in named.items():
        found = _culprit(name, value, set())
        if found is not None:
            where, what = found
            raise NotPicklable(
                f"{where} can't be sent to the worker processes: {_describe(what)}\n"
                "  functions and classes have to be defined at the top level of a module, and open files, locks and "
                "connections be made in setup(), which runs in each worker"
            ) from error


def check_script(kind: type) -> None:
    """Refuse to start workers from a script that they can't import, or that would start workers of its own in them.

    Args:
        kind: class of the module that is trained.

    Raises:
        RuntimeError: this process is a worker that imports the script, and has come to the call that started it.
        NotPicklable: there is no file of the script, and workers need it.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "each worker imports the script, and this one has come to the call that starts the workers: put what the "
            'script does under `if __name__ == "__main__":`'
        )
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists()):
        return
    if file is not None or kind.__module__ == "__main__":
        raise NotPicklable(
            f"{kind.__name__} is used in a session that is no file ({file or 'a prompt, a notebook, or python -c'}), "
            "which the worker processes can't import: put the classes into a file (.py) and import them, start that "
            "file, or take devices=1"
        )


def _describe(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    if name is not None and "<locals>" in name:
        return f"{name} is defined inside of a function"
    if name is not None and "<lambda>" in name:
        return "it is a lambda"
    return f"a {type(value).__module__}.{type(value).__qualname__} can't be pickled"


def _culprit(where: str, value: object, seen: set[int]) -> tuple[str, object] | None:
    if id(value) in seen or _pickles(value):
        return None
    seen.add(id(value))
    for place, part in _parts(where, value):
        found = _culprit(place, part, seen)
        if found is not None:
            return found
    return where, value


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(where: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"{where}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{where}[{number}]", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(getattr(value, "__code__", None)):
        state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
        attributes = state if isinstance(state, Mapping) else vars(value)
        for name, part in attributes.items():
            if name in ("_modules", "_parameters", "_buffers") and isinstance(part, Mapping):
                yield from ((f"{where}.{key}", inner) for key, inner in part.items())
            else:
                yield f"{where}.{name}", part
