"""Block bounds of sharded tensors, and undoing `fully_shard`, which torch applies only once to a module."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FSDP = "torch.distributed.fsdp"


def own_block(tensor: Any) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return what this rank has of a tensor, and where in it that begins; None if it has all of it."""
    if not hasattr(tensor, "to_local"):
        return tensor, None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offsets)


def units_of(module: nn.Module) -> list[Any]:
    """Return FSDP's groups of parameters that are gathered together.

    Args:
        module: sharded, as are some of its parts.
    """
    from torch.distributed.fsdp import FSDPModule

    found: list[Any] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
            found += [state._fsdp_param_group] if several is None else several
    return [unit for unit in found if unit is not None]


@final
class AsBuilt:
    """What a module is before it is sharded.

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
        """Note what becomes of the module's attributes inside."""
        before = [(vars(part), dict(vars(part))) for part, _ in self._kinds]
        yield
        self._changed = [
            (now, {name: value for name, value in old.items() if now.get(name) is not value}, now.keys() - old.keys())
            for now, old in before
        ]

    def restore(self, device: torch.device) -> None:
        """Let the module be as it was, with parameters whose values are lost.

        Works at any moment, also after an error in the middle of a forward or backward.

        Args:
            device: of the parameters; "meta" gives them no memory.
        """
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # meshes of one size are equal for it, though a rank's place in them isn't
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
    """Remove what `fully_shard` has hooked in, then or at the first forward; others' hooks stay."""
    for name, hooks in vars(part).items():
        if name.endswith("hooks") and isinstance(hooks, dict):
            for key in [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_FSDP)]:
                del hooks[key]


@final
class Pauses:
    """Marks when a device waits for what other ranks have to give to a sharded module, within its steps.

    FSDP lets the stream that computes wait for others' shards before a block is used, and after its backward for the
    reduction of gradients of the one before. What it does beside that there, copying, takes as long for any number of
    samples.

    Args:
        module: sharded, as are some of its parts.
        mark: returns a moment of the device's time, such as an event that was just recorded.

    Attributes:
        spans: begin and end of each pause so far.
    """

    def __init__(self, module: nn.Module, mark: Callable[[], Any]) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self._mark = mark
        for unit in units_of(module):
            for name in ("wait_for_unshard", "post_backward"):
                method = getattr(unit, name)
                method = getattr(method, "unmarked", method)  # of an earlier run in this process
                marked: Any = functools.partial(self._within, method)
                marked.unmarked = method
                setattr(unit, name, marked)

    def _within(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        began = self._mark()
        found = method(*args, **options)
        self.spans.append((began, self._mark()))
        return found


@final
class Waits:
    """Counts the seconds that a sharded module's collectives take, in which a rank on a CPU waits for the others.

    Args:
        module: sharded, as are some of its parts.
        note: called before each collective with a description of it; None for no call.

    Attributes:
        seconds: so far.
    """

    def __init__(self, module: nn.Module, note: Callable[[str], None] | None = None) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.seconds = 0.0
        # torch 2.13 has new names for them, and warns of the old ones.
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
    """A collective as FSDP calls it, with memory for its result."""

    def __init__(
        self, collective: Callable[..., Any], waits: Waits, what: str, note: Callable[[str], None] | None
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
