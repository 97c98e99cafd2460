"""Runs with killed or failing processes continue, and each sample is trained the right number of times."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA, EarlyStopping, FaultRecovery, ModelCheckpoint
from fabricx.distributed.stop_consensus import STOP_KEY
from fabricx.errors import WorkerFailed
from fabricx.fault_tolerance import memory_checkpoint
from fabricx.loggers import CSVLogger, JSONLogger, TensorBoardLogger
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, Mesh, ParameterServer
from fabricx.testing import (
    QUIET,
    Fault,
    LayeredModule,
    Ledger,
    TinyModule,
    cut,
    fail,
    kill,
    layered_data,
    tiny_loader,
)
from tests import warm
from tests.soak import params

from .aborted import silent
from .ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact, train
from .meshes import ChangesOnce


def test_options_of_other_callbacks_have_no_effect_on_recovery(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: EarlyStopping's patience, a number of checks, was read as seconds and ended recovery in place."""
    stops: Any = EarlyStopping("entries", patience=3, strict=False)
    fault = kill(rank=1).during("forward", step=3)
    module, trainer = train(DDP(), [stops, fault], tmp_path, recovery=FaultRecovery(snapshots=False))
    assert exact(module)
    assert len(trainer.failures) == 1
    assert "all workers restart" not in capfd.readouterr().err


class ChangesLimits(Ledger):
    """Changes a limit of the trainer at the start of training, and trains another layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.other = nn.Linear(6, 1).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if not self.trainer.global_step:
            self.trainer.log_every_n_steps = 7  # a replacement begins later
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.other.requires_grad_().parameters(), "lr": 0.1})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.other(batch[0]).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_replacement_has_the_limits_and_parameter_groups_set_by_hooks(strategy: str, tmp_path: Path) -> None:
    fault, quick = kill(rank=1).during("backward", step=5), FaultRecovery(snapshots=False)
    module, trainer = train(STRATEGIES[strategy](), [fault], tmp_path, recovery=quick, module=ChangesLimits())
    assert exact(module)
    assert len(trainer.failures) == 1
    assert module.other.weight.abs().max() < 0.1  # trained for two epochs


IN_PLACE = [  # survivors continue in place; the replacement of the first dead worker dies as well
    kill(rank=1).during("backward", step=3),
    kill(rank=2).during("start"),
    kill(rank=0).during("optimizer", step=5, attempt=1),
    kill(rank=0).during("validation", step=8, attempt=2),
    kill(rank=1).during("checkpoint", step=8, attempt=3),
    kill(rank=1).during("batch end", step=11, attempt=4),
]
STRATEGIES: dict[str, Any] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "local_sgd": lambda: LocalSGD(every=2),
    "parameter_server": lambda: ParameterServer(servers=2),
    "optimizer in shared memory": lambda: ParameterServer(servers=0, optimizer="server"),
    "optimizer on servers": lambda: ParameterServer(optimizer="server"),
    "compressed both ways": lambda: ParameterServer(
        compression="topk", compression_keep=0.2, pull_compression="bf16", servers=2
    ),
    "powersgd": lambda: ParameterServer(compression="powersgd"),
    "ddp, powersgd": lambda: DDP(compression="powersgd"),
    "compressed pulls": lambda: ParameterServer(optimizer="server", pull_compression="topk", servers=2),
    "ddp, backend without errors": lambda: silent(DDP()),
    "fsdp, backend without errors": lambda: silent(FSDP()),
}


# Each update sends a part of the previous gradients.
LOSSY = ("compressed both ways", "powersgd", "ddp, powersgd", "compressed pulls")


VARIANTS = (
    "powersgd", "fsdp, backend without errors", "compressed both ways", "optimizer on servers", "ddp, powersgd",
    "compressed pulls", "parameter_server",
)  # fmt: skip


@pytest.mark.parametrize(
    "strategy", params([strategy for strategy in STRATEGIES if strategy not in VARIANTS], VARIANTS)
)
def test_weights_after_many_kills_equal_those_of_an_undisturbed_run(strategy: str, tmp_path: Path) -> None:
    expected, reference = train(STRATEGIES[strategy](), [], tmp_path / "a")
    module, trainer = train(STRATEGIES[strategy](), IN_PLACE, tmp_path / "b")
    assert len(trainer.failures) == len(IN_PLACE) - 1
    assert trainer.global_step == reference.global_step == STEPS
    assert trainer.state.passed == trainer.state.trained == STEPS
    if strategy not in LOSSY:
        assert exact(module)
        assert exact(expected)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    assert float(trainer.callback_metrics["loss"]) == float(reference.callback_metrics["loss"])
    assert float(trainer.callback_metrics["val"]) == float(reference.callback_metrics["val"])
    assert not list(tmp_path.glob("*/runs/*/recovery"))


class KeepsDDP(fx.Callback):
    """Keeps references to torch's DDP of each generation, like the traceback of an interrupted backward."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(trainer.strategy._ddp)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.kept.clear()


