"""Optimizers over parts of parameters: divided for servers with all attributes, and joined again."""

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

from fabricx import by_value
from fabricx.parameter_server.wire.messages import Groups
from fabricx.parameter_server.wire.partition import Piece, Rows, Shard

_OWN: Final = ("state", "param_groups", "defaults")  # attributes that torch's pickling of an optimizer includes
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SKIPPED: Final = (*_HOOKS, "_opt_called", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
                   "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")  # fmt: skip


@final
@dataclass
class PackedOptimizers:
    """Optimizers as plain data: attributes, groups and state, including nested optimizers.

    torch's pickling includes state and groups only, and drops attributes of subclasses.

    Attributes:
        data: the pickled objects; tensors are replaced by numbers, parameters first.
        tensors: tensors other than parameters.
        pushed: group values that workers have pushed last; see `Hyperparameters`.
    """

    data: bytes
    tensors: list[Tensor]
    pushed: Groups

    def unpack(self, parameters: Sequence[Tensor]) -> list[Optimizer]:
        """Restore the optimizers over new parameters.

        Args:
            parameters: parameters in the order in which they were packed.
        """
        tensors = [*parameters, *self.tensors]
        reader = pickle.Unpickler(io.BytesIO(self.data))
        reader.persistent_load = lambda number: tensors[number]  # type: ignore[method-assign]
        optimizers: list[Optimizer] = reader.load()
        return optimizers


def pack(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor],
    parts: Sequence[Piece | Rows] | None = None, pushed: Groups | None = None,
) -> PackedOptimizers:  # fmt: skip
    """Convert optimizers to plain data.

    Args:
        optimizers: not changed.
        parameters: parameters to include, in this order; state and groups of other parameters are omitted.
        parts: part of each parameter, for which tensors of the state are cut and copied; None for whole parameters,
            with references to the live tensors.
        pushed: see `PackedOptimizers`; None for the present values.

    Raises:
        ValueError: an attribute refers to an omitted parameter, or can't be pickled.
    """
    file = io.BytesIO()
    packer = _Packer(file, parameters, parts)
    try:
        packer.dump(list(optimizers))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"an attribute of {names} can't be sent to a server: {error}\n"
            "  remove it from the optimizer; or use optimizer='worker', or strategy=ddp"
        ) from error
    return PackedOptimizers(file.getvalue(), packer.tensors, pushed or groups_of(nested(optimizers)))


class _Packer(pickle.Pickler):
    def __init__(
        self, file: io.BytesIO, parameters: Sequence[Tensor], parts: Sequence[Piece | Rows] | None
    ) -> None:  # fmt: skip
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._by_value = by_value.Reducer()
        self._copies = parts is not None
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._parts = {id(p): part for p, part in zip(parameters, parts or (), strict=False)}
        self.tensors: list[Tensor] = []
        self._replaced: dict[int, tuple[Any, Any]] = {}  # keeps shared groups and states shared
        self._others: dict[int, tuple[Tensor, int]] = {}
        self._left_out: set[int] = set()

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if (number := self._numbers.get(id(value))) is not None:
            return number
        if id(value) in self._left_out:
            raise ValueError(
                "an attribute of the optimizer refers to a parameter on another server: use servers=1, or "
                "optimizer='worker'"
            )
        if id(value) not in self._others:
            self._others[id(value)] = value, len(self._numbers) + len(self.tensors)
            view = value.untyped_storage().nbytes() != value.nbytes  # pickle would include the whole storage of a view
            self.tensors.append(value.detach().cpu().clone() if self._copies or view else value)
        return self._others[id(value)][1]

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Optimizer):
            return self._by_value(value)
        kept = attributes_of(value)
        self._left_out |= {id(p) for p in _parameters(value) if id(p) not in self._numbers}
        kept["param_groups"] = self._once(value.param_groups, self._groups)
        kept["state"] = self._once(value.state, self._state)
        if "defaults" in vars(value):
            kept["defaults"] = value.defaults
        # A wrapper that doesn't call torch's constructor has no hooks, and must not get hooks on its class.
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
        cut_state: Any = copy.copy(state)
        cut_state.clear()
        for key, values in state.items():
            if not isinstance(key, Tensor):
                cut_state[key] = values
            elif id(key) in self._numbers:
                part = self._parts.get(id(key))
                cut = part is not None and isinstance(values, dict)
                cut_state[key] = (
                    {name: _state_of(value, key, part) for name, value in values.items()} if cut else values
                )
        return cut_state  # type: ignore[no-any-return]


