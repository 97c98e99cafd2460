"""Optimizers over parts of parameters: cut for servers with all attributes, and joined again."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.parameter_server.wire.messages import Groups
from fabricx.parameter_server.wire.partition import Piece, Rows, Shard

_OWN: Final = ("state", "param_groups", "defaults")  # what torch's own pickling of an optimizer contains
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SKIPPED: Final = (*_HOOKS, "_opt_called", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
                   "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")  # fmt: skip


@final
@dataclass
class PackedOptimizers:
    """Optimizers as plain data: attributes, groups and state of each, and of optimizers that they contain.

    torch's own pickling keeps state and groups only, and drops attributes that a subclass has added.

    Attributes:
        data: the objects, pickled; tensors are referred to by number, parameters first.
        tensors: all others.
        given: the group values that workers brought last; see `Hyperparameters`.
    """

    data: bytes
    tensors: list[Tensor]
    given: Groups

    def unpack(self, parameters: Sequence[Tensor]) -> list[Optimizer]:
        """Return the optimizers, over parameters in the order in which they were packed."""
        tensors = [*parameters, *self.tensors]
        reader = pickle.Unpickler(io.BytesIO(self.data))
        reader.persistent_load = lambda number: tensors[number]  # type: ignore[method-assign]
        optimizers: list[Optimizer] = reader.load()
        return optimizers


def pack(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor],
    parts: Sequence[Piece | Rows] | None = None, given: Groups | None = None,
) -> PackedOptimizers:  # fmt: skip
    """Return optimizers as plain data.

    Args:
        optimizers: they stay as they are.
        parameters: those to keep, in this order; state and groups of others are left out.
        parts: of each parameter; tensors of the optimizers' state are cut to it and copied. None for whole parameters,
            with live tensors instead of copies.
        given: see `PackedOptimizers`; the values as they are, if not given.

    Raises:
        ValueError: an attribute refers to a parameter that isn't kept, or can't be pickled.
    """
    file = io.BytesIO()
    packer = _Packer(file, parameters, parts)
    try:
        packer.dump(list(optimizers))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"an attribute of {names} can't be sent to a server: {error}\n"
            "  functions have to be defined at the top level of a module; or take optimizer='worker', or strategy=ddp"
        ) from error
    return PackedOptimizers(file.getvalue(), packer.tensors, given or groups_of(nested(optimizers)))


class _Packer(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, parameters: Sequence[Tensor], parts: Sequence[Piece | Rows] | None
    ) -> None:  # fmt: skip
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._copies = parts is not None
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._parts = {id(p): part for p, part in zip(parameters, parts or (), strict=False)}
        self.tensors: list[Tensor] = []
        self._replaced: dict[int, tuple[Any, Any]] = {}  # shared groups and states stay shared
        self._others: dict[int, tuple[Tensor, int]] = {}
        self._left_out: set[int] = set()

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if (number := self._numbers.get(id(value))) is not None:
            return number
        if id(value) in self._left_out:
            raise ValueError(
                "an attribute of the optimizer refers to a parameter that lies on another server: take servers=1, or "
                "optimizer='worker'"
            )
        if id(value) not in self._others:
            self._others[id(value)] = value, len(self._numbers) + len(self.tensors)
            view = value.untyped_storage().nbytes() != value.nbytes  # pickled, it would take all that it is a view of
            self.tensors.append(value.detach().cpu().clone() if self._copies or view else value)
        return self._others[id(value)][1]

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Optimizer):
            return NotImplemented
        kept = attributes_of(value)
        self._left_out |= {id(p) for p in _parameters(value) if id(p) not in self._numbers}
        kept["param_groups"] = self._once(value.param_groups, self._groups)
        kept["state"] = self._once(value.state, self._state)
        if "defaults" in vars(value):
            kept["defaults"] = value.defaults
        # A wrapper that doesn't call torch's constructor has no hooks, and none may be added to its class.
        fill = _fill if _HOOKS[0] in vars(value) else _fill_plainly
        return _blank, (type(value),), kept, None, None, fill

    def _once(self, source: Any, make: Callable[[Any], Any]) -> Any:
        if id(source) not in self._replaced:
            self._replaced[id(source)] = source, make(source)
        return self._replaced[id(source)][1]

    def _groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._once(group, self._group) for group in groups]

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [p for p in group["params"] if id(p) in self._numbers]}

    def _state(self, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
        found: Any = copy.copy(state)
        found.clear()
        for key, values in state.items():
            if not isinstance(key, Tensor):
                found[key] = values
            elif id(key) in self._numbers:
                part = self._parts.get(id(key))
                cut = part is not None and isinstance(values, dict)
                found[key] = {name: _state_of(value, key, part) for name, value in values.items()} if cut else values
        return found  # type: ignore[no-any-return]


def _blank(kind: type[Optimizer]) -> Optimizer:
    return object.__new__(kind)


def _fill(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    Optimizer.__setstate__(optimizer, {"defaults": {}, **attributes})


def _fill_plainly(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    vars(optimizer).update(attributes)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes other than state, groups, hooks and torch's own bookkeeping."""
    return {
        name: value for name, value in vars(optimizer).items()
        if name not in (*_OWN, *_SKIPPED) and not hasattr(value, "_wrapped_by_lr_sched")
    }  # fmt: skip


