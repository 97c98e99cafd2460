"""The loss among the outputs of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fabricx.errors import WrongLoss


def checked_loss(loss: Any) -> Tensor:
    """Return the loss of `training_step` with shape [].

    Args:
        loss: result of the step.

    Raises:
        ValueError: it is not a tensor with a single element and a gradient.
    """
    if not isinstance(loss, Tensor):
        kind = f"a dict without 'loss' ({sorted(loss)})" if isinstance(loss, Mapping) else type(loss).__name__
        raise ValueError(f"training_step returned {kind}; return a loss tensor, a dict with 'loss', or None")
    if loss.numel() != 1:
        raise WrongLoss(
            f"training_step returned a loss of shape {tuple(loss.shape)}; return a single number, such as loss.mean()"
        )
    if not loss.requires_grad:
        raise WrongLoss(
            "training_step returned a loss without a gradient: it doesn't depend on any parameter that requires a "
            "gradient. Check that it is not detached or computed under no_grad, and that not all parameters are frozen"
        )
    return loss.reshape(())


def loss_of(outputs: Any) -> Tensor:
    """Return the loss in the outputs of a training step, shape [].

    Args:
        outputs: a loss, or a mapping with "loss".

    Raises:
        ValueError: there is no loss with a gradient.
    """
    loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else outputs
    if loss is None:
        raise ValueError(
            "training_step returned no loss for the first two samples, which model parallelism computes before "
            "training; return a loss for each batch"
        )
    return checked_loss(loss)
