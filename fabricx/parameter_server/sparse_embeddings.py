"""Embeddings with sparse gradients, whose rows are divided over servers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


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
                raise ValueError(
                    f"{name} has max_norm, which changes rows on a worker, and servers don't receive the change: "
                    "remove max_norm"
                )
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


def before_lookups(
    tables: dict[nn.Module, int], wanted: Callable[[], bool], pull_rows: Callable[[dict[int, Tensor]], None]
) -> list[Callable[[], None]]:  # fmt: skip
    """Pull the rows that an embedding looks up before each of its forwards in training.

    Args:
        tables: embeddings with the numbers of their parameters.
        wanted: whether a gradient is being computed; otherwise rows are present already.
        pull_rows: pulls rows: unique row ids, shape [k], by the number of the parameter.

    Returns:
        Functions that end this.
    """

    def pull_before(number: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def pull(part: nn.Module, args: tuple[Any, ...]) -> None:
            if wanted():
                pull_rows({number: args[0].detach().unique().cpu()})

        return pull

    return [part.register_forward_pre_hook(pull_before(number)).remove for part, number in tables.items()]
