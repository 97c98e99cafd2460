"""Names are resolved to objects, and wrong names produce advice."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fabricx import plugins
from fabricx.core.strategy import Strategy
from fabricx.launch.preloaded import PRELOAD
from fabricx.strategies import DDP


@pytest.mark.parametrize("kind", ["strategies", "callbacks", "loggers", "launchers"])
def test_every_built_in_name_can_be_found(kind: str) -> None:
    assert all(isinstance(plugins.find(kind, name), type) for name in plugins.names(kind))


def test_the_fork_server_imports_the_modules_of_all_strategies_ahead_of_the_ranks() -> None:
    assert {plugins.find("strategies", name).__module__ for name in plugins.names("strategies")} <= {*PRELOAD}


@pytest.mark.parametrize("name", plugins.names("strategies"))
def test_options_of_a_strategy_are_keys_of_the_command(name: str) -> None:
    """Regression: `compression` of local_sgd could not be set on the command line."""
    keys = OmegaConf.load(Path(__file__).parents[2] / "conf" / "strategy" / f"{name}.yaml").keys() - {"name"}
    assert keys == inspect.signature(plugins.find("strategies", name)).parameters.keys()


def test_a_dotted_path_selects_a_plugin() -> None:
    assert isinstance(plugins.build("strategies", "fabricx.strategies.ddp.DDP", bucket_mib=5.0), DDP)


def test_an_unknown_name_is_an_error_with_the_nearest_and_all_names() -> None:
    with pytest.raises(LookupError, match=r"Did you mean 'ddp'\?\n  known: async_sgd, .*, single, tensor\n  your own"):
        plugins.build("strategies", "dpd")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("strategies", " strategy._target_=my_project.strategy.Mine"),
        ("callbacks", r" \+callbacks.mine._target_=my_project.callback.Mine"),
        ("loggers", r" \+logger.mine._target_=my_project.logger.Mine"),
        ("launchers", " launcher._target_=my_project.launcher.Mine"),
    ],
)
def test_the_suggested_override_for_a_custom_plugin_is_accepted_by_the_command(kind: str, advice: str) -> None:
    with pytest.raises(LookupError, match=f"your own: give its dotted path instead, e.g.{advice}$"):
        plugins.find(kind, "mine")


def test_an_unknown_option_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no option 'bucket_mb'\. Did you mean 'bucket_mib'"):
        plugins.build("strategies", "ddp", bucket_mb=1)


def test_mpi_as_a_backend_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"ddp has no option 'backend': .* MPI itself is not used. Remove it"):
        plugins.build("strategies", "ddp", backend="mpi")
    with pytest.raises(TypeError, match=r"DDP has no argument 'backend': .* MPI itself is not used. Remove it"):
        DDP(backend="mpi")  # type: ignore[call-arg]


def test_an_invalid_dotted_path_is_explained() -> None:
    with pytest.raises(LookupError, match=r"there is no module .nowhere."):
        plugins.build("strategies", "nowhere.Strategy")
    with pytest.raises(LookupError, match=r"has no 'DPD'"):
        plugins.build("strategies", "fabricx.strategies.ddp.DPD")


def test_plugins_registered_by_another_package_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "theirs"

        @staticmethod
        def load() -> type[Strategy]:
            return DDP

    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: [Entry] if group.endswith("strategies") else [])
    assert isinstance(plugins.build("strategies", "theirs"), DDP)
    assert "theirs" in plugins.names("strategies")
