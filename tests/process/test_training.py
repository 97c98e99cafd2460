"""Two ranks compute the results of a single process; an error on one rank ends all ranks, with its reason."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fabricx as fx
from fabricx.errors import NotPicklable, RanksDisagree, WorkerFailed
from fabricx.lightning.functions import grad_norm
from fabricx.strategies import DDP
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")

SAMPLES = 29  # no multiple of a batch size


class Numbered(Dataset[Any]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True), index


class Ledger(TinyModule):
    """Entry i of the ledger ends at -1/B per training of sample i in a global batch of B samples."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("constant", 1.0, on_step=True, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        return loss + self.ledger[batch[2]].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch[2].float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[2]

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layer.parameters()}, {"params": [self.ledger], "lr": 1.0}]
        return torch.optim.SGD(groups, lr=0.1)


def train(
    root: Path, devices: int, accumulate: int, strategy: Any = "ddp", **options: Any
) -> tuple[Ledger, fx.Trainer]:
    torch.manual_seed(5)
    module = Ledger()
    trainer = fx.Trainer(
        max_epochs=2, devices=devices, strategy=strategy, accumulate_grad_batches=accumulate, log_every_n_steps=1,
        default_root_dir=root, **{**QUIET, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(Numbered(), batch_size=8 // devices, shuffle=True), DataLoader(Numbered(), 2))
    return module, trainer


@pytest.mark.parametrize(("strategy", "accumulate"), params([("ddp", 2), ("fsdp", 1)], [("ddp", 1), ("fsdp", 2)]))
def test_two_ranks_train_the_weights_of_a_single_process(tmp_path: Path, accumulate: int, strategy: str) -> None:
    # fsdp accepts a single dtype only, and the ledger is float64.
    precision = {"ddp": "32-true", "fsdp": "64-true"}[strategy]
    alone, single = train(tmp_path, 1, accumulate, precision=precision)
    together, parallel = train(tmp_path, 2, accumulate, strategy, precision=precision)
    # the script's own module has the weights; float32 sums in a different order
    torch.testing.assert_close(together.layer.weight, alone.layer.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together.ledger, alone.ledger, rtol=1e-12, atol=0)
    assert (parallel.global_step, parallel.current_epoch) == (single.global_step, single.current_epoch)
    for name, value in single.callback_metrics.items():
        assert float(parallel.callback_metrics[name]) == pytest.approx(float(value), rel=1e-5), name
    assert float(parallel.callback_metrics["constant_epoch"]) == 1.0  # a constant remains 1 on uneven ranks
    assert float(parallel.callback_metrics["mean"]) == (SAMPLES - 1) / 2  # every sample counts once


class Norms(TinyModule):
    """Logs norms between backward and step, as in Lightning's recipe."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradient", grad_norm(self, 2)["grad_2.0_norm_total"])
        self.log("weight", self.layer.weight.norm())


@pytest.mark.parametrize("accumulate", params([2], [1]))
def test_logged_norms_equal_those_of_a_single_process_if_a_rank_has_no_last_sample(accumulate: int) -> None:
    metrics = {}
    for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        torch.manual_seed(5)
        trainer = fx.Trainer(
            max_epochs=1, devices=devices, strategy=strategy, accumulate_grad_batches=accumulate, **QUIET
        )
        trainer.fit(Norms(), tiny_loader(17, 8 // devices))
        metrics[strategy] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["ddp"] == pytest.approx(metrics["single"], rel=1e-5)  # float32 sums in a different order
    assert metrics["fsdp"] == pytest.approx(metrics["single"], rel=1e-5)


def test_evaluations_and_predictions_on_two_ranks_count_each_sample_once(tmp_path: Path) -> None:
    trainer = fx.Trainer(devices=2, strategy="ddp", default_root_dir=tmp_path, **QUIET)
    five_samples = DataLoader(Numbered(5), batch_size=1)
    assert trainer.validate(Ledger(), five_samples, verbose=False) == [{"mean": 2.0}]
    assert torch.cat(trainer.predict(Ledger(), DataLoader(Numbered(), 3))).tolist() == list(range(SAMPLES))
    single_sample = DataLoader(Numbered(1), batch_size=1)  # rank 1 has no sample
    assert trainer.validate(Ledger(), single_sample, verbose=False) == [{"mean": 0.0}]


class FailsOnOneRank(TinyModule):
    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble = trouble

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1:
            if self.trouble == "raises":
                raise ArithmeticError("only on one")
            if self.trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "skips":
                return None
            if self.trouble == "logs":
                self.log("other", 1.0)
            if self.trouble == "stops":
                self.trainer.should_stop = True
        if batch_idx == 2 and self.trouble == "all skip":
            return None
        if batch_idx == 2 and self.trouble == "all stop":
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def fit(root: Path, trouble: str, strategy: str) -> fx.Trainer:
    options = {**QUIET, "log_every_n_steps": 1, "default_root_dir": root}
    trainer = fx.Trainer(max_epochs=1, devices=2, strategy=strategy, **options)
    trainer.fit(FailsOnOneRank(trouble), tiny_loader(64, 4))
    return trainer


TROUBLES = {
    "raises": "rank 1 failed:(?s:.*)ArithmeticError: only on one",
    "dies": "rank 1 failed:(?s:.*)killed by SIGKILL",
    "skips": "returned None on rank 1",
    "logs": r"rank 0: 'loss'\n  rank 1: 'loss', 'other'",
}


@pytest.mark.parametrize(
    ("strategy", "trouble"),
    params(
        [*(("ddp", trouble) for trouble in TROUBLES), ("fsdp", "skips")],
        [("fsdp", trouble) for trouble in TROUBLES if trouble != "skips"],
    ),
)
def test_an_error_on_one_rank_ends_all_ranks_with_its_reason(tmp_path: Path, trouble: str, strategy: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=TROUBLES[trouble]) as caught:
        fit(tmp_path, trouble, strategy)
    assert time.monotonic() - began < 60  # a hang, not slowness
    if trouble in ("skips", "logs"):
        assert isinstance(caught.value.__cause__, RanksDisagree)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_may_skip_a_batch_together_and_stop_at_the_requested_step(tmp_path: Path, strategy: str) -> None:
    assert fit(tmp_path, "all skip", strategy).global_step == 7
    assert fit(tmp_path, "all stop", strategy).global_step == 3
    # One rank requests the stop.
    assert fit(tmp_path, "stops", strategy).global_step in (3, 4)


class Stream(IterableDataset[Any]):
    """Ten samples on rank 0, sixteen on rank 1; the numbers are unknown in advance."""

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank()
        yield from ((torch.ones(4), torch.ones(1)) for _ in range(10 + 6 * rank))


@pytest.mark.parametrize(("strategy", "accumulate"), params([("ddp", 3), ("fsdp", 1)], [("ddp", 1), ("fsdp", 3)]))
def test_streams_of_different_length_neither_hang_nor_repeat(tmp_path: Path, strategy: str, accumulate: int) -> None:
    options = {**QUIET, "default_root_dir": tmp_path, "accumulate_grad_batches": accumulate}
    trainer = fx.Trainer(max_epochs=2, devices=2, strategy=strategy, **options)
    trainer.fit(TinyModule(), DataLoader(Stream(), batch_size=2), DataLoader(Stream(), batch_size=2))
    assert (trainer.global_step, trainer.current_epoch) == (2 * -(-8 // accumulate), 2)


class Lists(fx.DataModule):
    """A different number of batches on each rank; validation is after the same batch on all ranks."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.lengths = lengths

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return [(torch.ones(2, 4), torch.ones(2, 1))] * self.lengths[self.trainer.global_rank]

    def val_dataloader(self) -> Any:
        return tiny_loader()


@pytest.mark.parametrize(("strategy", "lengths"), [("ddp", (7, 4)), ("ddp", (0, 7)), ("fsdp", (4, 7))])
def test_lists_of_different_lengths_end_together(tmp_path: Path, strategy: str, lengths: tuple[int, int]) -> None:
    options = {**QUIET, "default_root_dir": tmp_path, "accumulate_grad_batches": 3, "val_check_interval": 0.5}
    trainer = fx.Trainer(max_epochs=1, devices=2, strategy=strategy, **options)
    trainer.fit(TinyModule(), datamodule=Lists(*lengths))
    assert (trainer.global_step, trainer.num_training_batches) == (3, 7)


class Plateau(TinyModule):
    """Halves its rate after an update whose loss, over all ranks, is not below the previous minimum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ranks = [(0.0, 10.0), (6.0, 5.0), (7.0, 4.2), (8.0, 1.0)][batch_idx]  # means of 5.0, 5.5, 5.6 and 4.5
        self.log("level", ranks[self.global_rank])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        rate = self.optimizers().param_groups[0]["lr"]
        self.log_dict({"rate_max": rate}, reduce_fx="max")
        self.log_dict({"rate_min": rate}, reduce_fx="min")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        options = {"scheduler": schedule, "monitor": "level", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": options}


def test_reduce_lr_on_plateau_per_step_monitors_the_mean_of_all_ranks(tmp_path: Path) -> None:
    trainer = fx.Trainer(max_epochs=1, devices=2, strategy="ddp", default_root_dir=tmp_path, **QUIET)
    trainer.fit(Plateau(), tiny_loader(32, 4))
    rates = [float(trainer.callback_metrics[name]) for name in ("rate_max", "rate_min")]
    assert rates == pytest.approx([2.5e-4] * 2)  # 5.5 and 5.6 are not below 5.0
    refused = fx.Trainer(max_epochs=1, devices=1, strategy="async_sgd", default_root_dir=tmp_path, **QUIET)
    with pytest.raises(WorkerFailed, match="set interval='epoch'"):
        refused.fit(Plateau(), tiny_loader(8, 4))


class Adversarial(TinyModule):
    """Two optimizers in a manual loop; the first loss depends on the parameters of both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)
        nn.init.constant_(self.critic.weight, 0.3)
        nn.init.constant_(self.critic.bias, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward((self.critic(self(batch[0])) - batch[1]).pow(2).mean())
        first.step()
        second.zero_grad()
        self.manual_backward((self.critic(self(batch[0]).detach()) + 1).pow(2).mean())
        second.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), 0.1), torch.optim.SGD(self.critic.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters.*")
def test_a_manual_loop_with_two_optimizers_trains_the_same_on_two_ranks(tmp_path: Path) -> None:
    trained = []
    for devices in (1, 2):
        module = Adversarial()
        trainer = fx.Trainer(max_steps=3, devices=devices, strategy="ddp", default_root_dir=tmp_path, **QUIET)
        trainer.fit(module, tiny_loader(30, 8 // devices))
        assert trainer.global_step == 3
        trained.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)  # float32 sums in a different order


def test_the_error_names_an_attribute_that_cannot_be_pickled(tmp_path: Path) -> None:
    module = TinyModule()
    module.activation = threading.Lock()
    trainer = fx.Trainer(max_epochs=1, devices=2, strategy="ddp", default_root_dir=tmp_path, **QUIET)
    with pytest.raises(NotPicklable, match=r"module\.activation can't be sent"):
        trainer.fit(module, tiny_loader())


class ChecksSharedMemory(fx.Callback):
    """Records whether gradients are reduced in shared memory."""

    def __init__(self) -> None:
        self.in_memory = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.in_memory = trainer.strategy._shared is not None


def test_sums_in_shared_memory_are_bitwise_equal_to_those_of_gloo_on_two_ranks(tmp_path: Path) -> None:
    results = []
    for shared in (True, False):
        strategy: Any = DDP(shared_memory=shared, bucket_mib=1e-4)
        module, trainer = train(tmp_path, 2, 1, strategy, callbacks=[sums := ChecksSharedMemory()])
        assert sums.in_memory == shared
        results.append([*module.parameters(), trainer.callback_metrics["loss_epoch"]])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("compression", params(["bf16", "powersgd"], ["fp16"]))
def test_ddp_with_compressed_gradients_trains(tmp_path: Path, compression: Any) -> None:
    strategy = DDP(compression=compression)
    module = TinyModule()
    trainer = fx.Trainer(max_epochs=4, devices=2, strategy=strategy, default_root_dir=tmp_path, **QUIET)
    trainer.fit(module, tiny_loader(32, 4), tiny_loader(32, 4))
    assert float(trainer.callback_metrics["val_loss"]) < 0.1  # it begins above 1