def test_an_interrupted_backward_has_no_effect_on_the_next_backward(tmp_path: Path) -> None:
    keeps: Any = KeepsDDP()
    _, trainer = train(STRATEGIES["ddp, powersgd"](), [keeps, *IN_PLACE], tmp_path)
    assert len(trainer.failures) == len(IN_PLACE) - 1
    assert trainer.global_step == STEPS


@pytest.mark.parametrize("strategy", params(["ddp", "fsdp"], ["parameter_server"]))
def test_a_lost_worker_is_replaced_without_checkpoints(strategy: str, tmp_path: Path) -> None:
    def fit(*faults: Fault) -> tuple[Ledger, fx.Trainer]:
        torch.manual_seed(3)
        module = Ledger(SAMPLES, BATCH)
        trainer = fx.Trainer(
            devices=2, strategy=strategy, max_epochs=EPOCHS, default_root_dir=tmp_path, callbacks=list(faults), **QUIET
        )
        trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
        return module, trainer

    expected, _ = fit()
    recovered, trainer = fit(kill(rank=1).during("backward", step=3))
    assert not trainer.enable_checkpointing
    assert len(trainer.failures) == 1
    assert all(torch.equal(a, b) for a, b in zip(recovered.parameters(), expected.parameters(), strict=True))
    assert not [path for path in tmp_path.rglob("*") if "recovery" in path.parts or "checkpoints" in path.parts]


@pytest.mark.parametrize("strategy", params(["fsdp", "optimizer in shared memory"], ["optimizer on servers", "ddp"]))
def test_averages_continue_from_the_weights_of_all_ranks(strategy: str, tmp_path: Path) -> None:
    """A joining replacement has shards of the weights, and weights in shared memory change for all ranks."""

    def fit(*faults: Fault) -> tuple[LayeredModule, fx.Trainer]:
        torch.manual_seed(3)
        module = LayeredModule()
        trainer = fx.Trainer(
            devices=2, strategy=STRATEGIES[strategy](), max_epochs=2, default_root_dir=tmp_path,
            callbacks=[EMA(0.5), *faults], **QUIET,
        )  # fmt: skip
        trainer.fit(module, DataLoader(layered_data(24), 3), DataLoader(layered_data(6), 3))
        return module, trainer

    expected, reference = fit()
    recovered, trainer = fit(kill(rank=1).during("backward", step=3))
    assert len(trainer.failures) == 1
    assert all(torch.equal(a, b) for a, b in zip(recovered.parameters(), expected.parameters(), strict=True))
    assert float(trainer.callback_metrics["val"]) == float(reference.callback_metrics["val"])


@pytest.mark.parametrize(
    ("strategy", "step", "trains"),
    params(
        [(lambda: DDP(shared_memory=False), 2, False), (FSDP, 4, True)],
        [
            (DDP, 2, False),
            (DDP, 2, True),
            (FSDP, 4, False),
            (lambda: LocalSGD(every=3), 4, False),
            (ParameterServer, 2, False),
        ],
    ),
)
def test_a_replacement_reduces_the_same_gradients_as_the_survivors(
    strategy: Any, step: int, trains: bool, tmp_path: Path
) -> None:
    """`requires_grad` has changed since set-up, or since the in-memory checkpoints of step 3."""

    def fit(*faults: Fault) -> tuple[LayeredModule, fx.Trainer]:
        torch.manual_seed(3)
        module, changes = LayeredModule(), ChangesOnce("body.0", step, trains=trains)
        trainer = fx.Trainer(
            devices=2, strategy=strategy(), max_epochs=2, default_root_dir=tmp_path, callbacks=[changes, *faults],
            **QUIET,
        )  # fmt: skip
        trainer.fit(module, DataLoader(layered_data(24), 3))
        return module, trainer

    expected, _ = fit()
    recovered, trainer = fit(kill(rank=1).during("backward", step=step))
    assert len(trainer.failures) == 1
    assert all(torch.equal(a, b) for a, b in zip(recovered.parameters(), expected.parameters(), strict=True))


