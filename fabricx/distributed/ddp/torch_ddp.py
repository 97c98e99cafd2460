"""torch's DistributedDataParallel around a whole training step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

_SENT: Final = {  # dtypes that gloo and NCCL send
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip
# torch 2.13 renamed the argument, and warns about the old name.
_SIGNATURE = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
BUFFERS_ARGUMENT = "forward_sync_buffers" if "forward_sync_buffers" in _SIGNATURE else "broadcast_buffers"


def check_dtypes(module: nn.Module) -> None:
    """Refuse parameters and buffers that DDP could not broadcast.

    Args:
        module: the user's module.

    Raises:
        ValueError: gloo and NCCL do not send the dtype of a parameter or buffer.
    """
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    if unknown := {name: tensor.dtype for name, tensor in named if tensor.dtype not in _SENT}:
        raise ValueError(
            f"torch's DDP cannot broadcast {', '.join(f'{name} of {dtype}' for name, dtype in unknown.items())}: use a "
            "wider dtype, such as int32, or strategy=fsdp"
        )


class BufferSourceDDP(nn.parallel.DistributedDataParallel):
    """Copies the buffers of a rank that may change from step to step, by a private method of torch.

    torch's copies those of rank 0. `source` returns the rank. `tests/process/test_idle_worker.py` fails
    if torch renames the method.
    """

    source: Callable[[], int] = staticmethod(int)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        super()._sync_module_buffers(self.source())  # type: ignore[no-untyped-call]


class StepModule(nn.Module):
    """Adapter that DDP wraps as its model; a call runs the user's training step.

    Args:
        module: the user's module. `step` has to be set before the first call.
        several_backwards: DDP searches for parameters without gradients.
    """

    step: Callable[..., Any]

    def __init__(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().__init__()
        self.module = module
        trained = next((p for p in module.parameters() if p.requires_grad), None)
        if several_backwards and trained is not None:  # DDP searches, and warns if it finds no unused parameter
            self.unused = nn.Parameter(trained.detach().new_zeros(1))
        self.called = [False]  # whether it was called since the last backward

    def __call__(self, *args: Any) -> Any:  # bypasses torch's hooks, which cost two frames per call
        self.called[0] = True
        return self.step(*args)