def _blank(kind: type[Optimizer]) -> Optimizer:
    return object.__new__(kind)


def _fill(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    Optimizer.__setstate__(optimizer, {"defaults": {}, **attributes})


def _fill_plainly(optimizer: Optimizer, attributes: dict[str, Any]) -> None:
    vars(optimizer).update(attributes)


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes, without state, groups, hooks and torch's bookkeeping.

    Args:
        optimizer: optimizer of any class.
    """
    return {
        name: value for name, value in vars(optimizer).items()
        if name not in (*_OWN, *_SKIPPED) and not hasattr(value, "_wrapped_by_lr_sched")
    }  # fmt: skip


def nested(value: Any) -> list[Optimizer]:
    """Return the distinct optimizers in a value: itself, in containers, and in attributes of optimizers.

    Args:
        value: an optimizer, or a container.


    >>> nested([])
    []
    """
    optimizers: dict[int, Optimizer] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Optimizer):
            if id(value) not in optimizers:
                optimizers[id(value)] = value
                collect(attributes_of(value))
        elif isinstance(value, (list, tuple, dict)):
            for part in value.values() if isinstance(value, dict) else value:
                collect(part)

    collect(value)
    return list(optimizers.values())


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def sliced(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], shard: Shard
) -> tuple[PackedOptimizers, list[Tensor]]:  # fmt: skip
    """Return copies of optimizers that step a server's part of the parameters.

    Args:
        optimizers: not changed.
        parameters: all parameters, by number.
        shard: the server's part.

    Returns:
        The copies, and the parts as parameters: whole parameters in their shape, pieces as vectors.
    """
    whole = [parameters[part.parameter] for part in shard.parts]
    made: list[Tensor] = []
    for parameter, part in zip(whole, shard.parts, strict=True):
        made.append(nn.Parameter(part_of(parameter, part).cpu().clone(memory_format=torch.contiguous_format)))
    return pack(optimizers, whole, shard.parts), made


def part_of(tensor: Tensor, part: Piece | Rows) -> Tensor:
    """Return a part of a tensor, as a view if possible.

    Args:
        tensor: a parameter, or a tensor of the same shape.
        part: of the parameter.
    """
    whole = tensor.detach()
    if isinstance(part, Rows):
        return whole[part.first :: part.step]
    return whole if part.size == whole.numel() else whole.reshape(-1)[part.start : part.stop]


def flat_part(tensors: Sequence[Tensor], shard: Shard) -> Tensor:
    """Concatenate a server's parts of tensors to a vector.

    Args:
        tensors: tensors by parameter number, with the parameters' shapes.
        shard: the server's part; it is empty on some servers if there are more of them than parameters.
    """
    parts = [part_of(tensors[part.parameter], part).reshape(-1) for part in shard.parts]
    return torch.cat(parts) if parts else tensors[0].detach().new_empty(0)


def _state_of(value: object, whole: Tensor, part: Piece | Rows | None) -> object:
    """Return a part of a parameter's state; numbers and tensors of another shape are not divided."""
    if not isinstance(value, Tensor) or part is None:
        return value
    # `detach` returns a new tensor object, which is copied later: each part counts its own steps.
    return part_of(value, part) if value.shape == whole.shape else value.detach()


@final
@dataclass
class ServerOptimizers:
    """The optimizers of a server.

    Attributes:
        shard: the server's part of the parameters.
        packed: the optimizers.
    """

    shard: Shard
    packed: PackedOptimizers


def load_from_servers(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], servers: Sequence[ServerOptimizers]
) -> None:
    """Load the servers' optimizer state, attributes and changed group values into a worker's optimizers.

    Args:
        optimizers: the worker's optimizers, over whole parameters; changed in place.
        parameters: all parameters, by number.
        servers: optimizers of all servers; attributes are those of the first server.
    """
    unpacked = []
    for server in servers:
        whole = [parameters[part.parameter] for part in server.shard.parts]
        unpacked.append(server.packed.unpack(whole))
    parts = [{id(parameters[part.parameter]): part for part in server.shard.parts} for server in servers]
    copies = [nested(restored) for restored in unpacked]
    for index, target in enumerate(nested(optimizers) if servers else ()):
        _load_optimizer(target, [parts_of_server[index] for parts_of_server in copies], parts)
        [now], pushed = groups_of([copies[0][index]]), servers[0].packed.pushed[index]
        for group, values, before in zip(target.param_groups, now, pushed, strict=True):
            group.update({k: v for k, v in values.items() if k not in before or not _same(before[k], v)})


