"""Compares modules, options and optimizers of all ranks before the first forward.

Ranks that train different models exchange gradients of different parameters: they hang, or train something else. So a
digest of what each rank has built is gathered at set-up; the descriptions themselves only where digests differ.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.grad_hooks import number_of_hooks
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree

if TYPE_CHECKING:
    from fabricx.core.optimizers import Schedule
    from fabricx.data import Feed
    from fabricx.trainer.trainer import Trainer

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
SHOWN: Final = 12  # differences of an error
SMALL: Final = 8  # elements of a tensor that is compared by value in words
COMPARED: Final = 2**20  # bytes of a tensor of a checkpoint that are compared by value
NOTHING: Final = "nothing"
BUILD_ALIKE: Final = (
    "build the same on all ranks, in __init__, setup, configure_model, configure_optimizers, DataLoaders and the "
    "Trainer (weights may differ: those of rank 0 are taken; a rank's own data may differ in an IterableDataset or "
    "another iterable of batches)"
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
    """Refuse ranks that have built different things; every rank calls it.

    Args:
        world: the ranks.
        described: what this rank has built: a description by name, in an order that counts.
        when: the moment, for the message.
        remedy: what to do, for the message.

    Raises:
        RanksDisagree: on every rank; the message has what differs, by rank.
    """
    if world.size == 1:
        return
    own = hashlib.blake2b(repr(list(described.items())).encode(), digest_size=16).hexdigest()
    if len(set(world.gather_objects(own))) == 1:
        return
    by_rank: list[dict[str, str]] = world.gather_objects(dict(described))
    lines = differences(by_rank)
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise RanksDisagree(
        f"ranks differ {when}, and would not train one model:\n  "
        + "\n  ".join([*lines[:SHOWN], *more])
        + f"\n  {remedy}"
    )


def share_weights(world: World, module: nn.Module) -> None:
    """Let all ranks have the parameters and buffers of rank 0; every rank calls it.

    Ranks build layers with random numbers of their own. Tensors travel only where those of some rank are others.

    Args:
        world: the ranks.
        module: to be evaluated. What is sharded is one model already; what has no shape yet is left out.
    """
    if world.size == 1:
        return
    found = (*module.parameters(), *module.buffers())
    tensors = [one for one in found if not nn.parameter.is_lazy(one) and not hasattr(one, "full_tensor")]
    own = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        own.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if len(set(world.gather_objects(own.hexdigest()))) > 1:
        with torch.no_grad():
            for tensor in tensors:
                world.broadcast(tensor.data)


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each thing that ranks describe differently.

    >>> differences([{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1"}])
    ['b: 2 on rank 0, nothing on ranks 1, 2']
    """
    lines = []
    for name in dict.fromkeys(name for described in by_rank for name in described):
        ranks: dict[str, list[int]] = {}
        for rank, described in enumerate(by_rank):
            ranks.setdefault(described.get(name, NOTHING), []).append(rank)
        if len(ranks) > 1:
            lines.append(f"{name}: " + ", ".join(f"{what} on {_ranks(those)}" for what, those in ranks.items()))
    return lines or [f"the order: {', '.join(described)} on rank {rank}" for rank, described in enumerate(by_rank)]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def of_module(module: nn.Module) -> dict[str, str]:
    """Return the kinds of a module's parts, and the shapes of its parameters and buffers.

    >>> list(of_module(nn.Linear(2, 1)).items())[1]
    ('weight', 'parameter, shape [1, 2], float32, trained')
    """
    found = {name or "the module": _kind(part) for name, part in module.named_modules()}
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), name)
        trained = "trained" if parameter.requires_grad else "frozen"
        hooks = number_of_hooks(parameter)
        kind = f"parameter, {_like(parameter)}, {trained}" + (f", {hooks} gradient hooks" if hooks else "")
        found[name] = kind if same == name else f"tied to {same}"
    for name, buffer in module.named_buffers():
        found[name] = f"buffer, {_like(buffer)}"
    return found


def _kind(part: nn.Module) -> str:
    """Return the class of a module, with the options that torch shows of its own ones."""
    own = type(part).__module__.startswith("torch.nn.")
    return f"{type(part).__qualname__}({part.extra_repr() if own else ''})"


