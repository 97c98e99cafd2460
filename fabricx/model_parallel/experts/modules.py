"""Which submodules compute the experts of a mixture, with stacked weights that can be divided over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final

from torch import nn

from fabricx.errors import nearest

Experts = list[tuple[str, nn.Module]]
PROTOCOL: Final = (
    "a module of experts has an attribute num_experts, parameters of shape [num_experts, ...], and a forward(tokens, "
    "index, weights) of tokens [n, width], the experts of each token [n, k] and their weights [n, k]; see "
    "docs/experts.md"
)


def find_experts(module: nn.Module, experts: str | Sequence[str], ranks: int) -> Experts:
    """Return the submodules with experts that are divided over ranks, by name, in the order of the module.

    Args:
        module: root module.
        experts: names of submodules; or the name of their class; or "auto" for all that can be divided.
        ranks: over which the experts are divided.

    Raises:
        LookupError: a submodule or class does not exist.
        ValueError: the module has no experts, or they can't be divided.
    """
    parts = dict(module.named_modules())
    if experts == "auto":
        modules = [(name, part) for name, part in parts.items() if name and not _reason(part)]
        if not modules:
            raise ValueError(f"no submodule has experts to divide: {PROTOCOL}. Or use strategy=ddp")
    else:
        modules = [(name, parts[name]) for name in _selected(parts, experts)]
        for name, part in modules:
            if reason := _reason(part):
                raise ValueError(f"experts={experts!r}: {name} {reason}; {PROTOCOL}")
    modules = [(name, part) for name, part in modules if not any(name.startswith(f"{other}.") for other, _ in modules)]
    _check_owned(module, modules)
    for name, part in modules:
        if part.num_experts % ranks:
            raise ValueError(
                f"{name} has {part.num_experts} experts, which {ranks} ranks can't share equally: set expert to a "
                f"divisor of {part.num_experts}"
            )
    return modules


def _selected(parts: dict[str, nn.Module], experts: str | Sequence[str]) -> list[str]:
    if not isinstance(experts, str):
        for name in experts:
            if not name or name not in parts:
                raise LookupError(f"experts: the module has no part {name!r}{_did_you_mean(name, list(parts))}")
        return list(experts)
    names = [name for name, part in parts.items() if any(c.__name__ == experts for c in type(part).__mro__[:-2])]
    if not names:
        classes = sorted({type(part).__name__ for part in parts.values()})
        raise LookupError(f"experts={experts!r}: the module has no such class{_did_you_mean(experts, classes)}")
    return names


def _did_you_mean(name: str, known: list[str]) -> str:
    close = nearest(name, known)
    return f". Did you mean {close!r}?" if close else f"; it has {', '.join(sorted(filter(None, known))[:20])}"


def _reason(part: nn.Module) -> str:
    """Return why the experts of a module can't be divided; "" if they can."""
    count, parameters = vars(part).get("num_experts"), dict(part.named_parameters())
    if not isinstance(count, int) or count < 2:
        return "has no attribute num_experts"
    if not any(parameter.dim() > 2 for parameter in parameters.values()):
        return "has no stacked matrices"
    for name, parameter in parameters.items():
        if not parameter.dim() or parameter.shape[0] != count:
            return f"has a parameter {name} of shape {tuple(parameter.shape)}, and {count} experts"
    if buffer := next((name for name, _ in part.named_buffers()), ""):
        return f"has a buffer {buffer}, which can't be divided"
    arguments = inspect.signature(part.forward).parameters.values()
    positional = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    several = len(positional) > 1 or any(a.kind is a.VAR_POSITIONAL for a in arguments)
    return "" if several else "has a forward without the experts of the tokens"


def _check_owned(module: nn.Module, modules: Experts) -> None:
    """Refuse weights that a module outside of the experts reads, too.

    Raises:
        ValueError: names both.
    """
    inside = {id(p): name for name, part in modules for p in part.parameters()}
    experts = {id(part) for _, part in modules}
    names = {name for name, part in module.named_modules(remove_duplicate=False) if id(part) in experts}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = inside.get(id(parameter))
        if owner is not None and not any(name.startswith(f"{other}.") for other in names):
            raise ValueError(f"{name} is tied to the experts {owner}, and can't be divided with them: untie it")
