"""Expert parallelism of an unchanged module: a rank has some experts, and computes the tokens of other ranks, too.

Source: Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", ICLR 2021;
without its limit of tokens per expert: each token is computed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.model_parallel.experts.call_order import CallOrder
from fabricx.model_parallel.experts.modules import PROTOCOL, Experts
from fabricx.model_parallel.experts.token_exchange import exchange, exchanged
from fabricx.model_parallel.placement import Placement, replace_data
from fabricx.model_parallel.tensor.collectives import whole_tensor

REMEDY: Final = (
    "An expert has to compute each token by itself, from the arguments of its module. Modules whose experts don't "
    "can't be divided: select the other modules by experts=CLASS or a list of names"
)


@final
class ExpertParallel:
    """Divides stacked experts over the ranks of a group, which have different data.

    A module of experts is called as in a single process, with the tokens of this rank. Its parameters stay the same
    objects, with the rows of this rank's experts as data; their gradients are from the tokens of all ranks of the
    group.

    Args:
        module: root module, with weights that are equal on all ranks, and without gradients.
        modules: modules of experts, see `find_experts`.
        world: ranks of the group.

    Attributes:
        placements: of each divided parameter, by all names of the parameter.
    """

    def __init__(self, module: nn.Module, modules: Experts, world: World) -> None:
        self.placements: dict[str, Placement] = {}
        self._reached: list[Tensor] = []  # zeros, of which each depends on the outputs of a call in the newest step
        self._order = CallOrder([name for name, _ in modules])
        counts: list[Any] = [part.num_experts for _, part in modules]
        self._most: int = max(counts) // world.size  # experts of a module on this rank
        self._module, self._expert_modules, self.world = module, modules, world
        ids: set[int] = set()
        for name, part in modules:
            ids |= {id(parameter) for parameter in part.parameters()}
            vars(part)["forward"] = _Routed(name, part, self)
        with torch.no_grad():
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) in ids:
                    shape = tuple(parameter.shape)
                    self.placements[name] = Placement(shape, 0, shape[:1], world.size)
            for name, parameter in module.named_parameters():
                if name in self.placements:
                    replace_data(parameter, self.placements[name].shard(parameter.data, world.rank))

    @property
    def ranks(self) -> int:
        """Return the number of ranks over which the experts are divided."""
        return self.world.size

    def world_changed(self, world: World) -> None:
        """Use a new process group with the same place of this rank.

        Args:
            world: ranks of the group, as many as before.
        """
        self.world = world

    def describe(self) -> str:
        """Return the line that names the divided modules; names that differ by numbers share an entry."""
        counts: dict[tuple[str, int], int] = {}
        for name, module in self._expert_modules:
            part: Any = module
            key = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), part.num_experts)
            counts[key] = counts.get(key, 0) + 1
        entries = (f"{name} ({n}): {total // self.ranks} of {total} on each" for (name, total), n in counts.items())
        return f"expert parallel on groups of {self.ranks} ranks: {'; '.join(entries)}"

    @property
    def forwards(self) -> list[Any]:
        """Return the forwards of the divided modules, which a copy of the root module has to share."""
        return [vars(part)["forward"] for _, part in self._expert_modules]

    def inside(self, name: str) -> bool:
        """Return whether a submodule is a part of the experts.

        Args:
            name: of the submodule.
        """
        return any(name.startswith(f"{experts}.") for experts, _ in self._expert_modules)

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step that counts calls of experts.

        Args:
            step: step of the module.
        """
        return self._order.wrap_step(step, self._reached.clear)

    @property
    def calls(self) -> int:
        """Return the number of calls of experts since the newest step began."""
        return self._order.calls

    def begin_backward(self) -> None:
        """Compare with the other ranks of the group, before the gradients of tokens are sent.

        Raises:
            RanksDisagree: a different rank calls experts.
        """
        table = torch.zeros(self.world.size, 1 + self._most, dtype=torch.int64, device=self.world.device)
        self._agreed(table, self._order.backward())
        self._reached.clear()

    def announce(self, name: str, counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Send the numbers of rows to the ranks of the group; return the sent and the received, by rank and expert.

        Args:
            name: of the module that is called.
            counts: rows for each expert, shape [experts].

        Raises:
            RanksDisagree: some ranks call other experts, or none.
        """
        counts = counts.view(self.world.size, -1)
        table = nn.functional.pad(counts, (1, self._most - counts.shape[1]))
        sent, received = self._agreed(table, self._order.next_call(name))
        columns = slice(1, 1 + counts.shape[1])
        return [row[columns] for row in sent], [row[columns] for row in received]

    def _agreed(self, table: Tensor, number: int) -> tuple[list[list[int]], list[list[int]]]:
        table[:, 0] = number
        sent, received = torch.stack([table, exchanged(table, self.world)]).tolist()  # a device waits once
        self._order.check([row[0] for row in received])
        return sent, received

    def reach(self, result: Tensor) -> None:
        """Note the result of a call.

        Args:
            result: output of a module of experts.
        """
        if self._order.in_step and result.requires_grad:  # not in hooks, and not in a recomputation
            self._reached.append(result.reshape(-1)[:0].sum())

    def zero(self) -> Tensor | None:
        """Return a loss of zero; its backward sends gradients like the newest step. None without a graph."""
        return torch.stack([term.double() for term in self._reached]).sum() if self._reached else None

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Return the whole tensor of a parameter, or of an optimizer's moment; collective.

        Args:
            name: of the parameter, as in `module.named_parameters()`.
            local: part of this rank; a tensor of another shape, such as a step count, is returned as it is.
        """
        return whole_tensor(self.placements.get(name), local, self.world)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor; the inverse of `whole`, without communication.

        Args:
            name: of the parameter.
            whole: its tensor, or a moment; a tensor of another shape is returned as it is.
        """
        placement = self.placements.get(name)
        if placement is None or tuple(whole.shape) != placement.shape:
            return whole
        return placement.shard(whole, self.world.rank)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the whole parameters of the module; collective. The parameters stay the same objects."""
        for name, parameter in self._module.named_parameters():
            if name in self.placements:
                parameter.grad = None
                replace_data(parameter, self.whole(name, parameter.data))
        self.release()
        self.placements = {}

    def release(self) -> None:
        """Send no more tokens to other ranks."""
        for _, part in self._expert_modules:
            routed = vars(part).pop("forward", None)
            if isinstance(routed, _Routed) and routed.replaced is not None:
                vars(part)["forward"] = routed.replaced
        self._reached.clear()


@final
class _Routed:
    """The forward of a module of experts: sends tokens to the ranks with their experts, and returns the outputs."""

    def __init__(self, name: str, part: Any, owner: ExpertParallel) -> None:
        self._name, self._part, self._owner = name, part, owner
        self._forward = part.forward
        self.replaced = vars(part).get("forward")  # a forward of this instance, which other code has set
        self._signature = inspect.signature(part.forward)
        self._experts: int = part.num_experts

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        tokens, index, others = self._arguments(args, options)
        world, chosen = self._owner.world, index.shape[1] if index.dim() == 2 else 1
        pairs = index.reshape(-1)  # of a token and an expert
        order = pairs.argsort(stable=True)
        counts = torch.bincount(pairs, minlength=self._experts)
        if len(counts) > self._experts:
            self._refuse(f"expert {len(counts) - 1} of {self._experts}")
        leaving, arriving = self._owner.announce(self._name, counts)
        sent, received = [sum(row) for row in leaving], [sum(row) for row in arriving]
        rows = [tokens[order // chosen], *(other.reshape(-1)[order] for other in others if other is not None)]
        inputs = exchange(rows, world, sent, received)
        experts = torch.arange(self._experts // world.size, device=pairs.device, dtype=index.dtype).repeat(world.size)
        repeats = torch.tensor(arriving, device=pairs.device).reshape(-1)
        outputs = self._computed(inputs, experts.repeat_interleave(repeats), others, index.dim())
        (back,) = exchange((outputs,), world, received, sent)
        back = back[order.argsort()]
        result = back if index.dim() == 1 else back.view(*index.shape, *back.shape[1:]).sum(1)
        self._owner.reach(result)
        return result

    def _computed(
        self, inputs: Sequence[Tensor], experts: Tensor, others: Sequence[Tensor | None], dim: int
    ) -> Tensor:  # fmt: skip
        """Return the outputs of this rank's experts for rows of all ranks.

        Args:
            inputs: rows of tokens, and the elements of other arguments.
            experts: of the rows, as numbers among this rank's.
            others: arguments after the second; those that are not None are in `inputs`.
            dim: of the second argument.
        """
        rows = len(experts)
        if not rows:  # a row of which nothing is used: outputs have their dtype and width, and weights a gradient
            width = inputs[0].shape[1]
            stand_in = torch.linspace(-1, 1, width, dtype=inputs[0].dtype, device=inputs[0].device)
            inputs = [torch.cat([inputs[0], stand_in[None]]), *(torch.cat([x, x.new_ones(1)]) for x in inputs[1:])]
            experts = experts.new_zeros(1)
        converted = iter(inputs[1:])
        columns = [None if other is None else next(converted) for other in others]
        if dim == 2:
            experts, columns = experts[:, None], [None if x is None else x[:, None] for x in columns]
        with self._of_own():
            outputs = self._forward(inputs[0], experts, *columns)
        if not isinstance(outputs, Tensor) or len(outputs) != len(experts):
            self._refuse("outputs that are not a tensor with a row for each token")
        return outputs[:rows]

    def _arguments(self, args: Any, options: Any) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        bound = self._signature.bind(*args, **options)
        positional: list[Any] = [*bound.args, *[None] * (2 - len(bound.args))]
        tokens, index, others = positional[0], positional[1], positional[2:]
        if bound.kwargs:
            self._refuse(f"the keyword {next(iter(bound.kwargs))}")
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            self._refuse("tokens that are not a tensor of shape [n, width]")
        whole = isinstance(index, Tensor) and not index.is_floating_point() and index.dim() in (1, 2)
        if not whole or len(index) != len(tokens):
            self._refuse("an index that is not a tensor of shape [n] or [n, k], of whole numbers")
        for other in others:
            if other is not None and not (isinstance(other, Tensor) and other.shape == index.shape):
                self._refuse(f"an argument that is not a tensor of shape {list(index.shape)}")
        return tokens, index, others

    @contextmanager
    def _of_own(self) -> Iterator[None]:
        """Context in which the module has the number of this rank's experts."""
        parts = [part for part in self._part.modules() if vars(part).get("num_experts") == self._experts]
        for part in parts:
            part.num_experts = self._experts // self._owner.world.size
        try:
            yield
        finally:
            for part in parts:
                part.num_experts = self._experts

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"the experts {self._name} can't be divided over ranks, with {what}: {PROTOCOL}. "
            "Select other modules by experts=CLASS or a list of their names"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(f"{self._name} is divided over ranks, and can't be copied: copy the module before or after fit")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self._name} is divided over ranks, and can't be pickled: use trainer.save_checkpoint")
