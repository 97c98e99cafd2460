"""Data parallelism of a module whose experts are divided over data ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import ShardsWeights, WrapsStep
from fabricx.model_parallel.data_parallel.gradient_sums import GradientSums
from fabricx.model_parallel.experts.expert_parallel import ExpertParallel


@final
class ExpertSums(GradientSums, ShardsWeights, WrapsStep):
    """Sum gradients after backward: of experts over the ranks that hold the same experts, of other weights over all.

    The gradients of a rank's experts contain the tokens of the whole group already. The ranks of a group compute each
    microbatch together: a rank without a sample computes a sample of a different rank, with a loss of zero.
    """

    traits = Traits(elastic=True, exchanges=True)

    def __init__(self) -> None:
        super().__init__()
        self.experts: ExpertParallel | None = None
        self._step: Callable[..., Any] | None = None
        self._newest: tuple[Any, ...] = ()  # arguments of a step with a loss
        self._called = False  # a step has run
        self._computed = False  # the newest step has called experts, and its backward has not begun

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        Strategy.setup(self, module)  # weights are equal on all ranks already: the module was divided

    def teardown(self) -> None:
        if self.experts is not None:
            self.experts.release()
        self.experts = self._step = None
        self._newest, self._called, self._computed = (), False, False
        super().teardown()

    @property
    def computes_together(self) -> bool:
        return self.experts is not None and bool(self.experts.placements)

    # -- one step ------------------------------------------------------------------------------------------------

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        self._step = step

        def followed(*args: Any) -> Any:
            self._called = True
            outputs = step(*args)
            self._computed = self.experts is not None and self.experts.calls > 0
            if _loss(outputs) is not None:
                self._newest = args
            return outputs

        return followed if self.experts is not None else step

    def forward_backward(
        self, step: Callable[..., Any], backward: Callable[[Any], Any], batch: Any, index: int
    ) -> Any:  # fmt: skip
        return backward(step(batch, index))

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        self._begin_backward()
        Strategy.backward(self, loss, compute)
        self.end_backward()

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        """Exchange tokens and gradients with the other ranks: compute any available batch, with a loss of zero.

        Args:
            example: as in `Strategy.backward_without_data`.

        Raises:
            ValueError: no batch is available, or the graph is unknown.
        """
        if self.experts is None or self._step is None:
            return True
        if self._computed:  # the step has called the experts, but has returned no loss
            self._backward_of_zero()
            return True
        batches = [args for args in (example, self._newest) if args]
        if not batches and not self._called:
            raise ValueError(
                f"rank {self.world.rank} has not received a batch yet, but every rank computes its experts for each "
                "batch; provide at least one batch per rank, or use fewer devices"
            )
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        for args in batches:  # the step may return no loss for this batch, and may not even compute
            with torch.random.fork_rng(devices=devices):
                loss = _loss(self._step(*args))
            if loss is not None or self.experts.calls:
                self._backward_of_zero(loss)
                return True
        return False

    def _backward_of_zero(self, loss: Tensor | None = None) -> None:
        """Send gradients of zero, in the exchanges of the newest step on the other ranks.

        Args:
            loss: loss of this step; None without a loss.

        Raises:
            ValueError: the graph is unknown.
        """
        assert self.experts is not None
        terms = [term for term in (None if loss is None else loss * 0.0, self.experts.zero()) if term is not None]
        if terms:
            self.backward(torch.stack([term.double() for term in terms]).sum())
            return
        if any(parameter.requires_grad for parameter in self._divided()):
            raise ValueError(
                "a step has returned None after it has called experts in an activation checkpoint with "
                "use_reentrant=True, which other ranks compute again in their backward: return a loss of zero, or set "
                "use_reentrant=False"
            )
        self._begin_backward()  # nothing before the experts is trained, nor are they
        self.end_backward()

    def _begin_backward(self) -> None:
        self._computed = False
        if self.experts is not None:
            self.experts.begin_backward()

    def _divided(self) -> set[nn.Parameter]:
        assert self.experts is not None
        assert self.module is not None
        placements = self.experts.placements
        return {parameter for name, parameter in self.module.named_parameters() if name in placements}

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.experts is None or self.module is None:
            return super().sum_gradients(parameters)
        divided = self._divided()
        self.sum_over(self.world, [parameter for parameter in parameters if parameter not in divided])
        self.sum_over(self.world.axis("copies"), [parameter for parameter in parameters if parameter in divided])


def _loss(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs
