"""The smallest part that can't be sent to a worker is named, also in classes and functions that are sent by value."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fabricx.errors import NotPicklable
from fabricx.launch.pickling import check_picklable


def uses(lock: Any) -> Callable[[], Any]:
    def step() -> Any:
        return lock

    return step


def made(**attributes: Any) -> Any:
    return type("Local", (), attributes)()


def numbers() -> Any:
    yield 1


@pytest.mark.parametrize(("value", "named"), [
    (SimpleNamespace(net=[1, threading.Lock()]), r"module\.net\[1\] .*_thread\.lock"),
    (SimpleNamespace(order=numbers()), r"module\.order .*generator"),
    (SimpleNamespace(step=uses(threading.Lock())), r"the variable lock that module\.step uses .*lock"),
    (functools.partial(len, threading.Lock()), r"module\.args\[0\] .*lock"),
    (made(guard=threading.Lock()), r"Local\.guard .*lock"),
    (made(step=staticmethod(uses(threading.Lock()))), r"the variable lock that Local\.step uses .*lock"),
])  # fmt: skip
def test_the_smallest_object_that_cannot_be_pickled_is_named(value: Any, named: str) -> None:
    with pytest.raises(NotPicklable, match=rf"^{named} can't be pickled|^{named}.* can't be sent"):
        check_picklable({"module": value})


def test_a_variable_of_the_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    code = "import threading\nGUARD = threading.Lock()\ndef step():\n    return GUARD\n"
    script = type(sys)("__main__")
    exec(code, vars(script))
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(NotPicklable, match=r"the script's variable GUARD that module\.step uses can't be sent"):
        check_picklable({"module": SimpleNamespace(step=script.step)})


def test_local_classes_lambdas_and_closures_can_be_sent() -> None:
    check_picklable({"module": made(step=uses(3)), "collate": lambda items: items})
