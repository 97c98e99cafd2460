"""Local SGD: each rank makes local steps, and the ranks average their weights periodically."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.checkpoint import tree
from fabricx.core.gradient_checks import check_frozen
from fabricx.core.held_gradients import keep_in_state, take_from_state
from fabricx.core.placeholder import is_placeholder
from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import Elastic, HoldsPart, KeepsLocalState, MeasuresWaiting, WrapsStep
from fabricx.distributed.joint_statistics import JointStatistics
from fabricx.distributed.optimizer_moments import average_moments, furthest, is_moment
from fabricx.distributed.world import World
from fabricx.errors import check_choice

Outer = Literal["average", "nesterov"]
_OUTERS = ("average", "nesterov")
_BLOCK: Final = 16 << 20  # elements of a fragment that are combined at once, to bound temporary memory


@dataclass
class _Fragment:
    """Parameters that are synchronised at the same steps: a block of a fragment, all of a small fragment.

    Attributes:
        number: index of the fragment; several blocks have the same.
        parameters: this rank's parameters.
        base: weights of all ranks after the latest synchronisation, shape [elements].
        velocity: outer momentum, shape [elements]; empty without momentum.
        apart: whether the ranks have stepped since their weights were equal.
        begun: step at which the pending synchronisation began; None without a pending synchronisation.
        moved: this rank's weight difference to `base` at that step; the all-reduce replaces it by the sum over ranks.
        work: the pending all-reduce; None without.
        local: this rank's weights and their mean over ranks, while the parameters hold the mean; None otherwise.
    """

    number: int
    parameters: list[Tensor]
    base: Tensor
    velocity: Tensor
    apart: bool = False
    begun: int | None = None
    moved: Tensor = field(default_factory=lambda: torch.empty(0))
    work: Any = None
    local: tuple[Tensor, Tensor] | None = None

    def wait(self) -> None:
        """Wait for the pending all-reduce, if any."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def flat(self) -> Tensor:
        """Return this rank's weights as a vector with the dtype of `base`, shape [elements]."""
        return torch.cat([parameter.detach().reshape(-1).to(self.base.dtype) for parameter in self.parameters])

    def set(self, values: Tensor) -> None:
        """Copy a vector of weights, shape [elements], to the parameters."""
        parts = values.split([parameter.numel() for parameter in self.parameters])
        with torch.no_grad():
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))