class Streams(LayeredModule):
    """Divides its stream over the ranks when the loader is created.

    Args:
            by: the source of the rank.
    """

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def train_dataloader(self) -> Any:
        if self.by == "sampler":
            sampler_options = self.trainer.distributed_sampler_kwargs
            rank, ranks = sampler_options["rank"], sampler_options["num_replicas"]
        elif self.by == "variables":
            rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        else:
            rank, ranks = self.global_rank, self.trainer.world_size
        data = [tuple(part.double() for part in sample) for sample in layered_data(24)]
        return DataLoader(Stream([data[index] for index in range(rank, 24, ranks)]), 3)


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


@pytest.mark.parametrize(
    ("strategy", "by", "devices"),
    params(
        [(FSDP, "variables", 2), (DDP, "sampler", 2)],
        [
            (DDP, "rank", 2),
            (DDP, "variables", 3),
            (lambda: LocalSGD(every=2), "rank", 2),
            (ParameterServer, "variables", 3),
            (FSDP, "sampler", 3),
            (lambda: Mesh(tensor=2, data="fsdp"), "sampler", 4),
            (lambda: Mesh(pipeline=2, data="ddp"), "sampler", 4),
        ],
    ),
)
def test_a_replacement_divides_a_stream_as_the_dead_worker_did(
    strategy: Any, by: str, devices: int, tmp_path: Path
) -> None:
    """A replacement creates its loader before it joins: no other rank reads its part of the stream.

    The ranks of a model group read the same part.
    """

    def fit(*faults: Fault) -> tuple[Streams, fx.Trainer]:
        torch.manual_seed(3)
        module = Streams(by).double()
        trainer = fx.Trainer(
            devices=devices, strategy=strategy(), max_epochs=2, default_root_dir=tmp_path,
            callbacks=[*faults, FaultRecovery(patience=0.0)], **QUIET,
        )  # fmt: skip
        trainer.fit(module)
        return module, trainer

    expected, reference = fit()
    recovered, trainer = fit(kill(rank=devices // 2).during("backward", step=2))
    assert len(trainer.failures) == 1
    readers = devices // 2 if isinstance(trainer.strategy, Mesh) else devices
    assert trainer.global_step == reference.global_step == 2 * -(-24 // readers // 3)
    # The cuts of a pipeline, and so the order of sums, depend on measured times.
    far = [
        float((a - b).detach().abs().max()) for a, b in zip(recovered.parameters(), expected.parameters(), strict=True)
    ]
    assert max(far) <= (1e-12 if isinstance(trainer.strategy, Mesh) else 0.0)


class WritesLines(Ledger):
    """The main rank writes a line per batch to a file that it opens at the start of the fit."""

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero:
            self.lines = (Path(self.trainer.default_root_dir) / "lines").open("a")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            print(batch_idx, file=self.lines, flush=True)

    def on_fit_end(self) -> None:
        if self.trainer.is_global_zero:
            self.lines.close()


@pytest.mark.parametrize("strategy", params([DDP()], [FSDP(), LocalSGD(every=2)]))
def test_hooks_of_a_joining_replacement_of_the_main_rank_run_on_the_main_rank(strategy: Any, tmp_path: Path) -> None:
    module, trainer = train(
        strategy, [kill(rank=0).during("backward", step=5)], tmp_path, module=WritesLines(SAMPLES, BATCH)
    )
    assert exact(module)
    assert len(trainer.failures) == 1  # the replacement wrote to its file
    assert len((tmp_path / "lines").read_text().splitlines()) >= STEPS


@pytest.mark.parametrize("strategy", params(["fsdp"], ["ddp"]))
def test_recovery_with_indivisible_numbers_of_samples_is_exact(strategy: str, tmp_path: Path) -> None:
    (expected, _), (module, trainer) = (
        train(STRATEGIES[strategy](), faults, tmp_path / name, devices=3, module=Ledger(43, 12), data=Numbered(43))
        for name, faults in (("a", []), ("b", IN_PLACE))
    )
    assert len(trainer.failures) == len(IN_PLACE) - 1
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "strategy", params([AsyncSGD(damp=False)], [AsyncSGD(every=3, outer="sum"), ParameterServer(mode="bounded")])
)
def test_asynchronous_workers_continue_after_deaths_of_the_main_rank_and_at_a_meeting(
    strategy: Any, tmp_path: Path
) -> None:
    faults = [
        kill(rank=0).during("backward", step=3),
        kill(rank=1).during("validation", step=4, attempt=1),  # at a meeting of all workers
    ]
    module, trainer = train(strategy, faults, tmp_path, devices=3)
    assert len(trainer.failures) == 2
    assert trainer.current_epoch == EPOCHS
    # each gradient is the mean of a worker's own batch, a third of the batch size in the ledger
    updates_per_sample = 3.0 if not strategy._settings.aggregate else 1.0
    assert exact(module, EPOCHS * updates_per_sample)


@pytest.mark.parametrize("strategy", params([FSDP(), AsyncSGD(damp=False)], [DDP(), ParameterServer()]))
def test_a_run_continues_after_the_death_of_all_workers_and_cut_connections(strategy: Any, tmp_path: Path) -> None:
    faults = [
        *(kill(rank).during("batch end", step=5) for rank in range(2)),
        cut(rank=1).during("backward", step=7, attempt=1),
        cut(rank=0).during("optimizer", step=9, attempt=2),
    ]
    module, trainer = train(strategy, faults, tmp_path)
    assert exact(module, EPOCHS * (2.0 if isinstance(strategy, AsyncSGD) else 1.0))
    assert len(trainer.failures) >= 2
    assert trainer.current_epoch == EPOCHS


def test_rows_and_checkpoints_after_a_recovery_are_those_of_a_single_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "log_every_n_steps": 1}
    saver = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1, asynchronous=False)
    faults = [kill(rank=1).during("forward", step=7), saver]
    loggers = [JSONLogger(), TensorBoardLogger()]
    _, trainer = train(DDP(), faults, tmp_path, logger=loggers, **options)  # type: ignore[arg-type]
    [folder] = tmp_path.glob("runs/*")
    steps = sorted(checkpoint.read_manifest(path)["step"] for path in checkpoint.list_committed(folder / "checkpoints"))
    assert steps == [3, 6, 9, 12]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row and "val" not in row] == list(range(1, STEPS + 1))
    events = EventAccumulator(str(folder))
    events.Reload()
    event, last = events.Tensors("events/recovery/text_summary")
    assert b"recovered 1 time, 0 samples lost" in last.tensor_proto.string_val[0]
    assert re.search(rb"rank 1 failed: .*; 2 workers continue from step 7", event.tensor_proto.string_val[0])
    assert trainer.failures


