"""Meshes train as a single process on the same global batches; checkpoints move between all meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA
from fabricx.errors import WorkerFailed
from fabricx.model_parallel.hidden_gradients import DividedGradient
from fabricx.strategies import DDP, FSDP, Mesh
from fabricx.testing import QUIET, TinyModule, kill, run_ranks, tiny_loader
from tests.soak import SOAK, params

from .meshes import (
    EPOCHS,
    GPT,
    LENGTH,
    RUNS,
    Block,
    ChangesOnce,
    Counts,
    recovered,
    sentences,
    train,
)

pytestmark = pytest.mark.usefixtures("warm_ranks")


def far(first: Any, second: Any) -> float:
    """Return the largest difference of weights, metrics and norms."""
    weights = [float((value - second["weights"][name]).abs().max()) for name, value in first["weights"].items()]
    metrics = [abs(value - second["metrics"][name]) for name, value in first["metrics"].items()]
    assert len(first["norms"]) == len(second["norms"]) > 0
    norms = [abs(a - b) for a, b in zip(first["norms"], second["norms"], strict=True)]
    return max(weights + metrics + norms)


MESHES: dict[str, tuple[Callable[[], Any], int, int]] = {  # strategy, ranks, data ranks
    "tensor": (lambda: Mesh(tensor=2), 2, 1),
    "pipeline": (lambda: Mesh(pipeline=2), 2, 1),
    "zero bubble": (lambda: Mesh(pipeline=2, schedule="zero_bubble", microbatches=3), 2, 1),
    "ddp x tensor": (lambda: Mesh(tensor=2), 4, 2),
    "fsdp x tensor": (lambda: Mesh(tensor=2, data="fsdp"), 4, 2),
    "ddp x pipeline": (lambda: Mesh(pipeline=2), 4, 2),
    "fsdp x pipeline": (lambda: Mesh(pipeline=2, data="fsdp"), 4, 2),
    "pipeline x tensor": (lambda: Mesh(pipeline=2, tensor=2), 4, 1),
    "pipeline x sequence": (lambda: Mesh(pipeline=2, tensor=2, sequence=True), 4, 1),
    "zero bubble x sequence": (
        lambda: Mesh(pipeline=2, schedule="zero_bubble", microbatches=3, tensor=2, sequence=True), 4, 1
    ),
    "tensor of 4": (lambda: Mesh(tensor=4), 4, 1),
}  # fmt: skip
SHORT = (
    "zero bubble", "ddp x tensor", "ddp x pipeline", "fsdp x pipeline", "pipeline x sequence",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Callable[[str], dict[str, Any]]:
    """Return a function that trains in a single process, once per run."""

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        options, module = RUNS[name]
        return train("single", 4, {"max_epochs": EPOCHS, **options}, module)

    return run


def test_meshes_train_the_weights_of_a_single_process(alone: Callable[[str], dict[str, Any]]) -> None:
    first, second, dropout = RUNS
    # Most meshes have one kind of run, and both in a soak. Dropout on a tensor axis equals that of a single process.
    cases = [
        (name, run)
        for number, name in enumerate(MESHES if SOAK else SHORT)
        for run in ([first, second] if SOAK else [(first, second)[number % 2]])
    ]
    for name, run in [*cases, ("tensor", dropout)]:
        (strategy, ranks, shares), (options, module) = MESHES[name], RUNS[run]
        by_rank = run_ranks(train, ranks, strategy(), 4 // shares, {"max_epochs": EPOCHS, **options}, module)
        expected = alone(run)
        assert expected["metrics"]["samples"] == 5
        assert far(expected, by_rank[0]) < 1e-9, name
        for other in by_rank[1:]:
            assert other["metrics"] == by_rank[0]["metrics"], name
            assert all(torch.equal(other["weights"][n], w) for n, w in by_rank[0]["weights"].items()), name


@pytest.mark.parametrize("data", params(["fsdp"], ["ddp"]))
def test_stages_reduce_the_gradients_of_a_window_if_its_last_batch_has_no_sample(data: Any) -> None:
    """The first and the last stage use the tied weights; the 8th batch has a single sample, on one data rank.

    The validation after the 7th batch, within a window, computes with averages of the weights.
    """
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "val_check_interval": 7}
    expected = train("single", 4, options, {}, "", None, True, 29)
    by_rank = run_ranks(train, 4, Mesh(pipeline=2, data=data), 2, options, {}, "", None, True, 29)
    assert all(far(expected, results) < 1e-9 for results in by_rank)


STRATEGIES: dict[str, tuple[Callable[[], Any], int, int]] = {
    "ddp": (DDP, 2, 2), "fsdp": (FSDP, 2, 2), "tensor": MESHES["tensor"], "pipeline": MESHES["pipeline"],
    "both": MESHES["pipeline x tensor"], "fsdp x tensor": MESHES["fsdp x tensor"],
    "fsdp x pipeline": MESHES["fsdp x pipeline"],
}  # fmt: skip
ROUTES = [("tensor", "pipeline", "fsdp x tensor", "ddp", "tensor")]
MORE_ROUTES = [
    ("fsdp x tensor", "both", "ddp"), ("fsdp", "pipeline", "pipeline"), ("tensor", "fsdp x pipeline", "fsdp x tensor"),
]  # fmt: skip


def test_checkpoints_move_between_meshes_and_other_strategies(tmp_path: Path) -> None:
    options = {"max_epochs": EPOCHS}
    weights = train("single", 4, options, {}, ema=True)["weights"]
    expected = []
    for step in range(1, 5):
        train("single", 4, {"max_steps": step}, {}, str(tmp_path / str(step)), ema=True)
        expected.append(checkpoint.load(tmp_path / str(step) / "end"))
    for number, route in enumerate([*ROUTES, *(MORE_ROUTES if SOAK else ())]):
        saved = None
        # One step on each mesh, within the first epoch, and then the rest of the run.
        for step, name in enumerate(route, 1):
            (strategy, ranks, _), folder = STRATEGIES[name], str(tmp_path / f"route {number}, {step}")
            # Global batch: the batch size times the number of data ranks at the start of the run.
            batch = 4 // STRATEGIES[route[0]][2]
            last = step == len(route)
            limit, target = (options, "") if last else ({"max_steps": step}, folder)
            end = run_ranks(train, ranks, strategy(), batch, limit, {}, target, saved, True)[0]
            if last:
                assert max(float((end["weights"][n] - w).abs().max()) for n, w in weights.items()) < 1e-9, route
            else:
                saved = f"{folder}/end"
                assert_same_state(checkpoint.load(saved), expected[step - 1], name)


def assert_same_state(actual: dict[str, Any], reference: dict[str, Any], name: str) -> None:
    """Compare weights, averages and moments of two checkpoints."""
    assert actual["strategy"].keys() == reference["strategy"].keys(), name
    assert actual["callbacks"].keys() - {"FaultRecovery"} == reference["callbacks"].keys(), name
    averages, others = (state["callbacks"]["EMA"]["averages"] for state in (reference, actual))
    pairs = [(reference["strategy"]["module"], actual["strategy"]["module"]), (averages, others)]
    moments, others = (state["strategy"]["optimizers"][0]["state"] for state in (reference, actual))
    assert moments.keys() == others.keys()
    pairs.append(({k: v["exp_avg"] for k, v in moments.items()}, {k: v["exp_avg"] for k, v in others.items()}))
    for expected, values in pairs:
        assert max(float((values[key] - value).abs().max()) for key, value in expected.items()) < 1e-9, name


def test_a_resumed_run_on_the_same_mesh_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    options, module = {"max_epochs": EPOCHS}, {"dropout": 0.2}
    for name, (strategy, ranks) in {"t": (Mesh(tensor=2), 2), "p": (Mesh(pipeline=2), 2)}.items():
        folder = str(tmp_path / name)
        run_ranks(train, ranks, strategy, 4, {"max_steps": 1}, module, f"{folder} begun")
        begun = f"{folder} begun/end"
        whole = run_ranks(train, ranks, strategy, 4, options, module, "", begun)[0]
        run_ranks(train, ranks, strategy, 4, {"max_steps": 3}, module, folder, begun)
        # The cuts depend on measured times and are resumed; otherwise sums would round differently.
        again = run_ranks(train, ranks, strategy, 4, options, module, "", f"{folder}/end")[0]
        assert again["metrics"] == whole["metrics"]
        assert all(torch.equal(again["weights"][n], w) for n, w in whole["weights"].items()), name


def equal(recovered_run: Any, weights: dict[str, Tensor], metrics: dict[str, float]) -> None:
    """Compare a recovered run; rounding may differ, because the cuts of a pipeline depend on measured times."""
    assert len(recovered_run[2]) == 1
    assert recovered_run[1].keys() == metrics.keys()
    assert max(float((recovered_run[0][name] - value).abs().max()) for name, value in weights.items()) < 1e-9
    assert all(abs(recovered_run[1][name] - value) < 1e-9 for name, value in metrics.items())


@pytest.mark.parametrize(
    ("strategy", "devices", "rank", "moment"),
    params(
        [
            (lambda: Mesh(pipeline=2), 2, 0, "forward"),
            (lambda: Mesh(context=2, data="fsdp"), 2, 1, "forward"),
            (lambda: Mesh(pipeline=2, data="fsdp"), 4, 1, "optimizer"),
        ],
        [
            (lambda: Mesh(pipeline=2, data="fsdp", schedule="zero_bubble"), 4, 2, "backward"),
            (lambda: Mesh(tensor=2, data="fsdp"), 4, 2, "optimizer"),
            (lambda: Mesh(context=2, pipeline=2), 4, 1, "forward"),
            (lambda: Mesh(context=2, pipeline=2), 4, 2, "backward"),
        ],
    ),
)
def test_a_dead_worker_of_a_mesh_is_replaced_in_place(
    strategy: Any, devices: int, rank: int, moment: Any, alone: Callable[[str], dict[str, Any]]
) -> None:
    expected = alone("AdamW")
    recovered_run = recovered(strategy(), devices, [kill(rank).during(moment, step=3)])
    equal(recovered_run, expected["weights"], expected["metrics"])


@pytest.mark.parametrize(
    ("strategy", "devices", "rank", "moment"),
    params(
        [(lambda: Mesh(tensor=2), 2, 1, "backward")],
        [
            (lambda: Mesh(pipeline=2), 2, 0, "forward"),
            (lambda: Mesh(tensor=2, data="fsdp"), 4, 2, "optimizer"),
            (lambda: Mesh(context=2, data="fsdp"), 2, 1, "forward"),
        ],
    ),
)
def test_a_replacement_draws_the_random_numbers_of_a_dead_worker(
    strategy: Any, devices: int, rank: int, moment: Any
) -> None:
    weights, metrics, _ = recovered(strategy(), devices, [], dropout=0.2)
    equal(recovered(strategy(), devices, [kill(rank).during(moment, step=3)], dropout=0.2), weights, metrics)


@pytest.mark.parametrize("axis", params(["tensor"], ["pipeline", "context"]))
def test_a_replacement_continues_the_average_of_its_shard_of_the_weights(axis: str) -> None:
    def strategy() -> Mesh:
        return Mesh(**{axis: 2})  # type: ignore[arg-type]

    weights, metrics, _ = recovered(strategy(), 2, [EMA(0.5)])
    equal(recovered(strategy(), 2, [EMA(0.5), kill(1).during("backward", step=3)]), weights, metrics)


@pytest.mark.parametrize("trains", params([True], [False]))
@pytest.mark.parametrize("axis", params(["context"], ["pipeline", "tensor"]))
def test_in_memory_checkpoints_restore_requires_grad_on_all_ranks(axis: str, trains: bool) -> None:
    """In-memory checkpoints are of step 3; step 4 changes the trained parameters, and step 5 is interrupted."""

    def strategy() -> Mesh:
        return Mesh(**{axis: 2})  # type: ignore[arg-type]

    changes = ChangesOnce("blocks.1", 4, trains=trains)
    weights, metrics, _ = recovered(strategy(), 2, [changes])
    equal(recovered(strategy(), 2, [changes, kill(1).during("backward", step=4)]), weights, metrics)


class Measures(GPT):
    """Counts in torchmetrics objects, predicts, and has batch statistics outside of its blocks."""

    def __init__(self, statistics: bool) -> None:
        super().__init__(sgd=True)
        self.batch_norm = nn.BatchNorm1d(LENGTH) if statistics else nn.Identity()
        self.sum, self.total = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def forward(self, ids: Tensor) -> Tensor:
        return self.batch_norm(super().forward(ids))  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.sum.update(loss.detach())
        self.log("sum", self.sum, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.total.update(batch.sum())

    def on_validation_epoch_end(self) -> None:
        self.log("total", self.total.compute())
        self.total.reset()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1])[:, -1]  # type: ignore[no-any-return]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, Mesh) and not self.norms:
            with pytest.raises(DividedGradient, match="a rank has only its part"):
                nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.norms.append(0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for name in ("blocks.0.down.weight", "blocks.2.qkv.weight"):  # sharded along columns, and along fused parts
                weight = self.get_parameter(name)
                weight.div_(weight.norm(dim=1, keepdim=True))
            self.get_parameter("blocks.2.up.bias")[1:3] *= 0.5
        self.log("norm", nn.utils.get_total_norm(list(self.parameters())), on_step=True, on_epoch=False)
        self.log("state", sum(value.double().square().sum() for value in self.state_dict().values()))  # type: ignore[arg-type]


def measured(strategy: Any, statistics: bool) -> dict[str, Any]:
    fx.seed_everything(3)
    module = Measures(statistics)
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{**QUIET, "max_epochs": 1, "gradient_clip_val": 0.5})
    trainer.fit(module, DataLoader(sentences(10), 4), DataLoader(sentences(5), 2))  # type: ignore[arg-type]
    predicted = trainer.predict(module, DataLoader(sentences(5), 2))  # type: ignore[arg-type]
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "predicted": torch.cat(predicted), "weights": module.state_dict(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "statistics"),
    params([(Mesh(tensor=2), True), (Mesh(pipeline=2, microbatches=1), True)], [(Mesh(pipeline=2), False)]),
)
def test_metric_objects_predictions_and_batch_statistics_equal_those_of_a_single_process(
    strategy: Mesh, statistics: bool
) -> None:
    alone = measured("single", statistics)
    for results in run_ranks(measured, 2, strategy, statistics):
        assert results["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)  # float32
        assert torch.allclose(results["predicted"], alone["predicted"], atol=1e-4)
        assert all(torch.allclose(results["weights"][name], w, atol=1e-4) for name, w in alone["weights"].items())


class CountsBatches(fx.Callback):
    """Has its own metric object."""

    def __init__(self) -> None:
        self.counted = Counts()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counted.update(len(batch))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("of callback", float(self.counted.compute()))


class CountsEarly(GPT):
    """Counts samples before its blocks (computed by all stages of a pipeline), and in hooks.

    Args:
        validates: also count before the blocks in validations.
    """

    def __init__(self, validates: bool) -> None:
        super().__init__(sgd=True)
        self.blocks.append(Block(0.0))
        self.validates = validates
        self.trained, self.validated, self.in_hook = Counts(), Counts(), Counts()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained.update(len(batch))
        self.log("early", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        loss = super().training_step(batch, batch_idx)
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.in_hook.update(len(batch))
        self.log("in hook", self.in_hook, on_step=False, on_epoch=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.validates:
            self.validated.update(len(batch))
            self.log("validated", self.validated)
        super().validation_step(batch, batch_idx)


def counted(strategy: Any, devices: int, validates: bool) -> tuple[dict[str, float], list[float]]:
    fx.seed_everything(3)
    module, callback = CountsEarly(validates), CountsBatches()
    module.in_hook.update(100)  # initial value of the first epoch
    options: Any = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = fx.Trainer(devices=devices, strategy=strategy, callbacks=[callback], **options)
    trainer.fit(module, DataLoader(sentences(10), 4), DataLoader(sentences(5), 2))  # type: ignore[arg-type]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "loss" not in name}
    return metrics, [float(metric.total) for metric in (module.validated, module.in_hook, callback.counted)]


@pytest.mark.parametrize(
    ("strategy", "validates"),
    params([(Mesh(pipeline=2), True)], [(Mesh(pipeline=2, virtual=2, microbatches=4), False), (Mesh(tensor=2), True)]),
)
def test_metric_objects_updated_by_all_stages_count_samples_once(strategy: Mesh, validates: bool) -> None:
    alone, objects = counted("single", 1, validates)
    actual, actual_objects = counted(strategy, 2, validates)
    assert actual == pytest.approx(alone, rel=1e-4)  # float32
    assert alone["trained"] == alone["early"] == alone["of callback"] == 10.0
    assert actual_objects == objects


PARAMETRIZED: dict[str, Callable[[nn.Module], Any]] = {
    "spectral": nn.utils.parametrizations.spectral_norm,
    "weight": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old spectral": nn.utils.spectral_norm,
}


class Parametrized(GPT):
    """Computes some weights from other parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        for block in self.blocks:
            PARAMETRIZED[kind](block.up)
            PARAMETRIZED[kind](block.out)


