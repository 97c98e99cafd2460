"""LocalSGD: rounds of one step equal ddp, each round has a single collective, and runs resume exactly."""

from __future__ import annotations

import contextlib
import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA, FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, LocalSGD, Single
from fabricx.testing import QUIET, LayeredModule, layered_data, run_ranks
from tests.soak import params

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Plain(LayeredModule):
    """Trained with SGD, whose steps are linear in the gradient."""

    def __init__(self, momentum: float = 0.0) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.momentum = momentum
        self.spread: list[float] = []
        self.collectives: list[int] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)


class RecordsSpread(fx.Callback):
    """Records the distance of the ranks' weights after each step, and the number of collectives of the step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._mode = CommDebugMode()
        self._mode.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._mode.__exit__(None, None, None)
        module.collectives.append(sum(self._mode.get_comm_counts().values()))
        del self._mode
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        mean = trainer.world.all_reduce(weights.clone()) / trainer.world.size
        module.spread.append(float((weights - mean).abs().max()))


def train(strategy: Any, devices: int = 2, *, module: Any = None, ckpt: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(2)
    module = module or Plain()
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 2, **QUIET, **options})
    data = DataLoader(layered_data(43), 12 // devices, shuffle=True)
    trainer.fit(module, data, DataLoader(layered_data(5), 1), ckpt_path=ckpt)
    return module, trainer


def largest_difference(first: Any, second: Any) -> float:
    return max(
        float((a - b).detach().abs().max()) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


ONE_STEP_ROUNDS: list[Any] = [{"every": 1}, {"every": 9, "synchronous_steps": 99}]


@pytest.mark.parametrize(
    ("momentum", "options"),
    params(
        [(0.9, ONE_STEP_ROUNDS[0]), (0.0, ONE_STEP_ROUNDS[1])], [(0.0, ONE_STEP_ROUNDS[0]), (0.9, ONE_STEP_ROUNDS[1])]
    ),
)
def test_rounds_of_one_step_equal_ddp(momentum: float, options: dict[str, Any]) -> None:
    expected, single = train(Single(), 1, module=Plain(momentum))
    module, several = train(LocalSGD(**options), module=Plain(momentum))
    assert largest_difference(module, expected) < 2e-6
    assert several.global_step == single.global_step == 8
    assert float(several.callback_metrics["val"]) == pytest.approx(float(single.callback_metrics["val"]), rel=1e-4)


def test_ranks_diverge_within_a_round_and_are_averaged_at_its_end() -> None:
    module, _ = train(LocalSGD(every=3), callbacks=[RecordsSpread()], log_every_n_steps=0, limit_val_batches=0)
    meets = [step % 3 == 0 for step in range(1, 9)]
    assert [count > 0 for count in module.collectives] == meets
    assert [spread < 1e-6 for spread in module.spread] == meets


def test_fragments_are_averaged_at_different_steps_and_overlap_later_steps() -> None:
    options = {"every": 4, "fragments": 2, "overlap_steps": 1}
    module, _ = train(LocalSGD(**options), callbacks=[RecordsSpread()], log_every_n_steps=0, limit_val_batches=0)
    assert module.collectives == [0, 1, 0, 1, 0, 1, 0, 1]
    assert min(module.spread) > 1e-6  # there is always a fragment in transfer


def test_a_validation_within_a_round_has_no_effect_on_training() -> None:
    options: dict[str, Any] = {"every": 3, "outer": "nesterov", "fragments": 2, "overlap_steps": 2}
    often, trainer = train(LocalSGD(**options), val_check_interval=1)
    never, _ = train(LocalSGD(**options), limit_val_batches=0)
    assert all(torch.equal(a, b) for a, b in zip(often.parameters(), never.parameters(), strict=True))
    assert "val" in trainer.callback_metrics


def _due_at(steps: tuple[int, ...], trainer: Any) -> bool:
    return trainer.global_step in steps


def test_snapshots_at_any_step_have_no_effect_on_training() -> None:
    options: dict[str, Any] = {
        "every": 4, "outer": "nesterov", "fragments": 2, "overlap_steps": 2, "keep_local": 0.3, "compression": "int4",
    }  # fmt: skip
    results = []
    for steps in ((), (3, 5, 6)):
        recovery = FaultRecovery()
        vars(recovery)["_due"] = functools.partial(_due_at, steps)
        module, _ = train(LocalSGD(**options), module=Normed(momentum=0.9), callbacks=[recovery])
        results.append(module.state_dict())
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


class Saves(fx.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path)


class Constant(Plain):
    """Has gradients that do not depend on the weights: steps of both ranks can be added up in any order."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = batch[0].mean()
        return scale * sum((tensor * torch.linspace(-1.0, 1.0, tensor.numel()).view_as(tensor)).sum()
                           for tensor in self.parameters())  # fmt: skip


