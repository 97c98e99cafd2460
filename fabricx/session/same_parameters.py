"""Parameters that remain the same objects when `on_load_checkpoint` creates layers anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fabricx.distributed.sharding.dtensors import is_dtensor


@contextlib.contextmanager
def same_parameters(module: nn.Module, *, keep_layers: bool) -> Iterator[None]:
    """Put the former parameters into layers that a hook creates anew: optimizers and the strategy refer to them.

    Args:
        module: of a run whose optimizers exist.
        keep_layers: new layers receive the values of the former layers, also of their buffers; otherwise former
            parameters receive the values of the new layers, as before a checkpoint is loaded.

    Raises:
        ValueError: a trained parameter has another shape than before, or was divided between ranks.
    """
    layers = set(module.modules())
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    yield
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        former, (owner, key) = parameters.get(name, parameter), _place(module, name)
        if former is parameter:
            continue
        if former.shape == parameter.shape and not is_dtensor(former):
            if not keep_layers or owner in layers:  # the hook has set a parameter of a former layer
                with torch.no_grad():
                    former.copy_(parameter)
            setattr(owner, key, former)
        elif former.requires_grad:
            why = "which the strategy has divided between ranks" if is_dtensor(former) else "with another shape"
            raise ValueError(
                f"on_load_checkpoint has created {name} anew, {why}, and the optimizers have the former parameter: "
                "create the layer in setup or configure_model, and in on_load_checkpoint only if the module lacks it"
            )
    for name, buffer in list(module.named_buffers(remove_duplicate=False)) if keep_layers else ():
        owner, key = _place(module, name)
        if owner not in layers and buffers.get(name, buffer).shape == buffer.shape:
            setattr(owner, key, buffers.get(name, buffer))


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, key = name.rpartition(".")
    return module.get_submodule(owner), key
