"""Refusals with remedies at set-up before the first batch, and reported settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.callbacks import GradientAccumulation
from fabricx.strategies import DDP, Mesh
from fabricx.testing import QUIET, TinyModule, tiny_loader


class Several(TinyModule):
    """An optimizer that computes the loss several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_accumulation_is_refused_at_set_up_also_if_a_callback_begins_it_later() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("accumulate_grad_batches=2", {"accumulate_grad_batches": 2}),
        ("GradientAccumulation of 3 batches", {"callbacks": [GradientAccumulation({5: 3, 7: 1})]}),
    ]
    for message, options in cases:
        with pytest.raises(ValueError, match=f"{message}.*: .* remove it and set a larger"):
            fx.Trainer(max_steps=1, **options, **QUIET).fit(Several(), tiny_loader())
        module = TinyModule()
        module.automatic_optimization = False
        with pytest.raises(ValueError, match=f"{message}.* has no effect on a manually optimised module"):
            fx.Trainer(max_steps=1, **options, **QUIET).fit(module, tiny_loader())
    assert "static_graph=True needs one backward per update" in DDP(static_graph=True).accumulation_refused
    assert Mesh(data=DDP(static_graph=True)).accumulation_refused
    assert not DDP().accumulation_refused


def test_sparse_gradients_refuse_clipping_unless_the_module_clips() -> None:
    class Sparse(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 2, sparse=True)

    class Clips(Sparse):
        def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **named: Any) -> None: ...

    options: dict[str, Any] = {**QUIET, "max_steps": 1, "gradient_clip_val": 1.0}
    with pytest.raises(ValueError, match="sparse"):
        fx.Trainer(**options).fit(Sparse(), tiny_loader())
    fx.Trainer(**options).fit(Clips(), tiny_loader())


def test_the_recorder_has_the_processes_of_the_loader(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fabricx.telemetry.recorder import NoopRecorder

    attributes: dict[str, Any] = {}
    monkeypatch.setattr(NoopRecorder, "update_attributes", lambda recorder, **named: attributes.update(named))
    fx.Trainer(max_steps=1, **QUIET).fit(TinyModule(), tiny_loader())
    assert attributes["loader_processes"] == 0
    assert attributes["cores"] >= 1
