"""Checkpoints are saved at points from which a run resumes exactly; saving elsewhere is an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx import checkpoint
from fabricx.checkpoint.files import read_manifest
from fabricx.errors import WorkerFailed
from fabricx.session import save_points
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer
from fabricx.testing import QUIET, SavesAtEnd, TinyModule, run_ranks, tiny_loader
from tests.soak import params


class Saves(fx.Callback):
    """Writes a checkpoint in a single hook.

    Args:
        path: of the checkpoint.
        alone: save on the main rank only.
    """

    def __init__(self, path: Path, alone: bool) -> None:
        self.path, self.alone = path, alone

    def save(self, trainer: Any, *rest: Any) -> None:
        if trainer.is_global_zero or not self.alone:
            trainer.save_checkpoint(self.path)


class SavesAfterBatch(Saves):
    on_train_batch_end: Any = Saves.save


class SavesAfterEpoch(Saves):
    on_train_epoch_end: Any = Saves.save


def saves_in(hook: str, path: Path, *, alone: bool = False) -> fx.Callback:
    made: fx.Callback = type("SavesIn", (Saves,), {hook: Saves.save})(path, alone)
    return made


def errors_of(cases: list[tuple[str, bool]], folder: Path) -> list[str]:
    """Train with a checkpoint in each hook, successively; return the errors, "" without an error."""
    save_points.ALL_CALL_S = 0.5  # type: ignore[misc]
    errors = []
    for number, (hook, alone) in enumerate(cases):
        callback = saves_in(hook, folder / f"{number}.ckpt", alone=alone)
        trainer = fx.Trainer(devices=2, strategy="ddp", max_steps=2, callbacks=[callback], **QUIET)
        try:
            trainer.fit(TinyModule(), tiny_loader(16, 4))
        except Exception as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


def test_saving_in_an_unsuitable_hook_is_an_error_that_names_a_suitable_hook(tmp_path: Path) -> None:
    cases = {
        "on_fit_start": "save in on_train_start",
        "on_before_backward": "Save in on_train_batch_end",
        "on_before_optimizer_step": "Save in on_train_batch_end",
        "on_train_batch_end": "",
        "on_train_epoch_end": "",
    }
    for errors in run_ranks(errors_of, 2, [(hook, False) for hook in cases], tmp_path):
        for error, expected in zip(errors, cases.values(), strict=True):
            assert expected in error
            assert bool(error) == bool(expected)


def test_saving_on_a_single_rank_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 has not within 0\.5 s\. Every rank has to call it"):
        run_ranks(_raises, 2, tmp_path)


def _raises(folder: Path) -> None:
    [error] = errors_of([("on_train_batch_end", True)], folder)
    raise RuntimeError(error)


class SavesEachBatch(fx.Callback):
    """Writes a checkpoint at the beginning and at the end of each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}-{batch_idx}-start.ckpt")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for number in range(2):
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}-{batch_idx}-{number}.ckpt", wait=False)


class SkipsTheRest(TinyModule):
    """At batch `skip`, if any, changes the learning rate and skips the rest of the epoch."""

    def __init__(self, skip: int | None) -> None:
        super().__init__()
        self.skip = skip

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if batch_idx != self.skip:
            return None
        self.optimizers().param_groups[0]["lr"] *= 0.5
        return -1


def train_with_idle_ranks(folder: Path, skip: int | None) -> tuple[list[str], int, list[Any]]:
    """Train 9 samples in global batches of 8, so that only rank 0 has a sample of every second batch."""
    saves = SavesEachBatch(folder)
    trainer = fx.Trainer(devices=2, strategy="ddp", max_epochs=2, callbacks=[saves], **QUIET)
    module = SkipsTheRest(skip)
    trainer.fit(module, tiny_loader(9, 4))
    return sorted(path.name for path in folder.iterdir()), trainer.global_step, _weights(module)


def resume(path: Path | None) -> list[Any]:
    trainer = fx.Trainer(devices=2, strategy="ddp", max_epochs=2, **QUIET)
    module = TinyModule()
    trainer.fit(module, tiny_loader(9, 4), ckpt_path=path)
    return _weights(module)


def _weights(module: Any) -> list[Any]:
    return [parameter.tolist() for parameter in module.parameters()]


def test_ranks_without_a_sample_take_part_in_saving_and_skipping(tmp_path: Path) -> None:
    plain = run_ranks(resume, 2, None)
    for name, skip in (("all", None), ("skip", 1)):
        (tmp_path / name).mkdir()
        [first, second] = run_ranks(train_with_idle_ranks, 2, tmp_path / name, skip)
        assert first == second
        ends = [f"{epoch}-{batch}-{n}.ckpt" for epoch in (0, 1) for batch in (0, 1) if batch != skip for n in (0, 1)]
        starts = [f"{epoch}-{batch}-start.ckpt" for epoch in (0, 1) for batch in (0, 1)]
        assert first[:2] == (sorted(starts + ends), len(ends) // 2)
        assert (first[2] == plain[0]) is (skip is None)
    for name in ("0-1-start.ckpt", "0-1-1.ckpt", "1-0-start.ckpt", "1-1-0.ckpt"):
        assert run_ranks(resume, 2, tmp_path / "all" / name) == plain


@pytest.mark.parametrize("strategy", params([AsyncSGD()], [ParameterServer(backup_workers=1)]))
def test_asynchronous_workers_save_at_meetings_only(strategy: Any, tmp_path: Path) -> None:
    def fit(saves: type[Saves]) -> None:
        callback = saves(tmp_path / "a.ckpt", alone=False)
        trainer = fx.Trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=[callback], **QUIET)
        trainer.fit(TinyModule(), tiny_loader(16, 4))

    with pytest.raises(WorkerFailed, match=r"ModelCheckpoint\(every_n_train_steps=...\)"):
        fit(SavesAfterBatch)
    fit(SavesAfterEpoch)
    assert (tmp_path / "a.ckpt").is_dir()


