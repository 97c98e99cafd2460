"""A call of the Trainer with its arguments, validated before any process starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricx.core.callback import Callback
from fabricx.core.datamodule import DataModule
from fabricx.core.hooks import check_hooks
from fabricx.core.module import Module
from fabricx.data import combined, make_feed
from fabricx.distributed.world import World
from fabricx.errors import did_you_mean
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
        began_with: ranks with which the run of the checkpoint began, read before workers start: a worker that joins
            later may find that checkpoint deleted. None if each rank reads it.
    """

    stage: str
    module: Module
    train: Any
    evaluate: Any
    datamodule: DataModule | None
    ckpt_path: str | Path | None
    flag: bool = True
    began_with: int | None = None

    def __post_init__(self) -> None:
        for name in ("train", "evaluate"):
            if isinstance(data := adapt_data(getattr(self, name)), DataModule):
                self.datamodule = data
                setattr(self, name, None)
        self.module, self.datamodule = adapt_module(self.module), adapt_data(self.datamodule)


def check_job(trainer: TrainerInterface, job: Job) -> None:
    """Validate a job before any process starts.

    Args:
        trainer: the trainer that runs the job.
        job: the job.

    Raises:
        ValueError: the module or the data does not fit the job or a callback.
    """
    module, stage = job.module, job.stage
    if not isinstance(module, Module):
        raise ValueError(f"trainer.{stage}({type(module).__name__}): pass an instance of a subclass of fabricx.Module")
    data = job.datamodule
    needed = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(stage)
    if needed and not callable(getattr(module, needed, None)):
        near = did_you_mean(needed, [name for name in dir(type(module)) if not name.startswith("_")])
        raise ValueError(f"{type(module).__name__} has no {needed}, which trainer.{stage} calls.{near}")
    for owner in (module, data):
        if owner is not None:
            check_hooks(owner)
    source = "train_dataloader" if stage == "fit" else f"{'val' if stage == 'validate' else stage}_dataloader"
    loaders = job.train if stage == "fit" else job.evaluate
    if loaders is None and not any(_has(owner, source) for owner in (data, module)):
        argument = "train_dataloaders" if stage == "fit" else "dataloaders"
        raise ValueError(
            f"trainer.{stage} has no data: pass {argument}=... or datamodule=..., or define "
            f"{type(module).__name__}.{source}"
        )
    checks = [c.check_fit for c in trainer.callbacks if type(c).check_fit is not Callback.check_fit]
    if stage == "fit" and checks:
        ranks = World(size=max(1, len(trainer.device_ids) * trainer.num_nodes))
        shard, has_loader = trainer.use_distributed_sampler, job.train is not None
        feed = (
            make_feed(combined(job.train), ranks, seed=0, shard=shard, balance=trainer.balance) if has_loader else None
        )
        for check in checks:
            check(trainer, module, None if feed is None else feed.global_batch)
    if (
        stage == "fit"
        and type(module).configure_optimizers is Module.configure_optimizers
        and module.automatic_optimization
    ):
        import warnings

        warnings.warn(f"{type(module).__name__} has no configure_optimizers: no weights will be trained", stacklevel=4)


def _has(owner: Any, name: str) -> bool:
    contract = DataModule if isinstance(owner, DataModule) else Module
    return owner is not None and (name in vars(owner) or getattr(type(owner), name) is not getattr(contract, name))
