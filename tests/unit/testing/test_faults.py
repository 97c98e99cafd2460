from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.testing import TinyModule, fail, kill, tiny_loader


def test_a_fault_that_would_never_occur_is_refused(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_epochs=1, callbacks=[kill(rank=0)], **quiet)
    with pytest.raises(ValueError, match=r'kill\(rank=0\) has no moment.*kill\(rank=0\)\.during\("forward"'):
        trainer.fit(TinyModule(), tiny_loader())
    with pytest.raises(ValueError, match=r"moment='forwards' isn't known to kill. Did you mean 'forward'"):
        kill(rank=0).during("forwards")


def test_a_fault_occurs_at_its_step(quiet: dict[str, Any]) -> None:
    trainer = fx.Trainer(max_epochs=1, callbacks=[fail(rank=0, error="no luck").during("backward", step=1)], **quiet)
    with pytest.raises(RuntimeError, match="no luck"):
        trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 1
