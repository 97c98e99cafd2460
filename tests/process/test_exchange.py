"""Traffic between workers and servers: complete gradients, sparse rows, compression, and overlap."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fabricx import checkpoint
from fabricx.callbacks import ModelCheckpoint
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, AsyncSGD, ParameterServer, Single
from fabricx.testing import SavesAtEnd
from tests.process.served import Recorded, train
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")


def same_weights(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_each_gradient_and_the_weights_are_sent_once_per_step() -> None:
    module, trainer = train(ParameterServer(servers=2), 2, batch=6, limit_val_batches=0)
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert module.traffic == [(8 * size, 8 * size)] * 2
    module, trainer = train(AsyncSGD(servers=2), 2, batch=4, limit_val_batches=0, max_epochs=1)
    assert sum(sent for sent, _ in module.traffic) == trainer.global_step * size
    quiet = 2 * 2  # each worker receives the weights at meetings: at the end of the epoch, and after it
    assert sum(received for _, received in module.traffic) <= (trainer.global_step + quiet) * size


ROWS, WIDTH = 1009, 6


class WithEmbedding(Recorded):
    """Adds rows of a large embedding to each input; a batch uses few of its rows.

    Args:
        reads: the whole table is also read, in the "step", or in "hooks".
    """

    def __init__(self, kind: str, *, sparse: bool = True, reads: str = "", **options: Any) -> None:
        super().__init__()
        self.kind, self.sparse, self.reads, self.level = kind, sparse, reads, 0.0
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse, **options)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.reads == "hooks":
            self.level = self.table.weight.detach().mean(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.append(batch[2].tolist())
        rows = self.table((batch[2] * 97) % ROWS)
        rows = rows + F.embedding(batch[2] % 5, self.table.weight, sparse=self.sparse)  # rows that many samples share
        rows = rows + (self.level if self.reads == "hooks" else self.table.weight.data.mean(0) if self.reads else 0.0)
        return super(Recorded, self).training_step([batch[0] + rows, batch[1]], batch_idx)

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.02)
        if self.kind == "adagrad":
            return torch.optim.Adagrad(self.parameters(), lr=0.02)
        others = [parameter for parameter in self.parameters() if parameter is not self.table.weight]
        return [torch.optim.AdamW(others, lr=0.01), torch.optim.SparseAdam([self.table.weight], lr=0.01)]


SPARSE = params(
    [
        (ParameterServer(servers=2), 2, "sgd"),
        (ParameterServer(optimizer="server", servers=2, link="gloo"), 2, "adagrad"),
        (ParameterServer(mode="bounded", max_staleness=0, servers=3), 2, "adam"),
        (AsyncSGD(servers=2), 1, "adam"),
    ],
    [
        *((ParameterServer(servers=2), 2, kind) for kind in ("adagrad", "adam")),
        (AsyncSGD(servers=2), 1, "sgd"),
        *((ParameterServer(optimizer="server", servers=2, link="gloo"), 2, kind) for kind in ("sgd", "adam")),
        *((ParameterServer(mode="bounded", max_staleness=0, servers=3), 2, kind) for kind in ("sgd", "adagrad")),
        (AsyncSGD(servers=2), 1, "adagrad"),
        *((ParameterServer(servers=0), 2, kind) for kind in ("sgd", "adagrad", "adam")),
        *((ParameterServer(link="gloo"), 2, kind) for kind in ("sgd", "adagrad", "adam")),
    ],
)


# torch's Adagrad creates sparse tensors without setting the check explicitly.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("strategy", "devices", "kind"), SPARSE)
def test_sparse_rows_are_trained_like_a_dense_table(strategy: Any, devices: int, kind: str, tmp_path: Path) -> None:
    reads = "hooks" if isinstance(strategy, ParameterServer) and strategy.mode == "sync" else "step"
    expected, _ = train(Single(), 1, module=WithEmbedding(kind, reads=reads), batch=12)
    saver = SavesAtEnd(tmp_path / "end.ckpt")
    module, _ = train(
        strategy, devices, module=WithEmbedding(kind, reads=reads), batch=12 // devices, callbacks=[saver]
    )
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        exact = devices == 1 and kind != "sgd"  # SGD adds the gradients of a row one after another
        assert torch.equal(a, b) if exact else torch.allclose(a, b, atol=2e-6)
    again, _ = train(
        Single(),
        1,
        module=WithEmbedding(kind, reads=reads),
        ckpt=tmp_path / "end.ckpt",
        max_epochs=3,
        batch=12 // devices,
    )
    whole, _ = train(Single(), 1, module=WithEmbedding(kind, reads=reads), max_epochs=3)
    for a, b in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(a, b, atol=5e-6)
    if kind != "adam":  # SparseAdam moves no rows without a gradient, and has momentum only for rows with a gradient
        dense, _ = train(Single(), 1, module=WithEmbedding(kind, sparse=False, reads=reads), batch=12)
        assert torch.allclose(module.table.weight, dense.table.weight, atol=2e-6)


@pytest.mark.parametrize("strategy", [ParameterServer(servers=2), AsyncSGD(link="gloo")])
def test_unused_rows_are_not_sent(strategy: Any) -> None:
    module, _ = train(strategy, 2, module=WithEmbedding("sgd"), batch=4, limit_val_batches=0, max_epochs=1)
    dense = 4 * sum(parameter.numel() for name, parameter in module.named_parameters() if name != "table.weight")
    touched = sum(
        len({*(n * 97 % ROWS for n in batch), *(n % 5 for n in batch)})
        for batches in module.by_rank
        for batch in batches
    )
    sent, received = (sum(column) for column in zip(*module.traffic, strict=True))
    row = 4 * (WIDTH + 1)  # with its index
    steps = sum(len(batches) for batches in module.by_rank)
    if isinstance(strategy, ParameterServer):
        assert sent == pytest.approx(steps * dense + touched * row, rel=0.02)
        assert received < steps * dense + 2 * touched * row  # rows of both workers
    else:  # the indices of the requested rows, and later the indices and gradients
        assert sent == pytest.approx(steps * dense + touched * (row + 4), rel=0.02)
        seen = {number for batches in module.by_rank for batch in batches for number in batch}
        changed = len({*(n * 97 % ROWS for n in seen), *(n % 5 for n in seen)})
        meetings = 2 * (2 * dense + changed * row)  # each worker receives each changed row once
        assert received <= steps * dense + touched * 4 * WIDTH + meetings


class CountsUpdates(WithEmbedding):
    """Records the number of updates in its weights at each step."""

    updates: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.updates = [*self.updates, self.trainer.strategy.wait_for_weights(-1)]


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_updates_are_counted_when_rows_are_read_before_all_weights_are_received(overlap: Any) -> None:
    module, _ = train(AsyncSGD(overlap=overlap), 1, module=CountsUpdates("sgd"), max_epochs=1)
    assert module.updates == [0, 1, 2, 3]


class MovesAllRows(torch.optim.SGD):
    """Moves all rows of a table that has a gradient, as a user's optimizer may."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(1e-3)


