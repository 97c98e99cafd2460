"""Islands with local steps equal single ranks with local_sgd."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.distributed.sharding.dtensors import own_part
from fabricx.model_parallel.data_parallel.island_steps import IslandSteps
from fabricx.strategies import LocalSGD, Mesh
from fabricx.testing import QUIET, kill, run_ranks
from tests.process.meshes import GPT, RUNS, SAMPLES, recovered, train
from tests.soak import SOAK, params

pytestmark = pytest.mark.usefixtures("warm_ranks")


def far(expected: dict[str, Any], actual: dict[str, Any]) -> float:
    """Return the largest difference of weights and metrics."""
    weights = [float((value - actual["weights"][name]).abs().max()) for name, value in expected["weights"].items()]
    return max(weights + [abs(value - actual["metrics"][name]) for name, value in expected["metrics"].items()])


OVERLAPPED = {"every": 4, "fragments": 2, "overlap_steps": 1, "keep_local": 0.3}
NESTEROV = {"every": 2, "outer": "nesterov"}


@pytest.mark.parametrize(
    ("options", "run", "axes"),
    params(
        [
            (NESTEROV, "AdamW", {"tensor": 2}),
            (OVERLAPPED, "AdamW", {"pipeline": 2}),
            (NESTEROV, "SGD, accumulation", {"replicas": 2}),
            (NESTEROV, "SGD, accumulation", {"shard": 2}),
        ],
        [
            ({"every": 3}, "SGD, accumulation", {"context": 2}),
            ({"every": 3}, "SGD, accumulation", {"tensor": 2}),
            (OVERLAPPED, "AdamW", {"tensor": 2}),
            (NESTEROV, "AdamW", {"pipeline": 2, "schedule": "zero_bubble"}),
            ({"every": 4, "fragments": 3}, "AdamW", {"pipeline": 2, "tensor": 2, "sequence": True}),
            (NESTEROV, "AdamW", {"pipeline": 2, "context": 2}),
            (OVERLAPPED, "SGD, accumulation", {"context": 2, "tensor": 2}),
            (OVERLAPPED, "AdamW", {"replicas": 2}),
            (NESTEROV, "SGD, accumulation", {"replicas": 2, "tensor": 2}),
            (OVERLAPPED, "AdamW", {"replicas": 2, "pipeline": 2}),
            ({"every": 3}, "SGD, accumulation", {"replicas": 2, "context": 2}),
            (OVERLAPPED, "AdamW", {"shard": 2}),
            (NESTEROV, "AdamW", {"shard": 2, "tensor": 2}),
            ({"every": 3}, "SGD, accumulation", {"shard": 2, "context": 2}),
            (NESTEROV, "SGD, accumulation", {"shard": 2, "pipeline": 2}),
        ],
    ),
)
def test_islands_train_the_weights_of_single_ranks(
    options: dict[str, Any], run: str, axes: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    """With validations within a round, clipping, averages, and a checkpoint that both resume."""
    run_options, module = RUNS[run]
    within = axes.get("replicas", 1) * axes.get("shard", 1)
    ranks = 2 * within * math.prod(axes.get(axis, 1) for axis in ("pipeline", "context", "tensor"))
    strategies = {
        "single": (2, 2, lambda: LocalSGD(**options)),
        "groups": (ranks, 2 // within, lambda: Mesh(data=LocalSGD(**options), **axes)),
    }
    saved = {}
    for name, (ranks, batch, strategy) in strategies.items():
        first = {"max_epochs": 2, "max_steps": 5, "val_check_interval": 3, **run_options}
        saved[name] = run_ranks(train, ranks, strategy(), batch, first, module, str(tmp_path / name), None, True, 27)
    single, *others = saved["groups"]
    assert far(saved["single"][0], single) < 1e-9
    assert all(torch.equal(other["weights"][n], w) for other in others for n, w in single["weights"].items())
    rest = {"max_epochs": 3 if SOAK else 2, "val_check_interval": 3, **run_options}
    resumed = [
        ("single", "single"),
        ("single", "groups"),
        ("groups", "single"),
        *([("groups", "groups")] if SOAK else []),
    ]
    ends = []
    for to, source in resumed:
        (ranks, _, strategy), (_, batch, _) = strategies[to], strategies[source]
        checkpoint = str(tmp_path / source / "end")
        ends.append(run_ranks(train, ranks, strategy(), batch, rest, module, "", checkpoint, True, 27)[0])
    assert max(far(ends[0], end) for end in ends[1:]) < 1e-9


@pytest.mark.parametrize("axis", params(["tensor", "replicas", "shard"], ["pipeline", "context"]))
def test_all_islands_restore_their_in_memory_checkpoints_after_the_death_of_a_rank(axis: str) -> None:
    def strategy() -> Mesh:
        return Mesh(data=LocalSGD(every=3, outer="nesterov"), **{axis: 2})  # type: ignore[arg-type]

    weights, metrics, _ = recovered(strategy(), 4, [])
    again, others, failures = recovered(strategy(), 4, [kill(rank=2).during("backward", step=4)])
    assert len(failures) == 1
    # Rounding may differ, because the cuts of a pipeline depend on measured times.
    expected, actual = {"weights": weights, "metrics": metrics}, {"weights": again, "metrics": others}
    assert far(expected, actual) <= (1e-9 if axis == "pipeline" else 0.0)


class NoLoss(GPT):
    """Returns no loss for a third of the batches, alternating between the two islands."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        if (batch_idx + strategy.data_ranks.rank // strategy.step_ranks.size) % 3 == 2:
            self.log("loss", torch.zeros(()), on_epoch=True)
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("axes", "accumulate"),
    params(
        [({"context": 2}, 2), ({"replicas": 2}, 1), ({"shard": 2}, 1)],  # data ranks divide a window differently
        [
            ({"pipeline": 2}, 2),
            ({"pipeline": 2, "context": 2}, 2),
            ({"pipeline": 2, "replicas": 2}, 1),
            ({"pipeline": 2, "shard": 2}, 1),
        ],
    ),
)
def test_gradients_of_a_window_are_reduced_if_its_last_batch_has_no_loss_or_no_sample(
    axes: dict[str, int], accumulate: int
) -> None:  # fmt: skip
    """The 8th batch has a single sample, so the second island has no sample."""
    ranks, mesh = 2 * math.prod(axes.values()), Mesh(data=LocalSGD(every=2), **axes)  # type: ignore[arg-type]
    batch = 2 // (axes.get("replicas", 1) * axes.get("shard", 1))
    arguments = {"accumulate_grad_batches": accumulate}, {"sgd": True}, "", None, False, 29, NoLoss
    alone, *_ = run_ranks(train, 2, LocalSGD(every=2), 2, *arguments)
    islands = run_ranks(train, ranks, mesh, batch, *arguments)
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


