"""Local SGD: each rank makes local steps, and the ranks average their weights periodically."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.checkpoint import tree
from fabricx.consistency.frozen_means import FrozenMeans
from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.core.strategy import Strategy, Traits
from fabricx.core.strategy_parts import Elastic, HoldsPart, KeepsLocalState, MeasuresWaiting, WrapsStep
from fabricx.core.strategy_support.gradient_checks import check_frozen
from fabricx.core.strategy_support.held_gradients import keep_in_state, take_from_state
from fabricx.distributed.compression.encoded_sum import EncodedSum
from fabricx.distributed.sharding.dtensors import is_dtensor, own_part, with_part
from fabricx.distributed.sharding.fragments import Fragment, in_fragments
from fabricx.distributed.sharding.fsdp_internals import shard_like
from fabricx.distributed.statistics.joint_statistics import JointStatistics
from fabricx.distributed.statistics.optimizer_moments import average_moments, furthest, is_moment
from fabricx.distributed.world import World
from fabricx.errors import check_choice, check_share

Outer = Literal["average", "nesterov"]
DifferenceCompression = Literal["int8", "int4"]
_OUTERS = ("average", "nesterov")


@final
class LocalSGD(Strategy, Elastic, HoldsPart, KeepsLocalState, MeasuresWaiting, WrapsStep):
    """Make local steps on each rank, and combine the weight differences of all ranks every `every` steps (a round).

    With a single step per round, plain gradient descent and averaging, results equal those of ddp. A validation within
    a round uses the mean of the ranks' weights; afterwards each rank continues with its local weights, except for
    elements that a hook has changed during the validation. A checkpoint ends the round and averages the optimizers'
    moments, so that a run resumes exactly, and any other strategy can load the checkpoint.

    A validation and a checkpoint join the running statistics of batch normalisation: means are weighted by samples, and
    variances include the differences between ranks, as with one process on the global batch. Other buffers are those of
    rank 0. Frozen parameters that a module changes itself (a teacher's moving average) are averaged as the others are.

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
        compression: compression of weight differences, with error feedback: "int8" (1 byte for each weight) or "int4"
            (half a byte). Each rank receives the compressed differences of all others. A checkpoint adds the errors to
            the weights, uncompressed.

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
        compression: DifferenceCompression | None = None,
    ) -> None:
        super().__init__()
        check_choice("local_sgd", "outer", outer, _OUTERS)
        check_choice("local_sgd", "compression", compression, (*get_args(DifferenceCompression), None))
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
        check_share("keep_local", keep_local)
        if not outer_lr > 0.0:
            raise ValueError(f"outer_lr={outer_lr}: must be more than 0")
        check_share("outer_momentum", outer_momentum)
        if synchronous_steps < 0:
            raise ValueError(f"synchronous_steps={synchronous_steps}: must be 0 or more steps")
        self.every = every
        self.outer = outer
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.synchronous_steps = synchronous_steps
        self.fragments = fragments
        self.overlap_steps = overlap_steps
        self.keep_local = keep_local
        self.compression = compression
        self._fragments: list[Fragment] = []
        self._frozen: list[Tensor] = []  # parameters outside of all fragments
        self._frozen_means = FrozenMeans(())
        self._used: dict[str, None] = {}  # names of the parameters that had a gradient in this rank's newest batch
        self._trained: Collection[str] = ()  # names of the parameters in fragments
        self._statistics = JointStatistics(nn.Identity())

    @property
    def _peers(self) -> World:
        """Return the ranks that combine their weights: all data ranks, or those with the same shards in each island."""
        return self.world.axis("islands")

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_placeholder(tensor):
                self._peers.broadcast(own_part(tensor))
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if any(parameter.is_complex() for parameter in trained.values()):
            raise ValueError(
                "local_sgd averages real numbers, and a parameter is complex; train torch.view_as_real of it, or use "
                "strategy=ddp"
            )
        self._used = {}
        self._combine(module, trained)
        self._statistics = JointStatistics(module)

    def _combine(self, module: nn.Module, trained: Collection[str]) -> None:
        """Begin rounds with the present weights.

        Args:
            module: the user's module.
            trained: names of the parameters that ranks combine.
        """
        parameters = dict(module.named_parameters())
        self._trained = frozenset(trained)
        self._frozen = [parameter for name, parameter in parameters.items() if name not in trained]
        self._frozen_means = FrozenMeans(self._frozen, self._frozen_means)
        combined = {name: parameter for name, parameter in parameters.items() if name in trained}
        self._fragments = in_fragments(
            combined, self.elements, self.fragments, momentum=self.outer == "nesterov", excluded=is_placeholder,
            compression=self.compression,
        )  # fmt: skip

    def _combined(self) -> Iterator[tuple[str, Tensor]]:
        for fragment in self._fragments:
            yield from fragment.parameters.items()

    def teardown(self) -> None:
        self._fragments, self._frozen, self._frozen_means = [], [], FrozenMeans(())
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
            used = {name: None for name, parameter in self._combined() if parameter.grad is not None}
            self._used = used or self._used  # none before the last backward of a window, if islands shard the weights

    def backward_without_data(self, example: tuple[Any, ...] = ()) -> bool:
        self._restore_local()
        for name, parameter in self._combined():  # a gradient of zero, so that momentum and weight decay continue
            if name in self._used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return False  # backward is local

    def after_update(self, step: int) -> int:
        rounds = [fragment for fragment in self._fragments if self._meets(fragment, step)]
        for fragment in self._fragments:
            fragment.apart = True
            if fragment.begun is not None and step >= fragment.begun + self.overlap_steps:
                self._end(fragment, self.keep_local)
            if self._meets(fragment, step):
                self._begin(fragment, step)
                if not self.overlap_steps or step <= self.synchronous_steps:
                    self._end(fragment, 0.0)
        if rounds:
            self._frozen_means.join(self._peers)
        return step

    def synchronize(self, copies: Mapping[str, Tensor] | None = None, *, ends: bool = False) -> None:
        if ends:  # hooks may replace the weights later, and a later checkpoint must not average these
            self._restore_local(ends_round=True)
        if any(fragment.apart for fragment in self._fragments) and not any(f.local for f in self._fragments):
            self._show_means()
        self._frozen_means.join(self._peers, read=True, shown=not ends)
        if self.data_ranks.size > 1:
            self._statistics.join(self.data_ranks, copies)
        super().synchronize(copies, ends=ends)

    def _show_means(self) -> None:
        """Set the parameters to their means over ranks, until `_restore_local`; collective."""
        for fragment in self._fragments:
            local = fragment.flat()
            fragment.set(self._peers.all_reduce(local.clone()).div_(self._peers.size))
            fragment.local = local, fragment.flat()

    @torch.no_grad()
    def _local_weights(self) -> dict[int, Tensor]:
        """Return the weights that `_restore_local` would restore, by the `id` of the parameter."""
        weights = self._frozen_means.local()
        for fragment in self._fragments:
            if fragment.local is not None:
                local, mean = fragment.local
                parts = fragment.by_name(torch.where((now := fragment.flat()) == mean, local, now))
                for name, part in parts.items():
                    parameter = fragment.parameters[name]
                    value = part.to(parameter.dtype)
                    weights[id(parameter)] = with_part(parameter, value) if is_dtensor(parameter) else value
        return weights

    def _restore_local(self, *, ends_round: bool = False) -> None:
        """Restore this rank's local weights after `synchronize`, with the elements of the mean that hooks changed.

        Block by block, so that a block is all that is copied meanwhile.

        Args:
            ends_round: combine the weight differences of all ranks since the last synchronisation; collective.
        """
        self._frozen_means.restore()
        for fragment in self._fragments:
            changes = None
            if fragment.local is not None:
                (local, mean), fragment.local = fragment.local, None
                now = fragment.flat()
                fragment.set(local)
                changes = None if torch.equal(mean, now) else (now == mean, now)
            if ends_round and fragment.codec is not None:
                if fragment.begun is not None:
                    self._end(fragment, self.keep_local)
                self._add_errors(fragment)
            if ends_round and fragment.apart:
                fragment.wait()  # this round includes the differences of a pending one
                self._begin(fragment, 0, exact=True)
                self._end(fragment, 0.0)
            if changes is not None:
                unchanged, now = changes
                fragment.set(torch.where(unchanged, fragment.flat(), now))
            if ends_round:
                self._begin_from(fragment)

    def _add_errors(self, fragment: Fragment, errors: list[Tensor] | None = None) -> None:
        """Add the errors of compressed weight differences to the weights, as if they had been sent with the newest.

        Args:
            fragment: its errors are zero then.
            errors: those of all ranks; None to add them up, which is collective.
        """
        if fragment.codec is None or not fragment.codec.lost.numel():
            return
        lost, fragment.codec.lost = fragment.codec.lost, torch.empty(0)
        mean = self._peers.all_reduce(lost).div_(self._peers.size) if errors is None else torch.stack(errors).mean(0)
        now, before = fragment.flat(), fragment.base.clone()
        if self.outer == "average":
            fragment.base.sub_(mean)
        else:
            fragment.velocity.add_(mean)
            fragment.base.sub_(mean, alpha=self.outer_lr * (1.0 + self.outer_momentum))
        fragment.set(now.add_(fragment.base).sub_(before))  # with the changes of hooks after the round

    def _begin_from(self, fragment: Fragment) -> None:
        """Begin the next round with the present weights, as a run that resumes from them; collective.

        They differ from the base if hooks have changed them, or if they have 16 bits.
        """
        now = fragment.flat()
        differs = torch.tensor(float(not torch.equal(now, fragment.base)), device=now.device)
        if self._peers.all_reduce(differs, "max") > 0:
            fragment.set(self._peers.all_reduce(now).div_(self._peers.size))
            fragment.base.copy_(fragment.flat())

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        self._restore_local(ends_round=True)
        self._frozen_means.join(self._peers, read=True)
        for optimizer in optimizers:
            keep_in_state(optimizer)
            average_moments(self._peers, optimizer)
            take_from_state(optimizer, loaded=False)
        state = super().state_dict(module, optimizers)
        if not optimizers:
            return state
        if self.module is None and self.outer == "nesterov":
            raise ValueError(
                "a checkpoint after the fit lacks the outer momentum of local_sgd, which has ended with it: save it in "
                "on_train_end or by ModelCheckpoint, or save the weights only (weights_only=True)"
            )
        state["used"] = self.data_ranks.gather_objects(
            self._used
        )  # keys, so that a mesh joins the states of its stages
        return {**state, "outer": self._velocities()} if self.outer == "nesterov" else state

    def _use(self, by_rank: Sequence[Iterable[str]], *, same_ranks: bool) -> None:
        """Restore the parameters that had a gradient: the next batch may be without a sample of this rank.

        Args:
            by_rank: names on each rank of the earlier run.
            same_ranks: there are as many ranks as before; otherwise, a rank has the names of all.
        """
        chosen = [by_rank[self.data_ranks.rank]] if same_ranks else by_rank
        self._used = {name: None for names in chosen for name in names}

    def _velocities(self) -> dict[str, Tensor]:
        """Return the outer momentum by name of the parameter, as views with its shape; that of a shard is a DTensor."""
        return {
            name: with_part(parameter, part) if is_dtensor(parameter := fragment.parameters[name]) else part
            for fragment in self._fragments
            for name, part in fragment.by_name(fragment.velocity).items()
        }

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        for fragment in self._fragments:
            fragment.base.copy_(fragment.flat())
        self._statistics.remember()
        self._frozen_means = FrozenMeans(self._frozen, self._frozen_means)
        if by_rank := state.get("used"):
            self._use(by_rank, same_ranks=len(by_rank) == self.data_ranks.size)
        if saved := state.get("outer") if self.outer == "nesterov" else None:
            self._load_velocities(saved)

    def _load_velocities(self, saved: Mapping[str, Tensor]) -> None:
        """Load the outer momentum by name; checkpoints of earlier versions have it by number of the fragment."""
        own = self._velocities()
        for number in {str(fragment.number) for fragment in self._fragments} & saved.keys():
            names = [name for f in self._fragments if str(f.number) == number for name in f.parameters]
            sizes = [own[name].numel() for name in names]
            if saved[number].numel() == sum(sizes):
                parts = zip(names, saved[number].split(sizes), strict=True)
                saved = {**saved, **{name: part.view(own[name].shape) for name, part in parts}}
        for name, velocity in own.items():
            if name in saved and saved[name].shape == velocity.shape:
                velocity.copy_(_divided_like(velocity, saved[name]))

    def local_state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        for fragment in self._fragments:
            fragment.wait()
        state, local = super().state_dict(module, optimizers), self._local_weights()
        names = module.named_parameters(remove_duplicate=False)
        state["module"].update({name: local[id(parameter)] for name, parameter in names if id(parameter) in local})
        rounds = [
            {
                "shares": {name: self._share(values) for name, values in f.equal_on_ranks.items()},
                "apart": f.apart, "begun": f.begun, "lost": torch.empty(0) if f.codec is None else f.codec.lost,
            }
            for f in self._fragments
        ]  # fmt: skip
        return {
            **state, "rounds": rounds, "statistics": self._statistics.state_dict(), "used": self._used,
            "shows_means": bool(local), "frozen": self._frozen_means.changed(),
        }  # fmt: skip

    def load_local_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        for fragment, *saved in zip(self._fragments, *(state["rounds"] for state in states), strict=True):
            fragment.begun, fragment.apart = saved[0]["begun"], saved[0]["apart"]
            if fragment.begun is not None:
                fragment.moved = torch.empty_like(fragment.base)
            if fragment.codec is not None:
                fragment.codec.lost = saved[0]["lost"].to(fragment.base.device, copy=True)
            for name, values in fragment.equal_on_ranks.items():
                self._join([shares["shares"][name] for shares in saved], values, own=own)
        self._frozen_means.add_changed([any(flags) for flags in zip(*(s["frozen"] for s in states), strict=True)])
        moved, frozen = [], []
        for state in states:
            super().load_state_dict(state, module, optimizers)
            if not own:
                moved.append([fragment.base - fragment.flat() for fragment in self._fragments])
                frozen.append(self._frozen_means.values())
        for fragment in self._fragments:
            fragment.local = None
        self._frozen_means = FrozenMeans(self._frozen, self._frozen_means)
        if not own:  # the number of ranks has changed: end the round of the former ranks
            scalars = {tree.escape(name) for name, parameter in module.named_parameters() if not parameter.dim()}
            moments = _mean([state["optimizers"] for state in states], scalars)
            super().load_state_dict({**states[0], "optimizers": moments}, module, optimizers)
            self._frozen_means.set_means(frozen)
            rounds = zip(*(state["rounds"] for state in states), strict=True)
            for fragment, parts, former in zip(self._fragments, zip(*moved, strict=True), rounds, strict=True):
                self._add_errors(fragment, [one["lost"].to(fragment.base.device) for one in former])
                fragment.moved = torch.stack(parts).mean(0)
                self._step_from_base(fragment, 0.0)
        elif states[0]["shows_means"]:  # hooks that follow read and change these
            self._show_means()
            self._frozen_means.join(self._peers, read=True, shown=True)
        self._statistics.load_states([state["statistics"] for state in states], own=own)
        self._use([state["used"] for state in states], same_ranks=False)

    def _share(self, values: Tensor) -> Tensor:
        """Return the part of a vector, equal on all ranks, that this rank stores in an in-memory checkpoint."""
        return values.tensor_split(self._peers.size)[self._peers.rank]

    def _join(self, shares: Sequence[Tensor], values: Tensor, *, own: bool) -> None:
        """Write the shares of all ranks to a vector; with this rank's share only (`own`), collective."""
        if own:
            self._share(values).copy_(shares[0])
            for rank, share in enumerate(values.tensor_split(self._peers.size)):
                self._peers.broadcast(share, rank)
        else:
            values.copy_(torch.cat(list(shares)))

    def world_changed(self, world: World) -> None:
        self.world = world
        if self.module is not None:
            self._combine(self.module, self._trained)  # fsdp may have sharded the weights into other parameters

    def _meets(self, fragment: Fragment, step: int) -> bool:
        if step <= self.synchronous_steps:
            return True
        return (step + fragment.number * self.every // self.fragments) % self.every == 0

    def _begin(self, fragment: Fragment, step: int, *, exact: bool = False) -> None:
        fragment.begun = step
        moved = fragment.flat()
        fragment.moved = torch.sub(fragment.base, moved, out=moved)  # reuses the memory of the copy
        if self._peers.size == 1:
            return
        if fragment.codec is None or exact:
            fragment.work = dist.all_reduce(fragment.moved, group=self._peers.group, async_op=True)
        else:
            fragment.work = EncodedSum(fragment.moved, fragment.codec, self._peers.group, self._peers.size)

    def _end(self, fragment: Fragment, keep: float) -> None:
        """Wait for the weight differences, and step from the base along their mean (equation 1 of DiLoCo).

        `keep` is the weight of local steps since the all-reduce began, as in `keep_local`.
        """
        began = time.perf_counter()
        fragment.wait()
        self.waited_s += time.perf_counter() - began
        fragment.moved.div_(self._peers.size)
        self._step_from_base(fragment, keep)

    def _step_from_base(self, fragment: Fragment, keep: float) -> None:
        gradient, velocity = fragment.moved, fragment.velocity
        if self.outer == "average":
            fragment.base.sub_(gradient)
        else:
            velocity.mul_(self.outer_momentum).add_(gradient)
            fragment.base.sub_(gradient.add_(velocity, alpha=self.outer_momentum), alpha=self.outer_lr)
        fragment.set(fragment.base.lerp(fragment.flat(), keep) if keep else fragment.base)
        fragment.begun, fragment.apart = None, keep > 0.0
        fragment.moved = torch.empty(0)  # frees a copy of the weights until the next round ends


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


def _divided_like(tensor: Tensor, value: Tensor) -> Tensor:
    return shard_like(value, tensor) if is_dtensor(tensor) and not is_dtensor(value) else value