def _like(tensor: Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "without a shape yet"
    return f"shape {list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"


def of_training(t: Trainer) -> dict[str, str]:
    """Return the options of the trainer, of the strategy, and of callbacks that all ranks need."""
    found = {name: _plain(getattr(t, name)) for name in OPTIONS}
    found["automatic_optimization"] = str(t.module.automatic_optimization)
    found["strategy"] = _options(t.strategy)
    acting = [callback for callback in t.callbacks if callback.needs_all_ranks]
    return found | {f"callback {number}": _options(callback) for number, callback in enumerate(acting)}


def of_data(train: Feed | None, evaluation: Sequence[Feed]) -> dict[str, str]:
    """Return the lengths and orders of DataLoaders, which are divided over the ranks."""
    found = {} if train is None else {"training data": train.described()}
    return found | {f"evaluation data {number}": feed.described() for number, feed in enumerate(evaluation)}


def _options(one: Any) -> str:
    """Return the class of an object, and the arguments that it was made with where it keeps them as plain data."""
    names = inspect.signature(type(one).__init__).parameters
    values = {name: getattr(one, name) for name in names if hasattr(one, name)}
    plain = ", ".join(f"{name}={_plain(value)}" for name, value in values.items())
    return f"{type(one).__qualname__}({plain})"


def of_hooks(t: Trainer, changed: Collection[str] = ()) -> dict[str, str]:
    """Return what hooks may have changed since set-up, and have to change on all ranks.

    Args:
        t: the trainer.
        changed: hyperparameters that some rank has changed just now.
    """
    found = {name: _plain(getattr(t, name)) for name in OPTIONS} | of_module(t.module) | of_data(t.train_feed, ())
    if t.strategy.dealer is not None:  # each rank has the hyperparameters of its newest update
        groups = of_optimizers(t.module, t.optimizers, ()) if changed else {}
        return found | {name: value for name, value in groups.items() if name in changed}
    # What another optimizer keeps in its groups may be measured on this rank alone.
    known = [o for o in t.optimizers if t.strategy.traits.synchronous or type(o).__module__.startswith("torch.")]
    # In no order of their own: that of a group's options is another after a state was loaded.
    return found | dict(sorted(of_optimizers(t.module, known, ()).items()))


def of_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], schedules: Sequence[Schedule]
) -> dict[str, str]:  # fmt: skip
    """Return the optimizers: their classes, parameters and hyperparameters; and their schedules."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {}
    for number, optimizer in enumerate(optimizers):
        where = f"optimizer {number}"
        found[where] = type(optimizer).__qualname__
        for place, group in enumerate(optimizer.param_groups):
            parameters = [names.get(id(p), f"a tensor, {_like(p)}") for p in group["params"]]
            for name, value in ({**group, "params": parameters}).items():
                found[f"{where}, group {place}, {name}"] = _plain(value)
    for number, schedule in enumerate(schedules):
        where, scheduler = f"schedule {number}", schedule.scheduler
        found[where] = f"{type(scheduler).__qualname__} each {schedule.frequency} {schedule.interval}"
        found[f"{where}, monitor"] = repr(schedule.monitor)
        for name, value in vars(scheduler).items() if hasattr(scheduler, "__dict__") else ():
            if not name.startswith("_") and name != "optimizer":
                found[f"{where}, {name}"] = _plain(value)
    return found


def of_added(added: Mapping[str, Any]) -> dict[str, str]:
    """Return what hooks add to a checkpoint; of large tensors, and of shards, the shapes only."""
    return {name: _with_values(value) for name, value in added.items()}


def _with_values(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_with_values(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_with_values, value))}]"
    if not isinstance(value, Tensor) or hasattr(value, "full_tensor") or value.nbytes > COMPARED or not value.numel():
        return _plain(value)
    words = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"tensor, {_like(value)}, {hashlib.blake2b(words, digest_size=16).hexdigest()}"


def _plain(value: Any) -> str:
    """Return a value in words that are the same on all ranks: of what isn't plain data, the class."""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    if isinstance(value, Tensor):
        small = not value.is_meta and value.numel() <= SMALL
        return f"tensor {value.tolist()}" if small else f"tensor, {_like(value)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return type(value).__qualname__