def nested(value: Any) -> list[Optimizer]:
    """Return the optimizers in a value: itself, those in a container, and those in optimizers' attributes; each once.

    >>> nested([])
    []
    """
    found: dict[int, Optimizer] = {}

    def look(value: Any) -> None:
        if isinstance(value, Optimizer):
            if id(value) not in found:
                found[id(value)] = value
                look(attributes_of(value))
        elif isinstance(value, (list, tuple, dict)):
            for part in value.values() if isinstance(value, dict) else value:
                look(part)

    look(value)
    return list(found.values())


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def sliced(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], shard: Shard
) -> tuple[PackedOptimizers, list[Tensor]]:  # fmt: skip
    """Return copies of optimizers that step one server's part of their parameters.

    Args:
        optimizers: the user's own; they stay as they are.
        parameters: all of them, by number.
        shard: what the server keeps.

    Returns:
        the copies, and the parts, as parameters: whole ones in their shape, pieces as vectors.
    """
    whole = [parameters[part.parameter] for part in shard.parts]
    made: list[Tensor] = []
    for parameter, part in zip(whole, shard.parts, strict=True):
        made.append(nn.Parameter(part_of(parameter, part).cpu().clone(memory_format=torch.contiguous_format)))
    return pack(optimizers, whole, shard.parts), made


def part_of(tensor: Tensor, part: Piece | Rows) -> Tensor:
    """Return a part of a parameter, or of something of its shape: a view where there is one."""
    whole = tensor.detach()
    if isinstance(part, Rows):
        return whole[part.first :: part.step]
    return whole if part.size == whole.numel() else whole.reshape(-1)[part.start : part.stop]


def flat_part(tensors: Sequence[Tensor], shard: Shard) -> Tensor:
    """Return a server's part of tensors of the parameters' shapes, by parameter, as one vector."""
    return torch.cat([part_of(tensors[part.parameter], part).reshape(-1) for part in shard.parts])


def _state_of(value: object, whole: Tensor, part: Piece | Rows | None) -> object:
    """Return a part of an optimizer's state of a parameter; numbers and tensors of another shape are copied whole."""
    if not isinstance(value, Tensor) or part is None:
        return value
    # A tensor of its own, which is copied later: each part counts its own steps.
    return part_of(value, part) if value.shape == whole.shape else value.detach()


@final
@dataclass
class ServerOptimizers:
    """Optimizers as one server has them.

    Attributes:
        shard: its part of the parameters.
        packed: the optimizers.
    """

    shard: Shard
    packed: PackedOptimizers


