"""Islands that make local steps train what as many single ranks train with local_sgd."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fabricx.model_parallel.island_steps import IslandSteps
from fabricx.strategies import LocalSGD, Mesh
from fabricx.testing import kill, run_ranks
from tests.process.meshes import GPT, RUNS, recovered, train
from tests.soak import SOAK, params

pytestmark = pytest.mark.usefixtures("warm_ranks")


def far(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Return the largest difference of weights and metrics."""
    weights = [float((value - found["weights"][name]).abs().max()) for name, value in expected["weights"].items()]
    return max(weights + [abs(value - found["metrics"][name]) for name, value in expected["metrics"].items()])


OVERLAPPED = {"every": 4, "fragments": 2, "overlap_steps": 1, "keep_local": 0.3}
NESTEROV = {"every": 2, "outer": "nesterov"}


@pytest.mark.parametrize(
    ("options", "run", "axes"),
    params(
        [
            (NESTEROV, "AdamW", {"tensor": 2}),
            (OVERLAPPED, "AdamW", {"pipeline": 2}),
        ],
        [
            ({"every": 3}, "SGD, accumulation", {"context": 2}),
            ({"every": 3}, "SGD, accumulation", {"tensor": 2}),
            (OVERLAPPED, "AdamW", {"tensor": 2}),
            (NESTEROV, "AdamW", {"pipeline": 2, "schedule": "zero_bubble"}),
            ({"every": 4, "fragments": 3}, "AdamW", {"pipeline": 2, "tensor": 2, "sequence": True}),
            (NESTEROV, "AdamW", {"pipeline": 2, "context": 2}),
            (OVERLAPPED, "SGD, accumulation", {"context": 2, "tensor": 2}),
        ],
    ),
)
def test_islands_train_what_single_ranks_train(
    options: dict[str, Any], run: str, axes: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    """With validations within a round, clipping, averages, and a checkpoint from which both go on."""
    given, module = RUNS[run]
    ranks = 2 * math.prod(axes.get(axis, 1) for axis in ("pipeline", "context", "tensor"))
    ways = {
        "single": (2, lambda: LocalSGD(**options)), "groups": (ranks, lambda: Mesh(data=LocalSGD(**options), **axes)),
    }  # fmt: skip
    saved = {}
    for name, (ranks, strategy) in ways.items():
        first = {"max_epochs": 2, "max_steps": 5, "val_check_interval": 3, **given}
        saved[name] = run_ranks(train, ranks, strategy(), 2, first, module, str(tmp_path / name), None, True, 27)
    single, *others = saved["groups"]
    assert far(saved["single"][0], single) < 1e-9
    assert all(torch.equal(other["weights"][n], w) for other in others for n, w in single["weights"].items())
    rest = {"max_epochs": 3 if SOAK else 2, "val_check_interval": 3, **given}
    resumed = [
        ("single", "single"),
        ("single", "groups"),
        ("groups", "single"),
        *([("groups", "groups")] if SOAK else []),
    ]
    ends = [
        run_ranks(train, ways[to][0], ways[to][1](), 2, rest, module, "", str(tmp_path / source / "end"), True, 27)[0]
        for to, source in resumed
    ]
    assert max(far(ends[0], end) for end in ends[1:]) < 1e-9


@pytest.mark.parametrize("axis", params(["tensor"], ["pipeline", "context"]))
def test_all_islands_return_to_their_copies_if_a_rank_dies(axis: str) -> None:
    def strategy() -> Mesh:
        return Mesh(data=LocalSGD(every=3, outer="nesterov"), **{axis: 2})  # type: ignore[arg-type]

    weights, metrics, _ = recovered(strategy(), 4, [])
    again, others, failures = recovered(strategy(), 4, [kill(rank=2).during("backward", step=4)])
    assert len(failures) == 1
    # Sums may round differently, since the cuts of a pipeline depend on measured times.
    expected, found = {"weights": weights, "metrics": metrics}, {"weights": again, "metrics": others}
    assert far(expected, found) <= (1e-9 if axis == "pipeline" else 0.0)


class NoLoss(GPT):
    """Has no loss for a third of the batches, each time on one of two islands."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if (batch_idx + self.trainer.strategy.data_ranks.rank) % 3 == 2:
            self.log("loss", torch.zeros(()), on_epoch=True)
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("axes", params([{"context": 2}], [{"pipeline": 2}, {"pipeline": 2, "context": 2}]))
def test_gradients_of_a_window_are_reduced_if_its_last_batch_has_no_loss_or_no_sample(axes: dict[str, int]) -> None:
    """The 8th batch has a single sample, which the second island has not."""
    ranks, mesh = 2 * math.prod(axes.values()), Mesh(data=LocalSGD(every=2), **axes)  # type: ignore[arg-type]
    arguments = 2, {"accumulate_grad_batches": 2}, {}, "", None, False, 29, NoLoss
    alone, *_ = run_ranks(train, 2, LocalSGD(every=2), *arguments)
    islands = run_ranks(train, ranks, mesh, *arguments)
    assert all(far(alone, island) < 1e-9 for island in islands)


def test_options_of_the_data_strategy_may_be_a_mapping() -> None:
    islands = Mesh(tensor=2, data={"name": "local_sgd", "every": 7}).data_strategy
    assert isinstance(islands, IslandSteps)
    strategy = islands.data_strategy
    assert isinstance(strategy, LocalSGD)
    assert strategy.every == 7
    assert Mesh(pipeline=2, data={"name": "fsdp"}).data == "fsdp"
    with pytest.raises(ValueError, match="set its name"):
        Mesh(tensor=2, data={"every": 7})
    with pytest.raises(ValueError, match=r"no option 'evry'.*Did you mean 'every'"):
        Mesh(tensor=2, data={"name": "local_sgd", "evry": 7})


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="with expert isn't supported"):
        Mesh(data="local_sgd", expert=2)
