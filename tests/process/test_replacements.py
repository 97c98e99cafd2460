"""A replacement of a dead worker has the state of the other ranks: weights, data, gradients, and values of hooks."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx.callbacks import EMA, FaultRecovery
from fabricx.strategies import DDP, FSDP, LocalSGD, Mesh, ParameterServer
from fabricx.testing import QUIET, Fault, LayeredModule, Ledger, TinyModule, kill, layered_data, tiny_loader
from tests.soak import params

from .kills import STRATEGIES
from .ledgers import BATCH, SAMPLES, STEPS, Numbered, exact, train
from .meshes import ChangesOnce


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
            (lambda: LocalSGD(every=3, compression="int4"), 4, False),
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
