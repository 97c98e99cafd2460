"""What of a run a checkpoint holds, and how a run takes it up again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricx import checkpoint
from fabricx.errors import CheckpointError
from fabricx.hparams import plain
from fabricx.loaders import rebuild_feeds

if TYPE_CHECKING:
    from fabricx.trainer import Trainer


def save_checkpoint(
    t: Trainer, path: Path, *, weights_only: bool,
    after: Callable[[], None] | None = None, failed: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Begin to write a checkpoint of the run, with all ranks; `t.writer` knows when it is there."""
    if t.module is None:
        raise ValueError("save_checkpoint: the trainer has run nothing yet, so there is nothing to save")
    state: dict[str, Any] = {
        "strategy": t.strategy.state_dict(t.module, [] if weights_only else t.optimizers),
        "hparams": plain(t.module.hparams),
        "state": t.state.state_dict(),
    }
    if not weights_only:
        state |= {
            "schedules": [schedule.scheduler.state_dict() for schedule in t.lr_schedulers],
            "metrics": dict(t.published.metrics),  # a schedule that waits for the epoch's end may look at one
            "precision": t.precision_plugin.state_dict(),
            "callbacks": {callback.state_key: callback.state_dict() for callback in t.callbacks},
            "datamodule": t.datamodule.state_dict() if t.datamodule is not None else {},
            "random": t.world.gather_objects(random_state()),
        }
    for hook in t.hooks.on_save_checkpoint if t.hooks is not None else ():
        hook(state)
    manifest = {
        "step": t.state.step,
        "epoch": t.state.epoch,
        "samples": t.state.samples,
        "world_size": t.world.size,
        "strategy": type(t.strategy).__name__,
        "module": f"{type(t.module).__module__}.{type(t.module).__qualname__}",
        "precision": t.precision,
        "weights_only": weights_only,
        "hparams": plain(t.module.hparams),
        "configuration": t.configuration,
    }
    t.writer = t.writer or checkpoint.Writer(t.world)
    t.writer.begin(path, state, manifest, after, failed)


def restore(t: Trainer, path: Path, *, weights_only: bool) -> None:
    """Take up a checkpoint: all of it to train on, the weights alone to evaluate.

    Raises:
        CheckpointError: it holds weights only, and training can't go on from those.
    """
    # It was verified when it was chosen, before any process started.
    state = checkpoint.load(path, t.world.device, t.strategy.sharded_parameters(), verified=True)
    for hook in t.hooks.on_load_checkpoint:
        hook(state)
    if weights_only:
        t.module.load_state_dict(state["strategy"]["module"])
        return
    if "schedules" not in state:
        raise CheckpointError(f"{path} holds weights only: it can be evaluated, but training can't go on from it")
    t.strategy.load_state_dict(state["strategy"], t.module, t.optimizers)
    for schedule, saved in zip(t.lr_schedulers, state["schedules"], strict=True):
        schedule.scheduler.load_state_dict(saved)
    t.published.metrics.update(state["metrics"])
    t.precision_plugin.load_state_dict(state["precision"])
    attempt = state["state"].get("attempt", 0) + 1
    t.state.load_state_dict({**state["state"], "attempt": attempt})
    rebuild_feeds(t)
    if len(state["random"]) != t.world.size:
        _take_up_with_other_ranks(t, len(state["random"]))
    for callback in t.callbacks:
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    if t.datamodule is not None and state["datamodule"]:
        t.datamodule.load_state_dict(state["datamodule"])
    if t.world.rank < len(state["random"]):
        set_random_state(state["random"][t.world.rank])


def _take_up_with_other_ranks(t: Trainer, before: int) -> None:
    """Find the place in the epoch again: the global batches are the same, their cut into microbatches isn't."""
    found = t.train_feed.batches_before(t.state.samples, t.accumulate_grad_batches)
    if found is not None:
        t.state.batch = found
    elif t.state.batch:
        t.print(
            f"the checkpoint was written by {before} ranks, and {t.world.size} go on: what each rank reads is its own "
            "loader's affair, so some samples of this epoch may be trained twice or not at all"
        )


def random_state() -> dict[str, Any]:
    """Return the random state of this process as plain data and tensors."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Take over what `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
