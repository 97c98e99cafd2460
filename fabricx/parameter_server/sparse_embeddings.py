"""Embeddings with sparse gradients, whose rows are divided over servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fabricx.core.tensors.tensor_properties import PROPERTIES

C = TypeVar("C", bound=Callable[..., Any])
_MAX_NORM: Final = "max_norm changes rows on a worker, and servers don't receive the change: remove max_norm"


def _outside_of_graphs(function: C) -> C:
    disabled: Any = torch.compiler.disable(function)
    wrapped: C = disabled
    return wrapped


class PullsTables(Protocol):
    """The part of `WeightPulls` that `TableReads` uses.

    Attributes:
        lacks_rows: tables of this worker may lack updates that its other weights have.
    """

    lacks_rows: bool

    def pull_rows(self, ids: dict[int, Tensor]) -> None:
        """Pull rows of tables into the parameters.

        Args:
            ids: unique row ids, shape [k], by parameter number.
        """

    def pull_tables(self) -> None:
        """Pull all changed rows of all tables into the parameters."""


def sparse_embeddings(module: nn.Module | None, parameters: Sequence[Tensor]) -> dict[nn.Module, int]:
    """Return the embeddings with sparse gradients, and the numbers of their parameters.

    Args:
        module: the user's module; None for no embeddings.
        parameters: parameters of all optimizers, by number.

    Raises:
        ValueError: an embedding has `max_norm`, so that its forward changes weights.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    tables: dict[nn.Module, int] = {}
    for name, part in module.named_modules() if module is not None else ():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and id(part.weight) in numbers:
            if part.max_norm is not None:
                raise ValueError(f"{name}: {_MAX_NORM}")
            tables[part] = numbers[id(part.weight)]
    return tables


def check_servers_can_step(optimizers: Sequence[Optimizer], tables: Collection[Tensor]) -> None:
    """Check that servers can step tables with sparse gradients.

    Args:
        optimizers: the user's optimizers.
        tables: parameters of embeddings with sparse gradients.

    Raises:
        ValueError: a group of a table has momentum, which changes rows without a gradient.
    """
    sparse = {id(table) for table in tables}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if group.get("momentum") and any(id(parameter) in sparse for parameter in group["params"]):
            raise ValueError(
                "momentum also changes rows of a sparse embedding that have no gradient, but servers receive only "
                "rows with a gradient: set momentum=0 for the table (in a group of its own), sparse=False, or use "
                "optimizer='worker'"
            )


@final
class TableReads(TorchFunctionMode):
    """While active, the rows of a table arrive from the servers before a function of torch reads them.

    A lookup pulls the rows that it needs. Any other function that receives the table, such as `table.detach()`, pulls
    all rows that have changed. A function that writes to a table is an error, as the servers would not receive it.

    Args:
        tables: tables by their number.
        weights: pulls from the servers.
    """

    def __init__(self, tables: Mapping[int, Tensor], weights: PullsTables) -> None:
        super().__init__()
        self._tables = {id(table): number for number, table in tables.items()}
        self._memory = {table.data_ptr() for table in tables.values()}
        self._weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and (not name.endswith("__") or name in _IN_PLACE) and args:
            self._check_unwritten(name, args[0])
        if func in _LOOKUPS and options.get("max_norm") is not None and self._tables.keys() & set(map(id, args)):
            raise ValueError(f"{func.__name__}: {_MAX_NORM}")
        if self._weights.lacks_rows and func not in PROPERTIES:
            tensors = [value for value in _flat((*args, *options.values())) if isinstance(value, Tensor)]
            read = {self._tables[id(tensor)] for tensor in tensors if id(tensor) in self._tables}
            if read:
                self._pull(func, read, tensors)
        return func(*args, **options)

    def _check_unwritten(self, name: str, written: Any) -> None:
        if not isinstance(written, Tensor) or name == "requires_grad_" or torch.compiler.is_compiling():
            return
        memory = None
        with contextlib.suppress(RuntimeError):  # a tensor within torch.vmap has no storage
            memory = written.untyped_storage().data_ptr()
        if memory in self._memory:
            raise ValueError(
                f"training_step changes a sparse table by {name}, but servers hold the weights, so a worker's change "
                "would be lost: compute the changed weights in each forward, or use optimizer='worker'"
            )

    @_outside_of_graphs
    def _pull(self, func: Any, read: set[int], tensors: list[Tensor]) -> None:
        ids: Tensor | None = next((t for t in tensors if not t.is_floating_point() and not t.is_complex()), None)
        if func in _LOOKUPS and ids is not None:
            self._weights.pull_rows({number: ids.detach().unique().cpu().long() for number in read})
        else:
            self._weights.pull_tables()


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


_IN_PLACE: Final = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or"))}
_LOOKUPS: Final = {F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag}
