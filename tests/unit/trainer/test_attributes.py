"""Attributes changed by a worker, in the objects of the caller."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fabricx as fx
from fabricx import by_value
from fabricx.testing import TinyModule
from fabricx.trainer import attributes
from fabricx.trainer.attributes import AttributesBefore, Changed
from fabricx.trainer.sessions import Sessions, returned


class Net(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self._seen, self._untouched = 0, ["of the caller"]
        self.layer.history = []
        self.layer.register_buffer("average", torch.zeros(2), persistent=False)


class Data(fx.DataModule):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.train: Any = None
        self.scaler = {"mean": torch.zeros(1)}


def sent(value: Any, worker: dict[str, Any], caller: dict[str, Any]) -> Any:
    with by_value.shared_objects(worker):
        data = by_value.dumps(value, home=True)
    with by_value.shared_objects(caller):
        return pickle.loads(data)


def changed(before: AttributesBefore, module: Any, data: Any, others: tuple[Any, ...] = ()) -> Changed:
    return before.changed(module, data, lambda value: [value, *others], main_rank=True)


def test_plain_and_private_attributes_of_submodules_are_returned() -> None:
    caller: Any = Net()
    worker: Any = Net()
    kept, buffer = caller._untouched, caller.layer.average
    before = AttributesBefore(worker, None)
    worker._seen, worker._function = 5, lambda x: x
    worker.layer.history += [1.0, np.float64(2.0), torch.ones(1)]
    worker.layer.average += 3.0
    worker.layer._first = worker.layer.history
    attributes_sent = sent(changed(before, worker, None), {}, {})
    assert set(attributes_sent.module[""]) == {"_seen"}
    assert set(attributes_sent.module["layer"]) == {"history", "average", "_first"}
    attributes_sent.absorb(caller, None)
    assert (caller._seen, caller._untouched is kept) == (5, True)
    assert caller.layer.history == [1.0, 2.0, torch.ones(1)]
    assert caller.layer._first is caller.layer.history
    assert caller.layer.average is buffer
    assert buffer.tolist() == [3.0, 3.0]


def test_parameters_that_hooks_freeze_and_unfreeze_are_so_in_the_next_run() -> None:
    caller = nn.Sequential(*[nn.Linear(1, 1) for _ in range(3)])
    caller[1].requires_grad_(False)
    worker = copy.deepcopy(caller)
    caller[2].bias.requires_grad_(False)  # between the start and the end of the run
    before = AttributesBefore(worker, None)
    worker[0].requires_grad_(False)
    worker[1].weight.requires_grad_(True)
    sent(changed(before, worker, None), {}, {}).absorb(caller, None)
    flags = {name: parameter.requires_grad for name, parameter in caller.named_parameters()}
    assert flags == {
        "0.weight": False, "0.bias": False, "1.weight": True, "1.bias": False, "2.weight": True, "2.bias": False,
    }  # fmt: skip


def test_attributes_of_a_data_module_are_returned_if_all_ranks_have_set_equal_values() -> None:
    caller, worker, other = Data(), Data(), Data()
    before, elsewhere = AttributesBefore(nn.Module(), worker), AttributesBefore(nn.Module(), other)
    gathered: list[Any] = []
    for rank, data in enumerate((worker, other)):
        data.train, data.scaler["mean"] = torch.utils.data.TensorDataset(torch.arange(3)), torch.ones(1)
        data.rank, data.lines = rank, (line for line in "ab")
    elsewhere.changed(nn.Module(), other, lambda value: gathered.append(value) or [value], main_rank=False)
    attributes_sent = changed(before, nn.Module(), worker, tuple(gathered))
    assert set(attributes_sent.data) == {"train", "scaler"}
    assert attributes_sent.remaining == {"rank": "different on each rank", "lines": "can't be pickled"}
    attributes_sent.absorb(nn.Module(), caller)
    assert len(caller.train) == 3
    assert float(caller.scaler["mean"]) == 1.0
    with pytest.raises(AttributeError, match=r"'lines': it remains in the workers.*\(can't be pickled\).*call setup"):
        _ = caller.lines
    assert not hasattr(copy.deepcopy(caller), "lines")
    with pytest.raises(AttributeError, match=r"has no attribute 'line'$"):
        _ = caller.line


def test_large_values_are_not_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "LIMIT", 1000)
    net, data = Net(), Data()
    data.unchanged = np.zeros(1000)
    before = AttributesBefore(net, data)
    net._large, net._view = torch.zeros(1000), torch.zeros(1000)[:2]
    data.large, data.text, data.first, data.second = [np.zeros(1000)], "a" * 1001, "b" * 900, "c" * 900
    attributes_sent = changed(before, net, data)
    assert set(attributes_sent.module[""]) == {"_view"}
    assert attributes_sent.module[""]["_view"].untyped_storage().nbytes() == 8
    assert set(attributes_sent.data) == {"first"}
    assert set(attributes_sent.remaining) == {"large", "text", "second"}


def test_optimizers_are_returned_with_the_callers_parameters_or_the_reason_is_an_error() -> None:
    caller, worker = Net(), Net()
    optimizer = torch.optim.Adam(worker.parameters(), lr=0.5)
    worker.layer.weight.sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    names = [dict(net.named_parameters()) for net in (worker, caller)]
    sessions = Sessions()
    sessions.returned = sent(returned([optimizer], [schedule], whole=True), *names)
    [restored] = sessions.optimizers
    assert restored.param_groups[0]["params"][0] is caller.layer.weight
    assert int(restored.state[caller.layer.weight]["step"]) == 1
    assert sessions.schedules[0].optimizer is restored
    assert len(pickle.loads(pickle.dumps(sessions)).optimizers) == 1
    sessions.returned = returned([optimizer], [schedule], whole=False)
    for part in ("optimizers", "schedules"):
        with pytest.raises(RuntimeError, match="remain in the worker processes: no rank has their whole state"):
            getattr(sessions, part)
    assert pickle.loads(pickle.dumps(sessions)).optimizers == []


class NoLength(tuple[int, ...]):
    """Like the tuples of e3nn, which have items but no length."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


def test_an_attribute_whose_class_raises_errors_is_not_returned() -> None:
    module: Any = TinyModule()
    module._seen, module._odd = 0, [NoLength((1, 2))]
    before = AttributesBefore(module, None)
    module._seen, module._odd = 1, [NoLength((3, 4))]
    assert changed(before, module, None).module == {"": {"_seen": 1}}
