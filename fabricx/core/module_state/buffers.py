"""Buffers of a module: the persistent buffers, and the restoration of all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import final

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the buffers that `state_dict` contains.

    Args:
        module: the module; its submodules are included.
    """
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@final
class BufferMark:
    """Buffers of a module, and copies of their values.

    A step may change a buffer in place, assign a new tensor to its name, or register it: `restore` undoes this.

    Args:
        module: the module; its submodules are included.
        without: submodules that are left out.
    """

    def __init__(self, module: nn.Module, without: Collection[nn.Module] = ()) -> None:
        self._registered = [(part, dict(part._buffers)) for part in module.modules() if part not in without]
        buffers = {id(b): b for _, named in self._registered for b in named.values() if b is not None}
        self._values = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]

    def restore(self) -> None:
        """Restore names, tensors and values."""
        for part, before in self._registered:
            if part._buffers.keys() != before.keys() or any(part._buffers[name] is not before[name] for name in before):
                part._buffers.clear()
                part._buffers.update(before)
        for buffer, value in self._values:
            buffer.data.copy_(value)  # not counted as a change: a backward that follows may need the buffer
