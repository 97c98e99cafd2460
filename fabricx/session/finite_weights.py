"""Warns of weights that are NaN or infinite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fabricx.core.module_state.placeholder import is_placeholder

if TYPE_CHECKING:
    from fabricx.session.session import Session


def warn_of_nonfinite_weights(session: Session) -> None:
    """Warn once if a trained weight is NaN or infinite, on the main rank.

    It reads each weight, so it is called at the end of an epoch. A sharded weight is read on the ranks that have the
    shard: after a further step all weights are NaN.

    Args:
        session: session of a fit.
    """
    name = first_nonfinite(session.module) if session.world.main_rank else None
    if name is not None:
        session.warn_once(
            "weights are not finite",
            f"the weight {name} is NaN or infinite at the end of epoch {session.state.epoch}, as the loss or a "
            "gradient was: set Trainer(detect_anomaly=True) to find the operation, and continue from an earlier "
            "checkpoint with a smaller learning rate or gradient_clip_val",
        )


def first_nonfinite(module: nn.Module) -> str | None:
    """Return the name of the first trained parameter with a value that is NaN or infinite; None if there is none.

    >>> layer = nn.Linear(2, 1)
    >>> first_nonfinite(layer)
    >>> _ = layer.bias.data.fill_(float("inf"))
    >>> first_nonfinite(layer)
    'bias'

    Args:
        module: its parameters may be shards, or of another stage of a pipeline.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not is_lazy(parameter) and not is_placeholder(parameter):
            local = getattr(parameter, "_local_tensor", parameter).detach()
            if not torch.isfinite(local).all():
                return name
    return None
