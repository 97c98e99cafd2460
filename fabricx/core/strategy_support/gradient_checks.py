"""Checks of gradients that several strategies share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

from torch import Tensor, nn

from fabricx.distributed.world import World

SPARSE_CLIPPED: Final = (
    "torch can't clip sparse gradients; set sparse=False, or clip only dense gradients in configure_gradient_clipping"
)


def sparse_tables(module: nn.Module) -> list[str]:
    """Return the names of the embeddings that are trained with sparse gradients.

    Args:
        module: the user's module.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse)
    return [name for name, part in parts if part.weight.requires_grad]


def warn_of_lost_residuals(world: World) -> None:
    """Warn that compression errors (residuals) are dropped, because the number of ranks has changed.

    Args:
        world: the new ranks; only rank 0 warns.
    """
    if world.main_rank:
        warnings.warn(
            "the number of ranks has changed, so the compression errors of gradients are dropped; resume with the "
            "same number of ranks to keep them",
            stacklevel=3,
        )


def check_dense(module: nn.Module, option: str) -> None:
    """Refuse embeddings with sparse gradients, before training.

    Args:
        module: the user's module.
        option: option that does not support sparse gradients, for the message.

    Raises:
        ValueError: the module has such an embedding; the message names the remedies.
    """
    if names := sparse_tables(module):
        raise ValueError(
            f"{option} does not support sparse gradients, which {names[0]} has; set sparse=False, or use strategy=ddp"
        )


def check_frozen(module: nn.Module | None, frozen: Sequence[Tensor], option: str) -> None:
    """Refuse gradients of parameters that were frozen at set-up, because the strategy does not reduce them.

    Args:
        module: the user's module.
        frozen: its parameters that required no gradient at set-up.
        option: strategy or option that reduces no other gradients, for the message.

    Raises:
        ValueError: such a parameter requires a gradient now.
    """
    for parameter in frozen:
        if parameter.requires_grad:
            names = {id(tensor): name for name, tensor in module.named_parameters()} if module is not None else {}
            raise ValueError(
                f"{names.get(id(parameter), 'a parameter')} was frozen at set-up and is trained now, but {option} "
                "reduces only gradients of parameters that were not frozen at set-up; freeze it in on_train_start "
                "instead, or use strategy=ddp"
            )
