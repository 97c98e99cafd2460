"""Times at which a checkpoint can be saved, and collective saves of all ranks."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fabricx.core.state import Phase, RunState
from fabricx.errors import RanksApart, RanksDisagree
from fabricx.session import save_points
from fabricx.session.save_points import check_savable, follow_hooks, meet_to_save, publish_hooks_done
from fabricx.session.status import BatchStatus, CheckpointStatus


def session(rank: int = 0, ranks: int = 1, store: Any = None, **batch: Any) -> Any:
    world = SimpleNamespace(rank=rank, size=ranks, store=store, generation=0, key=lambda name: f"run/{name}")
    saved: list[Any] = []
    trainer = SimpleNamespace(saved=saved)
    result = SimpleNamespace(
        world=world, state=RunState(phase=Phase.TRAIN), batch=BatchStatus(**batch), checkpoints=CheckpointStatus(),
        running=True, trainer=trainer, strategy=SimpleNamespace(traits=SimpleNamespace(lockstep=True)),
        checks=SimpleNamespace(apply_changes=lambda changes, idle: saved.append(changes)),
    )  # fmt: skip

    def save(path: str, weights_only: bool, *, wait: bool, single_file: bool | None = None) -> None:
        meet_to_save(result, path, weights_only=weights_only, wait=wait, single_file=single_file)  # type: ignore[arg-type]
        saved.append(path)

    trainer.save_checkpoint = save
    return result


@pytest.mark.parametrize(
    ("batch", "weights_only", "error", "message"),
    [
        ({"asynchronous": True}, True, RanksApart, "save_checkpoint: each rank works at its own pace"),
        ({"in_step": True}, False, RuntimeError, "Save in on_train_batch_end, or with weights_only=True"),
        ({"in_step": True, "idle_ranks": 1}, True, RuntimeError, "some ranks have no sample of this batch"),
    ],
)
def test_a_save_at_an_unsupported_time_is_an_error_that_names_a_valid_time(
    batch: Any, weights_only: bool, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        check_savable(session(**batch), weights_only=weights_only)


def test_only_weights_may_be_saved_within_a_step_and_all_state_after_it() -> None:
    check_savable(session(in_step=True), weights_only=True)
    check_savable(session(), weights_only=False)


def test_a_run_that_has_not_begun_or_is_being_saved_is_not_saved() -> None:
    begins = session()
    begins.state.phase = Phase.IDLE
    with pytest.raises(RuntimeError, match="training has not begun"):
        check_savable(begins, weights_only=True)
    begins.running = False  # after the run
    check_savable(begins, weights_only=False)
    begins.checkpoints.collecting = True
    with pytest.raises(RuntimeError, match="called in on_save_checkpoint"):
        check_savable(begins, weights_only=False)


def on_ranks(*calls: Any) -> list[Any]:
    """Call each function in a thread; returns the results and errors."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return results


def test_ranks_that_save_with_the_same_arguments_meet_each_time() -> None:
    store = dist.HashStore()
    ranks = [session(rank, 2, store) for rank in range(2)]
    for _ in range(2):
        results = on_ranks(*(lambda s=s: meet_to_save(s, "a.ckpt", weights_only=False, wait=True) for s in ranks))
        assert results == [None, None]


def test_different_arguments_are_an_error_of_all_ranks_that_lists_them() -> None:
    store = dist.HashStore()
    ranks = [session(rank, 2, store) for rank in range(2)]
    errors = on_ranks(
        lambda: meet_to_save(ranks[0], "a.ckpt", weights_only=False, wait=True),  # type: ignore[arg-type]
        lambda: meet_to_save(ranks[1], "b.ckpt", weights_only=False, wait=True),  # type: ignore[arg-type]
    )
    for error in errors:
        assert isinstance(error, RanksDisagree)
        assert "rank 0: 'a.ckpt'" in str(error)
        assert "rank 1: 'b.ckpt'" in str(error)


def test_a_save_on_a_single_rank_is_an_error_that_names_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_points, "ALL_CALL_S", 0.0)
    with pytest.raises(RanksDisagree, match=r"rank 0 has called save_checkpoint.*rank 1, 2 has not"):
        meet_to_save(session(0, 3, dist.HashStore()), "a.ckpt", weights_only=True, wait=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("skip", [False, True])
def test_a_rank_without_a_sample_repeats_the_saves_and_changes_of_the_others(skip: bool) -> None:
    store = dist.HashStore()
    busy, idle = (session(rank, 2, store, idle_ranks=1) for rank in range(2))

    def hooks() -> None:
        for path in ("a.ckpt", "b.ckpt"):
            busy.trainer.save_checkpoint(path, True, wait=True)
        publish_hooks_done(busy, "lr=0.1", skip=skip)

    skipped = on_ranks(hooks, lambda: follow_hooks(idle))
    assert skipped == [None, skip]
    assert idle.trainer.saved == busy.trainer.saved == ["a.ckpt", "b.ckpt", "lr=0.1"]
    assert on_ranks(lambda: publish_hooks_done(busy), lambda: follow_hooks(idle)) == [None, False]  # the next hooks
