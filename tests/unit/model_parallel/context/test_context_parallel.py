"""Selection of divided blocks and arguments; the process tests compare with a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.model_parallel.context.context_parallel import ContextParallel, context_blocks


class Block(nn.Module):
    """Records the shapes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 3), []  # type: ignore[var-annotated]

    def forward(self, x: Tensor, options: Any = None, scale: Any = None) -> Tensor:
        tensors = [x, *(options or {}).values(), *(() if scale is None else (scale,))]
        self.seen.append([tuple(tensor.shape) for tensor in tensors])
        return x + self.layer(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, memory: int = 0) -> Tensor:
        count = x.shape[1]
        options = {"mask": torch.ones(count, count), "table": torch.ones(1, count, 3)}
        if memory:
            options["memory"] = torch.ones(2, memory, 3)
        for block in self.blocks:
            x = block(x, options, scale=torch.ones(2, 1))
        return x


def divided(net: Net, length: int = 8, **options: Any) -> ContextParallel:
    """Return the module on rank 0 of 2, after a whole run that records the dims."""
    blocks = [(f"blocks.{number}", block) for number, block in enumerate(net.blocks)]
    parallel = ContextParallel(net, blocks, World(rank=0, size=2), **options)
    parallel._learns = True
    parallel.wrap_step(net)(torch.zeros(2, length, 3))
    parallel._learns = False
    return parallel


def test_tensors_with_the_sequence_are_divided_and_all_others_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "all_gather", lambda self, tensor: torch.stack([tensor, tensor]))
    net = Net()
    parallel = divided(net)
    assert net.blocks[0].seen.pop() == [(2, 8, 3), (8, 8), (1, 8, 3), (2, 1)]
    x = torch.zeros(4, 12, 3)  # a second batch with a different length
    assert parallel.wrap_step(net)(x).shape == (4, 12, 3)
    for block in net.blocks:
        assert block.seen[-1] == [(4, 6, 3), (6, 12), (1, 6, 3), (2, 1)]
    net(x)  # outside of a step
    assert net.blocks[0].seen[-1][0] == (4, 12, 3)
    with torch.no_grad():
        parallel.wrap_step(net)(x[:, :3])  # an evaluation of a length that can't be divided
    assert net.blocks[0].seen[-1][0] == (4, 3, 3)
    with pytest.raises(ValueError, match="its length is 3"):
        parallel.wrap_step(net)(x[:, :3])
    assert parallel.wrap_step(net)(x[:, :7]).shape == (4, 7, 3)
    assert net.blocks[0].seen[-1] == [(4, 4, 3), (4, 7), (1, 4, 3), (2, 1)]
    parallel.wrap_step(net)(x[:, :7], memory=4)  # not taken for keys of a shard
    assert net.blocks[0].seen[-1] == [(4, 6, 3), (6, 7), (1, 6, 3), (2, 4, 3), (2, 1)]
    parallel._length = 6
    shard = parallel._shard(x[:, :6], {4})
    assert shard is not None
    assert shard.local == 8  # neither that of the memory nor that of the whole sequence
    parallel.undo()
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in net.modules())


def test_a_module_without_the_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0, has no argument with a sequence in dim 5 \(sequence_dim\)"):
        divided(Net(), dim=5)


def test_a_single_block_is_accepted_by_name() -> None:
    net = Net()
    assert context_blocks(net, ["blocks.1"], lambda: None) == [("blocks.1", net.blocks[1])]
    with pytest.raises(LookupError, match="the module has no part 'block'"):
        context_blocks(net, ["block"], lambda: None)
