"""State of the caller's objects after workers have trained copies."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

import fabricx as fx
from fabricx.callbacks import EarlyStopping, ModelCheckpoint
from fabricx.core.strategy_parts import ShardsWeights
from fabricx.testing import QUIET, TinyModule
from fabricx.trainer import attributes as attributes_module
from fabricx.trainer.result import Outcome, picklable_part
from fabricx.trainer.run_records import RunRecords


def test_objects_that_cannot_be_sent_stay_in_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shard: ...

    monkeypatch.setattr(attributes_module, "is_dtensor", lambda value: isinstance(value, Shard))
    with (tmp_path / "log").open("w") as file:
        attributes = {"a": 1, "file": file, "lock": threading.Lock(), "nested": [Shard()], "w": torch.ones(2)}
        assert set(picklable_part(attributes)) == {"a", "w"}


class BuildsLayer(TinyModule):
    """Builds a layer in the workers."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)


def absorbed(module: Any, weights: dict[str, Any], **parts: Any) -> Any:
    callback: Any = SimpleNamespace(best=0)
    Outcome(weights=weights, **parts).absorb(module, [callback], [])
    return callback


def test_weights_are_written_into_the_callers_parameters() -> None:
    module = TinyModule()
    before = module.layer.weight
    callback = absorbed(
        module, {name: torch.full_like(value, 7.0) for name, value in module.state_dict().items()},
        attributes={"seen": 5}, callbacks=[(0, {"best": 9})],
    )  # fmt: skip
    assert module.layer.weight is before  # the user's optimizers and references stay valid
    assert set(before.flatten().tolist()) == {7.0}
    assert callback.best == 9
    assert module.seen == 5


def test_callbacks_keep_their_state_if_the_module_has_configured_others_in_the_workers() -> None:
    saves, stops = ModelCheckpoint(), EarlyStopping("loss")
    theirs, configured = EarlyStopping("loss"), ModelCheckpoint(monitor="loss")  # in place of the caller's `saves`
    theirs.wait_count, configured.best_model_path = 3, "best"
    module = TinyModule()
    callbacks, weights = [ModelCheckpoint(), theirs], module.state_dict()
    outcome = Outcome().portable(module, [theirs, configured], callbacks, [], RunRecords(), weights)
    first, second = outcome.absorb(module, [saves, stops], [])
    assert first is stops
    assert stops.wait_count == 3
    assert isinstance(second, ModelCheckpoint)
    assert (second.best_model_path, second.monitor) == ("best", "loss")
    assert saves.best_model_path == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_have_the_dtype_of_the_training(dtype: torch.dtype) -> None:
    module = TinyModule()
    absorbed(module, {name: value.to(dtype) for name, value in module.state_dict().items()})
    assert module.dtype == dtype


def test_layers_built_in_the_workers_are_built_in_the_callers_process() -> None:
    module, trained = BuildsLayer(), BuildsLayer()
    trained.configure_model()
    absorbed(module, trained.state_dict())
    assert torch.equal(module.late.weight, trained.late.weight)


def test_a_shared_submodule_or_tensor_copied_by_setup_receives_the_weights_of_both_names() -> None:
    class Averaged(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.average = self.model  # the workers' setup has made a copy
            self.model[0].bias = self.model[1].bias  # this pair is still a single tensor
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight  # a hook has created a new parameter

    module = Averaged()
    trained = {name: value.clone() for name, value in module.state_dict().items()}
    for name in trained:
        trained[name] += 2.0 * name.startswith("average") + 1.0 * (name == "second.weight")
    absorbed(module, trained)
    assert all(torch.equal(value, trained[name]) for name, value in module.state_dict().items())
    assert module.average is not module.model
    assert module.average[0].bias is module.average[1].bias
    assert module.model[0].bias is module.model[1].bias


def test_weak_references_of_the_caller_are_kept() -> None:
    module, target = TinyModule(), {1, 2}
    module.reference = weakref.ref(target)
    sent = Outcome().portable(module, [], [], [], fx.Trainer(**QUIET).records, {})
    assert "reference" not in sent.attributes


def test_names_of_a_submodule_that_cannot_be_copied_are_a_warning() -> None:
    class Fixed(nn.Linear):
        def __deepcopy__(self, memo: object) -> None:
            raise RuntimeError("only graph leaves")

    module = TinyModule()
    module.first = module.second = Fixed(2, 2, bias=False)
    trained = {name: value.clone() + name.startswith("second") for name, value in module.state_dict().items()}
    with pytest.warns(UserWarning, match=r"second.weight and first.weight .* can't be copied .*only graph leaves"):
        absorbed(module, trained)


def test_tied_weights_that_have_become_nan_stay_tied() -> None:
    module = TinyModule()
    module.first, module.second = nn.Linear(2, 2), nn.Linear(2, 2)
    module.second.weight = module.first.weight
    absorbed(module, {name: torch.full_like(value, torch.nan) for name, value in module.state_dict().items()})
    assert module.second.weight is module.first.weight
    assert module.first.weight.isnan().all()


class Stateful(TinyModule):
    """Has metric objects, including a persistent metric, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = 0
        self.values = torchmetrics.CatMetric()
        self.values.persistent(True)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def test_metric_objects_have_their_states_and_those_built_in_the_workers_are_added() -> None:
    caller, worker = Stateful(), Stateful()
    caller_values, known = caller.values, {name for name, _ in worker.named_modules()}
    worker.extra = 4
    worker.values.update(torch.ones(2))
    caller.values.update(torch.zeros(1))
    assert float(caller.values.compute()) == 0.0  # torchmetrics keeps the result
    worker.late = nn.ModuleDict({"total": torchmetrics.SumMetric()})
    worker.late.total.update(3.0)
    worker.tracker = torchmetrics.MetricTracker(torchmetrics.SumMetric(), maximize=True)
    worker.tracker.increment()
    worker.tracker.update(2.0)
    weights = ShardsWeights().whole_weights(worker)
    outcome = Outcome().portable(worker, [], [], [], RunRecords(), weights, known)
    with pytest.warns(UserWarning, match=r"created can't be sent, so their states remain in the workers: late\.total"):
        outcome.absorb(caller, [], [])
    assert caller.values is caller_values
    assert caller_values.compute().tolist() == [1.0, 1.0]
    assert caller.extra == 4
    assert float(caller.tracker.compute()) == 2.0
