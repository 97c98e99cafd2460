"""Registries of Lightning's accelerators and strategies, with which packages register classes at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final


@final
class Registry(dict[str, Any]):
    """Classes by name. fabricx does not select from it: its names are errors in the arguments of the Trainer.

    Packages register classes for devices that a run does not use, and must be importable nevertheless.

    Args:
        kind: of the classes, for messages.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def register(
        self,
        name: str,
        cls: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a class; without a class, return a decorator of it.

        Args:
            name: name of the class in the registry.
            cls: class to register.
            description: for readers of the registry.
            override: replace a class of the same name.
            init_params: arguments with which `get` calls the class.

        Raises:
            ValueError: the name is registered already.
        """
        if name in self and not override:
            raise ValueError(f"{self._kind} {name!r} is registered already; pass override=True to replace it")

        def registers(registered: Callable[..., Any]) -> Callable[..., Any]:
            self[name] = {"class": registered, "description": description, "init_params": init_params}
            return registered

        return registers if cls is None else registers(cls)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an object of a registered class.

        Args:
            name: name of the class.
            default: returned for an unknown name.

        Raises:
            KeyError: the name is unknown, and there is no default.
        """
        if name in self:
            return self[name]["class"](**self[name]["init_params"])
        if default is None:
            raise KeyError(f"{self._kind} {name!r} is not registered; registered: {', '.join(sorted(self)) or 'none'}")
        return default

    def remove(self, name: str) -> None:
        """Remove a class.

        Args:
            name: name of the class.
        """
        del self[name]

    def available_accelerators(self) -> list[str]:
        """Return the registered names."""
        return sorted(self)

    available_strategies = available_accelerators


AcceleratorRegistry: Final = Registry("accelerator")
StrategyRegistry: Final = Registry("strategy")