class Counts(fx.Callback):
    """Records the shared elements of the newest weights of each step that the rounds have not corrected yet."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.spread.append(sum(float(f.codec.lost.abs().sum()) for f in trainer.strategy._fragments))


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_errors_of_compressed_differences_are_added_at_the_end(compression: Any) -> None:
    """Regression: weight differences could not be compressed."""
    options = {"every": 3, "fragments": 2}
    exact, _ = train(LocalSGD(**options), module=Constant(), limit_val_batches=0)
    module, _ = train(
        LocalSGD(**options, compression=compression), module=Constant(), callbacks=[Counts()], limit_val_batches=0
    )
    assert module.spread[-1] > 0.0
    assert largest_difference(module, exact) < 2e-6


@pytest.mark.parametrize(
    ("outer", "compression"),
    params([("average", "int4"), ("nesterov", None)], [("average", None), ("nesterov", "int8")]),
)
def test_a_run_resumes_exactly_and_under_other_strategies(tmp_path: Path, outer: Any, compression: Any) -> None:
    options: dict[str, Any] = {
        "every": 4, "outer": outer, "outer_lr": 0.3, "outer_momentum": 0.5, "compression": compression
    }  # fmt: skip
    whole, _ = train(LocalSGD(**options), module=LayeredModule(), callbacks=[Saves(tmp_path / "five.ckpt")])
    saved = checkpoint.load(tmp_path / "five.ckpt")["strategy"]
    assert ("outer" in saved) == (outer == "nesterov")
    again, trainer = train(LocalSGD(**options), module=LayeredModule(), ckpt=tmp_path / "five.ckpt")
    assert trainer.global_step == 8
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    for strategy, devices in ((DDP(), 2), (Single(), 1)):
        other, trainer = train(
            strategy, devices, module=LayeredModule(), ckpt=tmp_path / "five.ckpt", max_steps=5, limit_val_batches=0
        )
        assert trainer.global_step == 5
        assert all(torch.equal(tensor, saved["module"][name]) for name, tensor in other.state_dict().items())


class ChangesAndSaves(fx.Callback):
    """Changes weights in and after a validation within a round, while the module has averaged weights; saves then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 2 and not trainer.ckpt_path:  # a resumed run repeats this validation
            trainer.save_checkpoint(self.path / "averages")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 4:
            module.head.weight.data.fill_(0.3)
            trainer.save_checkpoint(self.path / "changed")