def normalised(strategy: Any, kind: str, batch: int = 4) -> Any:
    """Train in the present ranks; return parameters and buffers, and the validation loss."""
    torch.set_default_dtype(torch.float64)
    try:
        fx.seed_everything(3)
        module = Parametrized(kind)
        devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        trainer = fx.Trainer(devices=devices, strategy=strategy, **{**QUIET, "max_epochs": 5 if SOAK else 1})
        data: Any = sentences(16)
        trainer.fit(module, DataLoader(data, batch), DataLoader(data[:4], 2))
        state: dict[str, Any] = {**module.state_dict(), "val": torch.as_tensor(trainer.callback_metrics["val"])}
        return {n: value.full_tensor() if hasattr(value, "full_tensor") else value for n, value in state.items()}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("strategy", "ranks", "data_ranks"),
    params(
        [(Mesh(pipeline=2, microbatches=1), 2, 1)],
        [
            (Mesh(tensor=2), 2, 1), (Mesh(tensor=2, pipeline=2, microbatches=1), 4, 1), (FSDP(), 2, 2),
            (Mesh(data="fsdp", tensor=2), 4, 2), (Mesh(data="fsdp", pipeline=2, microbatches=1), 4, 2),
        ],
    ),
)  # fmt: skip
def test_parametrized_weights_and_their_buffers_equal_those_of_a_single_process(
    strategy: Any, ranks: int, data_ranks: int
) -> None:
    for kind in PARAMETRIZED if SOAK else ["spectral"]:
        alone = normalised("single", kind)
        for weights in run_ranks(normalised, ranks, strategy, kind, 4 // data_ranks):
            assert max(float((weights[name] - value).abs().max()) for name, value in alone.items()) < 1e-9, kind


class ReadsEarlier(GPT):
    """Uses weights of the first stage after the blocks in its validation."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch) + self.get_parameter("blocks.0.up.weight").square().mean())


def refused(cases: list[tuple[Any, dict[str, Any], str]]) -> list[str]:
    """Return the error messages of fits that are refused at set-up."""
    return [refusal(*case) for case in cases]


def refusal(strategy: Any, options: dict[str, Any], change: str) -> str:
    module = ReadsEarlier() if change == "validation" else GPT()
    if change == "lbfgs":
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())  # type: ignore[method-assign]
    if change == "sparse":
        module.embed.sparse = True
    if change == "manual":
        module.automatic_optimization = False
    data = DataLoader(sentences(8), 4)  # type: ignore[arg-type]
    begin = 4 * torch.distributed.get_rank()
    train: Any = [torch.stack(sentences(8)[begin : begin + 4])] if change == "divided" else data
    try:
        fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_epochs": 1, **options}).fit(module, train, data)
    except Exception as error:
        assert not module.norms, "no update was made"
        return f"{type(error).__name__}: {error}"
    return ""


def test_unsupported_combinations_with_meshes_are_errors_with_the_remedy() -> None:
    cases = [
        (Mesh(tensor=2), {"compile": True}, "", "remove compile"),
        (Mesh(tensor=2), {"sync_batchnorm": True}, "", "remove sync_batchnorm"),
        (Mesh(tensor=2), {}, "lbfgs", "use AdamW or SGD"),
        (Mesh(pipeline=2), {}, "manual", "automatic optimization"),
        (Mesh(pipeline=2), {}, "sparse", "set sparse=False"),
        (Mesh(pipeline=2), {}, "validation", "validation_step uses blocks.0.up.weight at stage 1"),
        (Mesh(tensor=2), {}, "manual", "automatic optimization"),
        (Mesh(context=2), {}, "manual", "automatic optimization"),
        (Mesh(tensor=2), {}, "divided", "divide a stream by trainer.distributed_sampler_kwargs"),
        (Mesh(pipeline=2), {}, "divided", "divide a stream by trainer.distributed_sampler_kwargs"),
        (Mesh(context=2), {}, "divided", "divide a stream by trainer.distributed_sampler_kwargs"),
        (Mesh(tensor=2, plan={"blocks.*.nothing": "colwise"}), {}, "", "nothing"),
        (Mesh(pipeline=2, virtual=2), {}, "", "blocks can be divided into at most"),
    ]
    messages = run_ranks(refused, 2, [case[:3] for case in cases])[0]
    for (_, _, change, expected), message in zip(cases, messages, strict=True):
        assert expected in message, (change, message)


class Layers(TinyModule):
    """Has one block per layer, so that fsdp's blocks begin and end between the sharded layers of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)], nn.Linear(4, 1))


def test_blocks_of_fsdp_that_divide_a_pair_of_sharded_layers_are_an_error() -> None:
    options = {**QUIET, "max_epochs": 1}
    with pytest.raises(WorkerFailed, match=r"choose submodules that contain both layers, by data=FSDP\(wrap="):
        fx.Trainer(devices=4, strategy=Mesh(tensor=2, data="fsdp"), **options).fit(Layers(), tiny_loader())
    alone, module = Layers(), Layers()
    module.load_state_dict(alone.state_dict())
    fx.Trainer(devices=1, strategy="single", **options).fit(alone, tiny_loader(batch=8))
    fx.Trainer(devices=4, strategy=Mesh(tensor=2, data=FSDP(wrap=1e6)), **options).fit(module, tiny_loader())
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=1e-6)


class SavesWithinWindow(GPT):
    """Saves a checkpoint after the first batch of the second accumulation window."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/within")


def test_a_checkpoint_within_a_window_of_a_sharded_pipeline_is_complete_and_the_window_continues(
    tmp_path: Path,
) -> None:
    run_options, module = RUNS["SGD, accumulation"]
    options = {**run_options, "max_epochs": 1, "max_steps": 3}
    expected = train("single", 4, options, module)
    mesh = Mesh(pipeline=2, data="fsdp")
    results = run_ranks(train, 4, mesh, 2, options, module, str(tmp_path), None, False, 19, SavesWithinWindow)[0]
    resumed = train("single", 2, options, module, "", f"{tmp_path}/within")  # its batch is half of the global batch
    for name, value in expected["weights"].items():
        assert torch.allclose(results["weights"][name], value, rtol=0.0, atol=1e-12), name
        assert torch.allclose(resumed["weights"][name], value, rtol=0.0, atol=1e-12), name