class Plain(fx.Module):
    """A linear model with a part used by odd data ranks in odd batches only; some batches have no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(3, 1), nn.Linear(3, 1)

    def loss(self, batch: Tensor, rank: int, index: int) -> Tensor | None:
        if (rank >= 2 and index == 1) or (rank < 2 and index in {4, 5}):
            return None
        outputs = self.all(batch[:, :3])
        outputs = outputs + self.some(batch[:, :3]) if rank % 2 and index % 2 else outputs
        return (outputs[:, 0] - batch[:, 3]).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch, self.trainer.strategy.data_ranks.rank, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)


EVERY, CLIP = 3, 1.5


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def whole(value: Any) -> Tensor:
    tensor: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach()


def trained_in_islands(axis: str, count: int, accumulate: int) -> list[Tensor]:
    fx.seed_everything(1)
    module = Plain().double()
    mesh = Mesh(data=LocalSGD(every=EVERY, outer="nesterov"), **{axis: 2})  # type: ignore[arg-type]
    trainer = fx.Trainer(
        devices=4, strategy=mesh, gradient_clip_val=CLIP, accumulate_grad_batches=accumulate,
        **{**QUIET, "max_epochs": 3},
    )  # fmt: skip
    trainer.fit(module, DataLoader(list(rows(count)), 2 // accumulate))  # type: ignore[arg-type]
    return [whole(parameter) for parameter in module.parameters()]


def trained_by_torch(count: int, accumulate: int) -> list[Tensor]:
    """Return the weights of the same training in a single process, by equation 1 of DiLoCo."""
    fx.seed_everything(1)
    base = Plain().double()
    islands = [(island, copy.deepcopy(base)) for island in range(2)]
    optimizers = [module.configure_optimizers() for _, module in islands]
    used: list[list[nn.Parameter]] = [[], []]
    velocity = [torch.zeros_like(p) for p in base.parameters()]
    windows = [window for _ in range(3) for window in enumerate(rows(count).split(8))]
    for step, (number, window) in enumerate(windows, 1):
        shares = window.tensor_split(4)
        for island, module in islands:
            optimizers[island].zero_grad()
            losses = [
                (len(part), module.loss(part, rank, number * accumulate + index))
                for rank in (2 * island, 2 * island + 1)
                for index, part in enumerate(shares[rank].split(2 // accumulate) if len(shares[rank]) else ())
            ]
            for size, loss in losses:
                if loss is not None:
                    (loss * size / len(window) * 2).backward()
            if trained := [p for p in module.parameters() if p.grad is not None]:
                for p in trained:  # each replica has the same number of batches without a loss
                    assert p.grad is not None
                    p.grad *= 2 if any(loss is None for _, loss in losses) else 1
                used[island] = trained
            elif not losses:
                for p in used[island]:
                    p.grad = torch.zeros_like(p)
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizers[island].step()
        if step % EVERY == 0 or step == len(windows):
            parameters = zip(base.parameters(), *(module.parameters() for _, module in islands), strict=True)
            for v, (weight, *copies) in zip(velocity, parameters, strict=True):
                gradient = weight.detach() - torch.stack([p.detach() for p in copies]).mean(0)
                v.mul_(0.9).add_(gradient)
                weight.data.sub_(gradient + 0.9 * v, alpha=0.7)
                for p in copies:
                    p.data.copy_(weight)
    return [parameter.detach() for parameter in base.parameters()]


@pytest.mark.parametrize(
    ("axis", "count", "accumulate"),
    params(
        [("replicas", 30, 1), ("replicas", 26, 2), ("shard", 26, 1), ("shard", 30, 2)],
        [*(("replicas", *case) for case in ((26, 1), (30, 2), (25, 2))), ("shard", 26, 2), ("shard", 25, 2)],
    ),
)
def test_islands_train_the_weights_of_plain_torch_in_a_single_process(axis: str, count: int, accumulate: int) -> None:
    """The last window has 6 rows (2, 2, 1 and 1 on the ranks), or 2 rows, none of them for the second island.

    Shards are uneven: a weight of one row is on a single rank of its island.
    """
    expected = trained_by_torch(count, accumulate)
    for weights in run_ranks(trained_in_islands, 4, axis, count, accumulate):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


class Normed(fx.Module):
    """A module with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch[:, :3])[:, 0] - batch[:, 3]).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained_with_statistics(strategy: Any, **options: Any) -> dict[str, Tensor]:
    fx.seed_everything(1)
    module = Normed().double()
    trainer = fx.Trainer(devices=4, strategy=strategy, **{**QUIET, "max_epochs": 2, **options})
    trainer.fit(module, DataLoader(list(rows(34)), 3), DataLoader(list(rows(30)), 5))  # type: ignore[arg-type]
    state = {name: whole(value) for name, value in module.state_dict().items()}
    return {**state, "val": trainer.callback_metrics["val"]}


