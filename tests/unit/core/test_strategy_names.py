"""Names of Lightning's strategies: collectives of a single rank; `tests/process/test_lightning.py` has several."""

from __future__ import annotations

import pytest
import torch

from fabricx.strategies import Single


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
