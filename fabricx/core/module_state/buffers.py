"""Restoration of a module's buffers."""

from __future__ import annotations

from typing import final

from torch import nn


@final
class BufferMark:
    """Buffers of a module, and copies of their values.

    A step may change a buffer in place, assign another tensor to its name, or register it: `restore` undoes each.

    Args:
        module: the module; its submodules are included.
    """

    def __init__(self, module: nn.Module) -> None:
        self._registered = [(part, dict(part._buffers)) for part in module.modules()]
        self._values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def restore(self) -> None:
        """Restore names, tensors and values."""
        for part, before in self._registered:
            if part._buffers.keys() != before.keys() or any(part._buffers[name] is not before[name] for name in before):
                part._buffers.clear()
                part._buffers.update(before)
        for buffer, value in self._values:
            buffer.data.copy_(value)  # not counted as a change: a backward that follows may need the buffer
