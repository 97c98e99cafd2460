"""Functions of lightning.fabric."""

from __future__ import annotations

import io
import random
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabricx.lightning import fabric_functions as ours

theirs = pytest.importorskip("lightning.fabric.utilities.logger")


@dataclass
class Sizes:
    """Nested hyperparameters."""

    width: int = 2


PARAMS: dict[str, Any] = {
    "a": {"b": {"c": 1}, 5: 2}, "list": [{"x": 1}, {"y": {"z": 2}}], "numbers": [1, 2], "of": Sizes(),
    "space": Namespace(k={"v": 3}), "none": None, "empty": [],
}  # fmt: skip


@pytest.mark.parametrize("delimiter", ["/", "."])
def test_nested_hyperparameters_are_flattened_as_in_lightning(delimiter: str) -> None:
    assert ours.flatten_dict(PARAMS, delimiter) == theirs._flatten_dict(PARAMS, delimiter)


def function(a: int) -> int:
    return a


@pytest.mark.parametrize("name", ["sanitize_params", "sanitize_callable_params"])
def test_hyperparameters_become_strings_as_in_lightning(name: str) -> None:
    params: dict[str, Callable[..., Any] | Any] = {
        "lr": 0.1, "n": np.int64(3), "x": np.float32(0.5), "flag": True, "list": [1], "none": None,
        "class": torch.nn.ReLU, "function": function, "makes": lambda: 3, "text": "a",
    }  # fmt: skip
    assert getattr(ours, name)(params) == getattr(theirs, f"_{name}")(dict(params))


@pytest.mark.parametrize("params", [None, {"a": 1}, Namespace(a=1)])
def test_hyperparameters_are_converted_to_a_dict(params: Any) -> None:
    assert ours.convert_params(params) == theirs._convert_params(params)


def test_a_prefix_is_added_to_metric_names() -> None:
    for prefix in ("", "train"):
        assert ours.add_prefix({"loss": 1}, prefix, "-") == theirs._add_prefix({"loss": 1}, prefix, "-")


def test_tensors_of_one_element_become_numbers() -> None:
    assert ours.convert_tensors_to_scalars({"a": [torch.tensor(2), (torch.ones(1),)], "b": "c"}) == {
        "a": [2, (1.0,)], "b": "c",
    }  # fmt: skip
    with pytest.raises(ValueError, match="has 2 elements"):
        ours.convert_tensors_to_scalars([torch.ones(2)])


def test_files_are_read_without_objects_by_default(tmp_path: Path) -> None:
    content = {"it": Sizes()}
    torch.save(content, tmp_path / "a.pt")
    file = io.BytesIO((tmp_path / "a.pt").read_bytes())
    for source in (tmp_path / "a.pt", str(tmp_path / "a.pt"), f"file://{tmp_path / 'a.pt'}", file):
        with pytest.raises(Exception, match="Sizes"):
            ours.load_file(source)
        file.seek(0)
        assert ours.load_file(source, weights_only=False) == content


def test_loader_processes_have_different_seeds() -> None:
    kept, drawn = (random.getstate(), np.random.get_state(), torch.get_rng_state()), set()
    try:
        for worker, rank in ((0, None), (1, None), (0, 1), (1, 1)):
            torch.manual_seed(0)
            ours.worker_init_function(worker, rank)
            drawn.add((random.random(), float(np.random.rand())))
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    assert len(drawn) == 4
    assert ours.suggested_max_num_workers(1) >= 1
    with pytest.raises(ValueError, match="1 or more"):
        ours.suggested_max_num_workers(0)
    assert not ours.is_initialized()
