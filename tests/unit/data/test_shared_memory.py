"""A full /dev/shm is an error that names the full file system and the remedy."""

from __future__ import annotations

import gc
import traceback
from multiprocessing import synchronize
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.data.shared_memory import note_on
from fabricx.testing import QUIET, TinyModule, tiny_loader


# torch's half-made iterator complains when it is deleted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_semaphore_without_room_in_shared_memory_names_the_remedy(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", full)  # type: ignore[attr-defined]
    loader = DataLoader(tiny_loader().dataset, batch_size=4, num_workers=1)
    with pytest.raises(OSError, match="No space left") as caught:
        fx.Trainer(max_steps=1, **QUIET).fit(TinyModule(), loader)
    shown = "".join(traceback.format_exception(caught.value))
    monkeypatch.undo()
    del caught
    gc.collect()
    for expected in ("/dev/shm is full", "MiB are free", "takes about", "--shm-size", "num_workers=0"):
        assert expected in shown


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"), True),
        (
            RuntimeError("DataLoader worker (pid 1) is killed by signal: Bus error. It is possible that dataloader's"),
            True,
        ),
        (OSError(28, "No space left on device"), True),
        (OSError(28, "No space left on device", "/data/metrics.csv"), False),
        (OSError(5, "Input/output error"), False),
        (RuntimeError("shapes differ"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_other_errors_are_unchanged(error: BaseException, is_one: bool) -> None:
    loader = DataLoader(tiny_loader().dataset, batch_size=4, num_workers=2)
    assert (note_on(error, loader) is not None) is is_one
    assert note_on(error, DataLoader(tiny_loader().dataset)) is None
    assert note_on(error, None) is None