def take_in(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], servers: Sequence[ServerOptimizers]) -> None:
    """Put what the servers' optimizers have become into those of a worker: state, attributes, changed group values.

    Args:
        optimizers: of the worker, over whole parameters.
        parameters: all of them, by number.
        servers: the parts of all servers; attributes are the first server's.
    """
    unpacked = []
    for server in servers:
        whole = [parameters[part.parameter] for part in server.shard.parts]
        unpacked.append(server.packed.unpack(whole))
    parts = [{id(parameters[part.parameter]): part for part in server.shard.parts} for server in servers]
    copies = [nested(found) for found in unpacked]
    for place, own in enumerate(nested(optimizers) if servers else ()):
        _take_in_one(own, [mine[place] for mine in copies], parts)
        [now], given = groups_of([copies[0][place]]), servers[0].packed.given[place]
        for group, values, before in zip(own.param_groups, now, given, strict=True):
            group.update({k: v for k, v in values.items() if k not in before or not _same(before[k], v)})


def _take_in_one(
    own: Optimizer, copies: Sequence[Optimizer], parts: Sequence[Mapping[int, Piece | Rows]]
) -> None:  # fmt: skip
    for name, value in attributes_of(copies[0]).items():
        if not nested(value):
            setattr(own, name, value)
    for key, values in copies[0].state.items():
        if not isinstance(key, Tensor):
            own.state[key] = values
    for parameter in _parameters(own):
        pairs = [(part[id(parameter)], mine.state[parameter]) for mine, part in zip(copies, parts, strict=True)
                 if parameter in mine.state]  # fmt: skip
        if state := join_states(parameter, pairs):
            own.state[parameter] = state


def join_states(parameter: Tensor, parts: Sequence[tuple[Piece | Rows, dict[str, object]]]) -> dict[str, object]:
    """Put together what optimizers remember of the parts of one parameter."""
    states = [(part, state) for part, state in parts if state]
    if not states:
        return {}
    joined: dict[str, object] = {}
    for key, first in states[0][1].items():
        if not isinstance(first, Tensor) or first.numel() != states[0][0].size or not first.dim():
            joined[key] = first
            continue
        whole = torch.zeros(parameter.shape, dtype=first.dtype)
        for part, state in states:
            value = state[key]
            assert isinstance(value, Tensor)
            if isinstance(part, Rows):
                part_of(whole, part).copy_(value)
            else:
                whole.view(-1)[part.start : part.stop] = value.reshape(-1)
        joined[key] = whole.to(parameter.device)
    return joined


@final
class Remembered:
    """Attributes and group values of optimizers at one moment, to return to."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        every = nested(optimizers)
        self._attributes = [(own, attributes_of(own)) for own in every]
        self._groups = [(group, dict(group)) for own in every for group in own.param_groups]

    def restore(self) -> None:
        """Undo later changes."""
        for own, attributes in self._attributes:
            vars(own).update(attributes)
        for group, values in self._groups:
            group.clear()
            group.update(values)


@final
class Hyperparameters:
    """Applies the group values that workers bring, without undoing what the optimizers' own steps have changed.

    Some optimizers keep counters or estimates in their groups. A worker's copy isn't stepped and has their first
    values, so a value is taken over only when workers have changed it since the last time.

    Args:
        optimizers: as a server has them.
        given: the values that workers brought last, by group of each optimizer, contained ones too.
    """

    def __init__(self, optimizers: Sequence[Optimizer], given: Groups) -> None:
        self._optimizers = nested(optimizers)
        self.given = given

    def apply(self, groups: Groups) -> None:
        """Take over the values that workers have changed."""
        for optimizer, given, new in zip(self._optimizers, self.given, groups, strict=True):
            for group, before, values in zip(optimizer.param_groups, given, new, strict=True):
                for name, value in values.items():
                    if name not in before or not _same(before[name], value):
                        group[name] = before[name] = value


def groups_of(optimizers: Sequence[Optimizer]) -> Groups:
    """Return the hyperparameters of each group of each optimizer; tensors are copies."""
    return [
        [{name: value.clone() if isinstance(value, Tensor) else value
          for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]  # fmt: skip


def same_groups(one: Groups | None, other: Groups) -> bool:
    """Return whether hyperparameters are the same; None stands for none that were given."""
    if one is None or one is other:
        return True
    pairs = [(a, b) for mine, yours in zip(one, other, strict=True) for a, b in zip(mine, yours, strict=True)]
    return all(a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a) for a, b in pairs)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # of several elements
        return False
