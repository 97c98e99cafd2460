"""Tensors and layers of the module that are not in its parameters, though they are to be trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.module_state.buffers import persistent_buffers

if TYPE_CHECKING:
    from fabricx.session.session import Session

_SHOWN: Final = 3  # names in a message
_OF_MODULES: Final = frozenset(vars(nn.Module()))  # attributes of every module


def check_registered(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Check that the optimizers train only parameters of the module.

    Gradients of other tensors are not averaged over ranks, and checkpoints and recovery don't have their values. It is
    a warning on a single rank, and for tensors that no attribute of the module has, such as the copies of weights that
    an optimizer makes and writes back.

    Args:
        session: session of a fit, with the strategy set up.
        optimizers: results of `configure_optimizers`, to which hooks of a start may have added tensors.

    Raises:
        ValueError: an optimizer trains another tensor, and the run has several ranks.
    """
    parameters = list(session.module.parameters())
    known = set(map(id, parameters))
    trained = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    unknown = {number: p for number, p in trained.items() if number not in known and p.requires_grad}
    if not unknown:
        return
    text = _description(session.module, unknown)
    # Of an optimizer that was created before the strategy has replaced the parameters by shards.
    former = session.strategy.traits.sharded and {p.shape for p in unknown.values()} <= {p.shape for p in parameters}
    if session.world.size > 1 and (text is not None or former):
        raise ValueError(
            f"{text or _by_shape(unknown)}. Without that, its gradient is not averaged over the ranks, and checkpoints "
            "don't have its value"
        )
    saved = {id(buffer) for _, buffer in persistent_buffers(session.module)}
    if not unknown.keys() <= saved:
        session.warn_once(
            "unregistered parameters",
            f"{text or _by_shape(unknown)}. Without that, checkpoints don't have its value: a run that continues "
            "begins with the initial value",
        )


def warn_of_layers(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Warn of layers in plain lists and dicts of the module that no optimizer trains: checkpoints lack them, too.

    Args:
        session: session of a fit.
        optimizers: results of `configure_optimizers`.
    """
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    remedies = unregistered_layers(session.module, trained)
    if remedies:
        names = list(remedies)
        session.warn_once(
            "unregistered layers",
            f"the layers in {_listed([f'self.{name}' for name in names])} are not in self.parameters(), so they are "
            f"neither trained nor saved: assign self.{names[0]} = {remedies[names[0]]}. Layers that are not to be "
            "trained need requires_grad_(False)",
        )


def unregistered_layers(module: nn.Module, trained: Sequence[Tensor] = ()) -> dict[str, str]:
    """Return the attributes that have trainable layers which `parameters()` lacks, with the remedy of each.

    >>> net = nn.Module()
    >>> net.blocks = [nn.Linear(1, 1)]
    >>> unregistered_layers(net)
    {'blocks': 'nn.ModuleList(...)'}

    Args:
        module: the module of a run.
        trained: other parameters that are known.
    """
    known = {id(p) for p in (*module.parameters(), *trained)}
    return {
        name: remedy
        for name, value, remedy in _collections(module)
        if any(id(p) not in known and p.requires_grad for part in value for p in part.parameters())
    }


def _collections(module: nn.Module) -> Iterator[tuple[str, list[nn.Module], str]]:
    """Yield the name of each list, tuple and dict with layers, the layers, and the remedy."""
    for prefix, owner in module.named_modules():
        for name, value in vars(owner).items():
            of_user = name not in _OF_MODULES and not name.startswith("_hparams")
            if of_user and isinstance(value, (list, tuple, dict)):
                layers = [part for part in _parts(value) if isinstance(part, nn.Module)]
                if layers:
                    yield f"{prefix}.{name}" if prefix else name, layers, _remedy(value, [layers[0]])


def _description(module: nn.Module, unknown: Mapping[int, Tensor]) -> str | None:
    """Return a text with the attributes that have the tensors, and the remedy; None if no attribute has a tensor."""
    names = {name: remedy for name, numbers, remedy in _attributes(module) if not numbers.isdisjoint(unknown)}
    if not names:
        return None
    name, remedy = next(iter(names.items()))
    return (
        f"an optimizer trains {_listed([f'self.{name}' for name in names])}, but the module does "
        f"not have it in self.parameters(). Assign it as self.{name} = {remedy}"
    )


def _by_shape(unknown: Mapping[int, Tensor]) -> str:
    return (
        "an optimizer trains tensors that are not parameters of the module, of shapes "
        f"{_listed([str(list(tensor.shape)) for tensor in unknown.values()])}. Create the optimizer in "
        "configure_optimizers, from self.parameters(), and make each layer and each trained tensor an attribute of the "
        "module, as nn.Module and nn.Parameter"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _attributes(module: nn.Module) -> Iterator[tuple[str, set[int], str]]:
    """Yield the name of each attribute with tensors or layers, the `id` of each of its tensors, and the remedy."""
    for prefix, owner in module.named_modules():
        attributes = {name: value for name, value in vars(owner).items() if name not in _OF_MODULES}
        for name, value in (attributes | dict(owner.named_buffers(recurse=False))).items():
            if parts := list(_parts(value)):
                numbers = {id(tensor) for part in parts for tensor in _tensors(part)}
                yield f"{prefix}.{name}" if prefix else name, numbers, _remedy(value, parts)


def _parts(value: Any) -> Iterator[Tensor | nn.Module]:
    if isinstance(value, (Tensor, nn.Module)):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        items = value.values() if isinstance(value, dict) else value
        yield from (item for item in items if isinstance(item, (Tensor, nn.Module)))


def _tensors(part: Tensor | nn.Module) -> Iterator[Tensor]:
    return part.parameters() if isinstance(part, nn.Module) else iter([part])


def _remedy(value: Any, parts: list[Tensor | nn.Module]) -> str:
    layers = isinstance(parts[0], nn.Module)
    if isinstance(value, Tensor):
        return "nn.Parameter(...)"
    if isinstance(value, dict):
        return "nn.ModuleDict(...)" if layers else "nn.ParameterDict(...)"
    return "nn.ModuleList(...)" if layers else "nn.ParameterList(...)"
