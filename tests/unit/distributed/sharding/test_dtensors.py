"""DTensors are recognised without the import of their module."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fabricx.distributed.sharding.dtensors import is_dtensor, own_part, with_part


class Similar:
    """Has the methods of a DTensor."""

    def full_tensor(self) -> None: ...

    def to_local(self) -> None: ...


def test_tensors_and_other_objects_are_not_dtensors() -> None:
    assert not any(map(is_dtensor, (torch.ones(2), torch.nn.Parameter(torch.ones(2)), None, Similar())))


def test_the_local_part_of_a_dtensor_shares_its_memory() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)  # no collective
        assert is_dtensor(tensor)
        part = own_part(torch.nn.Parameter(tensor))
        assert not part.requires_grad
        part.fill_(3.0)
        assert tensor.to_local().tolist() == own_part(torch.tensor([3.0, 3.0])).tolist()
        other = with_part(tensor, torch.tensor([4.0, 5.0]))
        assert (other.placements, other.to_local().tolist()) == (tensor.placements, [4.0, 5.0])
    finally:
        dist.destroy_process_group()


def test_the_check_for_dtensors_imports_no_module() -> None:
    program = (
        "import sys; from fabricx.distributed.sharding.dtensors import is_dtensor; assert not is_dtensor(1); "
        "print([name for name in sys.modules if name.startswith('torch')])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"
