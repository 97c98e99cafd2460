"""Groups of tensor ranks that make local steps train what as many single ranks train with local_sgd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricx.strategies import LocalSGD, Mesh
from fabricx.testing import kill, run_ranks
from tests.process.meshes import RUNS, recovered, train
from tests.soak import SOAK, params

pytestmark = pytest.mark.usefixtures("warm_ranks")


def far(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Return the largest difference of weights and metrics."""
    weights = [float((value - found["weights"][name]).abs().max()) for name, value in expected["weights"].items()]
    return max(weights + [abs(value - found["metrics"][name]) for name, value in expected["metrics"].items()])


@pytest.mark.parametrize(
    ("options", "run"),
    params(
        [({"every": 2, "outer": "nesterov"}, "AdamW")],
        [
            ({"every": 3}, "SGD, accumulation"),
            ({"every": 4, "fragments": 2, "overlap_steps": 1, "keep_local": 0.3}, "AdamW"),
        ],
    ),
)
def test_groups_train_what_single_ranks_train(options: dict[str, Any], run: str, tmp_path: Path) -> None:
    """With validations within a round, clipping, averages, and a checkpoint from which both go on."""
    given, module = RUNS[run]
    ways = {"single": (2, lambda: LocalSGD(**options)), "groups": (4, lambda: Mesh(tensor=2, data=LocalSGD(**options)))}
    saved = {}
    for name, (ranks, strategy) in ways.items():
        first = {"max_epochs": 2, "max_steps": 5, "val_check_interval": 3, **given}
        saved[name] = run_ranks(train, ranks, strategy(), 2, first, module, str(tmp_path / name), None, True, 27)
    single, *others = saved["groups"]
    assert far(saved["single"][0], single) < 1e-9
    assert all(torch.equal(other["weights"][n], w) for other in others for n, w in single["weights"].items())
    rest = {"max_epochs": 3 if SOAK else 2, "val_check_interval": 3, **given}
    ends = [
        run_ranks(train, ways[to][0], ways[to][1](), 2, rest, module, "", str(tmp_path / source / "end"), True, 27)[0]
        for to, source in (("single", "single"), ("groups", "groups"), ("single", "groups"), ("groups", "single"))
    ]
    assert max(far(ends[0], end) for end in ends[1:]) < 1e-9


def test_all_groups_return_to_their_copies_if_a_rank_dies() -> None:
    def strategy() -> Mesh:
        return Mesh(tensor=2, data=LocalSGD(every=3, outer="nesterov"))

    weights, metrics, _ = recovered(strategy(), 4, [])
    again, others, failures = recovered(strategy(), 4, [kill(rank=2).during("backward", step=4)])
    assert len(failures) == 1
    assert others == metrics
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_options_of_the_data_strategy_may_be_a_mapping() -> None:
    strategy = Mesh(tensor=2, data={"name": "local_sgd", "every": 7}).data_strategy
    assert isinstance(strategy, LocalSGD)
    assert strategy.every == 7
    assert Mesh(pipeline=2, data={"name": "fsdp"}).data == "fsdp"
    with pytest.raises(ValueError, match="set its name"):
        Mesh(tensor=2, data={"every": 7})
    with pytest.raises(ValueError, match=r"no option 'evry'.*Did you mean 'every'"):
        Mesh(tensor=2, data={"name": "local_sgd", "evry": 7})


def test_axes_that_reduce_gradients_in_each_step_are_refused() -> None:
    for axes in ({"pipeline": 2}, {"context": 2, "tensor": 2}):
        with pytest.raises(ValueError, match=r"with a tensor axis only.*data='ddp'"):
            Mesh(data="local_sgd", **axes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with expert isn't supported"):
        Mesh(data="local_sgd", expert=2)
