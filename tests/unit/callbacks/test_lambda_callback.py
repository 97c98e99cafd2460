from __future__ import annotations

from typing import Any

import pytest

import fabricx as fx
from fabricx.callbacks import LambdaCallback
from fabricx.testing import TinyModule, tiny_loader


def test_functions_run_at_their_hooks_and_other_hooks_have_no_cost(quiet: dict[str, Any]) -> None:
    calls: list[Any] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: calls.append(type(module).__name__),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: calls.append(batch_idx),
        on_fit_end=None,
    )
    trainer = fx.Trainer(max_steps=2, callbacks=callback, **quiet)
    trainer.fit(TinyModule(), tiny_loader())
    assert calls == ["TinyModule", 0, 1]
    assert not trainer.session.hooks.on_fit_end


def test_a_misspelt_hook_is_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'on_train_start'"):
        LambdaCallback(on_trian_start=print)
    with pytest.raises(ValueError, match="must be a function"):
        LambdaCallback(on_train_start=3)  # type: ignore[arg-type]