def _load_optimizer(
    target: Optimizer, copies: Sequence[Optimizer], parts: Sequence[Mapping[int, Piece | Rows]]
) -> None:  # fmt: skip
    for name, value in attributes_of(copies[0]).items():
        if not nested(value):
            setattr(target, name, value)
    for key, values in copies[0].state.items():
        if not isinstance(key, Tensor):
            target.state[key] = values
    for parameter in _parameters(target):
        pairs = [(part[id(parameter)], source.state[parameter]) for source, part in zip(copies, parts, strict=True)
                 if parameter in source.state]  # fmt: skip
        if state := join_states(parameter, pairs):
            target.state[parameter] = state


def join_states(parameter: Tensor, parts: Sequence[tuple[Piece | Rows, dict[str, object]]]) -> dict[str, object]:
    """Join the optimizer states of a parameter's parts.

    Args:
        parameter: the whole parameter.
        parts: (part, state) of each server.
    """
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
class OptimizerSnapshot:
    """Snapshot of the attributes and group values of optimizers.

    Args:
        optimizers: including nested optimizers.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        every = nested(optimizers)
        self._attributes = [(optimizer, attributes_of(optimizer)) for optimizer in every]
        self._groups = [(group, dict(group)) for optimizer in every for group in optimizer.param_groups]

    def restore(self) -> None:
        """Restore the snapshot."""
        for optimizer, attributes in self._attributes:
            vars(optimizer).update(attributes)
        for group, values in self._groups:
            group.clear()
            group.update(values)


@final
class Hyperparameters:
    """Applies the group values that workers push, without reverting changes by the optimizers' own steps.

    Some optimizers keep counters or estimates in their groups. A worker's copy is not stepped and keeps the initial
    values, so a value is applied only if workers have changed it since their last push.

    Args:
        optimizers: a server's optimizers.
        pushed: values of the last push, by group of each optimizer, including nested optimizers.

    Attributes:
        pushed: see Args.
    """

    def __init__(self, optimizers: Sequence[Optimizer], pushed: Groups) -> None:
        self._optimizers = nested(optimizers)
        self.pushed = pushed

    def apply(self, groups: Groups) -> None:
        """Apply the values that workers have changed since the last call.

        Args:
            groups: values of a push.
        """
        for optimizer, pushed, new in zip(self._optimizers, self.pushed, groups, strict=True):
            for group, before, values in zip(optimizer.param_groups, pushed, new, strict=True):
                for name, value in values.items():
                    if name not in before or not _same(before[name], value):
                        group[name] = before[name] = value


def groups_of(optimizers: Sequence[Optimizer]) -> Groups:
    """Return the hyperparameters of each group of each optimizer; tensors are copied.

    Args:
        optimizers: optimizers in the order of the result.
    """
    return [
        [{name: value.clone() if isinstance(value, Tensor) else value
          for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]  # fmt: skip


def same_groups(first: Groups | None, second: Groups) -> bool:
    """Return whether hyperparameters are equal; None equals everything.

    Args:
        first, second: of the same optimizers.
    """
    if first is None or first is second:
        return True
    pairs = [(a, b) for left, right in zip(first, second, strict=True) for a, b in zip(left, right, strict=True)]
    return all(a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a) for a, b in pairs)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    try:
        return first is second or bool(first == second)
    except (RuntimeError, TypeError, ValueError):  # arrays of several elements
        return False
