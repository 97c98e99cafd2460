"""Resolvers of OmegaConf and the configuration of Hydra, which a process that does not execute the script lacks."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, final

_BUILT_IN: Final = "oc."  # begins the names of resolvers that OmegaConf registers itself
_checking: Final = contextvars.ContextVar("checking", default=False)  # whether a resolver can be sent


@final
class Resolvers:
    """Resolvers of the process that pickles this object; unpickling registers those that the receiver lacks.

    A resolver that can't be sent is omitted: a configuration that uses it raises OmegaConf's error in the receiver.

    Args:
        dumps: pickles an object for another process, or raises an error.
    """

    def __init__(self, dumps: Callable[[Any], bytes]) -> None:
        self._dumps = dumps

    def __getstate__(self) -> tuple[dict[str, Callable[..., Any]], Any]:
        if "omegaconf" not in sys.modules or _checking.get():
            return {}, None
        registered = _of_omegaconf().items()
        sent = {name: f for name, f in registered if not name.startswith(_BUILT_IN) and self._sends(f)}
        hydra = _of_hydra().cfg if "hydra.core.hydra_config" in sys.modules else None
        return sent, hydra if self._sends(hydra) else None

    def __setstate__(self, state: tuple[dict[str, Callable[..., Any]], Any]) -> None:
        resolvers, hydra = state
        for name, function in resolvers.items():
            _of_omegaconf().setdefault(name, function)
        if hydra is not None and _of_hydra().cfg is None:
            _of_hydra().cfg = hydra

    def _sends(self, value: Any) -> bool:
        token = _checking.set(True)  # a resolver may refer to a configuration, which refers to the resolvers
        try:
            self._dumps(value)
        except Exception:
            return False
        finally:
            _checking.reset(token)
        return True


def new_configuration(_: Resolvers, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return a configuration without its content, after its resolvers are registered.

    Args:
        _: the resolvers of the sender.
        make: constructor.
        arguments: arguments of the constructor.
    """
    return make(*arguments)


def _of_omegaconf() -> dict[str, Callable[..., Any]]:
    resolvers: dict[str, Callable[..., Any]] = import_module("omegaconf.basecontainer").BaseContainer._resolvers
    return resolvers


def _of_hydra() -> Any:
    return import_module("hydra.core.hydra_config").HydraConfig.instance()
