"""Find the part of an object that cannot be pickled, and check that workers can import the script."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fabricx.errors import NotPicklable


def check_picklable(named: Mapping[str, object], error: BaseException | None = None) -> None:
    """Check that objects can be pickled.

    Args:
        named: the objects, with their names for the error message.
        error: cause of the error to raise.

    Raises:
        NotPicklable: names the smallest part that cannot be pickled, such as `module.net.activation`.
    """
    for name, value in named.items():
        culprit = _culprit(name, value, set())
        if culprit is not None:
            path, part = culprit
            raise NotPicklable(
                f"{path} can't be sent to the worker processes: {_describe(part)}\n"
                "  define functions and classes at the top level of a module, and create open files, locks and "
                "connections in setup(), which runs in each worker"
            ) from error


def check_script(kind: type) -> None:
    """Check that workers can import the script, and that the import does not start workers again.

    Args:
        kind: class of the module to train.

    Raises:
        RuntimeError: this process is a worker that imports the script and reached the call that starts workers.
        NotPicklable: workers need the script, but it has no file.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "each worker imports the script, and this worker reached the call that starts the workers: put the code of "
            'the script under `if __name__ == "__main__":`'
        )
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists()):
        return
    if file is not None or kind.__module__ == "__main__":
        raise NotPicklable(
            f"{kind.__name__} is used in a session without a file ({file or 'a prompt, a notebook, or python -c'}), "
            "which the worker processes can't import: define the classes in a file (.py) and import or run that file, "
            "or use devices=1"
        )


def _describe(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    if name is not None and "<locals>" in name:
        return f"{name} is defined inside a function"
    if name is not None and "<lambda>" in name:
        return "it is a lambda"
    return f"a {type(value).__module__}.{type(value).__qualname__} can't be pickled"


def _culprit(path: str, value: object, seen: set[int]) -> tuple[str, object] | None:
    """Return path and value of the smallest part of `value` that cannot be pickled, or None."""
    if id(value) in seen or _pickles(value):
        return None
    seen.add(id(value))
    for part_path, part in _parts(path, value):
        culprit = _culprit(part_path, part, seen)
        if culprit is not None:
            return culprit
    return path, value


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(path: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{number}]", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(getattr(value, "__code__", None)):
        state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
        attributes = state if isinstance(state, Mapping) else vars(value)
        for name, part in attributes.items():
            if name in ("_modules", "_parameters", "_buffers") and isinstance(part, Mapping):
                yield from ((f"{path}.{key}", inner) for key, inner in part.items())
            else:
                yield f"{path}.{name}", part