class LogsEpochs(Ledger):
    """Logs a mean over the epoch; a dead rank's sums are in its record."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss.detach().double() / 3, on_step=False, on_epoch=True)
        return loss


class DiesAtEpochEnd(fx.Callback):
    """Kills a rank in a hook at the end of the second epoch, `times` times."""

    def __init__(self, rank: int, times: int) -> None:
        self.rank, self.times = rank, times

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1 and trainer.world.rank == self.rank and len(trainer.failures) < self.times:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "rank", "times"),
    params([("parameter_server", 1, 2), ("ddp", 0, 1)], [("ddp", 1, 2), ("parameter_server", 0, 1), ("fsdp", 1, 1)]),
)
def test_each_row_is_logged_once_after_a_death_at_the_end_of_an_epoch(
    strategy: str, rank: int, times: int, tmp_path: Path
) -> None:
    rows = []
    for number, faults in enumerate(([], [DiesAtEpochEnd(rank, times)])):
        _, trainer = train(
            strategy, faults, tmp_path / f"{number}", module=LogsEpochs(SAMPLES, BATCH), logger=JSONLogger(),  # type: ignore[arg-type]
            log_every_n_steps=1,
        )  # fmt: skip
        [log] = (tmp_path / f"{number}").rglob("metrics.jsonl")
        logged = [json.loads(line) for line in log.read_text().splitlines()]
        rows.append([{n: v for n, v in row.items() if n != "time" and "exchange" not in n} for row in logged])
        assert sum("exchange/sent_mib" in row for row in logged) == (strategy == "parameter_server") * EPOCHS
        assert len(trainer.failures) == number * times
    assert rows[0] == rows[1]


def test_a_replacement_of_the_main_rank_logs_to_the_same_folder(tmp_path: Path) -> None:
    """Regression: the replacement chose the next version, so that the rows of a run were in two folders."""
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")]
    _, trainer = train("ddp", [kill(0).during("forward", step=5)], tmp_path, logger=loggers, log_every_n_steps=1)
    assert len(trainer.failures) == 1
    assert sorted(path.name for path in tmp_path.glob("*/version_*")) == ["version_0", "version_0"]
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["loss"]] == list(range(1, STEPS + 1))


def test_a_repeating_error_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    faults = [fail(rank=1, error="out of luck").during("forward", step=5, attempt=None)]
    with pytest.raises(WorkerFailed, match="out of luck") as error:
        train(DDP(), faults, tmp_path, recovery=FaultRecovery(max_restarts=1, every_n_train_steps=2))
    assert error.value.rank == 1
    assert "RuntimeError: out of luck" in error.value.traceback
    assert list(tmp_path.glob("runs/*/recovery/step=*"))  # for a manual resume


def test_a_run_restarts_after_a_transient_error(tmp_path: Path) -> None:
    module, trainer = train(DDP(), [fail(rank=0, error="a hiccup").during("optimizer", step=5)], tmp_path)
    assert exact(module)
    assert len(trainer.failures) == 1
    assert "a hiccup" in trainer.failures[0]


def test_a_connection_error_in_a_hook_of_an_asynchronous_worker_restarts_all_workers(tmp_path: Path) -> None:
    """Asynchronous workers restart from the last meeting: recovery in place would repeat batches."""
    fault = fail(rank=0, error="Connection reset by peer").during("batch end", step=5)  # raised by a tracking server
    module, trainer = train(AsyncSGD(damp=False), [fault], tmp_path)
    assert exact(module, 2.0 * EPOCHS), module.entries
    [failure] = trainer.failures
    assert "Connection reset by peer" in failure


class NonFiniteLoss(Ledger):
    """The loss of rank 1 isn't finite at step 4."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step == 4 and self.global_rank == 1 else loss