class AddsRankValues(TinyModule):
    """Adds values that depend on the rank to checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        both = self.all_gather(float(self.global_rank))  # a number, as in Lightning
        checkpoint.update(of_all=both, of_rank=torch.full((20,), float(self.global_rank)), clock={"alike": 1})
        checkpoint[f"of {self.global_rank}"] = 1


def warned(path: Path) -> list[str]:
    trainer = fx.Trainer(devices=2, strategy="ddp", max_epochs=1, callbacks=[SavesAtEnd(path)], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(AddsRankValues(), tiny_loader(8, 4))
    return [str(warning.message) for warning in caught if "on_save_checkpoint" in str(warning.message)]


def test_values_of_on_save_checkpoint_that_differ_between_ranks_are_reported(tmp_path: Path) -> None:
    [warning], of_rank_1 = run_ranks(warned, 2, tmp_path / "a.ckpt")
    assert warning.startswith(
        "on_save_checkpoint adds values that differ between ranks (of 1, of_rank), and a checkpoint"
    )
    assert not of_rank_1  # rank 0 warns
    assert checkpoint.load(tmp_path / "a.ckpt")["of_all"].tolist() == [0.0, 1.0]


class Counts(fx.Callback):
    """Has tensors that differ between ranks in its state and as entries of checkpoints."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rank = float(trainer.global_rank)
        self.tensors = {name: torch.full((2,), rank) for name in "abcd"} | {"each": torch.full((2 + int(rank),), rank)}
        if rank:
            self.tensors["alone"] = torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def on_save_checkpoint(self, trainer: Any, module: Any, state: dict[str, Any]) -> None:
        state.update({f"entry {name}": value for name, value in self.tensors.items()})


class Buffered(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.register_buffer(f"batch{number}", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for number in range(4):
            self.get_buffer(f"batch{number}").copy_(batch[0][0])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "strategy", [DDP(), DDP(broadcast_buffers=False), FSDP(), LocalSGD(every=2), AsyncSGD()],
    ids=["ddp", "buffers", "fsdp", "local_sgd", "async_sgd"],
)  # fmt: skip
def test_tensors_that_differ_between_ranks_are_those_of_rank_0(strategy: Any, tmp_path: Path) -> None:
    """Regression: some tensors had the values of rank 1, which had written them."""
    module, path = Buffered(), tmp_path / "end.ckpt"
    trainer = fx.Trainer(devices=2, strategy=strategy, callbacks=[Counts(), SavesAtEnd(path)], **QUIET, max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*differ between ranks")
        trainer.fit(module, tiny_loader())
    saved = checkpoint.load(path)
    [states] = [state for key, state in saved["callbacks"].items() if "Counts" in key]
    entries = {name.removeprefix("entry "): value for name, value in saved.items() if name.startswith("entry ")}
    for group in (states, entries):
        assert group.keys() == {*"abcd", "each"}
        assert all(value.tolist() == [0.0, 0.0] for value in group.values())
    buffers = {tuple(saved["strategy"]["module"][f"batch{number}"].tolist()) for number in range(4)}
    assert buffers == {tuple(module.batch0.tolist())}


def test_saving_in_the_script_after_a_run_in_workers_saves_the_weights_only_with_a_warning(tmp_path: Path) -> None:
    trainer, module = fx.Trainer(devices=2, strategy="fsdp", max_steps=2, **QUIET), TinyModule()
    trainer.fit(module, tiny_loader(16, 4))
    with pytest.warns(UserWarning, match=r"the weights only, .* Pass weights_only=True to confirm"):
        whole = trainer.save_checkpoint(tmp_path / "all.ckpt")
    path = trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert read_manifest(whole)["weights_only"]
    assert read_manifest(path)["weights_only"]
    loaded = TinyModule.load_from_checkpoint(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))
    assert module.trainer is trainer  # also after the run


def test_an_evaluation_after_a_fit_does_not_change_a_later_checkpoint(tmp_path: Path) -> None:
    trainer, module = fx.Trainer(max_epochs=1, **QUIET), TinyModule()
    trainer.fit(module, tiny_loader(16, 4))
    trainer.validate(module, tiny_loader(16, 4), verbose=False)
    path = trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed, whole = TinyModule(), fx.Trainer(max_epochs=2, **QUIET)
    whole.fit(resumed, tiny_loader(16, 4), ckpt_path=path)
    assert whole.global_step == 2 * trainer.global_step
