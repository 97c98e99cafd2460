"""Detects uses of optimizers by hooks that would have no effect, or another one, under some strategies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.sharding.dtensors import is_dtensor

_ACCESSES: Final = (
    "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__", "clear", "get", "items",
    "keys", "pop", "popitem", "setdefault", "update", "values",
)  # fmt: skip

_UNNAMED: Final = "a tensor that an optimizer trains, and that is not in self.parameters(),"
_OURS: Final[list[None]] = []


@contextmanager
def not_watched() -> Iterator[None]:
    """Context of fabricx's code that hooks call, such as to save a checkpoint."""
    _OURS.append(None)
    try:
        yield
    finally:
        _OURS.pop()


class _Watched(defaultdict[Any, Any]):
    """State of an optimizer that notes whether it is used."""

    used = False


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def noting(self: _Watched, *args: Any, **options: Any) -> Any:
        self.used = self.used or not _OURS
        return method(self, *args, **options)

    return noting


for _name in _ACCESSES:
    setattr(_Watched, _name, _noting(_name))


@contextmanager
def watched_states(optimizers: Sequence[Optimizer]) -> Iterator[Callable[[], bool]]:
    """Context that notes whether the code inside reads, changes or replaces the state of an optimizer.

    Args:
        optimizers: optimizers of the module; their states are the same objects again afterwards, unless the code
            inside has replaced them.

    Returns:
        a function that returns whether a state was used so far.

    >>> optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    >>> with watched_states([optimizer]) as used:
    ...     optimizer.param_groups[0]["lr"] = 0.2
    ...     print(used())
    ...     optimizer.state.clear()
    ...     print(used())
    False
    True
    """
    kept = [
        (optimizer, optimizer.state, _Watched(dict, optimizer.state))
        for optimizer in optimizers
        if "state" in vars(optimizer)
    ]
    for optimizer, _, watched in kept:
        watched.used = False
        optimizer.state = watched
    try:
        yield lambda: any(watched.used or optimizer.state is not watched for optimizer, _, watched in kept)
    finally:
        for optimizer, state, watched in kept:
            if optimizer.state is watched:
                optimizer.state = state
                if watched.used:
                    state.clear()
                    state.update(watched)


@contextmanager
def cleared_gradients(optimizer: Optimizer, *, servers_step: bool) -> Iterator[None]:
    """Refuse a module's `optimizer_zero_grad` that keeps gradients, where they are summed over ranks after backward.

    Args:
        optimizer: optimizer whose gradients the code inside clears.
        servers_step: servers skip the parameters without a gradient of the present batch.

    Raises:
        ValueError: gradients are kept; or they are zero, which would differ from none.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained:
        yield
        return
    probed = min(trained, key=Tensor.numel)
    before, probed.grad = probed.grad, torch.ones_like(probed.detach())
    yield
    after, probed.grad = probed.grad, before
    if after is None:
        probed.grad = None
    elif bool(after.any()):
        raise ValueError(
            "optimizer_zero_grad keeps gradients, which are sums over the ranks already and would be summed again in "
            "the next update: clear them in each call, set accumulate_grad_batches to accumulate, or use strategy=ddp"
        )
    elif servers_step:
        raise ValueError(
            "optimizer_zero_grad sets gradients to zero, so that momentum and weight decay continue for parameters "
            "that a batch doesn't use, but servers skip these parameters: call optimizer.zero_grad() without "
            "set_to_none=False, or use parameter_server with optimizer='worker', or strategy=ddp"
        )
    elif before is not None:
        before.zero_()


@final
class KnownParameters:
    """The parameters at set-up, whose gradients ranks exchange.

    Args:
        module: the user's module.
        optimizers: its optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        known = [*module.parameters(), *_parameters(optimizers)]
        # Not weak references, with which torch can't swap parameters; other shards may replace those of fsdp.
        self._known = {id(parameter): parameter for parameter in known if not is_dtensor(parameter)}

    def check(self, module: nn.Module, optimizers: Sequence[Optimizer], strategy: str) -> None:
        """Refuse parameters that hooks have created since and that an optimizer trains.

        Args:
            module: the user's module.
            optimizers: its optimizers.
            strategy: class of the strategy, for the message.

        Raises:
            ValueError: the message names the parameter.
        """
        for parameter in _parameters(optimizers):
            if id(parameter) in self._known or is_dtensor(parameter) or not parameter.requires_grad:
                continue
            names = {id(p): name for name, p in module.named_parameters()}
            raise ValueError(
                f"{names.get(id(parameter), _UNNAMED)} was created or replaced after set-up, and "
                f"{strategy} exchanges gradients of the parameters at set-up only, so that ranks would train "
                "it apart: create it in __init__ or configure_model, as an nn.Parameter that is an attribute of the "
                "module, frozen until it is needed; change elements by "
                "`with torch.no_grad(): weight.copy_(new)`; or use strategy=single"
            )


def _parameters(optimizers: Sequence[Optimizer]) -> list[Any]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
