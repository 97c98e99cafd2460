"""Utility functions are compared with Lightning's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx.errors import PossibleUserWarning
from fabricx.lightning import functions
from fabricx.testing import TinyModule

utilities: Any = pytest.importorskip("lightning.pytorch.utilities")


@pytest.mark.parametrize("kind", [1, 2, "inf", 3.5])
def test_norms_of_gradients_are_lightnings(kind: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    assert functions.grad_norm(net, kind) == {}
    net(torch.randn(4, 3)).sum().backward()
    expected = utilities.grad_norm(net, kind)
    norms = functions.grad_norm(net, kind)
    assert norms.keys() == expected.keys()
    for name, norm in norms.items():
        assert float(norm) == pytest.approx(float(expected[name]))  # different summation order of float32 values
    with pytest.raises(ValueError, match="set a positive number"):
        functions.grad_norm(net, 0)


def test_a_summary_lists_the_layers() -> None:
    table = str(functions.summary(TinyModule(), max_depth=1))
    assert "layer" in table
    assert "Linear" in table


def test_a_profiler_measures_the_actions_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"filename='times'\): the table is printed, not written to a file"):
        functions.SimpleProfiler(filename="times")
    profiler, silent = functions.SimpleProfiler(), functions.PassThroughProfiler()
    for profiled in (profiler, silent, profiler):
        with profiled.profile("load"):
            pass
    assert len(profiler.recorded_durations["load"]) == 2
    profiler.describe()
    assert capsys.readouterr().out.startswith("load: 2 calls, ")
    assert (silent.recorded_durations, silent.summary()) == ({}, "")
    with pytest.raises(ValueError, match="has not begun"):
        profiler.stop("load")
    profiler.start("load")
    with pytest.raises(ValueError, match="has begun already"):
        profiler.start("load")


def test_generators_are_restored() -> None:
    torch.manual_seed(1)
    with functions.isolate_rng(include_cuda=False):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), inside)


def test_overridden_methods_are_found() -> None:
    class Net(TinyModule):
        def on_fit_start(self) -> None: ...

    assert functions.is_overridden("on_fit_start", Net())
    assert not functions.is_overridden("on_fit_end", Net())
    assert not functions.is_overridden("on_fit_start")
    assert functions.is_overridden("setup", type("Data", (fx.DataModule,), {"setup": lambda self, stage: None})())
    assert not functions.is_overridden("nothing", Net(), parent=fx.Module)
    with pytest.raises(ValueError, match="Expected a parent"):
        functions.is_overridden("on_fit_start", object())


def test_out_of_memory_errors_are_recognised_and_nested_tensors_detached() -> None:
    functions.garbage_collection_cuda()
    assert functions.is_oom_error(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert functions.is_oom_error(MemoryError())
    assert not functions.is_oom_error(ValueError("other"))
    tensor = torch.ones(1, requires_grad=True)
    detached = functions.recursive_detach({"a": tensor, "b": {"c": tensor, "d": 1}}, to_cpu=True)
    assert not detached["a"].requires_grad
    assert not detached["b"]["c"].requires_grad
    assert detached["b"]["d"] == 1


def test_warnings_of_a_module_are_ignored() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functions.disable_possible_user_warnings(module=__name__)
        warnings.warn("possible", PossibleUserWarning, stacklevel=1)


def test_the_logo_of_lightnings_examples_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    functions.cli_lightning_logo()
    assert capsys.readouterr() == ("", "")