@pytest.mark.parametrize("axis", params(["replicas"], ["shard"]))
def test_running_statistics_are_combined_over_all_data_ranks(axis: str) -> None:
    """With rounds of a single plain step, the mean over the ranks of islands equals that of single ranks."""
    expected = run_ranks(trained_with_statistics, 4, LocalSGD(every=1))[0]
    mesh = Mesh(data=LocalSGD(every=1), **{axis: 2})  # type: ignore[arg-type]
    for state in run_ranks(trained_with_statistics, 4, mesh):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)


class HalfWithoutLoss(Plain):
    """Returns no loss on one replica of an island."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 and self.trainer.strategy.data_ranks.rank == 3 else self.loss(batch, 0, 0)


class Manual(Plain):
    """Calls its optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clamped(GPT):
    """Changes its weights in validations, some of them within a round."""

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self.embed.weight.clamp_(-0.3, 0.3)
            self.norm.weight[0] = self.norm.weight.norm()


class CountsBytes(Clamped):
    """Checks that each rank stores only its shards of the weights, the moments and the weights of the last round."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        islands = self.trainer.strategy.data_strategy
        fragments = islands.rounds._fragments
        moments = [v for state in self.optimizers().state.values() for v in state.values() if v.dim()]
        with self.trainer.strategy.weights_as_stored():
            kept = [*map(own_part, [*self.parameters(), *moments])]
        kept += [values for f in fragments for values in (f.base, f.velocity)]
        elements = sum(p.numel() for p in self.parameters())
        # 19 rows are divided into 10 and 9.
        assert sum(part.numel() for part in kept) == pytest.approx(5 * elements / 2, rel=0.02)


class StoresShards(Clamped):
    """Checks that a rank stores at most its half of each weight between updates."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.weights_as_stored():
            sizes = {own_part(p).untyped_storage().nbytes() / (p.numel() * 8) for p in self.parameters() if p.dim() > 1}
        assert max(sizes) < 0.6


