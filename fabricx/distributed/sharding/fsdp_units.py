"""Submodules that fsdp shards as units: each gathers its weights to compute, and frees them afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from fabricx.errors import did_you_mean

_LISTS: Final = (nn.ModuleList, nn.ModuleDict)
Policy = str | Sequence[str] | float


def blocks(module: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the submodules that a policy selects, inner submodules first.

    Args:
        module: root module; never selected.
        policy: "auto": submodules with children that have siblings of the same class in a list, sequence or dict of
            modules, also in nested lists and dicts; names of classes; or the least number of parameters.

    Raises:
        ValueError: no submodule has a class of that name; the message lists the classes.

    >>> layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
    >>> len(blocks(nn.Sequential(layers, nn.Linear(4, 2)), "auto"))
    3
    """
    inner_first = [part for part in reversed(list(module.modules())) if part is not module]
    if isinstance(policy, (int, float)):
        return _of_size(module, policy)
    if policy == "auto":
        chosen = {id(block) for parent in module.modules() for block in _repeated(parent)}
        return [part for part in inner_first if id(part) in chosen]
    names = {policy} if isinstance(policy, str) else set(policy)
    classes = {type(part).__name__ for part in inner_first}
    for name in names - classes:
        raise ValueError(
            f"no submodule is a {name!r}.{did_you_mean(name, sorted(classes))}\n  known: {', '.join(sorted(classes))}"
        )
    return [part for part in inner_first if type(part).__name__ in names]


def _repeated(parent: nn.Module) -> list[nn.Module]:
    if not isinstance(parent, (*_LISTS, nn.Sequential)):
        return []
    able = [part for part in _members(parent) if any(part.children()) and any(True for _ in part.parameters())]
    kinds = [type(part) for part in able]
    return [part for part in able if kinds.count(type(part)) > 1]


def _members(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield the children, and those of lists and dicts among them in place of these."""
    for child in parent.children():
        if _never_called(child):
            yield from _members(child)
        else:
            yield child


def _never_called(part: nn.Module) -> bool:
    """Return whether no forward of the module itself would gather its weights."""
    return isinstance(part, _LISTS) and type(part).forward is nn.Module.forward


def _of_size(module: nn.Module, least: float) -> list[nn.Module]:
    """Return submodules, inner first, with at least `least` parameters outside of inner submodules in the result."""
    assigned: set[int] = set()
    chosen = []
    for part in reversed(list(module.modules())):
        sizes = {id(parameter): parameter.numel() for parameter in part.parameters()}
        free = {key: count for key, count in sizes.items() if key not in assigned}
        if part is not module and sum(free.values()) >= least and not _never_called(part):
            chosen.append(part)
            assigned |= sizes.keys()
    return chosen


def outermost_owners(module: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the outermost submodules with direct parameters.

    A manual step may call any submodule directly; each of these gathers its weights, and reduces its gradients.

    Args:
        module: root module; never selected.
        units: submodules to omit, because they are units already.
    """
    owners = []
    for child in module.children():
        if child in units:
            continue
        owners += [child] if _owns(child) else outermost_owners(child, units)
    return owners


def tied_parameters(module: nn.Module, block: nn.Module) -> list[str]:
    """Return the parameters of a submodule that are tied to other submodules; FSDP can't shard these separately.

    Args:
        module: root module.
        block: submodule of the root.
    """
    inside = {id(part) for part in block.modules()}
    outside = {id(p) for part in module.modules() if id(part) not in inside for p in part._parameters.values()}
    return [name for name, parameter in block.named_parameters() if id(parameter) in outside]


def check_owned(module: nn.Module) -> None:
    """Refuse parameters that a manual step would read without a forward that gathers them.

    Args:
        module: root module, with manual optimization.

    Raises:
        ValueError: a parameter belongs to the root itself, or to several of its submodules.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if names or _owns(module):
        raise ValueError(
            "strategy=fsdp gathers weights for the forward of a submodule, and "
            f"{', '.join(names) or 'a parameter list'} belongs to the manually optimised module itself; move it to a "
            "submodule, or use strategy=ddp"
        )
    if ties := [f"{name}.{tied}" for name, child in module.named_children() for tied in tied_parameters(module, child)]:
        raise ValueError(
            f"strategy=fsdp gathers weights for each submodule that a manual step calls, and {ties[0]} belongs to "
            "several submodules; combine these into a single submodule, or use strategy=ddp"
        )


def _owns(module: nn.Module) -> bool:
    """Return whether a module has direct parameters, also in a list or dict of parameters."""
    lists = (nn.ParameterList, nn.ParameterDict)
    return bool(module._parameters) or any(isinstance(child, lists) for child in module.children())


def check_shardable(module: nn.Module) -> None:
    """Refuse parameters that fully_shard can't put into a buffer with the others, or can't divide.

    Args:
        module: not sharded yet.

    Raises:
        ValueError: names the parameter, or parameters of different dtypes.
    """
    by_dtype: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        by_dtype.setdefault(parameter.dtype, name)
        if not parameter.ndim or not parameter.numel() or not parameter.is_contiguous():
            raise ValueError(f"strategy=fsdp can't divide {name} over the ranks: {_why_undivided(parameter)}")
    if len(by_dtype) > 1:
        dtypes = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
        raise ValueError(
            f"strategy=fsdp needs parameters of the same dtype, but {dtypes}; convert the module, or use strategy=ddp"
        )


def _why_undivided(parameter: nn.Parameter) -> str:
    if not parameter.ndim:
        return "it has no dimensions; give it the shape [1], or use strategy=ddp"
    if not parameter.numel():
        return f"it has no elements (shape {list(parameter.shape)}); remove it, or use strategy=ddp"
    return "it is not contiguous in memory; create it from tensor.contiguous(), or use strategy=ddp"


def fill_shards(module: nn.Module, device: torch.device) -> None:
    """Allocate and initialise this rank's shards of modules that were built on the meta device.

    Args:
        module: sharded.
        device: device of this rank.

    Raises:
        ValueError: a module has no `reset_parameters` method.
    """
    for name, part in module.named_modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in tensors):
            continue
        reset: Any = getattr(part, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"{name or type(module).__name__} ({type(part).__name__}) was built on the meta device, and has no "
                "reset_parameters() method to initialise its parameters; add the method, or build it in __init__"
            )
        part.to_empty(device=device, recurse=False)
        reset()