STRATEGIES_WITH_GRADIENTS = {"ddp": DDP, "fsdp": FSDP, "parameter_server": ParameterServer,
                  "optimizer in shared memory": lambda: ParameterServer(servers=0, optimizer="server"),
                  "optimizer on 2 servers": lambda: ParameterServer(servers=2, optimizer="server")}  # fmt: skip


@pytest.mark.parametrize(
    "strategy",
    params(
        ["ddp", "fsdp", "optimizer in shared memory", "optimizer on 2 servers"], ["parameter_server"]
    ),  # optimizers on workers are covered by ddp
)
def test_all_ranks_skip_a_nonfinite_update(strategy: str, tmp_path: Path) -> None:
    recovery = FaultRecovery(bad_gradients="skip")
    module, trainer = train(
        STRATEGIES_WITH_GRADIENTS[strategy](), [], tmp_path, recovery=recovery, module=NonFiniteLoss(SAMPLES, BATCH)
    )
    missing = module.entries.detach() + EPOCHS
    assert int((missing > 0.5).sum()) == BATCH  # the batch of a single step was skipped
    assert bool(torch.isfinite(module.layer.weight).all())
    assert trainer.global_step == STEPS


def test_skipping_nonfinite_updates_is_refused_if_no_rank_has_the_whole_gradient(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"bad_gradients='skip'.*bad_gradients='roll_back'"):
        train(ParameterServer(mode="bounded"), [], tmp_path, recovery=FaultRecovery(bad_gradients="skip"))


def test_the_error_names_the_parameters_of_a_nonfinite_update(tmp_path: Path) -> None:
    recovery = FaultRecovery(bad_gradients="raise", max_restarts=0)
    with pytest.raises(WorkerFailed, match=r"step 4: the gradient isn't finite in entries, layer\.weight"):
        train(DDP(), [], tmp_path, recovery=recovery, module=NonFiniteLoss(SAMPLES, BATCH))


def test_a_nonfinite_update_is_repeated_from_the_snapshot(tmp_path: Path) -> None:
    recovery = FaultRecovery(bad_gradients="roll_back", max_restarts=2, every_n_train_steps=2)
    with pytest.raises(WorkerFailed, match="step 4"):  # the error repeats after each restart
        train(DDP(), [], tmp_path, recovery=recovery, module=NonFiniteLoss(SAMPLES, BATCH))
    assert recovery._restarts == 3


