"""A loader that maps samples in processes: order of samples, memory limit, refusals."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.data import Preprocess
from fabricx.data.preprocess import bounded
from fabricx.testing import QUIET, TinyModule, tiny_data


def noisy(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add draws of three generators."""
    inputs, target = sample
    return inputs + 0.1 * torch.randn(4) + 0.01 * random.random() + 0.01 * float(np.random.rand()), target


class Seeing(TinyModule):
    """Records its training batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch[0].flatten().tolist())
        return nn.functional.mse_loss(self(batch[0]), batch[1])


def trained(root: Path, loader: Any, **options: Any) -> Seeing:
    torch.manual_seed(1)
    module = Seeing()
    fx.Trainer(max_epochs=2, default_root_dir=root, **{**QUIET, **options}).fit(module, loader)
    return module


def test_samples_have_the_order_of_a_loader_without_processes(tmp_path: Path) -> None:
    def doubled(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return 2 * sample[0], sample[1]

    plain = trained(tmp_path, DataLoader(tiny_data(40), batch_size=4, shuffle=True)).seen
    mapped = trained(tmp_path, Preprocess(tiny_data(40), doubled, batch_size=4, shuffle=True, workers=2)).seen
    assert mapped == [[2 * value for value in batch] for batch in plain]


@pytest.mark.filterwarnings("ignore:the checkpoint has the state of ModelCheckpoint")
def test_a_stopped_run_continues_with_the_same_random_draws(tmp_path: Path) -> None:
    def loader() -> Preprocess:
        return Preprocess(tiny_data(40), noisy, batch_size=4, shuffle=True, workers=1)

    whole = trained(tmp_path / "whole", loader()).seen
    saves = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=7, save_top_k=-1)
    first = trained(tmp_path / "a", loader(), max_steps=7, callbacks=[saves]).seen
    torch.manual_seed(99)
    module = Seeing()
    [path] = (tmp_path / "saved").iterdir()
    fx.Trainer(max_epochs=2, default_root_dir=tmp_path / "b", **QUIET).fit(module, loader(), ckpt_path=path)
    assert first + module.seen == whole


def test_prefetched_batches_stay_within_the_memory_limit() -> None:
    for workers in range(1, 9):
        for batch_mib in (0.1, 1.0, 30.0, 100.0):
            count, ahead = bounded(workers, batch_mib, 256.0)
            assert 1 <= count <= workers
            assert ahead >= 1
            assert count * ahead * batch_mib <= 256.0


def test_a_batch_larger_than_the_memory_limit_is_refused_by_the_constructor() -> None:
    with pytest.warns(UserWarning, match="exceed memory_mib=1"):
        loader = Preprocess([torch.zeros(2**19)], lambda sample: sample, batch_size=4, memory_mib=1, workers=3)
    assert (loader.num_workers, loader.prefetch_factor) == (1, 1)


def test_the_constructor_draws_no_numbers_of_the_users_generators() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    Preprocess(tiny_data(), noisy, batch_size=4, workers=0)
    drawn = (float(torch.rand(1)), random.random(), float(np.random.rand()))
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert drawn == (float(torch.rand(1)), random.random(), float(np.random.rand()))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Stream(), noisy), {}, "Stream isn't map-style"),
        (([], noisy), {}, "the dataset is empty"),
        (([1], 3), {}, "is not callable"),
        (([1], str), {"workers": -1}, "0 or more processes, or 'auto'"),
        (([1], str), {"memory_mib": 0}, "more than 0 MiB"),
        (([1], str), {"num_workers": 2}, "use workers instead"),
        (([1], str), {"prefetch_factor": 2}, "use memory_mib instead"),
    ],
)
def test_unsupported_options_are_errors_that_name_an_alternative(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocess(*arguments, **options)


def test_a_failing_function_is_reported_before_processes_start() -> None:
    def wrong(sample: Any) -> Any:
        raise KeyError("no image")

    with pytest.raises(KeyError, match="no image"):
        Preprocess(tiny_data(), wrong, batch_size=4)
