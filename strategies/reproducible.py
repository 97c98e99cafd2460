"""Data-parallel training whose weights are bitwise equal for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import Elastic
from fabricx.core.strategy_support.gradient_checks import check_dense, check_frozen
from fabricx.core.tensors.complex_numbers import as_real
from fabricx.distributed.world import World

HEADROOM: Final = 16  # powers of two by which a gradient may exceed all gradients of the previous update
BITS: Final = 62  # magnitude bits of a sum


@final
class Reproducible(Strategy, Elastic):
    """Split each global batch into the same parts on any number of ranks, and sum their gradients as integers.

    Thus the weights are bitwise equal for 1, 2 or 3 ranks, also if their number changes during a run, as long as the
    global batch is the same. Every rank keeps the whole model. Hooks see a part as a batch, and each part has its own
    random seed. Selected by `Trainer(deterministic="elastic")`.

    An integer is a multiple of a power of two, which is set from the largest gradient of the parameter in the previous
    update (at first, in the first part of a batch): elements down to 2**-20 of it keep the precision of float32. An
    infinite element makes the gradient of its whole parameter NaN, as integers have no infinity.

    Args:
        parts: parts of each global batch, and the largest number of ranks. Many small parts are slower. Batches of a
            batch sampler, or of several loaders, are parts by themselves: a window may have more of them.

    Raises:
        ValueError: `parts` is out of range.
    """

    traits = Traits(elastic=True)

    def __init__(self, *, parts: int = 12) -> None:
        super().__init__()
        if not 1 <= parts <= 2**10:
            raise ValueError(f"parts={parts}: must be between 1 and 1024")
        self.parts = parts
        self.traits = Traits(elastic=True, batch_parts=parts)
        self._sums: IntegerSums | None = None
        self._threads = 0
        self._frozen: list[Tensor] = []  # parameters whose gradients are not summed

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        if several_backwards:
            raise ValueError(
                "deterministic='elastic' controls the microbatches of a step, and needs automatic optimization"
            )
        for name, part in module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
                raise ValueError(
                    f"{name} keeps statistics of this rank's batches, which depend on the number of ranks; use "
                    "GroupNorm or LayerNorm, or remove deterministic='elastic'"
                )
        check_dense(module, "deterministic='elastic'")
        self._check_ranks()
        for tensor in (*module.parameters(), *module.buffers()):
            self.data_ranks.broadcast(tensor.data)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the order of sums in a matrix product depends on the number of threads
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._sums = IntegerSums([p for p in module.parameters() if p.requires_grad], self.parts)

    def _check_ranks(self) -> None:
        if self.data_ranks.size > self.parts:
            raise ValueError(
                f"parts={self.parts}: deterministic='elastic' divides a global batch into parts, and each of the "
                f"{self.data_ranks.size} ranks needs at least one; set a larger `parts`, or use fewer ranks"
            )

    def attach_optimizers(self, optimizers: list[Optimizer]) -> None:
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "deterministic='elastic' sums gradients once per update, and LBFGS needs them several times; use "
                    "another optimizer"
                )

    def world_changed(self, world: World) -> None:
        self.world = world
        self._check_ranks()
        assert self._sums is not None
        self._sums.clear()

    def teardown(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        self._sums, self._threads, self._frozen = None, 0, []
        super().teardown()

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        check_frozen(self.module, self._frozen, "deterministic='elastic'")
        super().backward(loss, compute)
        assert self._sums is not None
        self._sums.measure(self.data_ranks)
        self._sums.add()
        if self.ends_window:
            self._sums.join(self.data_ranks)

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        assert self._sums is not None
        self._sums.measure(self.data_ranks)
        if self.ends_window:
            self._sums.join(self.data_ranks)
        return True

    def discard_window(self) -> None:
        assert self._sums is not None
        self._sums.clear()

    def after_update(self, step: int) -> int:
        assert self._sums is not None
        self._sums.follow()
        return super().after_update(step)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        state = super().state_dict(module, optimizers)
        sums = self._sums if optimizers else None
        return {**state, "exponents": sums.exponents} if sums is not None and sums.follows else state

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        saved = state.get("exponents")
        if saved is not None and self._sums is not None and saved.shape == self._sums.exponents.shape:
            self._sums.exponents, self._sums.follows = saved.clone(), True


@final
class IntegerSums:
    """Sums of gradients over the parts of a batch and over ranks, as integers: independent of the order of addition.

    Args:
        parameters: parameters whose gradients are summed.
        parts: gradients in a sum; with more, as by accumulation, gradients may rise less from an update to the next.

    Attributes:
        exponents: exponent of a power of two above each parameter's gradient in the previous update, shape
            [parameters].
        follows: there was a previous update.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: int) -> None:
        self._parameters, self.follows, self._measured = parameters, False, False
        self._joined: Tensor | None = None  # largest magnitudes of the newest window, until its update
        self._bits = BITS - HEADROOM - (parts - 1).bit_length()
        device = parameters[0].device if parameters else torch.device("cpu")
        self.exponents = torch.zeros(len(parameters), dtype=torch.int64, device=device)
        numbers = [as_real(parameter.detach()) for parameter in parameters]
        sizes = [number.numel() for number in numbers]
        self._all = torch.zeros(sum(sizes) + 1, dtype=torch.int64, device=device)
        *totals, self._added = self._all.split([*sizes, 1])  # the last is the number of gradients in the sums
        self._totals = [total.view_as(n) for total, n in zip(totals, numbers, strict=True)]
        self._largest = torch.full((len(parameters),), -1.0, dtype=torch.float64, device=device)  # -1: no gradient

    def clear(self) -> None:
        """Reset the sums to zero."""
        self._all.zero_()
        self._largest.fill_(-1.0)
        self._measured, self._joined = False, None

    def measure(self, world: World) -> None:
        """Set the exponents of the first update from its first part; collective, and each rank's first call counts.

        The main rank has this part, whatever the number of ranks.

        Args:
            world: ranks to sum over.
        """
        if self.follows or self._measured:
            return
        self._measured = True
        absent = torch.zeros_like(self._largest[:0])
        gradients = [absent if p.grad is None else p.grad.detach() for p in self._parameters]
        largest = [_largest(as_real(gradient)) for gradient in gradients]
        if largest:
            self._follow(world.broadcast(torch.stack(largest).to(self._largest.device)))
            # Other parts may have larger gradients.
            self.exponents = torch.where(
                self.exponents > 0, self.exponents, (self.exponents + HEADROOM // 2).clamp(max=0)
            )

    def _follow(self, largest: Tensor) -> None:
        seen = (largest > 0.0) & largest.isfinite()
        self.exponents = torch.where(seen, torch.frexp(largest)[1].to(torch.int64), self.exponents)

    def add(self) -> None:
        """Add the parameters' gradients to the sums, and set the gradients to None."""
        scales = self._scales()
        self._added += 1
        for number, (parameter, total) in enumerate(zip(self._parameters, self._totals, strict=True)):
            if parameter.grad is None:
                continue
            gradient = as_real(parameter.grad.detach()).double()
            torch.maximum(self._largest[number], _largest(gradient), out=self._largest[number])
            total.add_(gradient.mul_(scales[number]).round_().clamp_(-(2.0**BITS), 2.0**BITS).to(torch.int64))
            parameter.grad = None

    def join(self, world: World) -> None:
        """Write the sums over all ranks to `parameter.grad`, and reset the sums; collective.

        Args:
            world: ranks to sum over.

        Raises:
            FloatingPointError: a gradient is too large for its integer.
        """
        world.all_reduce(self._all)
        world.all_reduce(self._largest, "max")
        added = int(self._added)
        headroom = min(HEADROOM, BITS - self._bits - (max(1, added) - 1).bit_length())
        if bool((self._largest.isfinite() & (self._largest > 2.0 ** (self.exponents + headroom).double())).any()):
            raise FloatingPointError(
                f"deterministic='elastic': a gradient is more than 2**{headroom} times as large as all of the "
                f"previous update (of the first batch: of its first part), and {added} can't be summed exactly; "
                "limit the loss, warm up the learning rate, or set a smaller accumulate_grad_batches"
            )
        scales, largest = self._scales().reciprocal(), self._largest.tolist()
        for number, (parameter, total) in enumerate(zip(self._parameters, self._totals, strict=True)):
            if largest[number] >= 0.0:
                gradient = total.double().mul_(scales[number])
                if largest[number] == torch.inf:  # infinity stands for NaN, too
                    gradient.fill_(torch.nan)
                parameter.grad = torch.empty_like(parameter)
                as_real(parameter.grad).copy_(gradient)
        joined = self._largest.clone()
        self.clear()
        self._joined = joined

    def follow(self) -> None:
        """Set the exponents from the gradients of the newest `join`, once the weights are updated with them.

        A death of a rank between the two repeats the sums with the exponents of before.
        """
        if self._joined is not None:
            self._follow(self._joined)
            self.follows, self._joined = True, None

    def _scales(self) -> Tensor:
        return torch.pow(2.0, (self._bits - self.exponents).double())


def _largest(gradient: Tensor) -> Tensor:
    """Return the largest magnitude, in double precision; infinity if an element is not finite."""
    largest = gradient.abs().max().double() if gradient.numel() else gradient.new_zeros((), dtype=torch.float64)
    return largest.nan_to_num(torch.inf, torch.inf)
