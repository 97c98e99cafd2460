"""Results of a run, transferred from a worker to the caller's objects."""

from __future__ import annotations

import contextlib
import copy
import io
import types
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fabricx import by_value
from fabricx.checkpoint.stored_tensors import stored_tensors
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.metrics.objects import attributes_of_metrics, metric_objects, set_states, states_of, states_on_cpu
from fabricx.trainer.attributes import Changed, refuse_shards
from fabricx.trainer.run_records import RunRecords
from fabricx.trainer.sessions import Returned

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.datamodule import DataModule
    from fabricx.core.logger import Logger
    from fabricx.core.module import Module


@dataclass
class Outcome:
    """The result of a job on the main rank; `portable` makes it plain data, which a worker can send to its parent.

    Attributes:
        results: metrics or outputs of the job.
        weights: the complete state dict of the module, by name.
        buffers: names of buffers of the module.
        records: records of the trainer, which the caller's trainer adopts.
        attributes: attributes of the module.
        modes: whether each submodule is in training mode, by name.
        metrics: states of metric objects, by path in the module.
        of_metrics: other attributes of metric objects, collections and wrappers, by path in the module.
        added: layers that `setup` and `configure_model` have added to the module in the workers, by path.
        tied: groups of names of the same tensor, among them a tensor of an added layer.
        built: metric objects, collections and wrappers that the workers have added to the module, by path.
        callbacks: of each callback of the run: its number among the caller's callbacks and its attributes; or None and
            a copy, for a callback that the module has configured.
        loggers: attributes of each logger that the caller's logger takes over.
        changed: other attributes that the run has changed.
        returned: optimizers and schedules of a fit.
        options: numbers and texts among the options of the trainer that hooks have set.
    """

    results: Any = None
    weights: dict[str, Any] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    records: RunRecords = field(default_factory=RunRecords)
    attributes: dict[str, Any] = field(default_factory=dict)
    modes: dict[str, bool] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    of_metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    added: dict[str, nn.Module] = field(default_factory=dict)
    tied: list[tuple[str, ...]] = field(default_factory=list)
    built: dict[str, Any] = field(default_factory=dict)
    callbacks: list[tuple[int | None, Any]] = field(default_factory=list)
    loggers: list[dict[str, Any]] = field(default_factory=list)
    changed: Changed = field(default_factory=Changed)
    returned: Returned = field(default_factory=Returned)
    options: dict[str, Any] = field(default_factory=dict)

    def portable(
        self, module: Module, callbacks: Sequence[Callback], callers: Sequence[Callback], loggers: Sequence[Logger],
        records: RunRecords, weights: dict[str, Any], known: Collection[str] | None = None,
    ) -> Outcome:  # fmt: skip
        """Add the attributes that the caller's objects copy.

        Args:
            module, callbacks, loggers: of the run, on the main rank.
            callers: callbacks of the caller, in the caller's order.
            records: records of the trainer.
            weights: the complete state dict of the module.
            known: names of the submodules of the caller's module; None for all.

        Returns:
            this object.
        """
        self.weights, self.records = weights, records
        self.buffers = frozenset(name for name, _ in module.named_buffers(remove_duplicate=False))
        own = (types.MethodType, weakref.ref)  # of objects in this process
        self.attributes = picklable_part(
            {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, own)}
        )
        parts = dict(module.named_modules())
        self.modes = {name: part.training for name, part in parts.items()}
        self.metrics = {name: states_on_cpu(states_of(metric)) for name, metric in metric_objects(module).items()}
        self.of_metrics = {
            name: picklable_part(attributes) for name, attributes in attributes_of_metrics(module).items()
        }
        known = parts if known is None else known
        added = {
            name: parts[name] for name in self.of_metrics
            if name not in known and name.rpartition(".")[0] in known
        }  # fmt: skip
        for part in added.values():
            part.to("cpu")
        self.built = picklable_part(added)
        self.added = picklable_part(self.added)
        numbers = {id(callback): number for number, callback in enumerate(callers)}
        for callback in callbacks:
            number, content = numbers.get(id(callback)), picklable_part(vars(callback))
            sent = {"": content} if number is not None else picklable_part({"": _copy_of(callback, content)})
            self.callbacks += [(number, part) for part in sent.values()]
        self.loggers = [logger.for_caller() for logger in loggers]
        return self

    def absorb(
        self, module: Module, callbacks: Sequence[Callback], loggers: Sequence[Logger], data: DataModule | None = None
    ) -> list[Callback]:  # fmt: skip
        """Copy the state of the workers' module, callbacks and loggers to the caller's objects.

        Args:
            module, callbacks, loggers: of the caller.
            data: data module of the caller, if any.

        Returns:
            the callbacks of the run: the caller's, and those that the module has configured in the workers.
        """
        _separate(module, self.weights)
        state = stored_tensors(module)
        lazy = {name for name, value in state.items() if isinstance(value, Tensor) and nn.parameter.is_lazy(value)}
        for name, tensor in self.weights.items():
            if not isinstance(tensor, Tensor) or name not in state or name in lazy:
                continue
            with torch.no_grad():
                if state[name].shape != tensor.shape:  # `setup` has set a tensor of a different shape
                    state[name].data = torch.empty_like(tensor, device=state[name].device)
                state[name].data = state[name].data.to(tensor.dtype)  # differs with precision="64-true"
                state[name].copy_(tensor)
        if lazy or set(state) != set(self.weights):  # layers that configure_model or setup has built in the workers
            module.configure_model()
            self._add_layers(module)
            _follow_pruning(module, self.weights)
            _add_missing(module, self.weights, self.buffers)
            _load(module, self.weights)
        else:  # extra state of submodules
            others = {name: value for name, value in self.weights.items() if not isinstance(value, Tensor)}
            module.load_state_dict(others, strict=False) if others else None
        vars(module).update(self.attributes)
        self.changed.absorb(module, data)
        self._absorb_metrics(module)
        for name, part in module.named_modules():
            part.training = self.modes.get(name, part.training)
        for logger, attributes in zip(loggers, self.loggers, strict=False):
            vars(logger).update(attributes)
        for number, attributes in self.callbacks:
            if number is not None:
                vars(callbacks[number]).update(attributes)
        return [copied if number is None else callbacks[number] for number, copied in self.callbacks]

    def _add_layers(self, module: Module) -> None:
        """Add the layers that the workers have built; their weights are loaded later."""
        for name, layer in self.added.items():
            owner, _, key = name.rpartition(".")
            parent = module.get_submodule(owner)
            if parent._modules.get(key) is None:
                setattr(parent, key, layer._apply(_in_memory))
        parts = dict(module.named_modules(remove_duplicate=False))
        for group in self.tied:
            places = [(parts.get(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group]
            tensor = getattr(places[0][0], places[0][1], None)
            for part, key in places[1:] if tensor is not None else ():
                if part is not None:
                    setattr(part, key, tensor)

    def _absorb_metrics(self, module: Module) -> None:
        """Set the states of metric objects; objects that workers have built are added."""
        for name, part in self.built.items():
            parent, _, key = name.rpartition(".")
            module.get_submodule(parent)._modules.setdefault(key, part)
        metrics = metric_objects(module)
        for name in self.metrics.keys() & metrics.keys():
            set_states(metrics[name], self.metrics[name])
        parts = dict(module.named_modules())
        for name in self.of_metrics.keys() & parts.keys():
            parts[name].__dict__.update(self.of_metrics[name])
        if lost := sorted(self.metrics.keys() - metrics.keys()):
            warnings.warn(
                f"metric objects that the workers have created can't be sent, so their states remain in the workers: "
                f"{', '.join(lost)}. Create them in __init__",
                stacklevel=2,
            )


def _separate(module: Module, weights: Mapping[str, Any]) -> None:
    """Copy the submodules and tensors that have several names here, and different values by name in the run.

    `self.average = self.model` in `__init__` with a copy in a `setup` of the workers is an example.

    Args:
        module: of the caller.
        weights: the complete state dict of the workers' module.
    """
    first: dict[int, str] = {}
    for name, tensor in stored_tensors(module).items():
        other = first.setdefault(id(tensor), name)
        value, known = weights.get(name), weights.get(other)
        if other == name or not isinstance(value, Tensor) or not isinstance(known, Tensor):
            continue
        if value.shape == known.shape and torch.equal(as_bytes(value), as_bytes(known)):  # also NaN
            continue
        try:
            _replace_by_copy(module, name.split("."), tensor)
        except Exception as error:  # such as a module that can't be copied
            warnings.warn(
                f"{name} and {other} are different in the run and the same here, and {name} can't be copied "
                f"({type(error).__name__}: {error}): both now have the values of {name}. Make the copy in __init__",
                stacklevel=2,
            )


def _replace_by_copy(module: Module, path: list[str], tensor: Tensor) -> None:
    """Copy the outermost submodule, or the tensor, of a path that has another name before it."""
    parts = dict(module.named_modules())  # each submodule by its first name
    for end, key in enumerate(path):
        owner = module.get_submodule(".".join(path[:end]))
        part = getattr(owner, key)
        if part is tensor or (isinstance(part, nn.Module) and parts.get(".".join(path[: end + 1])) is not part):
            setattr(owner, key, copy.deepcopy(part))
            break


def _in_memory(tensor: Tensor) -> Tensor:
    """Return memory for a tensor on the meta device."""
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor


def _add_missing(module: Module, weights: Mapping[str, Any], buffers: Collection[str]) -> None:
    """Add the parameters and buffers that the run has registered in submodules that the caller's module has, too.

    Args:
        module: of the caller.
        weights: the complete state dict of the workers' module.
        buffers: names of its buffers.
    """
    parts, known = dict(module.named_modules()), module.state_dict()
    for name, value in weights.items():
        owner, _, key = name.rpartition(".")
        if name not in known and owner in parts and isinstance(value, Tensor):
            if key in vars(parts[owner]):  # such as `self.scale = None` in __init__
                delattr(parts[owner], key)
            if name in buffers:
                parts[owner].register_buffer(key, value.clone())
            else:
                parts[owner].register_parameter(key, nn.Parameter(value.clone(), value.is_floating_point()))


def _follow_pruning(module: Module, weights: Mapping[str, Any]) -> None:
    """Prune the tensors that hooks have pruned in the workers, and end the pruning that hooks have ended.

    Args:
        module: of the caller.
        weights: the complete state dict of the workers' module.
    """
    parts, known = dict(module.named_modules()), module.state_dict()
    for name in {*weights, *known} - (weights.keys() & known.keys()):
        owner, _, key = name.rpartition(".")
        pruned = {f"{name}_orig", f"{name}_mask"}
        if owner in parts and name in known and pruned <= weights.keys():
            prune.custom_from_mask(parts[owner], key, weights[f"{name}_mask"])  # type: ignore[no-untyped-call]
        elif owner in parts and name in weights and pruned <= known.keys():
            prune.remove(parts[owner], key)  # type: ignore[no-untyped-call]


def _load(module: Module, weights: Mapping[str, Any]) -> None:
    """Load the weights of the run.

    Raises:
        ValueError: the workers' module has other layers than the caller's.
    """
    known = module.state_dict().keys()
    lacking, further = (sorted(names) for names in (known - weights.keys(), weights.keys() - known))
    if lacking or further:
        changes = [f"{what} {', '.join(names)}" for what, names in (("added", further), ("removed", lacking)) if names]
        raise ValueError(
            f"the run has ended, but its weights don't fit into the module of this process, since hooks or steps have "
            f"{' and '.join(changes)} in the workers. Create and replace layers in __init__, setup or "
            "configure_model; or end the script with the run, and read its last checkpoint"
        )
    module.load_state_dict(weights)


def added_layers(module: Module, known: Collection[str]) -> Outcome:
    """Return copies of the layers that a worker's module has and the caller's lacks; parameters have no memory.

    Args:
        module: all layers are built, and none is sharded or divided yet.
        known: names of the submodules of the caller's module.

    Returns:
        an outcome with `added` and `tied`.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    apart = attributes_of_metrics(module)  # `Outcome.built` has these
    names = [name for name in parts if name not in known and name.rpartition(".")[0] in known and name not in apart]
    if not names:
        return Outcome()
    memo: dict[int, Any] = {id(part): part for name, part in parts.items() if name in known}
    saved = {id(value) for value in stored_tensors(module).values()}
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False),
    ):  # fmt: skip
        by_tensor.setdefault(id(tensor), []).append(name)
        if id(tensor) in saved and not nn.parameter.is_lazy(tensor):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    added = {}
    for name in names:
        with contextlib.suppress(Exception):  # it can't be copied: `absorb` raises an error if it has weights
            added[name] = copy.deepcopy(parts[name], memo)
    return Outcome(added=added, tied=[tuple(group) for group in by_tensor.values() if len(group) > 1])


def holders(module: Module, callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return the objects whose metric objects have a state after a run, by name.

    Args:
        module, callbacks: of the run.
    """
    return {"module": module} | {f"{type(callback).__name__} {n}": callback for n, callback in enumerate(callbacks)}


def shared_names(
    trainer: Any, module: Module, data: DataModule | None, callbacks: Sequence[Callback], loggers: Sequence[Logger]
) -> dict[str, Any]:  # fmt: skip
    """Return the objects that the caller and the workers both have, by name: results refer to them.

    Args:
        trainer, module, data: of the run.
        callbacks, loggers: of the caller, in the caller's order.
    """
    named: dict[str, Any] = {"trainer": trainer, "strategy": trainer.strategy}
    for parts in (module.named_modules(), module.named_parameters(), module.named_buffers()):
        named |= {f"module.{name}": part for name, part in parts}
    named |= {} if data is None else {"data": data}
    named |= {f"callback {number}": callback for number, callback in enumerate(callbacks)}
    return named | {f"logger {number}": logger for number, logger in enumerate(loggers)}


def _copy_of(callback: Callback, attributes: dict[str, Any]) -> Callback:
    """Return a callback of the same class with these attributes only."""
    copied: Callback = type(callback).__new__(type(callback))
    vars(copied).update(attributes)
    return copied


def picklable_part(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that can be pickled.

    Args:
        attributes: attributes of any object, by name.
    """
    kept = {}
    for name, value in attributes.items():
        try:
            by_value.dump(value, io.BytesIO(), home=True, reduce=refuse_shards)
        except Exception:
            continue  # an open file, a progress bar, a shard of a tensor: of no use outside of the worker
        kept[name] = value
    return kept
