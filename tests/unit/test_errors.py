"""Tracebacks shown to users."""

from __future__ import annotations

import pickle

import pytest

import fabricx as fx
from fabricx import errors
from fabricx.errors import ALL_FRAMES, CheckpointError, brief_traceback
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Wrong(TinyModule):
    def training_step(self, batch, batch_idx):
        try:
            batch[7]
        except IndexError as error:
            raise KeyError("no seventh part") from error


@pytest.fixture
def error(tmp_path):
    with pytest.raises(KeyError) as caught:
        fx.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET).fit(Wrong(), tiny_loader())
    return caught.value


def test_a_traceback_shows_the_users_frames_and_how_to_see_the_rest(error):
    text = brief_traceback(error)
    assert "batch[7]" in text
    assert "KeyError: 'no seventh part'" in text
    assert "fit.py" not in text
    assert f"{ALL_FRAMES}=1 shows them" in text


def test_an_environment_variable_shows_all_frames(error, monkeypatch):
    monkeypatch.setenv(ALL_FRAMES, "1")
    text = brief_traceback(error)
    assert "fit.py" in text
    assert "left out" not in text


def test_an_error_without_a_user_frame_is_shown_completely():
    with pytest.raises(ValueError) as caught:
        fx.Trainer(profiler="simpel")
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own
    assert "options.py" in brief_traceback(error)


def test_a_damaged_checkpoint_is_an_error_that_names_another_checkpoint() -> None:
    [note] = CheckpointError("a.ckpt/state.pt is damaged: its size or checksum isn't what the manifest says").__notes__
    assert "fabricx checkpoint ls" in note
    again = pickle.loads(pickle.dumps(CheckpointError("a.ckpt is not a complete checkpoint")))
    assert again.__notes__ == [note]
    assert not hasattr(CheckpointError("the weights in a.ckpt are not those of the module"), "__notes__")


def test_warnings_and_endings_are_of_lightning_s_classes_too() -> None:
    assert issubclass(errors.ScheduleWarning, RuntimeWarning)
    assert (errors.Terminated().code, errors.Interrupted().code) == (143, 130)
    assert issubclass(errors.MissingMetric, RuntimeError)
