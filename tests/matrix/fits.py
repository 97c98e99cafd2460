"""Runs cells: each is a small `fit` or two, in ranks that run many cells, and the results of the fit."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import pickle
import queue
import threading
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import (
    EMA,
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LoadBalancer,
    StochasticWeightAveraging,
)
from fabricx.core.strategy_parts import HasServers, ModelParallel, as_part
from fabricx.distributed.world import World
from fabricx.errors import WorkerFailed
from fabricx.launch.supervisor import run_workers
from fabricx.parameter_server.worker.unreduced_gradients import GradientElsewhere
from fabricx.testing import QUIET, cut_links
from fabricx.trainer import process
from fabricx.trainer.run_request import Job, check_callbacks, check_job
from fabricx.trainer.set_up import execute
from tests.matrix.cells import BOUNDED, JOINED_WAYS, LOSSY, MESH_WAYS, ONE_WORKER, UNEQUAL_PACE, WAYS, Cell
from tests.matrix.module import CLIP, PRECISIONS, make_loaders, make_module, whole

EACH_BATCH = {
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
}  # fmt: skip
SERVERS = 2  # servers of each launch; a cell uses as many as its strategy needs
ALONE_S = 1.0  # until another rank has failed independently or waits for this rank, whose links are then cut
FAILED_S = 15.0  # until it has noticed that, or hangs
CELL_S = 100.0  # a cell takes less than a second, the first compiled cell 20 s on busy cores: longer is a hang


@dataclass
class Found:
    """Result of a cell on a rank.

    Attributes:
        error: last lines of the traceback, if it was refused or failed.
        trained: training steps that this rank started.
        seen: per update: (rates of the groups, norm of the gradient or None where it can't be read).
        metrics: by name, at the end.
        position: (updates, epochs).
        results: of validate, test and predict after the fit.
        resumed: result of the run that resumed from the checkpoint saved during training, if any.
        reference: result of a run without interruption, or under ddp, where a single process is no oracle.
        state: content of the final checkpoint.
        shared: the checkpoint from which other cells continue.
        random: digest of the random state of this rank before its first training step; "" for no step.
    """

    error: str = ""
    trained: int = 0
    seen: list[Any] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    position: tuple[int, int] = (0, 0)
    results: Any = None
    resumed: Found | None = None
    reference: Found | None = None
    state: Any = None
    shared: Path | None = None
    random: str = ""


class Watches(fx.Callback):
    """Notes the rates and the gradient of each update, and saves the state at the end."""

    def __init__(self, result: Found, path: Path) -> None:
        self.found, self.path = result, path

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        world = trainer.world
        serving = as_part(trainer.strategy, HasServers)
        gloo = serving.link == "gloo"
        if stage == "fit" and serving.servers and world.rank == 0:  # they begin to serve this run
            world.store.set(f"matrix/serve/{len(_SERVED)}", f"{world.job} {serving.servers} {int(gloo)}")
            _SERVED.append(world.job)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        if as_part(trainer.strategy, ModelParallel).divides:  # a rank has a part of each gradient
            whole_norm = trainer.strategy.gradient_norm([optimizer])
            self.found.seen.append((rates, None if whole_norm is None else float(whole_norm)))
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        try:
            norm = float(sum(whole(gradient).double().square().sum() for gradient in gradients)) ** 0.5
        except GradientElsewhere:  # it is on the servers, which is an error
            norm = None
        self.found.seen.append((rates, norm))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def saves_in(moment: str, path: Path, *, elsewhere: str = "on_train_batch_end") -> fx.Callback:
    """Return a callback that writes a checkpoint in a hook: in the first epoch, but not at its very beginning.

    Args:
        moment: the hook, or "from-single" or "to-single".
        path: of the checkpoint.
        elsewhere: the hook for the last two.
    """
    hook = moment if moment.startswith("on_") else elsewhere
    call = 2 if hook in EACH_BATCH else 1

    def save(self: Any, trainer: Any, *rest: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls >= call and not path.exists():  # a rank without a sample has not counted that batch
            trainer.save_checkpoint(path)

    made: fx.Callback = type("SavesIn", (fx.Callback,), {hook: save, "calls": 0})()
    return made


class ChangesRate(fx.Callback):
    """Halves the rate in the middle of training, once."""

    done = False

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.done:
            self.done = True
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5


def changes_weights(hook: str) -> fx.Callback:
    """Return a callback that makes some weights smaller in a hook."""

    @torch.no_grad()
    def change(self: Any, trainer: Any, module: Any, *rest: Any) -> None:
        if not trainer.sanity_checking:
            parts = [module.second, *([module.mixture] if module.cell.mixture else [])]
            for weight in (weight for part in parts for weight in part.parameters()):
                weight.mul_(0.9)

    made: fx.Callback = type("ChangesWeights", (fx.Callback,), {hook: change})()
    return made


class Toggles(fx.Callback):
    """Trains the first layer only in every other epoch."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.second.requires_grad_(trainer.current_epoch % 2 == 1)
        if module.cell.mixture:
            module.mixture.requires_grad_(trainer.current_epoch % 2 == 0)


class Unfreezes(BaseFinetuning):
    """Trains the first layer from the second epoch, with a separate rate."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.first)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.first, optimizer, lr=0.2)


def options(cell: Cell) -> dict[str, Any]:
    """Return the Trainer's options."""
    clip = None if cell.clip == "module" or cell.manual else CLIP[cell.clip]
    trainer_options: dict[str, Any] = {
        "max_epochs": 2, "precision": "32-true" if cell.model == "dtypes" else PRECISIONS[cell.precision],
        "accumulate_grad_batches": cell.accumulate,
        "gradient_clip_val": clip, "sync_batchnorm": cell.model == "sync-batchnorm", "num_sanity_val_steps": 1,
        "compile": {"backend": "eager"} if cell.model == "compiled" else False,
    }  # fmt: skip
    if clip is not None:
        trainer_options["gradient_clip_algorithm"] = cell.clip
    more: dict[str, dict[str, Any]] = {
        "limit": {"limit_train_batches": 1}, "max-steps": {"max_steps": 3}, "val-interval": {"val_check_interval": 1},
        "overfit": {"overfit_batches": 1}, "reload": {"reload_dataloaders_every_n_epochs": 1},
        "stop-early": {"max_epochs": 4}, "nan": {"max_epochs": 4},
    }  # fmt: skip
    return {**QUIET, "enable_fault_recovery": False, **trainer_options, **more.get(cell.loop, {})}


def callbacks(cell: Cell, ranks: int) -> list[fx.Callback]:
    """Return the callbacks that a cell asks for."""
    chosen: list[fx.Callback] = []
    if cell.callback == "ema":
        chosen.append(EMA(0.5))
    if cell.callback == "swa":
        chosen.append(StochasticWeightAveraging(0.15, swa_epoch_start=1, annealing_epochs=2))
    if cell.callback == "averaging":
        chosen.append(EMAWeightAveraging(decay=0.5, update_every_n_steps=2, update_starting_at_epoch=1))
    if cell.callback == "scheduler":
        chosen.append(GradientAccumulationScheduler({0: 2, 1: 1}))
    if cell.callback == "finetuning":
        chosen.append(Unfreezes())
    if cell.callback == "backbone":
        chosen.append(BackboneFinetuning(1, backbone_initial_ratio_lr=0.7))
    if cell.loop == "lr-callback":
        chosen.append(ChangesRate(3 if cell.data in ("few", "uneven") else 2))  # where some ranks may have no sample
    if cell.loop == "stop-early":
        chosen.append(EarlyStopping(monitor="val", patience=1, min_delta=100.0))
    if cell.loop == "nan":
        chosen.append(EarlyStopping(monitor="val"))
    if cell.model == "toggled":
        chosen.append(Toggles())
    if cell.change != "none":
        chosen.append(changes_weights(cell.change))
    if cell.data == "balanced" and ranks > 1:
        chosen.append(LoadBalancer(shares=[2 / (ranks + 1), *[1 / (ranks + 1)] * (ranks - 1)]))
    return chosen


def fit(
    cell: Cell, world: World, folder: Path, *, resume: Path | None = None, save: Path | None = None, began: int = 0
) -> Found:  # fmt: skip
    """Train a cell in this process, as a rank of a world; continues a run that `began` on a number of data ranks."""
    began = began or cell.data_ranks
    result = Found()
    torch.manual_seed(7)
    module = make_module(cell)
    try:
        own_callbacks = [*callbacks(cell, cell.data_ranks), Watches(result, folder / "end.ckpt")]
        if save is not None:
            elsewhere = "on_train_epoch_end" if cell.way in UNEQUAL_PACE else "on_train_batch_end"
            own_callbacks.append(saves_in(cell.save, save, elsewhere=elsewhere))
        trainer = fx.Trainer(
            devices=world.size,
            strategy={**JOINED_WAYS, **WAYS, **MESH_WAYS}[cell.way](),
            callbacks=own_callbacks,
            default_root_dir=folder,
            **options(cell),
        )
        train, validation = make_loaders(cell, began)
        if cell.loop == "reload":
            vars(module)["train_dataloader"] = lambda: make_loaders(cell, began)[0]
            train = None
        _run(trainer, Job("fit", module, train, validation, None, resume), world, folder)
        result.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        result.position = trainer.global_step, trainer.current_epoch
        if cell.loop == "evaluate":
            result.results = []
            for stage in ("validate", "test", "predict"):
                loader = make_loaders(cell, began)[1]
                job = Job(stage, module, None, loader, None, None, stage == "predict")
                result.results.append(_run(trainer, job, world, folder))
            result.results[2] = torch.cat(result.results[2])
    except Exception as error:
        result.error = "".join(traceback.format_exception(error)[-6:])
    result.trained, result.random = module.trained, module.random
    return result


def _run(trainer: fx.Trainer, job: Job, world: World, folder: Path) -> Any:
    check_job(job)
    check_callbacks(trainer, job)
    trainer.run_dir = folder
    trainer.state.seed = trainer.state.seed or torch.initial_seed()
    return execute(trainer, job, world).results


def run_cell(cell: Cell, world: World, folder: Path) -> Found:
    """Run a cell in this process, as a rank of a world: also from the checkpoint that it saves during training."""
    if cell.save == "from-single":
        return fit(cell, world, folder, resume=folder / "single.ckpt", began=1)
    middle = folder / "mid.ckpt"
    result = fit(cell, world, folder, save=None if cell.save == "none" else middle)
    if cell.save not in ("none", "to-single") and not result.error:
        world.barrier()  # the main rank may still be writing it
        if middle.exists():
            result.resumed = _beside(cell, world, folder, "again", resume=middle)
    if needs_own_oracle(cell) and not result.error:
        result.reference = _beside(reference_of(cell), world, folder, "reference")
    return result


def _beside(cell: Cell, world: World, folder: Path, name: str, **more: Any) -> Found:
    if world.rank == 0:
        (folder / name).mkdir()
    world.barrier()
    return fit(cell, world, folder / name, **more)


def needs_own_oracle(cell: Cell) -> bool:
    """Return whether a single process differs by design: each rank draws its own random numbers."""
    if cell.way in LOSSY:
        return True
    if cell.way == "reproducible":
        return cell.model == "dropout"
    # A pipeline stage seeds each microbatch, and batch statistics are those of a microbatch.
    return (cell.data_ranks > 1 or cell.way == "pipeline") and cell.model in ("dropout", "batchnorm")


def reference_of(cell: Cell) -> Cell:
    """Return the reference of a cell instead of a single process: `ddp`, or the same strategy without interruption.

    Random numbers and batches of a rank are equal under all strategies in which all ranks take each step together.
    """
    alike = cell.way not in {*LOSSY, *BOUNDED, *ONE_WORKER, "local_sgd", "reproducible", "pipeline"}
    return dataclasses.replace(cell, way="ddp" if alike and cell.save == "none" else cell.way)


# -- ranks that run many cells --------------------------------------------------------------------------------------


def run_cells(cells: Sequence[tuple[Cell, Path]]) -> list[list[Found]]:
    """Run cells with the same number of ranks, each in its folder; returns the results of all ranks, by cell.

    A cell that hangs, or ends differently on two ranks, ends its ranks; new ranks continue with the remaining cells.
    """
    begin = 0
    while begin < len(cells):
        ranks = cells[begin][0].ranks
        try:
            run_workers(_in_rank, (cells[begin:],), size=ranks, servers=SERVERS, serve=_serve)
        except WorkerFailed as error:
            last = str(error)
        else:
            last = ""
        done = begin
        while done < len(cells) and all(_file(cells[done][1], rank).exists() for rank in range(ranks)):
            done += 1
        ended = done > begin and any(_failed(_read(cells[done - 1][1], rank)) for rank in range(ranks))
        if done < len(cells) and not ended:  # the cell in which the ranks ended
            for rank in range(ranks):
                if not _file(cells[done][1], rank).exists():
                    lost = Found(error=f"HANGS or dies: {last[-3000:]}", trained=-1)
                    _file(cells[done][1], rank).write_bytes(pickle.dumps(lost))
            done += 1
        begin = done
    results = []
    for cell, folder in cells:
        by_rank = [_read(folder, rank) for rank in range(cell.ranks)]
        _read_states(by_rank[0], folder)
        results.append(by_rank)
    return results


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _read(folder: Path, rank: int) -> Found:
    result: Found = pickle.loads(_file(folder, rank).read_bytes())
    return result


def _failed(result: Found) -> bool:
    """Return whether a rank failed in training: other ranks may then be at a different step."""
    return bool(result.error) and result.trained != 0


def _read_states(result: Found, folder: Path) -> None:
    for part, name in ((result, "."), (result.resumed, "again"), (result.reference, "reference")):
        if part is not None and (folder / name / "end.ckpt").exists():
            part.state = checkpoint.load(folder / name / "end.ckpt")


def _in_rank(world: World, cells: Sequence[tuple[Cell, Path]]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = dataclasses.replace(world, device=torch.device("cpu"))
    world.join()
    assert world.store is not None
    try:
        for number, (cell, folder) in enumerate(cells):
            faulthandler.dump_traceback_later(CELL_S, exit=True)
            result = run_cell(cell, world, folder)
            faulthandler.cancel_dump_traceback_later()
            _file(folder, world.rank).with_suffix(".new").write_bytes(pickle.dumps(result))
            _file(folder, world.rank).with_suffix(".new").rename(_file(folder, world.rank))
            if not _together(world, number, result):
                return
    finally:
        if world.rank == 0:
            world.store.set(f"matrix/serve/{len(_SERVED)}", "-1 0 0")


def _together(world: World, number: int, result: Found) -> bool:
    """Return whether all ranks can continue with the next cell: success on all ranks, or a refusal on all.

    Raises:
        RuntimeError: this rank has failed, and other ranks may wait for it; they end as well.
    """
    assert world.store is not None
    world.store.set(f"matrix/{number}/{world.rank}", "failed" if _failed(result) else str(bool(result.error)))
    keys = [f"matrix/{number}/{rank}" for rank in range(world.size)]
    if _failed(result):
        try:
            world.store.wait(keys, timedelta(seconds=ALONE_S))
        except dist.DistError:
            cut_links()  # as a supervisor does, which ends this rank
    with contextlib.suppress(Exception):
        world.store.wait(keys, timedelta(seconds=FAILED_S if _failed(result) else CELL_S))
        outcomes = {world.store.get(key) for key in keys}
        return len(outcomes) == 1 and b"failed" not in outcomes
    if result.error:
        raise RuntimeError(result.error)
    return False


_SERVED: list[int] = []  # jobs of this world that were announced to servers


def _serve(world: World, number: int, folder: str | None = None, **more: Any) -> None:
    """Serve each job that needs a server of this number; an error in a job is raised here, and ends all ranks."""
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def in_job(job: int, gloo: bool) -> None:
        try:
            process.serve(dataclasses.replace(world, job=job), number, network=gloo)
        except BaseException as error:
            ended.put(error)

    def listen() -> None:
        assert world.store is not None
        try:
            for request in itertools.count():
                job, servers, gloo = map(int, world.store.get(f"matrix/serve/{request}").split())
                if job < 0:
                    break
                if number < servers:
                    threading.Thread(target=in_job, args=(job, bool(gloo)), daemon=True).start()
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    threading.Thread(target=listen, daemon=True).start()
    if (error := ended.get()) is not None:
        raise error
