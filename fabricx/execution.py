"""One job on one rank: set up, run the loop, tear down."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from fabricx import evaluation, loop
from fabricx.comm.agree import StopAgreement
from fabricx.comm.world import World
from fabricx.data import Feed, make_feed, to_device
from fabricx.datamodule import DataModule
from fabricx.hooks import Hooks, accepts, check_hooks, overrides
from fabricx.hparams import plain
from fabricx.logbook import Logbook
from fabricx.logger import Ending
from fabricx.module_hooks import ModuleHooks
from fabricx.optimization import OptimizerHandle, needs_closure, parse_optimizers
from fabricx.precision import make_precision
from fabricx.seed import seed_everything
from fabricx.state import Phase

if TYPE_CHECKING:
    from fabricx.dispatch import Job
    from fabricx.trainer import Trainer


_JOBS = itertools.count()  # every rank of a world runs the same jobs in the same order


@dataclass
class Overridden:
    """Which methods with a meaning of their own the module overrides, and what follows from it."""

    backward: bool = False
    optimizer_step: bool = False
    optimizer_zero_grad: bool = False
    configure_gradient_clipping: bool = False
    closures: frozenset[int] = frozenset()
    ckpt_path: Path | None = None
    manual_steps: dict[int, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a job left, on the main rank; plain data once it is `portable`."""

    results: Any = None
    weights: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)

    def portable(self, trainer: Trainer) -> Outcome:
        """Gather what the caller's objects have to take over."""
        module = trainer.module
        self.weights = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        keys = ("state", "interrupted", "run_dir", "num_training_batches", "num_val_batches", "_published", "_logged",
                "_stop_wanted", "_stopped")  # fmt: skip
        self.trainer = {key: getattr(trainer, key) for key in keys}
        self.attributes = _picklable({k: v for k, v in vars(module).items() if not k.startswith("_")})
        self.callbacks = [_picklable(vars(callback)) for callback in trainer.callbacks]
        return self

    def absorb(self, trainer: Trainer, job: Job) -> None:
        """Bring the caller's module, trainer and callbacks to where the job has brought the workers'."""
        own = dict(job.module.state_dict())
        for name, tensor in self.weights.items():
            if name in own and own[name].shape == tensor.shape:
                with torch.no_grad():
                    own[name].copy_(tensor)
        if set(own) != set(self.weights):  # layers that were built in configure_model or setup
            job.module.configure_model()
            job.module.load_state_dict(self.weights)
        vars(job.module).update(self.attributes)
        vars(trainer).update(self.trainer)
        trainer.module, trainer.datamodule = job.module, job.datamodule
        for callback, attributes in zip(trainer.callbacks, self.callbacks, strict=False):
            vars(callback).update(attributes)