class MovesAll(WithEmbedding):
    def configure_optimizers(self) -> Any:
        return MovesAllRows(self.parameters(), lr=0.02)


class ChecksTables(WithEmbedding):
    """Records the traffic of each meeting, and checks that all ranks have the same_weights table."""

    received: list[Any] = []

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            strategy: Any = self.trainer.strategy
            self.received = [*self.received, self.trainer.world.gather_objects(strategy.traffic[1])]
            tables = self.trainer.world.gather_objects(self.table.weight.detach())
            assert all(torch.equal(tables[0], other) for other in tables)


@pytest.mark.parametrize(
    "strategy",
    params(
        [AsyncSGD(servers=2), ParameterServer(optimizer="server", pull_compression="bf16")],
        [ParameterServer(optimizer="server", link="gloo")],
    ),
)
def test_tables_are_equal_on_all_ranks_at_each_meeting(strategy: Any) -> None:
    options: Any = {"batch": 4, "val_check_interval": 0.25, "limit_val_batches": 1, "max_epochs": 2}
    module, _ = train(strategy, 2, module=ChecksTables("sgd"), **options)
    assert len(module.received) == 12
    # With the weights and rows of all steps in between, this is less than a third of whole tables per meeting.
    assert max(module.received[-1]) < 12 * 4 * ROWS * WIDTH / 3
    all_moved, _ = train(AsyncSGD(), 2, module=MovesAll("own optimizer"), **options)
    moved = all_moved.table.weight.detach()
    fresh = MovesAll("own optimizer").table.weight.detach()
    assert float((moved - fresh).min()) > -0.5
    assert float((moved - fresh).median()) == pytest.approx(1e-3 * 22, rel=0.01)  # also rows without a gradient


