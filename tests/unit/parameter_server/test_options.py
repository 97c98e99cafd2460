"""Common options of the strategies with servers: a single definition, checked values, types of configurations."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from fabricx import plugins
from fabricx.core.options.annotations import check_value
from fabricx.parameter_server.options import ServerOptions
from fabricx.strategies import AsyncSGD, ParameterServer

PRESETS: list[Any] = [ParameterServer, AsyncSGD]
COMMON = [field.name for field in dataclasses.fields(ServerOptions)]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_common_options_and_the_presets_have_the_same_defaults(preset: Any) -> None:
    parameters = inspect.signature(preset).parameters
    strategy, common = preset(), ServerOptions()
    assert {name: parameters[name].default for name in COMMON} == {name: getattr(common, name) for name in COMMON}
    assert {name: getattr(strategy, name) for name in COMMON} == {name: getattr(common, name) for name in COMMON}
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("compression", "topq", "Did you mean 'topk'"),
        ("pull_compression", "powersgd", "pull_compression='powersgd' isn't known"),
        ("compression_keep", 0.0, "more than 0 and at most 0.5"),
        ("snapshot_every", -1, "or 0 for none"),
        ("link", "glo", r"Did you mean 'gloo'\?\n  known: auto, gloo"),
        ("shard_by", "elements", "Did you mean 'element'"),
        ("overlap", "forwards", "Did you mean 'forward'"),
    ],
)
def test_wrong_values_of_common_options_are_refused_by_each_preset(
    preset: Any, option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        preset(**{option: value})


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("option", "value"), [("servers", "two"), ("link", 1), ("compression", 16)])
def test_values_of_another_type_in_a_configuration_are_refused(preset: Any, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"annotated with {option}: "):
        check_value(f"strategy.{option}", value, preset, option)


def test_low_rank_factors_need_workers_that_step() -> None:
    assert ParameterServer(compression="powersgd")._design.rank == 2
    for options in ({"mode": "async"}, {"backup_workers": 1}, {"optimizer": "server"}):
        with pytest.raises(ValueError, match="needs all workers in each update"):
            ParameterServer(compression="powersgd", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="isn't known to AsyncSGD"):
        AsyncSGD(compression="powersgd")  # type: ignore[arg-type]


def test_a_misspelt_option_is_named_with_all_valid_options() -> None:
    with pytest.raises(ValueError, match="Did you mean 'servers'") as refused:
        plugins.build("strategies", "parameter_server", server=2)
    assert set(str(refused.value).splitlines()[-1].removeprefix("  known: ").split(", ")) >= {*COMMON, "mode"}