def test_a_run_resumes_exactly_from_a_validation_within_a_round(tmp_path: Path) -> None:
    """The outer step of a checkpoint's round is independent of changes by validations and hooks."""
    options: dict[str, Any] = {"every": 5, "outer": "nesterov"}
    callbacks: list[Any] = [EMA(0.5, apply_at_end=False, use_buffers=True), ChangesAndSaves(tmp_path)]
    whole, _ = train(LocalSGD(**options), module=Normed(0.5), callbacks=callbacks, val_check_interval=2)
    for name in ("averages", "changed"):
        path = tmp_path / name
        again, _ = train(LocalSGD(**options), module=Normed(0.5), callbacks=callbacks, val_check_interval=2, ckpt=path)
        pairs = zip(again.state_dict().values(), whole.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name


class SavesAtTheEnd(fx.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def saved(strategy: LocalSGD, folder: Path) -> None:
    """Train; save at the end and after the fit, as under torchrun, where the ranks remain."""
    _, trainer = train(strategy, callbacks=[SavesAtTheEnd(folder / "end")], max_steps=5)
    trainer.save_checkpoint(folder / "weights", weights_only=True)
    trainer.save_checkpoint(folder / "after")


def test_a_checkpoint_after_the_fit_equals_that_at_its_end_or_is_refused_without_outer_momentum(tmp_path: Path) -> None:
    run_ranks(saved, 2, LocalSGD(every=4), tmp_path)
    end, after = (checkpoint.load(tmp_path / name)["strategy"] for name in ("end", "after"))
    assert end["used"] == after["used"]
    assert end["used"][0]
    assert all(torch.equal(tensor, after["module"][name]) for name, tensor in end["module"].items())
    with pytest.raises(WorkerFailed, match=r"lacks the outer momentum of local_sgd.*on_train_end.*weights_only=True"):
        run_ranks(saved, 2, LocalSGD(every=4, outer="nesterov"), tmp_path / "nesterov")
    assert "outer" in checkpoint.load(tmp_path / "nesterov" / "end")["strategy"]


class Normed(Plain):
    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__(momentum)
        self.norm = nn.BatchNorm1d(6)
        self.changes: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.norm(inputs)
        return super().forward(inputs)


def test_running_statistics_of_batch_norm_equal_those_of_a_single_process(tmp_path: Path) -> None:
    expected, _ = train(Single(), 1, module=Normed())
    # With a validation after each step, statistics are combined at each step, also the step with 3 and 4 samples.
    # Otherwise a rank's weight counts all its steps, and the variance between ranks is estimated.
    cases: list[tuple[float, dict[str, Any]]] = [
        (1e-5, {"val_check_interval": 1}), (0.1, {"callbacks": [Saves(tmp_path / "five.ckpt")]}),
    ]  # fmt: skip
    for close, options in cases:
        module, _ = train(LocalSGD(every=3), module=Normed(), **options)
        assert torch.allclose(module.norm.running_mean, expected.norm.running_mean, rtol=0.0, atol=close)
        assert torch.allclose(module.norm.running_var, expected.norm.running_var, rtol=close)
        assert int(module.norm.num_batches_tracked) == int(expected.norm.num_batches_tracked) == 8


class SavesWithin(fx.Callback):
    """Saves after the first batch of a window and after its last batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx in (1, 2):
            before = module.norm.running_mean.clone()
            with contextlib.redirect_stdout(
                io.StringIO()
            ) as printed:  # warm ranks print to the output of an earlier test
                trainer.save_checkpoint(self.folder / f"{batch_idx}")
            if trainer.is_global_zero:
                (self.folder / f"{batch_idx}.txt").write_text(printed.getvalue())
            module.changes.append(float((module.norm.running_mean - before).abs().max()))


def test_a_checkpoint_within_a_window_has_the_statistics_of_its_start_and_warns(
    tmp_path: Path,
) -> None:
    module, _ = train(
        LocalSGD(every=3), module=Normed(), callbacks=[SavesWithin(tmp_path)], accumulate_grad_batches=2, max_epochs=1
    )
    first, within = (checkpoint.load(tmp_path / name)["strategy"]["module"] for name in ("1", "2"))
    assert min(module.changes) > 0.0  # the ranks' own statistics differ
    assert torch.equal(within["norm.running_mean"], first["norm.running_mean"])  # a resumed run repeats the window
    assert int(within["norm.num_batches_tracked"]) == int(first["norm.num_batches_tracked"]) == 2
    assert "2 is saved within an accumulation window" in (tmp_path / "2.txt").read_text()
    assert (tmp_path / "1.txt").read_text() == ""


class Skips(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 1 else loss  # type: ignore[no-any-return]


def test_a_single_rank_may_skip_a_batch() -> None:
    _, trainer = train(LocalSGD(every=2), module=Skips())
    assert trainer.global_step == 8


class SkipsWithAdam(Skips):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_a_run_with_different_step_counts_on_its_ranks_resumes_exactly(tmp_path: Path) -> None:
    """Regression: the saved step counts were those of several ranks, by parameter."""
    whole, _ = train(LocalSGD(every=2), module=SkipsWithAdam(), callbacks=[Saves(tmp_path / "five.ckpt")])
    again, trainer = train(LocalSGD(every=2), module=SkipsWithAdam(), ckpt=tmp_path / "five.ckpt")
    assert trainer.global_step == 8
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    [optimizer] = checkpoint.load(tmp_path / "five.ckpt")["strategy"]["optimizers"]
    assert {float(state["step"]) for state in optimizer["state"].values()} == {5.0}


class Stream:
    """Three batches on rank 0 and two on rank 1; the length is unknown."""

    def __init__(self) -> None:
        self.batches = list(DataLoader(layered_data(30), 6))

    def __iter__(self) -> Any:
        rank = dist.get_rank()
        yield from self.batches[rank::2][: 3 - rank]


class Promising(Stream):
    def __len__(self) -> int:
        return 3


def test_streams_of_different_lengths_are_trained_to_their_ends() -> None:
    batches = Stream().batches
    joined = [[torch.cat(pair) for pair in zip(*batches[n : n + 2], strict=True)] for n in (0, 2)]
    options: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", **QUIET}
    expected, module = Plain(momentum=0.9), Plain(momentum=0.9)
    alone = fx.Trainer(**options)
    alone.fit(expected, [*joined, batches[4]])
    trainer = fx.Trainer(devices=2, strategy=LocalSGD(every=1), **options)
    trainer.fit(module, Stream())
    assert trainer.global_step == alone.global_step == 6
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=1e-10)  # sums of doubles in another order
    with pytest.raises(WorkerFailed, match=r"Promising ended after 2 batches .* limit_train_batches"):
        fx.Trainer(devices=2, strategy=LocalSGD(every=1), **options).fit(Plain(), Promising())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"outer": "nestrov"}, "Did you mean 'nesterov'"),
        ({"compression": "int2"}, "compression='int2' isn't known to local_sgd"),
        ({"every": 4, "fragments": 5}, "fragments=5"),
        ({"every": 4, "overlap_steps": 4}, "overlap_steps=4"),
        ({"keep_local": 1.0}, "keep_local=1.0"),
        ({"outer_lr": 0.0}, "outer_lr=0.0: must be more than 0"),
        ({"outer_momentum": 1.5}, "outer_momentum=1.5: must be at least 0 and less than 1"),
        ({"synchronous_steps": -1}, "synchronous_steps=-1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(**options)


class _Skips(fx.Module):
    """A module whose gradient is the mean square of a batch; some batches have no loss."""

    def __init__(self, *skipped: float) -> None:
        super().__init__()
        self.layer, self.skipped = nn.Linear(1, 1, bias=False), skipped

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if float(batch[0]) in self.skipped else (self.layer(batch) * batch).mean()

    def configure_optimizers(self) -> Any:
        nn.init.zeros_(self.layer.weight)
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    ("accumulate", "skipped", "weight", "steps"),
    [
        # Samples 1 to 8, windows of a rank (1, 2), (3, 4), ...: the mean of batches with a loss.
        (2, (1.0, 3.0), -(4 + 16) / 2 - (25 + 36 + 49 + 64) / 4, 2),
        # A rank without an update counts the step, so that rounds and schedules of the ranks stay aligned.
        (1, (2.0,), -(1 + 0 + 9 + 16 + 25 + 36) / 2 - 0.1 * (49 + 64) / 2, 4),
    ],
)
def test_a_batch_without_a_loss_is_excluded_from_the_local_window(
    accumulate: int, skipped: tuple[float, ...], weight: float, steps: int
) -> None:
    module, samples = _Skips(*skipped), torch.arange(1.0, 9.0).reshape(-1, 1)
    trainer = fx.Trainer(
        devices=2, strategy=LocalSGD(every=1), max_epochs=1, accumulate_grad_batches=accumulate, **QUIET
    )
    trainer.fit(module, DataLoader(samples, 1))  # type: ignore[arg-type]
    assert float(module.layer.weight.detach()) == pytest.approx(weight)
    assert trainer.global_step == steps