class FlipsBit(fx.Callback):
    """FlipsBit a bit of a weight on rank 1, in the first attempt of a run."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and trainer.world.rank == 1 and not trainer.failures:
            module.layer.weight.data.view(torch.int32)[0, 3] ^= 1 << 20


def test_a_rank_with_different_weights_is_named_and_all_ranks_restart(tmp_path: Path) -> None:
    expected, _ = train(DDP(), [], tmp_path / "a", devices=3)
    recovery = FaultRecovery(every_n_train_steps=2, compare_every_n_steps=1)
    module, trainer = train(DDP(), [FlipsBit()], tmp_path / "b", recovery=recovery, devices=3)  # type: ignore[list-item]
    [failure] = trainer.failures
    assert "step 6: the weights of rank 1 differ" in failure
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


class StopsAndFails(Ledger):
    """Requests a stop of all workers, and fails after the request is published."""

    supervisor = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 4 and self.global_rank == 1:
            os.kill(self.supervisor, signal.SIGTERM)
            self.trainer.world.store.wait([STOP_KEY])  # type: ignore[union-attr]
            raise ValueError("while stopping")
        return super().training_step(batch, batch_idx)


def test_a_run_that_was_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    module = StopsAndFails(SAMPLES, BATCH)
    vars(module)["supervisor"] = os.getpid()
    with pytest.raises(WorkerFailed, match="while stopping"):
        train(DDP(), [], tmp_path, module=module)
    assert snapshots(tmp_path)  # for a resume


def test_restarts_without_progress_are_limited(tmp_path: Path) -> None:
    recovery = FaultRecovery(max_restarts=1, every_n_train_steps=100)
    faults = [kill(rank=1).during("forward", step=5, attempt=None)]
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        train(DDP(), faults, tmp_path, recovery=recovery)


@pytest.mark.parametrize(
    "options",
    [
        {"max_restarts": -1},
        {"every_n_train_steps": 0},
        {"bad_gradients": "skipp"},
        {"compare_every_n_steps": -1},
        {"frozen_after": 0.1},
        {"stuck_after": 0.5},
    ],
)
def test_wrong_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FaultRecovery(**options)


def test_a_run_is_resumed_from_its_snapshot_after_the_kill_of_its_supervisor(own_folder: Path) -> None:
    command = [sys.executable, "-m", "fabricx"]
    options: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    overrides = ["callbacks=fault_recovery", "callbacks.fault_recovery.every_n_train_steps=5", "trainer.devices=2"]
    first = warm.Popen([*command, "fit", "experiment=digits", *overrides, "trainer.max_epochs=1000"], **options)
    with first:
        wait_for(lambda: snapshots(own_folder) and snapshots(own_folder)[-1] >= 5)
        [run] = own_folder.glob("runs/*")
        again = warm.run([*command, "resume", str(run)], **options, timeout=100, check=False)
        assert again.returncode == 1
        assert f"process {first.pid} is training in" in again.stdout
        workers = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    assert not psutil.wait_procs(workers, timeout=60)[1]
    steps = snapshots(own_folder)[-1] + 50  # more steps than until the next checkpoint of an epoch
    more = ["trainer.max_epochs=-1", f"trainer.max_steps={steps}"]
    done = warm.run([*command, "resume", str(run), *more], **options, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{steps} steps" in done.stdout, done.stdout


LONG_SCRIPT = """
import sys
from pathlib import Path
import fabricx as fx
from torch.utils.data import DataLoader
from fabricx.callbacks import EarlyStopping, FaultRecovery
from fabricx.testing import QUIET, Ledger
from tests.process.ledgers import BATCH, SAMPLES, Numbered