class Momentum(WithEmbedding):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def test_momentum_of_sparse_tables_is_refused_on_servers() -> None:
    with pytest.raises(WorkerFailed, match="momentum also changes rows of a sparse embedding"):
        train(AsyncSGD(), module=Momentum("sgd"))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: WithEmbedding("sgd"), {"gradient_clip_val": 1.0}, "torch can.t clip sparse gradients"),
        (lambda: WithEmbedding("sgd", max_norm=1.0), {}, "table has max_norm"),
    ],
)
def test_options_without_support_for_sparse_rows_are_refused(make: Any, options: Any, message: str) -> None:
    for strategy in (ParameterServer(optimizer="server"), AsyncSGD()):
        with pytest.raises(WorkerFailed, match=message):
            train(strategy, module=make(), **options)
    with pytest.raises(WorkerFailed, match="compensation does not support sparse gradients"):
        train(AsyncSGD(compensation="dc"), module=WithEmbedding("sgd"))


class UsesWeightsDirectly(Recorded):
    """Uses a layer's weights without calling the layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(self.body(inputs), self.head.weight, self.head.bias)


class CountsForwards(Recorded):
    """Has a parameter outside of its layers, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.ones(6))  # a parameter without a layer
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs * self.free)


@pytest.mark.parametrize(("link", "servers"), params([("auto", 2), ("gloo", 1)], [("auto", 1), ("gloo", 2)]))
@pytest.mark.parametrize(
    ("make", "devices"),
    [
        (AsyncSGD, 1),
        *params(
            [(lambda **options: ParameterServer(optimizer="server", pull_compression="bf16", **options), 2)],
            [(lambda **options: ParameterServer(optimizer="server", **options), 2)],
        ),
    ],
)
def test_receiving_weights_during_the_next_forward_does_not_change_training(
    make: Any, devices: int, servers: int, link: Any
) -> None:
    options: dict[str, Any] = {"batch": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    at_once, trainer = train(make(servers=servers, link=link), devices, module=CountsForwards(), **options)
    later, overlapped = train(
        make(servers=servers, link=link, overlap="forward"), devices, module=CountsForwards(), **options
    )
    assert same_weights(later, at_once)
    assert overlapped.global_step == trainer.global_step
    assert float(overlapped.callback_metrics["val"]) == float(trainer.callback_metrics["val"])
    assert later.traffic == at_once.traffic


def test_using_weights_before_they_are_received_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match=r"head\.weight.*: used before the newest value was received"):
        train(AsyncSGD(overlap="forward"), module=UsesWeightsDirectly())
    train(AsyncSGD(), module=UsesWeightsDirectly(), max_epochs=1)


@functools.cache
def uncompressed(**options: Any) -> Any:
    """Return the run without compression, for comparison."""
    return train(ParameterServer(**options), 2, batch=3, max_epochs=8, limit_val_batches=2)


PARTS = {"bf16": 1 / 2, "topk": 0.2, "sign": 1 / 32}


@pytest.mark.parametrize(
    ("kind", "link"),
    params(
        [("bf16", "auto"), ("sign", "auto"), ("topk", "gloo")], [("topk", "auto"), ("bf16", "gloo"), ("sign", "gloo")]
    ),
)
def test_compressed_gradients_train_with_fewer_bytes(kind: Any, link: Any) -> None:
    strategy = ParameterServer(compression=kind, compression_keep=0.1, link=link)
    module, trainer = train(strategy, 2, batch=3, max_epochs=8, limit_val_batches=2)
    plain, other = uncompressed(link=link)
    (sent, received), (all_sent, all_received) = module.traffic[0], plain.traffic[0]
    assert sent == pytest.approx(PARTS[kind] * all_sent, rel=0.02)
    assert received == all_received
    assert float(trainer.callback_metrics["loss_epoch"]) < 2 * float(other.callback_metrics["loss_epoch"]) + 0.5


