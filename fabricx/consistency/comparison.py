"""Compares modules, options and optimizers of all ranks before the first forward.

Ranks with different models exchange gradients of different parameters: they hang, or train incorrectly. Therefore each
rank's digest of its objects is gathered at set-up, and the descriptions are gathered only if the digests differ.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.membership.generations import membership
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.sharding.grad_hooks import number_of_hooks
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.core.callback import Callback
    from fabricx.core.module import Module
    from fabricx.core.optimizers import Schedule
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.strategy import Strategy
    from fabricx.data import Feed

OPTIONS: Final = (
    "precision", "max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches",
    "overfit_batches", "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps",
    "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "deterministic", "sync_batchnorm",
    "use_distributed_sampler", "reload_dataloaders_every_n_epochs", "enable_telemetry",
)  # fmt: skip
LIMITS: Final = (
    "max_epochs", "max_steps", "min_epochs", "min_steps", "gradient_clip_val", "gradient_clip_algorithm",
    "check_val_every_n_epoch", "log_every_n_steps",
)  # fmt: skip
SHOWN: Final = 12  # maximum differences in an error message
SMALL: Final = 8  # maximum elements of a tensor whose values are described
COMPARED: Final = 2**20  # maximum bytes of a checkpoint's tensor whose values are compared
AT_SET_UP: Final = "the ranks at set-up"
NOTHING: Final = "nothing"
BUILD_ALIKE: Final = (
    "create the same objects on all ranks, in __init__, setup, configure_model, configure_optimizers, DataLoaders "
    "and the Trainer (weights may differ: those of rank 0 are used; a rank's own data may differ in an "
    "IterableDataset or another iterable of batches)"
)
NO_CONDITION: Final = (
    "without a condition that depends on the rank (such as self.global_rank or a loss of this rank; join a value with "
    "self.all_gather first)"
)
CHANGE_ALIKE: Final = (
    "change requires_grad, hooks of gradients, layers, optimizers, DataLoaders, weights and the Trainer's options on "
    f"all ranks in the same hook, {NO_CONDITION}"
)


def compare(world: World, described: Mapping[str, str], when: str = "at set-up", remedy: str = BUILD_ALIKE) -> None:
    """Raise an error if ranks have built different objects; every rank calls it.

    Args:
        world: the ranks.
        described: descriptions of this rank's objects by name; their order counts.
        when: moment of the comparison, for the message.
        remedy: next action, for the message.

    Raises:
        RanksDisagree: on every rank; the message lists the differences by rank.
    """
    if world.size == 1:
        return
    digest = hashlib.blake2b(repr(list(described.items())).encode(), digest_size=16).hexdigest()
    if len(set(world.gather_objects(digest))) == 1:
        return
    by_rank: list[dict[str, str]] = world.gather_objects(dict(described))
    names = [] if world.group is None else [f"rank {rank}" for rank in world.members]
    lines = _lines(differences(by_rank, names))
    raise RanksDisagree(f"ranks differ {when}, so they would not train the same model:\n  {lines}\n  {remedy}")


def _lines(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n  ".join([*lines[:SHOWN], *more])


def compare_at_set_up(world: World, part: str, described: Mapping[str, str]) -> None:
    """Compare the objects of all ranks at set-up; a worker that joins later compares with the ranks' set-up.

    Args:
        world: the ranks; a newcomer's world contains only itself.
        part: name of this comparison, unique in the run.
        described: see `compare`.

    Raises:
        RanksDisagree: on every rank, or on the newcomer; the message lists the differences.
    """
    if not membership().changes or world.store is None:
        compare(world, described)
        return
    key = world.key(f"built/{part}")
    if not world.newcomer:
        if world.main_rank:  # written before `compare`, so it exists when any rank trains
            world.store.set(key, json.dumps(dict(described)))
        compare(world, described)
        return
    first = json.loads(world.store.get(key))
    if list(first.items()) != list(described.items()):
        raise RanksDisagree(
            "a worker that joins the run has created other objects than the ranks at set-up:\n  "
            + _lines(differences([first, described], [AT_SET_UP, "this worker"]))
            + f"\n  {BUILD_ALIKE}. Until it has joined, its global_rank is its worker number, {world.rank}"
        )


def share_weights(world: World, module: nn.Module) -> None:
    """Copy parameters and buffers of rank 0 to all ranks if they differ; every rank calls it.

    Ranks initialise layers with their own random numbers. Tensors are sent only if the digests of ranks differ.

    Args:
        world: the ranks.
        module: module to be evaluated. Sharded tensors are consistent already; lazy tensors have no values yet.
    """
    if world.size == 1:
        return
    candidates = (*module.parameters(), *module.buffers())
    tensors = [p for p in candidates if not nn.parameter.is_lazy(p) and not is_dtensor(p)]
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(as_bytes(tensor.cpu()).numpy().data)
    if len(set(world.gather_objects(digest.hexdigest()))) > 1:
        with torch.no_grad():
            for tensor in tensors:
                world.broadcast(tensor.data)


def differences(by_rank: Sequence[Mapping[str, str]], names: Sequence[str] = ()) -> list[str]:
    """Return a line for each object that ranks describe differently.

    Args:
        by_rank: descriptions of each rank, by name.
        names: names of the sources of the descriptions; by default "rank 0", "rank 1", and so on.

    >>> differences([{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1"}])
    ['b: 2 on rank 0, nothing on ranks 1, 2']
    """
    lines = []
    for name in dict.fromkeys(name for described in by_rank for name in described):
        ranks: dict[str, list[int]] = {}
        for rank, described in enumerate(by_rank):
            ranks.setdefault(described.get(name, NOTHING), []).append(rank)
        if len(ranks) > 1:
            parts = (f"{text} on {_name_ranks(members, names)}" for text, members in ranks.items())
            lines.append(f"{name}: " + ", ".join(parts))
    return lines or [
        f"the order: {', '.join(described)} on {_name_ranks([rank], names)}" for rank, described in enumerate(by_rank)
    ]


def _name_ranks(ranks: Sequence[int], names: Sequence[str]) -> str:
    if names:
        return ", ".join(names[rank] for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def of_module(module: nn.Module) -> dict[str, str]:
    """Describe a module: the classes of its submodules, and the shapes of its parameters and buffers.

    Args:
        module: module at any depth.

    >>> list(of_module(nn.Linear(2, 1)).items())[1]
    ('weight', 'parameter, shape [1, 2], float32, trained')
    """
    described = {name or "the module": _kind(part) for name, part in module.named_modules()}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), name)
        trained = "trained" if parameter.requires_grad else "frozen"
        hooks = number_of_hooks(parameter)
        kind = f"parameter, {_like(parameter)}, {trained}" + (f", {hooks} gradient hooks" if hooks else "")
        described[name] = kind if same == name else f"tied to {same}"
    for name, buffer in module.named_buffers():
        described[name] = f"buffer, {_like(buffer)}"
    return described


def _kind(part: nn.Module) -> str:
    """Return the class of a module, with `extra_repr` for modules of torch."""
    of_torch = type(part).__module__.startswith("torch.nn.")
    return f"{type(part).__qualname__}({part.extra_repr() if of_torch else ''})"


def _like(tensor: Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "without a shape yet"
    return f"shape {list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def of_training(
    options: TrainerOptions, module: Module, strategy: Strategy, callbacks: Sequence[Callback]
) -> dict[str, str]:  # fmt: skip
    """Describe the options of the trainer, of the strategy, and of callbacks that need all ranks.

    Args:
        options: the trainer's options.
        module: the user's module.
        strategy: the run's strategy.
        callbacks: the run's callbacks.
    """
    described = {name: _plain(getattr(options, name)) for name in OPTIONS}
    described["automatic_optimization"] = str(module.automatic_optimization)
    described["strategy"] = _options(strategy)
    acting = [callback for callback in callbacks if callback.needs_all_ranks]
    return described | {f"callback {number}": _options(callback) for number, callback in enumerate(acting)}


def of_data(train: Feed | None, evaluation: Sequence[Feed]) -> dict[str, str]:
    """Describe lengths and orders of DataLoaders, which are divided over the ranks.

    Args:
        train: feed of the training data; None for an evaluation.
        evaluation: feeds of the evaluation data.
    """
    described = {} if train is None else {"training data": train.described()}
    return described | {f"evaluation data {number}": feed.described() for number, feed in enumerate(evaluation)}


def _options(plugin: Any) -> str:
    """Return the class of a plugin, with those constructor arguments that it stores as attributes."""
    names = inspect.signature(type(plugin).__init__).parameters
    values = {name: getattr(plugin, name) for name in names if hasattr(plugin, name)}
    plain = ", ".join(f"{name}={_plain(value)}" for name, value in values.items())
    return f"{type(plugin).__qualname__}({plain})"


def of_hooks(
    options: TrainerOptions, module: Module, strategy: Strategy, train: Feed, optimizers: Sequence[Optimizer],
    changed: Collection[str] = (),
) -> dict[str, str]:  # fmt: skip
    """Describe everything that hooks may have changed since set-up and have to change on all ranks.

    Args:
        options: the trainer's options.
        module: the user's module.
        strategy: the run's strategy.
        train: feed of the training data.
        optimizers: optimizers of the module.
        changed: hyperparameters that hooks of some rank have just changed.
    """
    described = {name: _plain(getattr(options, name)) for name in OPTIONS} | of_module(module) | of_data(train, ())
    if not strategy.traits.lockstep:  # hyperparameters of each rank's newest update may differ
        groups = of_optimizers(module, optimizers, ()) if changed else {}
        return described | {name: value for name, value in groups.items() if name in changed}
    # Optimizers from other packages may store values in their groups that were measured on this rank only.
    known = [o for o in optimizers if strategy.traits.synchronous or type(o).__module__.startswith("torch.")]
    # Sorted: loading a state changes the order of a group's options.
    return described | dict(sorted(of_optimizers(module, known, ()).items()))


def of_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], schedules: Sequence[Schedule]
) -> dict[str, str]:  # fmt: skip
    """Describe optimizers (classes, parameters and hyperparameters) and their schedulers.

    Args:
        module: owner of the parameters.
        optimizers: optimizers of the module.
        schedules: schedulers with their options.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    described = {}
    for number, optimizer in enumerate(optimizers):
        where = f"optimizer {number}"
        described[where] = type(optimizer).__qualname__
        for index, group in enumerate(optimizer.param_groups):
            parameters = [names.get(id(p), f"a tensor, {_like(p)}") for p in group["params"]]
            for name, value in ({**group, "params": parameters}).items():
                described[f"{where}, group {index}, {name}"] = _plain(value)
    for number, schedule in enumerate(schedules):
        where, scheduler = f"schedule {number}", schedule.scheduler
        described[where] = f"{type(scheduler).__qualname__} each {schedule.frequency} {schedule.interval}"
        described[f"{where}, monitor"] = repr(schedule.monitor)
        for name, value in vars(scheduler).items() if hasattr(scheduler, "__dict__") else ():
            if not name.startswith("_") and name != "optimizer":
                described[f"{where}, {name}"] = _plain(value)
    return described


def of_added(added: Mapping[str, Any]) -> dict[str, str]:
    """Describe values that hooks add to a checkpoint; of large and sharded tensors, only dtype and shape.

    Args:
        added: values by name.
    """
    return {name: _with_values(value) for name, value in added.items()}


def _with_values(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_with_values(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_with_values, value))}]"
    if not isinstance(value, Tensor) or is_dtensor(value) or value.nbytes > COMPARED or not value.numel():
        return _plain(value)
    words = as_bytes(value.cpu()).numpy().data
    return f"tensor, {_like(value)}, {hashlib.blake2b(words, digest_size=16).hexdigest()}"


def _plain(value: Any) -> str:
    """Return a text that is equal on all ranks for equal values; the class, for anything but plain data."""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    if isinstance(value, Tensor):
        small = not value.is_meta and value.numel() <= SMALL
        return f"tensor {value.tolist()}" if small else f"tensor, {_like(value)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return type(value).__qualname__