class Counts(fx.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        Path(f"step-{trainer.global_rank}").write_text(str(trainer.global_step))

if __name__ == "__main__":
    callbacks = [Counts(), FaultRecovery(every_n_train_steps=5)]
    trainer = fx.Trainer(devices=2, max_epochs=10**6, callbacks=callbacks, **QUIET)
    trainer.fit(Ledger(SAMPLES, BATCH), DataLoader(Numbered(), BATCH // 2, shuffle=True))
"""


def test_training_continues_while_the_supervisor_and_its_store_are_stopped(own_folder: Path) -> None:
    (own_folder / "script.py").write_text(LONG_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def steps() -> int:
        texts = [path.read_text() for path in own_folder.glob("step-*")]
        return min((int(text or 0) for text in texts), default=0)

    with warm.Popen([sys.executable, "script.py"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        for number, more in ((signal.SIGSTOP, 100), (signal.SIGCONT, 20), (signal.SIGTERM, 0)):
            wait_for(lambda: steps() > 5)
            before = steps()
            process.send_signal(number)
            wait_for(lambda before=before, more=more: steps() >= before + more)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "failed" not in errors


class LowMemory(Ledger):
    """Simulates a machine with little free memory."""

    def on_fit_start(self) -> None:
        memory_checkpoint.free = lambda: 1000.0


def test_a_run_restarts_from_the_snapshot_if_memory_is_insufficient_for_in_memory_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = [kill(rank=1).during("backward", step=5)]
    module, trainer = train(FSDP(), faults, tmp_path, module=LowMemory(SAMPLES, BATCH))
    assert "no in-memory checkpoint has valid parts" in trainer.failures[1]  # as the survivors have found
    assert exact(module)
    assert "all workers restart from step" in capfd.readouterr().err  # the newest complete snapshot


def snapshots(folder: Path) -> list[int]:
    """Return the steps of the complete snapshots of all runs."""
    paths = [path for recovery in folder.glob("runs/*/recovery") for path in checkpoint.list_committed(recovery)]
    return sorted(int(path.name.partition("=")[2]) for path in paths)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Adversaries(TinyModule):
    """Trains two parts alternately in a manual step; `toggle_optimizer` freezes the other part."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        for parameter in (*self.first.parameters(), *self.second.parameters()):
            torch.nn.init.constant_(parameter, 0.3)
        del self.layer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (-0.1, 1.0), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            outputs = self.second(self.first(batch[0] + 0.1 * torch.randn_like(batch[0])))
            self.manual_backward(sign * torch.nn.functional.mse_loss(outputs, batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.first.parameters(), lr=0.01), torch.optim.Adam(self.second.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("strategy", "moment"),
    params(
        [(DDP, "backward"), (FSDP, "forward"), (lambda: LocalSGD(every=2), "backward"), (ParameterServer, "backward")],
        [(DDP, "forward"), (FSDP, "backward"), (lambda: LocalSGD(every=2), "forward"), (ParameterServer, "forward")],
    ),
)
def test_a_manual_step_that_freezes_parameters_is_repeated(strategy: Any, moment: Any, tmp_path: Path) -> None:
    """The survivor was interrupted while a part was frozen, or while it counted its steps."""

    def trained(*faults: Fault) -> tuple[list[Any], int, int]:
        fx.seed_everything(3)
        module, options = Adversaries(), {**QUIET, "default_root_dir": tmp_path}
        trainer = fx.Trainer(devices=2, strategy=strategy(), max_epochs=2, callbacks=[*faults], **options)
        trainer.fit(module, tiny_loader(16, 2))
        return [p.tolist() for p in module.parameters()], trainer.global_step, len(trainer.failures)

    weights, steps, _ = trained()
    assert trained(kill(rank=0).during(moment, step=3)) == (weights, steps, 1)


class Redraws(fx.DataModule):
    """Draws half of the samples at set-up, and a quarter of these at the creation of its loader.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.windows = ranks, 0

    def setup(self, stage: str) -> None:
        self.half, _ = torch.utils.data.random_split(Numbered(), [SAMPLES // 2, SAMPLES // 2])

    def train_dataloader(self) -> Any:
        self.windows += 1
        indices = random.sample(range(SAMPLES // 2), SAMPLES // 4 - self.windows)
        return DataLoader(torch.utils.data.Subset(self.half, indices), BATCH // self.ranks, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self.windows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.windows = state_dict["windows"]


@pytest.mark.parametrize(
    "strategy", params([DDP, FSDP], [ParameterServer, lambda: LocalSGD(every=1), lambda: Mesh(tensor=2)])
)
def test_all_ranks_and_a_replacement_read_the_data_that_a_single_process_draws(strategy: Any, tmp_path: Path) -> None:
    def entries(strategy: Any, *faults: Fault) -> tuple[list[float], int]:
        fx.seed_everything(3)
        together = isinstance(strategy, Mesh)
        ranks = 2 if strategy else 1
        module, data = Ledger(SAMPLES, BATCH), Redraws(1 if together else ranks)
        options = {**QUIET, "default_root_dir": tmp_path, "reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}
        recovery = [FaultRecovery(every_n_train_steps=1)] if faults else []
        trainer = fx.Trainer(devices=ranks, strategy=strategy or "auto", callbacks=[*faults, *recovery], **options)
        trainer.fit(module, datamodule=data)
        return module.entries.detach().round(decimals=2).tolist(), len(trainer.failures)

    expected, _ = entries(None)
    assert sum(entry != 0.0 for entry in expected) <= SAMPLES // 2
    assert entries(strategy()) == (expected, 0)
    assert entries(strategy(), kill(rank=1).during("backward", step=3)) == (expected, 1)


class Anneals(TinyModule):
    """Scales the loss by a buffer, and by a number that isn't a buffer; its checkpoints contain both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.factor = 1.0
        self.register_buffer("ends", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.factor * self.scale + self.ends) * super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scale *= 0.8
        self.ends += 0.0625

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert {"state_dict", "hyper_parameters", "epoch", "global_step"} <= checkpoint.keys()
        # A hook may communicate; the number of a replacement is not reduced yet.
        checkpoint["scale"] = float(self.all_gather(torch.tensor(self.scale, dtype=torch.float64)).min())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert {"state_dict", "hyper_parameters", "epoch", "global_step"} <= checkpoint.keys()
        self.scale = checkpoint["scale"]


class VariesFactor(fx.Callback):
    """Changes a factor of the module's loss at each batch; the factor is in checkpoints."""

    factor = 1.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.factor = self.factor

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.factor = 1.5 - 0.4 * self.factor

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["factor"] = self.factor

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.factor = checkpoint["factor"]


@pytest.mark.parametrize(
    ("strategy", "rank", "moment"),
    params(
        [(DDP, 1, "backward"), (FSDP, 0, "forward"), (ParameterServer, 1, "batch end")],
        [
            (DDP, 0, "forward"), (DDP, 0, "batch end"), (ParameterServer, 1, "backward"),
            (lambda: LocalSGD(every=2), 1, "forward"), (FSDP, 1, "optimizer"),
            (lambda: ParameterServer(servers=0), 0, "backward"),
        ],
    ),
)  # fmt: skip
def test_a_replacement_receives_values_that_hooks_add_to_checkpoints(
    strategy: Any, rank: int, moment: Any, tmp_path: Path
) -> None:
    def trained(*faults: Fault) -> tuple[list[Any], bool]:
        fx.seed_everything(3)
        module, options = Anneals(), {**QUIET, "default_root_dir": tmp_path}
        recovery = FaultRecovery(snapshots=False)
        callbacks = [VariesFactor(), *faults, recovery]
        trainer = fx.Trainer(devices=2, strategy=strategy(), max_epochs=2, callbacks=callbacks, **options)
        trainer.fit(module, tiny_loader(24, 2))
        return [p.tolist() for p in module.parameters()], bool(trainer.failures)

    weights, _ = trained()
    assert trained(kill(rank=rank).during(moment, step=7)) == (weights, True)


class OverBatches(LayeredModule):
    """Steps the head at each batch, and the body at every second batch, with the gradients of both batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            of_head = number == 1
            if of_head or batch_idx % 2 == 0:
                optimizer.zero_grad()
            self.toggle_optimizer(optimizer)
            self.manual_backward(torch.nn.functional.mse_loss(self(batch[0]), batch[1]))
            if of_head or batch_idx % 2 == 1:
                optimizer.step()
            self.untoggle_optimizer(optimizer)


@pytest.mark.parametrize(
    ("strategy", "moment", "step"),
    params(
        [(DDP, "backward", 5), (FSDP, "forward", 5)],
        [(DDP, "batch end", 5), (ParameterServer, "backward", 5), (lambda: LocalSGD(every=2), "backward", 5)],
    ),
)
def test_gradients_accumulated_by_a_manual_step_are_not_lost_by_a_recovery(
    strategy: Any, moment: Any, step: int, tmp_path: Path
) -> None:
    def trained(*faults: Fault) -> tuple[list[Any], bool]:
        fx.seed_everything(3)
        module, options = OverBatches(), {**QUIET, "default_root_dir": tmp_path}
        recovery = FaultRecovery(every_n_train_steps=2)
        trainer = fx.Trainer(devices=2, strategy=strategy(), max_epochs=2, callbacks=[*faults, recovery], **options)
        trainer.fit(module, DataLoader(layered_data(29), 4, shuffle=True))  # a step of the body spans two epochs
        return [p.tolist() for p in module.parameters()], bool(trainer.failures)

    weights, _ = trained()
    assert trained(kill(rank=1).during(moment, step=step)) == (weights, True)


@pytest.mark.parametrize(("rank", "moment"), params([(1, "optimizer")], [(0, "optimizer"), (1, "backward")]))
def test_a_validation_within_an_interrupted_accumulation_window_is_repeated(
    rank: int, moment: Any, tmp_path: Path
) -> None:
    class Drops(Ledger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([torch.dropout(batch[0], 0.3, train=True), *batch[1:]], batch_idx)

    options: dict[str, Any] = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    results = []
    for faults in ([], [kill(rank=rank).during(moment, step=4)]):  # 2 steps in each of 3 epochs
        module, trainer = train(DDP(), faults, tmp_path / str(len(faults)), module=Drops(SAMPLES, BATCH), **options)
        assert len(trainer.failures) == len(faults)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.append(([p.tolist() for p in module.parameters()], metrics))
    assert results[0] == results[1]