@final
class LocalSGD(Strategy, Elastic, HoldsPart, KeepsLocalState, MeasuresWaiting, WrapsStep):
    """Make local steps on each rank, and combine the weight differences of all ranks every `every` steps (a round).

    With a single step per round, plain gradient descent and averaging, results equal those of ddp. A validation within
    a round uses the mean of the ranks' weights; afterwards each rank continues with its local weights, except for
    elements that a hook has changed during the validation. A checkpoint ends the round and averages the optimizers'
    moments, so that a run resumes exactly, and any other strategy can load the checkpoint.

    A validation and a checkpoint join the running statistics of batch normalisation: means are weighted by samples, and
    variances include the differences between ranks, as with one process on the global batch. Other buffers are those of
    rank 0.

    A rank whose batch has no loss makes no local step, and the step counts on all ranks, so that rounds and schedules
    stay aligned: ranks do not communicate within a round. If only some batches of an accumulation window have no loss,
    the step is that of the mean of the others.

    Sources: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; post-local SGD: Lin et al., "Don't
    Use Large Mini-Batches, Use Local SGD", ICLR 2020; DiLoCo (`outer="nesterov"`): Douillard et al., arXiv 2311.08105;
    fragments and overlap: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.

    Args:
        every: steps of a round.
        outer: "average" averages the ranks' weights; "nesterov" uses the mean weight difference as a gradient, and
            steps with Nesterov momentum. Momentum needs tens of rounds to be useful.
        outer_lr: learning rate of "nesterov".
        outer_momentum: momentum of "nesterov".
        synchronous_steps: number of first steps that are rounds of 1 step (post-local SGD).
        fragments: parts of the model with separate rounds, spread evenly over `every` steps.
        overlap_steps: steps that are trained while the all-reduce of a round is running.
        keep_local: weight of a rank's local weights when an overlapped result arrives, from 0 to less than 1; 0 uses
            the result only.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    traits = Traits(synchronous=False, averages=True, elastic=True, checkpoint_averages=True)  # mean of local steps
    batch_weight_refused = (
        "batch_weight needs the weight of the global batch in each step, and local_sgd makes local steps; use "
        "strategy=ddp, fsdp or parameter_server (mode='sync')"
    )

    def __init__(
        self,
        *,
        every: int = 25,
        outer: Outer = "average",
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        synchronous_steps: int = 0,
        fragments: int = 1,
        overlap_steps: int = 0,
        keep_local: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("local_sgd", "outer", outer, _OUTERS)
        if every < 1:
            raise ValueError(f"every={every}: must be 1 or more steps")
        if not 1 <= fragments <= every:
            raise ValueError(
                f"fragments={fragments}: must be between 1 and every={every}, so that their rounds end at different "
                "steps"
            )
        if not 0 <= overlap_steps < every:
            raise ValueError(
                f"overlap_steps={overlap_steps}: must be 0 or more and less than every={every}, so that a round's "
                "all-reduce ends before the next begins"
            )
        if not 0.0 <= keep_local < 1.0:
            raise ValueError(f"keep_local={keep_local}: must be a fraction, at least 0 and less than 1")
        self.every = every
        self.outer = outer
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.synchronous_steps = synchronous_steps
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.keep_local = keep_local
        self._fragments: list[_Fragment] = []
        self._frozen: list[Tensor] = []  # parameters outside of all fragments
        self._used: list[Tensor] = []  # parameters that had a gradient in this rank's newest batch
        self._used_at_end: dict[str, None] = {}  # names of `_used`, for a checkpoint after the fit
        self._statistics = JointStatistics(nn.Identity())

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_placeholder(tensor):
                self.data_ranks.broadcast(tensor.data)
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if any(parameter.is_complex() for parameter in trained.values()):
            raise ValueError(
                "local_sgd averages real numbers, and a parameter is complex; train torch.view_as_real of it, or use "
                "strategy=ddp"
            )
        self._fragments = []
        elements = {name: self.elements.get(name, parameter.numel()) for name, parameter in trained.items()}
        for number, names in enumerate(_in_parts(elements, self.fragments)):
            for block in _in_blocks([trained[name] for name in names if not is_placeholder(trained[name])]):
                base = _flat(block)
                velocity = base.new_zeros(base.numel() if self.outer == "nesterov" else 0)
                self._fragments.append(_Fragment(number, block, base, velocity))
        self._statistics = JointStatistics(module)

    def teardown(self) -> None:
        self._used_at_end = self._names_used()
        self._fragments, self._frozen, self._used = [], [], []
        self._statistics.close()
        self._statistics = JointStatistics(nn.Identity())
        super().teardown()

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def with_local_weights(*args: Any) -> Any:
            self._restore_local()
            return step(*args)

        return with_local_weights

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        if self.data_ranks.size > 1:
            check_frozen(self.module, self._frozen, "local_sgd")
        super().backward(loss, compute)
        if self.data_ranks.size > 1:
            self._used = [
                parameter for f in self._fragments for parameter in f.parameters if parameter.grad is not None
            ]

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        self._restore_local()
        for parameter in self._used:  # a gradient of zero, so that momentum and weight decay continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return False  # backward is local

    def after_update(self, step: int) -> int:
        for fragment in self._fragments:
            fragment.apart = True
            if fragment.begun is not None and step >= fragment.begun + self.overlap_steps:
                self._end(fragment, self.keep_local)
            if self._meets(fragment, step):
                self._begin(fragment, step)
                if not self.overlap_steps or step <= self.synchronous_steps:
                    self._end(fragment, 0.0)
        return step

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        if ends:  # hooks may replace the weights later, and a later checkpoint must not average these
            self._restore_local(ends_round=True)
        if any(fragment.apart for fragment in self._fragments) and not any(f.local for f in self._fragments):
            for fragment in self._fragments:
                if fragment.begun is not None:
                    self._end(fragment, self.keep_local)
                local = fragment.flat()
                fragment.set(self.data_ranks.all_reduce(local.clone()).div_(self.data_ranks.size))
                fragment.local = local, fragment.flat()
        if self.data_ranks.size > 1:
            self._statistics.join(self.data_ranks, copies)
        super().synchronize(copies, ends=ends)

    def _restore_local(self, *, ends_round: bool = False) -> None:
        """Restore this rank's local weights after `synchronize`, with the elements of the mean that hooks changed.

        Block by block, so that a block is all that is copied meanwhile.

        Args:
            ends_round: combine the weight differences of all ranks since the last synchronisation; collective.
        """
        for fragment in self._fragments:
            changes = None
            if fragment.local is not None:
                (local, mean), fragment.local = fragment.local, None
                now = fragment.flat()
                fragment.set(local)
                changes = None if torch.equal(mean, now) else (now == mean, now)
            if ends_round and fragment.apart:
                self._begin(fragment, 0)
                self._end(fragment, 0.0)
            if changes is not None:
                unchanged, now = changes
                fragment.set(torch.where(unchanged, fragment.flat(), now))

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        self._restore_local(ends_round=True)
        for optimizer in optimizers:
            keep_in_state(optimizer)
            average_moments(self.data_ranks, optimizer)
            take_from_state(optimizer, loaded=False)
        state = super().state_dict(module, optimizers)
        if not optimizers:
            return state
        if self.module is None and self.outer == "nesterov":
            raise ValueError(
                "a checkpoint after the fit lacks the outer momentum of local_sgd, which has ended with it: save it in "
                "on_train_end or by ModelCheckpoint, or save the weights only (weights_only=True)"
            )
        state["used"] = self.data_ranks.gather_objects(self._names_used())
        return {**state, "outer": self._velocities()} if self.outer == "nesterov" else state

    def _names_used(self) -> dict[str, None]:
        """Return the names of the parameters that had a gradient in this rank's newest batch.

        As keys, so that a mesh joins the states of its stages.
        """
        if self.module is None:
            return self._used_at_end
        used = set(map(id, self._used))
        return {name: None for name, parameter in self.module.named_parameters() if id(parameter) in used}

    def _use(self, by_rank: Sequence[Iterable[str]], *, same_ranks: bool) -> None:
        """Restore the parameters that had a gradient: the next batch may be without a sample of this rank.

        Args:
            by_rank: names on each rank of the earlier run.
            same_ranks: there are as many ranks as before; otherwise, a rank has the names of all.
        """
        assert self.module is not None
        used = set(by_rank[self.data_ranks.rank]) if same_ranks else {name for names in by_rank for name in names}
        self._used = [parameter for name, parameter in self.module.named_parameters() if name in used]

    def _velocities(self) -> dict[str, Tensor]:
        """Return the outer momentum by name of the parameter, as views with its shape."""
        assert self.module is not None
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        velocities = {}
        for fragment in self._fragments:
            parts = fragment.velocity.split([parameter.numel() for parameter in fragment.parameters])
            for parameter, part in zip(fragment.parameters, parts, strict=True):
                velocities[names[id(parameter)]] = part.view_as(parameter)
        return velocities

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        for fragment in self._fragments:
            fragment.base.copy_(fragment.flat())
        self._statistics.remember()
        if by_rank := state.get("used"):
            self._use(by_rank, same_ranks=len(by_rank) == self.data_ranks.size)
        if saved := state.get("outer") if self.outer == "nesterov" else None:
            self._load_velocities(saved)

    def _load_velocities(self, saved: Mapping[str, Tensor]) -> None:
        """Load the outer momentum by name; checkpoints of earlier versions have it by number of the fragment."""
        for name, velocity in self._velocities().items():
            if name in saved and saved[name].shape == velocity.shape:
                velocity.copy_(saved[name])
        for number in {fragment.number for fragment in self._fragments}:
            blocks = [fragment.velocity for fragment in self._fragments if fragment.number == number]
            sizes = [block.numel() for block in blocks]
            if str(number) in saved and saved[str(number)].numel() == sum(sizes):
                for block, part in zip(blocks, saved[str(number)].split(sizes), strict=True):
                    block.copy_(part)

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        self._restore_local()
        for fragment in self._fragments:
            fragment.wait()
        rounds = [
            {
                "shares": {name: self._share(values) for name, values in _equal_on_ranks(f).items()},
                "apart": f.apart, "begun": f.begun,
            }
            for f in self._fragments
        ]  # fmt: skip
        return {
            **super().state_dict(module, optimizers), "rounds": rounds, "statistics": self._statistics.state_dict(),
            "used": self._names_used(),
        }  # fmt: skip

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        for fragment, *saved in zip(self._fragments, *(state["rounds"] for state in states), strict=True):
            fragment.begun, fragment.apart = saved[0]["begun"], saved[0]["apart"]
            if fragment.begun is not None:
                fragment.moved = torch.empty_like(fragment.base)
            for name, values in _equal_on_ranks(fragment).items():
                self._join([shares["shares"][name] for shares in saved], values, own=own)
        moved = []
        for state in states:
            super().load_state_dict(state, module, optimizers)
            if not own:
                moved.append([fragment.base - fragment.flat() for fragment in self._fragments])
        for fragment in self._fragments:
            fragment.local = None
        if not own:  # the number of ranks has changed: end the round of the former ranks
            scalars = {tree.escape(name) for name, parameter in module.named_parameters() if not parameter.dim()}
            moments = _mean([state["optimizers"] for state in states], scalars)
            super().load_state_dict({**states[0], "optimizers": moments}, module, optimizers)
            for fragment, parts in zip(self._fragments, zip(*moved, strict=True), strict=True):
                fragment.moved = torch.stack(parts).mean(0)
                self._step_from_base(fragment, 0.0)
        self._statistics.load_states([state["statistics"] for state in states], own=own)
        self._use([state["used"] for state in states], same_ranks=False)

    def _share(self, values: Tensor) -> Tensor:
        """Return the part of a vector, equal on all ranks, that this rank stores in an in-memory checkpoint."""
        return values.tensor_split(self.data_ranks.size)[self.data_ranks.rank]

    def _join(self, shares: Sequence[Tensor], values: Tensor, *, own: bool) -> None:
        """Write the shares of all ranks to a vector; with this rank's share only (`own`), collective."""
        if own:
            self._share(values).copy_(shares[0])
            for rank, share in enumerate(values.tensor_split(self.data_ranks.size)):
                self.data_ranks.broadcast(share, rank)
        else:
            values.copy_(torch.cat(list(shares)))

    def world_changed(self, world: World) -> None:
        self.world = world
        for fragment in self._fragments:
            fragment.work = None

    def _meets(self, fragment: _Fragment, step: int) -> bool:
        if step <= self.synchronous_steps:
            return True
        return (step + fragment.number * self.every // self.fragments) % self.every == 0

    def _begin(self, fragment: _Fragment, step: int) -> None:
        fragment.begun = step
        moved = fragment.flat()
        fragment.moved = torch.sub(fragment.base, moved, out=moved)  # reuses the memory of the copy
        if self.data_ranks.size > 1:
            fragment.work = dist.all_reduce(fragment.moved, group=self.data_ranks.group, async_op=True)

    def _end(self, fragment: _Fragment, keep: float) -> None:
        """Wait for the weight differences, and step from the base along their mean (equation 1 of DiLoCo).

        `keep` is the weight of local steps since the all-reduce began, as in `keep_local`.
        """
        began = time.perf_counter()
        fragment.wait()
        self.waited_s += time.perf_counter() - began
        fragment.moved.div_(self.data_ranks.size)
        self._step_from_base(fragment, keep)

    def _step_from_base(self, fragment: _Fragment, keep: float) -> None:
        gradient, velocity = fragment.moved, fragment.velocity
        if self.outer == "average":
            fragment.base.sub_(gradient)
        else:
            velocity.mul_(self.outer_momentum).add_(gradient)
            fragment.base.sub_(gradient.add_(velocity, alpha=self.outer_momentum), alpha=self.outer_lr)
        fragment.set(fragment.base.lerp(fragment.flat(), keep) if keep else fragment.base)
        fragment.begun, fragment.apart = None, keep > 0.0
        fragment.moved = torch.empty(0)  # frees a copy of the weights until the next round ends


def _equal_on_ranks(fragment: _Fragment) -> dict[str, Tensor]:
    """Return the vectors of a fragment, without a pending all-reduce, that are equal on all ranks."""
    moved = {} if fragment.begun is None else {"moved": fragment.moved}
    return {"base": fragment.base, "velocity": fragment.velocity, **moved}


def _mean(states: Sequence[Any], scalars: Collection[str]) -> Any:
    """Average the moments in states of optimizers, over the ranks that have them.

    Other values of a parameter are those of the rank that has made the most steps, as in `average_moments`; values
    without a parameter are those of the first rank.

    Args:
        states: states of the optimizers on each rank, with names of parameters as keys.
        scalars: names of parameters without dimensions.
    """
    merged = []
    for ranks in zip(*states, strict=True):
        names = dict.fromkeys(name for rank in ranks for name in rank["state"])
        values = {name: [rank["state"][name] for rank in ranks if name in rank["state"]] for name in names}
        merged.append({**ranks[0], "state": {name: every[furthest(every)] for name, every in values.items()}})
    rest, mean = tree.split(merged)
    by_rank = [tree.split(state)[1] for state in states]
    for path, tensor in mean.items():
        owner, name = path.split("/")[-2:]
        if is_moment(name, tensor, 0 if owner in scalars else 1):
            mean[path] = torch.stack([tensors[path] for tensors in by_rank if path in tensors]).mean(0)
    return tree.join(rest, mean)


def _flat(parameters: list[Tensor]) -> Tensor:
    widest = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
    return torch.cat([parameter.detach().reshape(-1).to(widest) for parameter in parameters])


def _in_blocks(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split parameters in their order into blocks of up to `_BLOCK` elements, or of a single larger parameter."""
    blocks: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        if not blocks or parameter.numel() > room:
            blocks.append([])
            room = _BLOCK
        blocks[-1].append(parameter)
        room -= parameter.numel()
    return blocks


def _in_parts(elements: Mapping[str, int], count: int) -> list[list[str]]:
    """Split parameters in their order into parts with similar numbers of elements; at most a part per parameter.

    Args:
        elements: number of elements, by name.
        count: parts.

    >>> _in_parts({"a": 3, "b": 1, "c": 1, "d": 1, "e": 3}, 3)
    [['a'], ['b', 'c', 'd'], ['e']]
    """
    total, done = sum(elements.values()), 0
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, size in elements.items():
        parts[min(count - 1, (done + size // 2) * count // max(1, total))].append(name)
        done += size
    return [part for part in parts if part]
