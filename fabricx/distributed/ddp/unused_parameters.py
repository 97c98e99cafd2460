"""Complete DDP's gradient reduction when a backward has not reached all parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World


class UnusedParameters:
    """Completes DDP's gradient reduction when a backward has not reached all parameters.

    DDP reduces a bucket when every parameter of the bucket has a gradient, and keeps this rank's gradients if a
    gradient is missing. An additional backward with zero gradients reaches the missing parameters. A parameter without
    a gradient on any rank has `grad = None` afterwards, as in a single process, so weight decay and momentum skip it.

    A rank with missing parameters writes their list to the store before its additional backward. The all-reduces of DDP
    end after every rank has entered them, so all lists are in the store by then, and a rank without a list has a
    gradient for each parameter. Therefore no further collective is needed, and ranks without missing parameters do no
    additional work.

    Args:
        world: the ranks.
        parameters: parameters of DDP, in the same order on all ranks.
        sparse: parameters with sparse gradients; DDP accepts no dense gradients for them.
        before: the object of the same run for the set of parameters that was trained before; its counters continue.

    Attributes:
        parameters: see Args.
        reductions: number of reductions so far, the same on all ranks.
    """

    def __init__(
        self,
        world: World,
        parameters: Sequence[nn.Parameter],
        sparse: Set[Tensor],
        before: UnusedParameters | None = None,
    ) -> None:
        self.reductions: int = 0 if before is None else before.reductions
        self._world = world
        self.parameters = parameters
        self._sparse = sparse
        self._warned: bool = before is not None and before._warned
        self._written: str = "" if before is None else before._written

    def complete(self, loss: Tensor | None, *, warns: bool) -> None:
        """Reduce zero gradients for all parameters that a backward has not reached.

        Args:
            loss: loss of the backward of this step; None if this rank had no backward.
            warns: warn, once per run, that parameters got no gradient.
        """
        leaves = set() if loss is None else reached(loss)
        missing = [parameter for parameter in self.parameters if parameter not in leaves]
        if loss is not None and warns and not self._warned:
            self._warned = True
            warnings.warn(
                f"{len(missing)} of {len(self.parameters)} parameters got no gradient in this step. The step is "
                "correct but slower: freeze these parameters before training (requires_grad_(False)), or set "
                "DDP(find_unused_parameters=True) if this is intended",
                stacklevel=2,
            )
        self._write(bytes(parameter.grad is None for parameter in self.parameters))
        with requiring_grad(missing):
            zero(missing, self._sparse).backward()
        if self._world.device.type == "cuda":  # a device reduces after the backward has returned
            torch.cuda.current_stream(self._world.device).synchronize()
        for parameter, absent in zip(self.parameters, self._absent_everywhere(), strict=True):
            if absent:
                parameter.grad = None

    def _key(self, rank: int) -> str:
        return self._world.key(f"unused/{self._world.generation}/{self.reductions}/{rank}")

    def _write(self, absent: bytes) -> None:
        store = self._world.store
        assert store is not None
        store.set(self._key(self._world.rank), absent.decode("latin-1"))

    def _absent_everywhere(self) -> list[bool]:
        """Return, for each parameter, whether it has no gradient on any rank; called after the reduction."""
        store = self._world.store
        assert store is not None
        everywhere = [True] * len(self.parameters)
        for key in map(self._key, range(self._world.size)):
            if not store.check([key]):
                everywhere = [False] * len(self.parameters)
                break
            everywhere = [a and bool(b) for a, b in zip(everywhere, store.get(key), strict=True)]
        if self._written:  # key of the previous reduction; every rank read it before it entered the present reduction
            store.delete_key(self._written)
        self._written = self._key(self._world.rank)
        return everywhere


def reached(loss: Tensor) -> set[Tensor]:
    """Return the leaves of a loss's autograd graph that require a gradient.

    Args:
        loss: scalar with a graph.

    >>> weight, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> leaves = reached((weight * 2).sum())
    >>> weight in leaves, other in leaves
    (True, False)
    """
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    leaves: set[Tensor] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(leaf)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def zero(parameters: Sequence[Tensor], sparse: Set[Tensor] = frozenset()) -> Tensor:
    """Return a zero loss whose graph reaches all parameters; empty slices keep NaN weights out of the sum.

    Args:
        parameters: leaves to reach.
        sparse: parameters among them that receive a sparse gradient without rows.

    >>> weight = torch.ones(3, 2, requires_grad=True)
    >>> zero([weight], {weight}).backward()
    >>> weight.grad.is_sparse, weight.grad._nnz()
    (True, 0)
    """
    terms = [(_no_rows(p) if p in sparse else p.reshape(-1)[:0]).sum() for p in parameters]
    return torch.stack([term.to(terms[0]) for term in terms]).sum()


def _no_rows(table: Tensor) -> Tensor:
    return nn.functional.embedding(torch.empty(0, dtype=torch.long, device=table.device), table, sparse=True)


def with_sparse_gradients(module: nn.Module) -> set[Tensor]:
    """Return the weights of all embedding layers with `sparse=True`.

    Args:
        module: root of the submodules that are searched.
    """
    tables = (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return {part.weight for part in tables if part.sparse}


@contextmanager
def requiring_grad(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make all parameters require a gradient within the context.

    Args:
        parameters: trained and frozen parameters; frozen parameters are frozen again at the end.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
