"""A call of the Trainer with its arguments, validated before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabricx import by_value
from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.hook_calls.hooks import check_hooks, overrides
from fabricx.core.module import LightningModule, Module
from fabricx.core.module_hooks import ModuleHooks
from fabricx.data import make_feed, training_source
from fabricx.distributed.messages.authentication import new_key
from fabricx.distributed.world import World
from fabricx.errors import WrongArgument, did_you_mean
from fabricx.lightning import adapt_data, adapt_module

if TYPE_CHECKING:
    from fabricx.trainer.interface import TrainerInterface


@dataclass
class Job:
    """Arguments of a call of `fit`, `validate`, `test` or `predict`.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        module: the user's module.
        train, evaluate: loaders that the caller passed; a data module here becomes `datamodule`.
        datamodule: the data module that the caller passed.
        ckpt_path: the checkpoint to start from; `dispatch` resolves "last" and "best".
        flag: print the results; for predict, return the outputs.
        trusted: objects of any class are read from the checkpoint, which runs code that its files name.
        safe_globals: classes and functions that the caller has allowed in checkpoints
            (`torch.serialization.add_safe_globals`), for processes that don't execute the script.
        key: by which a restart of the workers knows objects in checkpoints as written by themselves.
        began_with: ranks with which the run of the checkpoint began, read before workers start: a worker that joins
            later may find that checkpoint deleted. None if each rank reads it.
        copied: each rank has a copy of the caller's objects, whose metric objects may have a state.
        resolvers: those of OmegaConf; a process that receives the job registers them.
        random: packed random states of the calling process; None if this process executes the job.
    """

    stage: str
    module: Module
    train: Any
    evaluate: Any
    datamodule: DataModule | None
    ckpt_path: str | Path | None
    flag: bool = True
    trusted: bool = False
    safe_globals: list[Any] = field(default_factory=torch.serialization.get_safe_globals)
    key: bytes = field(default_factory=new_key, repr=False)
    began_with: int | None = None
    copied: bool = False
    resolvers: by_value.Resolvers = by_value.RESOLVERS
    random: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.module, nn.Module) and "_modules" not in vars(self.module):
            raise WrongArgument(
                f"{type(self.module).__name__}.__init__ has not called super().__init__(): make it its first line"
            )
        for name, other in (("train", "evaluate"), ("evaluate", "train")):
            if isinstance(data := adapt_data(getattr(self, name)), DataModule):
                if getattr(self, other) is not None:
                    raise ValueError(
                        f"trainer.{self.stage}: there are loaders and a data module; pass either loaders or "
                        "datamodule=..."
                    )
                self.datamodule = data
                setattr(self, name, None)
        self.module, self.datamodule = adapt_module(self.module), adapt_data(self.datamodule)


def check_job(job: Job) -> None:
    """Validate module and data of a job before any process starts.

    Args:
        job: of a call.

    Raises:
        ValueError: the module or the data does not fit the job.
    """
    module, stage = job.module, job.stage
    _check_instances(job)
    if not isinstance(module, Module):
        raise WrongArgument(
            f"trainer.{stage}({type(module).__name__}): the first argument is the module; pass an instance of a "
            "subclass of fabricx.Module"
        )
    data = job.datamodule
    needed = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(stage)
    if needed and not callable(getattr(module, needed, None)):
        near = did_you_mean(needed, {name for name in dir(type(module)) if name[0] != "_"} - set(dir(Module)))
        raise ValueError(f"{type(module).__name__} has no {needed}, which trainer.{stage} calls: define it.{near}")
    steps = all(overrides(module, "predict_step", contract) for contract in (ModuleHooks, LightningModule))
    if stage == "predict" and (module.predict_step is None or (not steps and _lacks_forward(module))):
        raise ValueError(
            f"{type(module).__name__} has neither predict_step nor forward, which trainer.predict calls: define one of "
            "them"
        )
    for owner in (module, data):
        if owner is not None:
            check_hooks(owner, _uncalled(job, owner))
    source = "train_dataloader" if stage == "fit" else f"{'val' if stage == 'validate' else stage}_dataloader"
    loaders = job.train if stage == "fit" else job.evaluate
    if loaders is None and not any(_has(owner, source) for owner in (data, module)):
        argument = "train_dataloaders" if stage == "fit" else "dataloaders"
        raise WrongArgument(
            f"trainer.{stage} has no data: pass {argument}=... or datamodule=..., or define "
            f"{type(module).__name__}.{source}"
        )
    if stage == "fit" and module.automatic_optimization and not _has(module, "configure_optimizers"):
        raise ValueError(
            f"{type(module).__name__} has no configure_optimizers, so no weight would be trained: define it; for a "
            "module without optimizers it returns None"
        )


def _uncalled(job: Job, owner: object) -> set[str]:
    """Return steps and methods for loaders that a job does not call: of other stages, or replaced by its loaders."""
    fits = job.stage == "fit"
    stages = {"fit": ("train", "val"), "validate": ("val",)}.get(job.stage, (job.stage,))
    steps = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
    passed = {"train": job.train} if fits else {}
    passed |= {stage: job.evaluate for stage in stages if stage != "train"}
    named = {stage for stage in steps if stage not in stages or passed[stage] is not None}
    if owner is job.module and job.datamodule is not None:
        named |= {stage for stage in stages if _has(job.datamodule, f"{stage}_dataloader")}
    return {f"{stage}_dataloader" for stage in named} | {steps[stage] for stage in steps if stage not in stages}


def _check_instances(job: Job) -> None:
    """Refuse classes in place of objects.

    Raises:
        ValueError: names the class.
    """
    for argument in (job.module, job.train, job.evaluate, job.datamodule):
        if isinstance(argument, type):
            raise WrongArgument(
                f"trainer.{job.stage} got the class {argument.__name__}: pass an object of it, {argument.__name__}(...)"
            )


def _lacks_forward(module: Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def check_callbacks(trainer: TrainerInterface, job: Job) -> None:
    """Ask callbacks that check a fit whether it suits them, before any process starts.

    Args:
        trainer: of the caller, which the callbacks receive.
        job: validated.

    Raises:
        ValueError: the module or the data does not fit a callback.
    """
    checks = [c.check_fit for c in trainer.callbacks if type(c).check_fit is not Callback.check_fit]
    if job.stage != "fit" or not checks:
        return
    global_batch = None
    if job.train is not None:
        ranks = World(size=max(1, len(trainer.device_ids) * trainer.num_nodes))
        loader, shard = training_source(job.train), trainer.use_distributed_sampler
        global_batch = make_feed(loader, ranks, seed=0, shard=shard, balance=trainer.balance).global_batch
    for check in checks:
        check(trainer, job.module, global_batch)


def _has(owner: Any, name: str) -> bool:
    if owner is None or getattr(owner, name) is None:  # assigned by the user: there is no such loader
        return False
    contract = DataModule if isinstance(owner, DataModule) else Module
    return name in vars(owner) or getattr(type(owner), name) is not getattr(contract, name)
