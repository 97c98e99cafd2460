"""Names of Lightning that fabricx does not have: projects may import them, and their use is an error."""

from __future__ import annotations

from typing import Any, NoReturn, Union, final


@final
class Absent:
    """Stands for a class or function of Lightning in imports, annotations and `isinstance`.

    Args:
        name: its name.
        error: text of the errors, with its successor in fabricx.
    """

    def __init__(self, name: str, error: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__doc__ = self._error = error

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        """Raise an error that names the successor.

        Args:
            *args, **options: of the class or function.

        Raises:
            ImportError: always.
        """
        raise ImportError(self._error)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise ImportError(self._error)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._error)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007  # of annotations

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<{self._error}>"

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return Absent, (self.__name__, self._error)