def _picklable(attributes: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in attributes.items():
        try:
            pickle.dumps(value)
        except Exception:
            continue  # an open file, a live bar: it stays in the worker
        kept[name] = value
    return kept


def execute(t: Trainer, job: Job, world: World) -> Outcome:
    """Run a job on this rank, from set-up to tear-down."""
    ending: Ending = "failed"
    try:
        _set_up(t, job, world)
        results = _WORK[job.stage](t, job)
        _call(t.hooks.teardown, job.stage)
        if t.datamodule is not None:
            t.datamodule.teardown(job.stage)
        ending = "interrupted" if t.interrupted else "success"
        return Outcome(results)
    except BaseException as error:
        if t.hooks is not None:
            _call(t.hooks.on_exception, error)
        if t.datamodule is not None:
            t.datamodule.on_exception(error)
        raise
    finally:
        _close(t, ending)


def _call(hook: tuple[Callable[..., Any], ...], *args: Any) -> None:
    for function in hook:
        function(*args)


def _predict(t: Trainer, job: Job) -> list[Any]:
    t.restore(weights_only=True)
    by_loader = [t.world.gather_objects(mine) for mine in evaluation.predict(t, t.val_feeds, keep=job.flag)]
    ordered = [evaluation.in_dataset_order(by_rank) for by_rank in by_loader]
    return ordered if t.several_loaders else ordered[0]


def _evaluate(t: Trainer, job: Job) -> list[dict[str, float]]:
    t.restore(weights_only=True)
    results = evaluation.evaluate(t, Phase.VALIDATE if job.stage == "validate" else Phase.TEST, t.val_feeds)
    if job.flag and t.is_global_zero:
        t.print(table(results, job.stage))
    return results


_WORK: dict[str, Callable[[Trainer, Job], Any]] = {
    "fit": loop.fit, "validate": _evaluate, "test": _evaluate, "predict": _predict
}  # fmt: skip


def table(results: list[dict[str, float]], title: str) -> str:
    """Return the results of an evaluation as lines of text."""
    names = list(dict.fromkeys(name for found in results for name in found))
    width = max([len(name) for name in names] + [len(title)])
    rows = [f"  {n:<{width}}  " + "  ".join(f"{f[n]:>12.6g}" if n in f else " " * 12 for f in results) for n in names]
    return "\n".join([f"{title}:", *(rows or ["  (nothing was logged)"])])


def _set_up(t: Trainer, job: Job, world: World) -> None:
    """Bring up everything, in the order of the hooks that API.md fixes."""
    t.world = dataclasses.replace(world, job=next(_JOBS))
    t.strategy.enter(t.world)
    t.module, t.datamodule = job.module, job.datamodule
    _seed(t)
    _backend_flags(t)
    job.module.trainer = t
    if t.datamodule is not None:
        t.datamodule.trainer = t
    _module_callbacks(t)
    t.hooks = Hooks(t, t.module, t.callbacks)
    t.agreement = StopAgreement(t.world)
    if t._stop_wanted and job.stage == "fit":
        t._stop_wanted = t._stopped = False
    _open_loggers(t, job)
    if world.local_rank == 0:
        _if_any(t.datamodule, "prepare_data")
        t.module.prepare_data()
    world.barrier()
    if t.datamodule is not None:
        t.datamodule.setup(job.stage)
    _call(t.hooks.setup, job.stage)
    t.module.configure_model()
    _set_up_model(t, job)


def _if_any(owner: Any, name: str) -> None:
    if owner is not None:
        getattr(owner, name)()


def _seed(t: Trainer) -> None:
    """Give all ranks one seed for the data order; what is drawn elsewhere is each rank's own."""
    t.state.seed = t.world.broadcast_object(t.state.seed)
    if t.world.size > 1:
        seed_everything((t.state.seed + t.world.rank) % 2**32)


def _backend_flags(t: Trainer, *, on: bool = True) -> None:
    """Switch on what the run asks of torch, or off again."""
    if t.detect_anomaly:
        torch.autograd.set_detect_anomaly(on)
    if t.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(on, warn_only=t.deterministic == "warn")
    if t.benchmark is not None:
        torch.backends.cudnn.benchmark = t.benchmark and on


def _module_callbacks(t: Trainer) -> None:
    own = t.module.configure_callbacks()
    for callback in own if isinstance(own, (list, tuple)) else [own]:
        check_hooks(callback)
        t.callbacks = [one for one in t.callbacks if type(one) is not type(callback)]
        t.callbacks.append(callback)


def _open_loggers(t: Trainer, job: Job) -> None:
    if job.stage == "predict" or not t.is_global_zero or t.fast_dev_run:
        return
    assert t.run_dir is not None
    if t.loggers or job.stage == "fit":
        t.run_dir.mkdir(parents=True, exist_ok=True)
    for logger in t.loggers:
        logger.open(t.run_dir)
    t._open_loggers = True
    if job.stage != "fit":
        return
    from fabricx.provenance import write

    write(t.run_dir, None)
    given = [
        owner.hparams
        for owner in (t.module, t.datamodule)
        if owner is not None and owner.__dict__.get("_log_hyperparams")
    ]
    params = {name: value for hparams in given for name, value in plain(hparams).items()}
    for logger in t.loggers:
        if params:
            logger.log_hyperparams(params)


def _set_up_model(t: Trainer, job: Job) -> None:
    module, device = t.module, t.world.device
    t.precision_plugin = make_precision(t.precision, device)
    t.precision_plugin.convert(module)
    if t.sync_batchnorm and t.world.size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(module)
    module.to(device)
    _compile(t)
    own: dict[str, Any] = {
        name: overrides(module, name, ModuleHooks)
        for name in ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
    }
    t.overridden = Overridden(**own, ckpt_path=Path(job.ckpt_path) if job.ckpt_path else None)
    t._bring = _transfer(t)
    load_data(t, job)
    _wrap_steps(t)
    if job.stage != "fit":
        t.attach_log(None)
        return
    t.strategy.setup(module, several_backwards=not module.automatic_optimization)
    t.logbook = Logbook(t.strategy, training=True)
    t.attach_log(t.logbook)
    t.training_step = t.strategy.wrap_step(t.training_step)
    t.optimizers, t.lr_schedulers = parse_optimizers(module.configure_optimizers())
    t.optimizer_handles = [OptimizerHandle(optimizer, t) for optimizer in t.optimizers]
    t.overridden.closures = frozenset(id(optimizer) for optimizer in t.optimizers if needs_closure(optimizer))
    t.closures = bool(t.overridden.closures)
    if t._open_loggers and module.example_input_array is not None:
        for logger in t.loggers:
            logger.log_graph(module, module.example_input_array)


def _compile(t: Trainer) -> None:
    if not t.compile:
        return
    options = dict(t.compile) if isinstance(t.compile, Mapping) else {}
    # In place: names in the state dict stay. A module without a forward of its own has children that are called.
    own_forward = type(t.module).forward is not nn.Module.forward
    for part in [t.module] if own_forward else list(t.module.children()):
        part.compile(**options)


def _transfer(t: Trainer) -> Callable[[Any, int], Any] | None:
    """Return what brings a batch to the device; None where nothing has to be done."""
    owners = [owner for owner in (t.datamodule, t.module) if owner is not None]

    def own(name: str) -> Callable[..., Any] | None:
        for owner in owners:
            contract = DataModule if isinstance(owner, DataModule) else ModuleHooks
            if overrides(owner, name, contract):
                found: Callable[..., Any] = getattr(owner, name)
                return found
        return None

    before, move, after = (
        own("on_before_batch_transfer"),
        own("transfer_batch_to_device"),
        own("on_after_batch_transfer"),
    )
    convert, device = t.precision_plugin.convert_batch(), t.world.device
    if device.type == "cpu" and not (before or move or after or convert):
        return None  # it is there already

    def bring(batch: Any, loader: int) -> Any:
        batch = before(batch, loader) if before else batch
        batch = move(batch, device, loader) if move else to_device(batch, device)
        batch = convert(batch) if convert else batch
        return after(batch, loader) if after else batch

    return bring


def load_data(t: Trainer, job: Job) -> None:
    """Make the feeds of a stage from what was given, the data module, or the module, in this order."""
    stage = job.stage
    if stage == "fit":
        source = job.train if job.train is not None else _loader(t, "train_dataloader")
        t.train_dataloader = _fixed(source) if t.overfit_batches else source
        t.train_feed = _feed(t, t.train_dataloader, t.limit_train_batches)
        t.num_training_batches = t.train_feed.batches()
        t.overridden.__dict__["given_train"] = job.train
    words = {"fit": "val", "validate": "val", "test": "test", "predict": "predict"}
    given = job.evaluate if job.evaluate is not None else _loader(t, f"{words[stage]}_dataloader")
    if t.overfit_batches and stage == "fit" and given is not None:
        given = t.train_dataloader
    limit = getattr(t, f"limit_{words[stage]}_batches")
    has_step = stage != "fit" or callable(getattr(t.module, "validation_step", None))
    loaders = _several(given) if has_step and limit != 0 else []
    t.val_dataloaders = given
    t.several_loaders = len(loaders) > 1
    t.val_feeds = [_feed(t, loader, limit) for loader in loaders]
    t.num_val_batches = [feed.batches() for feed in t.val_feeds]
    if stage == "fit":
        t._val_every = _validation_interval(t)


def reload_loaders(t: Trainer) -> None:
    """Ask the data module or the module for new training batches."""
    if t.overridden.__dict__.get("given_train") is None:
        t.train_dataloader = _loader(t, "train_dataloader")
        t.train_feed = _feed(t, t.train_dataloader, t.limit_train_batches)
        t.num_training_batches = t.train_feed.batches()
        t._val_every = _validation_interval(t)


def rebuild_feeds(t: Trainer) -> None:
    """Make the feeds anew, after a checkpoint has brought its own seed of the data order."""
    t.train_feed = _feed(t, t.train_dataloader, t.limit_train_batches)
    t.val_feeds = (
        [_feed(t, loader, t.limit_val_batches) for loader in _several(t.val_dataloaders)] if t.val_feeds else []
    )


def _loader(t: Trainer, name: str) -> Any:
    for owner in (t.datamodule, t.module):
        found = getattr(owner, name)() if owner is not None else None
        if found is not None:
            return found
    return None


def _feed(t: Trainer, source: Any, limit: int | float) -> Feed:
    if isinstance(limit, float) and limit != float("inf") and not hasattr(source, "__len__"):
        raise ValueError(
            f"a part of the batches ({limit}) needs a loader with a length; {type(source).__name__} has none"
        )
    if isinstance(source, (list, tuple)) and source and all(isinstance(one, DataLoader) for one in source):
        raise ValueError("train on one loader: several training loaders have to be joined into one that yields both")
    if not hasattr(source, "__iter__"):
        raise ValueError(f"{type(source).__name__} is not something to iterate over: give a DataLoader or batches")
    return make_feed(source, t.world, seed=t.state.seed, limit=limit, shard=t.use_distributed_sampler)


def _several(given: Any) -> list[Any]:
    """Return the loaders: a list of loaders is several, a list of batches is one."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, (list, tuple)) and given and all(_is_loader(one) for one in given):
        return list(given)
    return [given]


def _is_loader(value: Any) -> bool:
    batch = isinstance(value, (torch.Tensor, Mapping, list, tuple, str))
    return hasattr(value, "__iter__") and not batch


def _fixed(loader: Any) -> Any:
    """Return a loader that gives the same batches in each epoch."""
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__len__"):
        return loader
    dataset: Any = loader.dataset
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=SequentialSampler(dataset),
        num_workers=loader.num_workers, collate_fn=loader.collate_fn, drop_last=loader.drop_last,
    )  # fmt: skip


def _validation_interval(t: Trainer) -> float:
    """Return every how many batches (steps, if that was asked for) a validation comes; infinity for epoch ends only."""
    from fabricx.settings import check_count

    every, total = t.val_check_interval, t.num_training_batches
    if not t.val_feeds or every is None:
        return float("inf")
    if isinstance(every, str):
        return float(check_count("val_check_interval", every, "step", 1) or 1)
    if isinstance(every, int) and not isinstance(every, bool):
        if every > total and t.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={every} is more than the {total} batches of an epoch; take a smaller one, or "
                "check_val_every_n_epoch=None to count across epochs"
            )
        return float(every)
    if total == float("inf"):
        if every != 1.0:
            raise ValueError(
                "val_check_interval as a part of an epoch needs a loader with a length; give a number of batches"
            )
        return float("inf")
    return float(max(1, int(total * every)))


def sanity_feeds(t: Trainer) -> list[Feed]:
    """Return the validation feeds, cut to the few batches of the sanity check."""
    few = float("inf") if t.num_sanity_val_steps == -1 else t.num_sanity_val_steps
    limit = min(few, t.limit_val_batches) if isinstance(t.limit_val_batches, int) else few
    return [_feed(t, loader, limit) for loader in _several(t.val_dataloaders)]


def _wrap_steps(t: Trainer) -> None:
    """Look at the steps' signatures once, and put the precision around them."""
    names = {"validation": "validation_step", "test": "test_step", "predict": "predict_step"}
    for word, name in names.items():
        step = getattr(t.module, name, None)
        if callable(step):
            t.steps[word] = _fitting(
                t.precision_plugin.wrap_step(step), accepts(step, 3), 3 if t.several_loaders else 2
            )
    if callable(getattr(t.module, "training_step", None)):
        step = t.module.training_step
        t.training_step = _fitting(t.precision_plugin.wrap_step(step), accepts(step, 2), 2)


def _fitting(step: Callable[..., Any], takes: int, given: int) -> Callable[..., Any]:
    if takes >= given:
        return step
    return lambda *args: step(*args[:takes])


def _close(t: Trainer, ending: Ending) -> None:
    """Give everything back, whatever has happened."""
    with _all_of_them() as attempt:
        if t.agreement is not None:
            attempt(t.agreement.close)
        if t.optimizers:
            attempt(t.strategy.teardown)
        if t._open_loggers:
            for logger in t.loggers:
                attempt(functools.partial(logger.close, ending))
    t._open_loggers = False
    t.agreement = None
    t.state.phase = Phase.IDLE
    if t.module is not None:
        t.attach_log(None)
    _backend_flags(t, on=False)


@contextlib.contextmanager
def _all_of_them() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Try each of several things; the first error is raised when all have been tried."""
    errors: list[BaseException] = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    yield attempt
    if errors:
        raise errors[0]
