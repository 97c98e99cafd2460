"""Shards and offsets of FSDP parameters; reversal of `fully_shard`, which torch applies to a module only once."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabricx.distributed.sharding.dtensors import is_dtensor

_FSDP = "torch.distributed.fsdp"


def shard_like(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of a tensor that every rank has, as a DTensor; no communication.

    Args:
        whole: whole tensor on any device.
        like: a DTensor of the same shape.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def own_block(tensor: Any) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return this rank's shard of a tensor and the shard's offset in each dim.

    Args:
        tensor: a DTensor or an ordinary tensor.

    Returns:
        The local shard and its global offsets; for an ordinary tensor, the tensor and None.
    """
    if not is_dtensor(tensor):
        return tensor, None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offsets)


def class_before_fsdp(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without that which `fully_shard` derives from it.

    Args:
        module: any module, also one that is not sharded.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it, no module is sharded
    kinds = (kind for kind in type(module).__mro__ if fsdp is None or not issubclass(kind, fsdp.FSDPModule))
    return cast(type[nn.Module], next(kinds))


def units_of(module: nn.Module) -> list[Any]:
    """Return FSDP's parameter groups; the parameters of a group are gathered together.

    Args:
        module: sharded with `fully_shard`, as are some submodules.
    """
    from torch.distributed.fsdp import FSDPModule

    units: list[Any] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
            units += [state._fsdp_param_group] if groups is None else groups
    return [unit for unit in units if unit is not None]


@final
class UnshardedModule:
    """State of a module before `fully_shard`, so that the module can be sharded again for other ranks.

    Args:
        module: not sharded yet.
    """

    def __init__(self, module: nn.Module) -> None:
        made: dict[int, nn.Parameter] = {}
        self._module = module
        self._kinds = [(part, type(part)) for part in module.modules()]
        self._changed: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = []
        self._places = [
            (part, name, made.setdefault(id(parameter), _like(parameter, torch.device("meta"))))
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]

    @contextmanager
    def sharding(self) -> Iterator[None]:
        """Record the attributes of the module that change inside this context."""
        before = [(vars(part), dict(vars(part))) for part, _ in self._kinds]
        yield
        self._changed = [
            (now, {name: value for name, value in old.items() if now.get(name) is not value}, now.keys() - old.keys())
            for now, old in before
        ]

    def restore(self, device: torch.device) -> None:
        """Reverse `fully_shard`; the parameters are new and their values are undefined.

        Can be called at any time, also after an error in the middle of a forward or backward.

        Args:
            device: device of the new parameters; "meta" allocates no memory.
        """
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # its key does not contain the rank's coordinate in the mesh
        trained = {name: parameter.requires_grad for name, parameter in self._module.named_parameters()}
        for part, kind in self._kinds:
            _module_state_mapping.pop(part, None)
            _remove_hooks(part)
            part.__class__ = kind
        for attributes, old, added in self._changed:
            for name in added:
                attributes.pop(name, None)
            attributes.update(old)
        self._changed = []
        made: dict[int, nn.Parameter] = {}
        for part, name, parameter in self._places:
            part._parameters[name] = made.setdefault(id(parameter), _like(parameter, device))
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(trained.get(name, True))


def _like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)


def _remove_hooks(part: nn.Module) -> None:
    """Remove the hooks that `fully_shard` has registered, at once or at the first forward; keep all other hooks."""
    for name, hooks in vars(part).items():
        if name.endswith("hooks") and isinstance(hooks, dict):
            for key in [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_FSDP)]:
                del hooks[key]


@final
class DeviceWaits:
    """Marks the periods in which a device waits for other ranks in the collectives of a sharded module.

    FSDP makes the compute stream wait for the shards of other ranks before a unit is used and, after its backward, for
    the gradient reduction of the previous unit. The copies that FSDP makes in these periods take the same time for any
    number of samples.

    Args:
        module: sharded with `fully_shard`, as are some submodules.
        mark: returns a device timestamp, such as an event that was just recorded.

    Attributes:
        spans: begin and end of each period so far.
    """

    def __init__(self, module: nn.Module, mark: Callable[[], Any]) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self._mark = mark
        for unit in units_of(module):
            for name in ("wait_for_unshard", "post_backward"):
                method = getattr(unit, name)
                method = getattr(method, "unmarked", method)  # unwrap the mark of an earlier run in this process
                marked: Any = functools.partial(self._within, method)
                marked.unmarked = method
                setattr(unit, name, marked)

    def _within(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        began = self._mark()
        output = method(*args, **options)
        self.spans.append((began, self._mark()))
        return output


@final
class CollectiveTimer:
    """Measures the time that a sharded module spends in collectives, in which a CPU rank waits for the other ranks.

    Args:
        module: sharded with `fully_shard`, as are some submodules.
        note: called with a description of each collective before the collective starts; None for no call.

    Attributes:
        seconds: total so far.
    """

    def __init__(self, module: nn.Module, note: Callable[[str], None] | None = None) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.seconds = 0.0
        # torch 2.13 has new names for them and warns about the old names.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        for name, part in module.named_modules():
            if isinstance(part, FSDPModule):
                named = name or type(module).__name__
                timed: Any = _Timed(gather, self, f"gathers the weights of {named}", note)
                part.set_custom_all_gather(timed)
                timed = _Timed(scatter, self, f"reduces the gradients of {named}", note)
                part.set_custom_reduce_scatter(timed)


@final
class _Timed:
    """A collective with the interface that FSDP requires: it also allocates memory for the output."""

    def __init__(
        self, collective: Callable[..., Any], waits: CollectiveTimer, what: str, note: Callable[[str], None] | None
    ) -> None:  # fmt: skip
        self._collective, self._waits = collective, waits
        self._what, self._note = what, note

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        if self._note is not None:
            self._note(self._what)
        began = time.perf_counter()
        work = self._collective(output_tensor, input_tensor, *args, **options)
        self._waits.seconds += time.perf_counter() - began
        return work
