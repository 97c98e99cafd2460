"""The user's optimizers on a worker; their state may be on servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer

from fabricx.parameter_server.optimizer_parts import (
    OptimizerSnapshot,
    ServerOptimizers,
    groups_of,
    load_from_servers,
    nested,
)
from fabricx.parameter_server.wire.messages import Groups


@final
class WorkerOptimizers:
    """The user's optimizers, including optimizers inside of optimizers.

    Args:
        optimizers: the user's optimizers.
        parameters: parameters of all optimizers, by number.

    Attributes:
        optimizers: see Args.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
        self.optimizers = optimizers
        self._parameters = parameters
        self._every = nested(list(optimizers))
        self._count = self._parameters_in_groups()
        self._stepped: dict[int, list[dict[str, Any]]] = {}  # hyperparameters of groups, by `id` of the optimizer

    def groups(self) -> Groups:
        """Return the hyperparameters of each group of each optimizer, at the time of the optimizer's step, if any."""
        if not self._stepped:
            return groups_of(self._every)
        return [self._stepped.get(id(optimizer)) or groups_of([optimizer])[0] for optimizer in self._every]

    def present_groups(self) -> Groups:
        """Return the present hyperparameters of each group of each optimizer."""
        return groups_of(self._every)

    def keep_groups(self, optimizer: Optimizer) -> None:
        """Keep the hyperparameters with which an optimizer steps; `optimizer_step` may set new values afterwards.

        Args:
            optimizer: an optimizer of the module.
        """
        every = nested([optimizer])
        self._stepped |= {id(part): groups for part, groups in zip(every, groups_of(every), strict=True)}

    def end_update(self) -> None:
        """Forget the hyperparameters of the steps, which servers have."""
        self._stepped.clear()

    def set_groups(self, groups: Groups) -> None:
        """Set hyperparameters.

        Args:
            groups: result of `groups` on any worker.
        """
        for optimizer, values_of_groups in zip(self._every, groups, strict=True):
            for group, values in zip(optimizer.param_groups, values_of_groups, strict=True):
                group.update(values)

    def check_parameters(self) -> None:
        """Check that no optimizer has got new parameters since training began.

        Raises:
            RuntimeError: an optimizer has new parameters.
        """
        count = self._parameters_in_groups()
        if count != self._count:
            raise RuntimeError(
                f"the optimizers had {self._count} parameters when training began and have {count} now, and servers "
                "don't have the new ones: pass all parameters in configure_optimizers, those to be trained later with "
                "requires_grad=False (they are skipped until it is True); or use strategy=single"
            )

    def _parameters_in_groups(self) -> int:
        return sum(len(group["params"]) for optimizer in self._every for group in optimizer.param_groups)

    def forget_moments(self) -> None:
        """Clear the state of the optimizers, because servers step."""
        for optimizer in self._every:
            optimizer.state.clear()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # otherwise torch warns about scheduler order

    def load(self, servers: Sequence[ServerOptimizers]) -> None:
        """Load the state of servers.

        Args:
            servers: optimizers of each server.
        """
        load_from_servers(self.optimizers, self._parameters, servers)

    @contextlib.contextmanager
    def holding(self, servers: Sequence[ServerOptimizers]) -> Iterator[None]:
        """Hold the state of servers inside this context.

        Args:
            servers: optimizers of each server.
        """
        remembered = OptimizerSnapshot(self.optimizers)
        self.load(servers)
        yield
        self.forget_moments()
        remembered.restore()