def test_each_rank_stores_its_shards_only_and_validation_hooks_change_whole_weights() -> None:
    arguments = {"val_check_interval": 2}, {}, "", None, True
    alone, *_ = run_ranks(train, 2, LocalSGD(every=3, outer="nesterov"), 2, *arguments, 27, Clamped)
    mesh = Mesh(data=LocalSGD(every=3, outer="nesterov"), shard=2)
    assert all(far(alone, rank) < 1e-9 for rank in run_ranks(train, 4, mesh, 1, *arguments, 27, CountsBytes))


def test_pipelines_of_an_island_shard_the_weights_of_each_stage() -> None:
    arguments = {"val_check_interval": 2}, {}, "", None, True
    [alone] = run_ranks(train, 1, LocalSGD(every=3, outer="nesterov"), 2, *arguments, SAMPLES, Clamped)
    mesh = Mesh(data=LocalSGD(every=3, outer="nesterov"), shard=2, pipeline=2)
    assert all(far(alone, rank) < 1e-9 for rank in run_ranks(train, 4, mesh, 1, *arguments, SAMPLES, StoresShards))


def fitted(module: fx.Module, axis: str = "replicas", **options: Any) -> None:
    mesh = Mesh(data="local_sgd", **{axis: 2})  # type: ignore[arg-type]
    fx.Trainer(devices=4, strategy=mesh, **{**QUIET, "max_epochs": 1, **options}).fit(module, DataLoader(rows(30), 2))  # type: ignore[arg-type]


class ChangesWeights(Plain):
    """Changes a weight on one of two replicas."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 3:
            self.all.weight.data += 0.1


def test_replicas_with_different_weights_are_an_error_with_their_ranks() -> None:
    with pytest.raises(fx.errors.WorkerFailed, match=r"all\.weight: alike on rank 2, other values on rank 3"):
        run_ranks(fitted, 4, ChangesWeights().double())


def test_unsupported_combinations_with_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replicas=2 x tensor=2 needs a multiple of 4 ranks.*set devices to 4 or 8"):
        Mesh(data="local_sgd", replicas=2, tensor=2).check_ranks(6)
    with pytest.raises(fx.errors.WorkerFailed, match="training_step returned None on rank 3 and a loss"):
        run_ranks(fitted, 4, HalfWithoutLoss().double())
    with pytest.raises(fx.errors.WorkerFailed, match="in an island and manual optimization"):
        run_ranks(fitted, 4, Manual().double())
    with pytest.raises(fx.errors.WorkerFailed, match="SyncBatchNorm with replicas"):
        run_ranks(functools.partial(fitted, sync_batchnorm=True), 4, Normed().double())


class WholeMatrices(Plain):
    """Its optimizer orthogonalizes the gradient of a whole matrix."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([self.all.weight], lr=0.1)


def test_unsupported_combinations_with_shards_are_refused() -> None:
    with pytest.raises(fx.errors.WorkerFailed, match="in an island and manual optimization"):
        run_ranks(fitted, 4, Manual().double(), "shard")
    with pytest.raises(fx.errors.WorkerFailed, match="SyncBatchNorm with shard"):
        run_ranks(functools.partial(fitted, sync_batchnorm=True), 4, Normed().double(), "shard")
    with pytest.raises(
        fx.errors.WorkerFailed,
        match="Muon computes an update from a whole matrix or from several parameters, and shard=2",
    ):
        run_ranks(fitted, 4, WholeMatrices().double(), "shard")


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="with expert isn't supported"):
        Mesh(data="local_sgd", expert=2)
