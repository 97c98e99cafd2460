"""Divided experts: rows, routing and refusals; process tests compare ranks with a single process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.model_parallel.experts.expert_parallel import ExpertParallel
from fabricx.model_parallel.experts.modules import find_experts


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.matrix = nn.Parameter(torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor | None = None) -> Any:
        assert len(tokens), "an expert is never called without a row"
        chosen = index if index.dim() == 2 else index[:, None]
        output = torch.einsum("nh,nkhd->nkd", tokens, self.matrix[: self.num_experts][chosen])
        return (output if weights is None else output * weights.view_as(chosen)[..., None]).sum(1)


class Pair(Experts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor | None = None) -> Any:
        return tokens, index


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> World:
    """A group of a single rank, whose all-to-all returns its input."""
    monkeypatch.setattr(dist, "all_to_all_single", lambda output, tensor, *_, **__: output.copy_(tensor))
    return World()


def divided(part: nn.Module, world: World) -> tuple[nn.Module, ExpertParallel]:
    module = nn.ModuleDict({"experts": part, "gate": nn.Linear(3, 4)})
    return module, ExpertParallel(module, find_experts(module, "auto", world.size), world)


TOKENS = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
INDEX = torch.tensor([[0, 3], [3, 1], [1, 0], [0, 1], [3, 1]])  # no token for expert 2
WEIGHTS = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "arguments", [(INDEX, WEIGHTS), (INDEX, None), (INDEX[:, 0],), (INDEX[:, 0], WEIGHTS[:, 0])], ids=str
)
def test_routed_tokens_have_the_outputs_of_the_undivided_module(alone: World, arguments: Any) -> None:
    plain = Experts()
    module, parallel = divided(Experts(), alone)
    inputs = [TOKENS.clone().requires_grad_() for _ in range(2)]
    outputs = [plain(inputs[0], *arguments), module["experts"](inputs[1], *arguments)]
    assert torch.allclose(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.allclose(plain.matrix.grad, module["experts"].matrix.grad)  # type: ignore[arg-type]
    assert parallel.calls == 1
    assert parallel.zero() is None  # not a step: its backward is not compared with other ranks


def test_a_call_without_tokens_takes_part_in_the_backward(alone: World) -> None:
    module, parallel = divided(Experts(), alone)
    tokens = torch.empty(0, 3, requires_grad=True)
    step = parallel.wrap_step(lambda: module["experts"](tokens, index, weights=torch.empty(0, 2)))
    index = torch.empty(0, 2, dtype=torch.long)
    assert step().shape == (0, 3)
    zero = parallel.zero()
    assert zero is not None
    zero.backward()
    assert module["experts"].matrix.grad.eq(0).all()
    parallel.begin_backward()
    assert parallel.zero() is None


def test_a_rank_has_the_rows_of_its_experts_and_states_become_whole() -> None:
    part = Experts()
    whole = part.matrix.detach().clone()
    _, parallel = divided(part, World(rank=1, size=2))
    assert part.num_experts == 4  # user code reads the total number
    assert torch.equal(part.matrix, whole[2:])
    assert parallel.placements.keys() == {"experts.matrix"}
    assert torch.equal(parallel.part("experts.matrix", whole), part.matrix)
    step = torch.ones(())
    assert parallel.part("experts.matrix", step) is step
    assert parallel.part("gate.weight", whole) is whole
    assert parallel.describe() == "expert parallel on groups of 2 ranks: experts (1): 2 of 4 on each"
    assert parallel.inside("experts.act")
    assert not parallel.inside("experts")
    parallel.release()
    assert "forward" not in vars(part)
    patched = Experts()
    vars(patched)["forward"] = own = lambda tokens, index: tokens
    divided(patched, World(rank=1, size=2))[1].release()
    assert vars(patched)["forward"] is own


@pytest.mark.parametrize(
    ("part", "arguments", "message"),
    [
        (Experts(), (TOKENS[None], INDEX), "tokens that are not a tensor of shape"),
        (Experts(), (TOKENS, INDEX[1:]), "an index that is not a tensor"),
        (Experts(), (TOKENS, WEIGHTS), "an index that is not a tensor"),
        (Experts(), (TOKENS, INDEX, WEIGHTS[:, 0]), r"not a tensor of shape \[5, 2\]"),
        (Experts(), (TOKENS, INDEX + 1), "expert 4 of 4"),
        (Pair(), (TOKENS, INDEX), "outputs that are not a tensor with a row for each token"),
    ],
)
def test_other_arguments_are_errors(alone: World, part: nn.Module, arguments: Any, message: str) -> None:
    module, _ = divided(part, alone)
    with pytest.raises(ValueError, match=f"the experts experts can't be divided over ranks, with .*{message}"):
        module["experts"](*arguments)


def test_a_divided_module_is_not_copied(alone: World) -> None:
    module, _ = divided(Experts(), alone)
    with pytest.raises(TypeError, match="can't be copied"):
        copy.deepcopy(module)
    with pytest.raises(TypeError, match=r"use trainer\.save_checkpoint"):
        pickle.dumps(module)
