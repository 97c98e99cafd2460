"""Names of Lightning's strategies: collectives of a single rank; `tests/process/test_lightning.py` has several."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.strategies import Single
from fabricx.testing import QUIET, TinyModule, tiny_loader


def test_a_single_rank_is_every_rank() -> None:
    strategy = Single()
    assert (strategy.is_global_zero, strategy.global_rank, strategy.local_rank, strategy.world_size) == (True, 0, 0, 1)
    assert strategy.root_device == torch.device("cpu")
    assert strategy.model is strategy.lightning_module is None
    strategy.barrier()
    assert strategy.broadcast({"a": 1}) == {"a": 1}
    numbers = torch.tensor([1, 2])
    for operation in ("mean", "avg", None, "sum", "SUM", "max"):
        assert strategy.reduce(numbers, reduce_op=operation).tolist() == [1, 2]
    assert strategy.reduce(3.5) == 3.5
    assert strategy.all_gather(numbers).tolist() == [1, 2]  # as Lightning's strategy of a single device
    with pytest.raises(ValueError, match="reduce_op='product'"):
        strategy.reduce(numbers, reduce_op="product")
    with pytest.raises(ValueError, match="pass None for all ranks"):
        strategy.reduce(numbers, group=object())  # type: ignore[arg-type]


def test_a_missing_name_is_an_error_with_its_successor() -> None:
    strategy: Any = Single()
    for name, successor in (
        ("setup_optimizers", "Single has no attribute 'setup_optimizers': .*add_param_group"),
        ("load_checkpoint", r"fit\(ckpt_path=...\).*torch.load"),
        ("num_nodes", r"trainer\.num_nodes"),
        ("root_devise", "Did you mean 'root_device'"),
        ("_layer_sync", "has no attribute '_layer_sync'$"),
    ):
        with pytest.raises(AttributeError, match=successor):
            getattr(strategy, name)
    assert pickle.loads(pickle.dumps(strategy)).world_size == 1


class Grows(TinyModule):
    """Trains a new parameter from the second epoch on, as a hook does that Lightning's `setup_optimizers` serves."""

    def on_train_epoch_end(self) -> None:
        assert self.trainer is not None
        self.late = torch.nn.Parameter(torch.zeros(1))
        self.trainer.optimizers[0].add_param_group({"params": [self.late]})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        late = getattr(self, "late", 0.0)
        return super().training_step(batch, batch_idx) + (late - 1.0) ** 2


def test_a_hook_trains_a_new_parameter_in_a_new_group() -> None:
    module = Grows()
    fx.Trainer(max_epochs=2, **QUIET).fit(module, tiny_loader())
    [group, late, _] = module.optimizers().param_groups
    assert late["params"][0].item() != 0.0
    assert group["lr"] == late["lr"]
