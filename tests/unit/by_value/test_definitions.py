"""A process creates each definition once, and keeps its own variables."""

from __future__ import annotations

import sys
import types

import pytest

from fabricx.by_value import definitions
from fabricx.by_value.definitions import Definitions


def test_a_process_without_a_script_has_an_empty_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    process, before = Definitions(), sys.modules["__main__"]
    monkeypatch.setitem(sys.modules, "__main__", before)  # restored after the test
    assert process.namespace({"__file__": "a.py"}) is vars(before)  # a script is never replaced
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "from multiprocessing.forkserver import main; main()"])
    monkeypatch.setattr(before, "__name__", "__main__")
    assert process.namespace({"__file__": "a.py"})["__file__"] == "a.py"
    assert sys.modules["__main__"] is process.script is not before
    assert process.namespace({"__file__": "b.py"})["__file__"] == "a.py"


def test_an_object_is_created_and_filled_once() -> None:
    process, filled = Definitions(), []
    made = process.make("a", type, ("Made", (), {}))
    assert process.make("a", type, ("Made", (), {})) is made
    for _ in range(2):
        process.fill(made, "a", None, lambda value, state: filled.append(state), 1)
    assert filled == [1]
    assert process.find("a") is made
    assert process.name_of(made) == "a"


def test_variables_that_a_module_has_are_kept() -> None:
    variables = {"rate": 1}
    function = types.FunctionType((lambda: rate).__code__, variables)  # type: ignore[name-defined] # noqa: F821
    slots = {"__globals__": {"rate": 2, "size": 3}, "__closure__": None, "_cloudpickle_submodules": []}
    definitions.fill_function(function, ({}, slots, ("<cell 7>", ["x = 1\n"])))
    assert (variables["rate"], variables["size"]) == (1, 3)
    assert definitions.linecache.getline("<cell 7>", 1) == "x = 1\n"
    del definitions.linecache.cache["<cell 7>"]
