"""A sharded module can be unsharded at any time, and sharded again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from fabricx.distributed.sharding.fsdp_internals import UnshardedModule, class_before_fsdp


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.head.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.fails = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(self.first(inputs)))
        if self.fails:
            raise RuntimeError("in the middle")
        return outputs

    def training_step(self, inputs: Tensor) -> Tensor:
        return self(inputs).sum()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_sharded_module_can_be_unsharded_and_sharded_again() -> None:
    module, seen = Tied(), []
    module.register_forward_hook(lambda *_: seen.append(1))
    names, attributes = list(module.state_dict()), set(vars(module))
    statistics = module.body[1].running_mean
    built = UnshardedModule(module)
    for time in range(3):
        with built.sharding():
            fully_shard(module.body)
            fully_shard(module)
            register_fsdp_forward_method(module, "training_step")
        module.training_step(torch.randn(3, 4)).backward()
        module.fails = time == 1  # with weights that are gathered
        if module.fails:
            with pytest.raises(RuntimeError, match="in the middle"):
                module.training_step(torch.randn(3, 4))
            module.fails = False
        built.restore(torch.device("cpu"))
        assert type(module) is Tied
        assert not any(isinstance(part, FSDPModule) for part in module.modules())
        assert set(vars(module)) == attributes
        assert list(module.state_dict()) == names
        assert module.head.weight is module.first.weight
        assert module.body[1].running_mean is statistics
        assert not module.frozen.requires_grad
        for parameter in module.parameters():
            assert type(parameter) is nn.Parameter
            nn.init.ones_(parameter)
        before = len(seen)
        assert module.training_step(torch.ones(3, 4)).requires_grad
        assert len(seen) == before + 1


class Reshards(nn.Linear):
    def reshard(self) -> None: ...


@pytest.mark.usefixtures("group")
def test_the_class_of_a_sharded_module_is_the_users_class() -> None:
    module = Reshards(2, 2)
    assert class_before_fsdp(module) is Reshards
    fully_shard(module)
    assert type(module) is not Reshards
    assert class_before_fsdp(module) is Reshards