@pytest.mark.parametrize(
    ("kind", "part", "optimizer"),
    params(
        [("bf16", 1 / 2, "worker"), ("topk", 0.2, "server"), ("sign", 1 / 32, "worker")],
        [("bf16", 1 / 2, "server"), ("topk", 0.2, "worker"), ("sign", 1 / 32, "server")],
    ),
)
def test_pulled_weights_are_compressed(kind: Any, part: float, optimizer: Any) -> None:
    options: dict[str, Any] = {"batch": 3, "max_epochs": 8, "limit_val_batches": 2}
    strategy = ParameterServer(pull_compression=kind, compression_keep=0.1, optimizer=optimizer, servers=2)
    module, trainer = train(strategy, 2, **options)
    plain, other = uncompressed(optimizer=optimizer, servers=2)
    (sent, received), (all_sent, all_received) = module.traffic[0], plain.traffic[0]
    assert sent == all_sent
    size = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert all_received == trainer.global_step * size
    whole = 0 if optimizer == "worker" else 8 * size + size  # at meetings: once per epoch, and at the start
    assert received == pytest.approx(part * all_received + whole, rel=0.03)
    assert float(trainer.callback_metrics["loss_epoch"]) < 2 * float(other.callback_metrics["loss_epoch"]) + 0.5


def test_powersgd_sends_low_rank_factors_instead_of_gradients() -> None:
    options: dict[str, Any] = {"batch": 3, "max_epochs": 8, "limit_val_batches": 2}
    exact, single = train(Single(), 1, **{**options, "batch": 6})
    whole, _ = train(ParameterServer(compression="powersgd", powersgd_rank=3), 2, **options)
    assert all(torch.allclose(a, b, atol=1e-1) for a, b in zip(whole.parameters(), exact.parameters(), strict=True))
    module, trainer = train(ParameterServer(compression="powersgd", powersgd_rank=1, servers=2), 2, **options)
    thin = sum(6 + 9 for name, p in module.named_parameters() if p.shape in ((6, 9), (9, 6)))
    others = sum(p.numel() for p in module.parameters() if p.dim() == 1 or 1 in p.shape)
    steps = trainer.global_step
    assert module.traffic[0][0] == pytest.approx(4 * steps * (thin + others), rel=0.02)
    assert float(trainer.callback_metrics["loss_epoch"]) < 2 * float(single.callback_metrics["loss_epoch"]) + 0.5


@pytest.mark.parametrize(
    "strategy",
    params(
        [
            ParameterServer(compression="topk", pull_compression="topk", servers=2), DDP(compression="powersgd"),
            ParameterServer(optimizer="server", pull_compression="topk", servers=2),
        ],
        [
            ParameterServer(compression="sign"), ParameterServer(compression="powersgd", powersgd_rank=1),
            ParameterServer(compression="sign", optimizer="server"),
        ],
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the checkpoint has the state of ModelCheckpoint")
def test_compression_residuals_are_stored_in_checkpoints(tmp_path: Path, strategy: Any) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    whole, _ = train(strategy, 2, callbacks=[saver], batch=6, enable_checkpointing=True)
    path = sorted(checkpoint.list_committed(tmp_path), key=lambda saved: checkpoint.read_manifest(saved)["step"])[0]
    saver = ModelCheckpoint(tmp_path / "again", every_n_train_steps=2)  # a checkpoint reads complete weights
    again, _ = train(strategy, 2, ckpt=path, callbacks=[saver], batch=6, enable_checkpointing=True)
    assert same_weights(again, whole)
    # Another number of workers: the residuals are lost, with a warning.
    _, trainer = train(strategy, 1, ckpt=path, batch=6)
    assert trainer.current_epoch == 2
