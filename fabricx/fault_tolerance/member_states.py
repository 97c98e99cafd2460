"""The state with which the members of a generation continue: that of the most advanced member."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from fabricx.checkpoint import tree
from fabricx.core.module_state.packed_attributes import differing, joined, packed, unpacked
from fabricx.distributed.membership.generations import Generation, membership
from fabricx.fault_tolerance import rank_record
from fabricx.fault_tolerance.common_state import common_state, load_common_state
from fabricx.fault_tolerance.hook_entries import hook_entries
from fabricx.fault_tolerance.progress import after_publishing, progress, record_of
from fabricx.session.rank_state import RankState, from_record

if TYPE_CHECKING:
    from fabricx.fault_tolerance.records import RankRecords
    from fabricx.session.session import Session

Records = list[tuple[Any, dict[str, Any]]]  # per-rank state by progress


@dataclass
class Contribution:
    """State that a member contributes to a generation.

    Attributes:
        progress: see `fault_tolerance.progress.progress`; empty for a replacement.
        records: per-rank state by progress, of this member or of the worker that it replaces.
        now: per-rank state at the time of the contribution; None for a replacement.
        vacant: (generation, records) of each rank without a worker, with the generation since which it is vacant.
        stop: reason for which all ranks have agreed to stop; empty without such an agreement.
    """

    progress: tuple[Any, ...] = ()
    records: Records = field(default_factory=list)
    now: dict[str, Any] | None = None
    vacant: list[tuple[int, Records]] = field(default_factory=list)
    stop: str = ""

    def complete(self, later: Mapping[tuple[Any, ...], LaterChanges], furthest: tuple[Any, ...]) -> dict[str, bool]:
        """Complete records from before hooks that do not run again, by what the hooks of another member have changed.

        Args:
            later: result of `later_changes` of the most advanced member.
            furthest: progress of that member; members with this progress have run the hooks themselves.

        Returns:
            names of attributes that these hooks change in the state with which this member continues, and whether
            their values are those of the most advanced member.
        """
        chosen, incomplete = record_at(self.records, furthest, self.now), dict[str, bool]()

        def completed(key: tuple[Any, ...], record: dict[str, Any]) -> dict[str, Any]:
            if key not in later or (self.progress and key == furthest):
                return record
            complete, changed = later[key].add_to(record)
            incomplete.update(changed if record is chosen else {})
            return complete

        self.records = [(key, completed(key, record)) for key, record in self.records]
        if self.now is not None:
            self.now = completed(self.progress, self.now)
        return incomplete


class LaterChanges(NamedTuple):
    """What a member has changed after a record.

    Attributes:
        buffers: names of buffers; the other members have received their values.
        before: attributes of the module and of callbacks in the record, packed.
        attributes: those that have changed, packed.
    """

    buffers: set[str]
    before: list[Any]
    attributes: list[Any]

    def add_to(self, record: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
        """Return a record without these buffers, and with these attributes where that is possible; see `joined`.

        Args:
            record: of any member, at the same progress.
        """
        buffers: dict[str, bytes] = record["buffers"] or {}
        kept = {name: value for name, value in buffers.items() if name not in self.buffers}
        attributes, changed = joined(record["attributes"], self.before, self.attributes)
        return {**record, "buffers": kept, "attributes": attributes}, changed


def record_at(
    records: Records, progress: tuple[Any, ...], now: dict[str, Any] | None = None
) -> dict[str, Any] | None:  # fmt: skip
    """Return the record of `progress`, else `now`, else the newest earlier record; None without.

    Records of earlier generations are skipped: the sums of the present generation include them.

    Args:
        records: per-rank state by progress.
        progress: progress of the most advanced member.
        now: present state of the rank.
    """
    exact = next((record for key, record in records if key == progress), None)
    if exact or now:
        return exact or now
    earlier = [(key, record) for key, record in records if key <= progress and key[-1] == progress[-1]]
    return max(earlier, key=lambda entry: entry[0])[1] if earlier else None


def records_of_all(
    contributions: list[Contribution], furthest: tuple[Any, ...]
) -> tuple[list[dict[str, Any]], bool]:  # fmt: skip
    """Return the per-rank states to continue with, and whether there is one for each rank, in their order.

    Otherwise the main rank receives all metric sums, which are only needed in total.

    Args:
        contributions: of all members, by rank.
        furthest: progress of the most advanced member.
    """
    present = [record_at(member.records, furthest, member.now) for member in contributions]
    vacant = [records for member in contributions for since, records in member.vacant if since > furthest[-1]]
    absent = [record_at(records, furthest) for records in vacant]
    each_rank = not vacant and all(record is not None for record in present)
    return [record for record in (*present, *absent) if record is not None], each_rank


def later_changes(records: Records) -> dict[tuple[Any, ...], LaterChanges]:
    """Return the buffers and attributes that differ in the first record, by the progress of each other record.

    A rank that dies in a hook after an update has a record from before this hook, which does not run again. The
    progress of the first record may be the same, if this member was interrupted in a later hook.

    Args:
        records: per-rank state by progress, of the most advanced member; newest first.
    """
    newest, newest_by_key = records[0][1], dict(reversed(records[1:]))
    buffers: dict[str, bytes] = newest["buffers"] or {}
    return {
        key: LaterChanges(
            {name for name, value in buffers.items() if (record["buffers"] or {}).get(name) != value},
            record["attributes"],
            differing(newest["attributes"], record["attributes"]),
        )
        for key, record in newest_by_key.items()
    }


@final
class MemberStates:
    """Loads the state of the most advanced member on all members of a generation.

    A worker may die while the members load the state, when only some of them have finished. A member starts to train
    only after all have loaded it. Until the supervisor has received that a member trains (`Generation.settled`), every
    member therefore contributes to the next generation what it contributed before, or has loaded.

    Args:
        session: this rank's session.
        ft: fault tolerance of the session.
        survivor: this rank was a member before; False for a replacement.

    Attributes:
        incomplete: names of attributes that hooks change in which a rank has died, and whether that rank has the values
            of another rank; otherwise it lacks these changes.
    """

    def __init__(self, session: Session, ft: RankRecords, *, survivor: bool) -> None:
        self._session, self._ft = session, ft
        # Start of the interrupted batch, until a state is loaded:
        self._batch_start = (ft.end_point or ft.resume_point or session.rank_state()) if survivor else None
        session.state.judging = session.state.judging or ft.judging
        self._contribution = Contribution() if self._batch_start is None else self._present(self._batch_start)
        self._common: dict[str, Any] | None = None  # loaded state that some members may lack
        self._loaded_in = -1  # newest generation, if it has loaded the state; else -1
        self.incomplete: dict[str, bool] = {}

    def prepare(self, generation: Generation) -> None:
        """Select the contribution to a generation.

        Args:
            generation: generation that this rank will join.
        """
        if 0 <= self._loaded_in <= generation.settled:  # a member trains with the loaded state
            self._contribution, self._common = self._present(self._session.rank_state()), None
        self._loaded_in = -1

    def load(self, generation: Generation) -> int:
        """Load the state of the most advanced member; collective.

        Nothing changes before all data is received.

        Args:
            generation: generation that this rank has joined.

        Returns:
            number of failures that this state includes.

        Raises:
            RuntimeError: all members are replacements.
        """
        session, contribution = self._session, self._contribution
        members = self._gather(generation)
        furthest = max(member.progress for member in members)
        if not furthest:
            raise RuntimeError(
                "no member of the process group has the state of the run; resume from a checkpoint on disk"
            )
        world, holder = session.world, [member.progress for member in members].index(furthest)
        lockstep = session.strategy.traits.lockstep
        if self._batch_start is not None and (contribution.progress == furthest or not lockstep):
            self._ft.load_attributes(self._batch_start.attributes)
            for options in self._ft.options:  # the hooks of the interrupted work run again
                options.remove_added()
                options.restore()
        entries = hook_entries(session)
        common = self._common
        if world.rank == holder and common is None:
            common = {**common_state(session), "hook_entries": entries, "later": self._later_changes()}
            common["attributes"] = packed(self._ft.attributes.changed()) if self._ft.attributes is not None else []
            if self._batch_start is not None:  # the hooks of the interrupted work run again
                common = self._batch_start.with_states(common)
        common = world.broadcast_object(common if world.rank == holder else None, holder)
        # A member may have been lost after it has agreed, and before the others have received that all agree.
        stop = next((member.stop for member in members if member.progress == furthest and member.stop), common["stop"])
        common["stop"] = stop
        if lockstep:
            if any(member.progress != furthest for member in members):
                weights = self._broadcast_weights(holder)
                if contribution.progress != furthest:
                    session.strategy.load_state_dict(weights, session.module, session.optimizers)
            for member in members:
                self.incomplete |= member.complete(common["later"], furthest)
            record = record_at(members[world.rank].records, furthest, members[world.rank].now)
            records, each_rank = records_of_all(members, furthest)
            source = world.rank if each_rank else None
            if contribution.progress == furthest and self._batch_start is not None and self._batch_start.of_window:
                self._batch_start.restore_buffers(session.module)
        else:  # the servers have the weights, and each worker keeps its metric sums
            record = record_at(members[world.rank].records, furthest, members[world.rank].now)
            records = [] if record is None else [record]
            source = 0 if records else None
        states = [from_record(per_rank) for per_rank in records]
        self._ft.torn = False
        newcomer = not contribution.progress
        # A worker at its own pace has other state than the most advanced worker.
        behind = newcomer or (lockstep and contribution.progress != furthest)
        if lockstep and behind:  # before on_load_checkpoint, which may set attributes, too
            self._ft.load_attributes(unpacked(common["attributes"] if record is None else record["attributes"]))
        load_common_state(session, {**common, "ranks": states}, source, newcomer=newcomer, behind=behind)
        self._contribution = Contribution(furthest, [] if record is None else [(furthest, record)], stop=stop)
        self._common, self._batch_start, self._loaded_in = common, None, generation.number
        failures: int = common["failures"]
        return failures

    def record(self) -> None:
        """Record the loaded state, before any rank continues: a replacement of this rank starts from this record."""
        session, contribution, slot = self._session, self._contribution, self._ft.slot
        if contribution.records and slot is not None:  # both records are needed until the generation is settled
            slot.write(*contribution.records[0])
        self._ft.record()
        contribution.records.append((progress(session), record_of(session.rank_state(), self._ft.buffers)))

    def _present(self, point: RankState) -> Contribution:
        """Return the present state as a contribution, with that at a point as the record to continue from."""
        session = self._session
        now = record_of(session.rank_state(), self._ft.buffers)
        if self._ft.publishing:  # other ranks may have finished this epoch
            now = after_publishing(now)
        stop = session.stop.reason if session.stop.agreed else ""
        return Contribution(
            progress(session), [(progress(session), record_of(point, self._ft.buffers))], now, stop=stop
        )

    def _gather(self, generation: Generation) -> list[Contribution]:
        """Return the contributions of all members, by rank; a replacement has the records of its predecessors."""
        folder, worker, world = membership().folder, membership().worker, self._session.world
        records, vacant = self._contribution.records, []
        if not self._contribution.progress:
            records = _read_slots(folder, generation.replacements.get(worker, ()))
        if world.main_rank:
            vacant = [(since, _read_slots(folder, workers)) for since, workers in generation.departed]
        return world.gather_objects(replace(self._contribution, records=records, vacant=vacant))

    def _later_changes(self) -> dict[tuple[Any, ...], LaterChanges]:
        """Return `later_changes` of this rank, which is the most advanced member."""
        if self._ft.slot is None:
            return {}
        return later_changes([*self._contribution.records, *_read_slots(membership().folder, [membership().worker])])

    def _broadcast_weights(self, holder: int) -> Any:
        """Return the weights and the optimizer states of rank `holder`, on all ranks."""
        session, world = self._session, self._session.world
        held: tuple[Any, dict[str, Tensor]] = (None, {})  # plain data and tensors of the holder
        if world.rank == holder:
            state = session.strategy.state_dict(session.module, session.optimizers)
            state["module"].update(self._batch_start.buffers if self._batch_start is not None else {})
            held = tree.split(state)
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in held[1].items()}
        rest, kinds = world.broadcast_object((held[0], kinds), holder)
        tensors = {}
        for name, (shape, dtype) in kinds.items():
            source = held[1].get(name)
            tensor = torch.empty(shape, dtype=dtype, device=world.device) if source is None else source.to(world.device)
            tensors[name] = world.broadcast(tensor, holder)
        return tree.join(rest, tensors)


def _read_slots(folder: str, workers: Iterable[int]) -> Records:
    return [entry for worker in workers for entry in rank_record.read(folder, worker)]
