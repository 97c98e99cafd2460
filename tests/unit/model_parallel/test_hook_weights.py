"""torch functions on weights of which a rank holds half of the rows, or which another stage holds."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from fabricx.core.rank_zero import set_launched_rank
from fabricx.model_parallel.hidden_gradients import DividedGradient
from fabricx.model_parallel.hook_weights import STAGES_APART, DividedWeight, HookWeights, paused

ROWS = 4


class Halves:
    """The first of two ranks, with rows 0 and 1 of `weight`; the second rank repeats the calls of this rank."""

    staged, divides, ends_early = False, True, False

    def __init__(self, module: nn.Module, whole: Tensor, absent: bool = False) -> None:
        self.module, self.other, self.absent, self.gathers = module, whole.detach().clone(), absent, 0
        self.changes: Counter[str] = Counter()
        self.elsewhere = False

    def divided_tensors(self, *, also_shared: bool) -> Iterator[tuple[str, Tensor, bool]]:
        yield "weight", self.module.get_parameter("weight"), self.absent

    def gradient_elsewhere(self, parameter: Tensor) -> bool:
        return self.elsewhere

    def empty(self, name: str, local: Tensor) -> Tensor:
        return torch.empty((ROWS, local.shape[1]), dtype=local.dtype, device="meta")

    def whole_weight(self, name: str, local: Tensor) -> Tensor:
        self.gathers += 1
        return self.other.clone() if self.absent else torch.cat([local.detach(), self.other[2:]])

    def part_of(self, name: str, local: Tensor, whole: Tensor) -> Tensor:
        self.other = whole.detach().clone()
        return whole[:2]

    @torch.no_grad()
    def write(self, name: str, local: Tensor, whole: Tensor, *, absent: bool) -> None:
        self.other = whole.detach().clone()
        if not absent:
            local.copy_(whole[:2])


def divided(absent: bool = False) -> tuple[nn.Linear, nn.Linear, Halves]:
    """Return a whole layer, the same layer with half of its weight, and the division."""
    torch.manual_seed(0)
    whole = nn.Linear(3, ROWS)
    half = copy.deepcopy(whole)
    half.weight.data = half.weight.data[:2].clone()
    if absent:
        half.weight.data = torch.full((), float("nan")).expand(ROWS, 3)
    return whole, half, Halves(half, whole.weight, absent)


def everything(layer: Any) -> list[Any]:
    weight = layer.weight
    rows = [float(piece.sum()) for piece in weight.chunk(2)]
    total = sum(value.double().square().sum() for value in layer.state_dict().values())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    return [
        list(weight.shape), weight.numel(), len(weight), weight.size(0), weight.data.shape[0], float(total), rows,
        weight.norm(), weight.norm(dim=0), weight.norm(dim=1), weight.data.abs().max(), weight[3].sum(), weight.t()[0],
        (weight @ weight.t()).trace(), nn.utils.parameters_to_vector(layer.parameters()),
        nn.utils.get_total_norm(list(layer.parameters())), torch.linalg.matrix_norm(weight, 2), weight.tolist(),
        weight.detach().cpu().numpy().sum(), torch.cat([weight, weight]).mean(), weight * weight, float(weight[0, 0]),
        copy.deepcopy(layer).weight.data, torch.load(file, weights_only=True)["weight"], repr(weight.detach()),
        nn.functional.linear(torch.ones(1, 3), weight, layer.bias), torch.equal(weight, weight.clone()),
    ]  # fmt: skip


def plain(values: list[Any]) -> list[Any]:
    return [value.detach().as_subclass(Tensor).tolist() if isinstance(value, Tensor) else value for value in values]


@pytest.mark.parametrize("absent", [False, True])
@torch.no_grad()
def test_a_hook_reads_whole_weights(absent: bool) -> None:
    whole, half, division = divided(absent)
    wanted = plain(everything(whole))
    with HookWeights(division):  # type: ignore[arg-type]
        assert plain(everything(half)) == wanted


@torch.no_grad()
def test_a_copy_on_the_cpu_is_read_without_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half, division = divided(False)
    with HookWeights(division):  # type: ignore[arg-type]
        copies = [half.weight.cpu(), half.weight.detach().cpu(), half.weight.data.to(torch.float32)]
        monkeypatch.setattr(division, "whole_weight", None)
        file = io.BytesIO()
        torch.save(copies, file)
        file.seek(0)
        for read in (*copies, *torch.load(file, weights_only=True)):
            assert read.tolist() == whole.weight.tolist()
        copies[1].mul_(2)  # as on a single process, where the array shares the weight's memory
    assert half.weight.tolist() == (2 * whole.weight[:2]).tolist()


def vector(layer: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(layer.parameters()) * 0.5, layer.parameters())


def load(layer: Any) -> None:
    state = {name: value.clone() * 2 for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "each element": lambda a: a.weight.clamp_(-0.1, 0.1).mul_(0.5).add_(1),
    "data": lambda a: a.weight.data.clamp_(-0.1, 0.1),
    "a new tensor of data": lambda a: setattr(a.weight, "data", a.weight.data * 0.9),
    "detached": lambda a: a.weight.detach().mul_(0.5),
    "norm of rows": lambda a: a.weight.div_(a.weight.norm(dim=1, keepdim=True)),
    "norm of columns": lambda a: a.weight.div_(a.weight.norm(dim=0, keepdim=True)),
    "norm": lambda a: a.weight.div_(a.weight.norm()),
    "largest norm": lambda a: a.weight.copy_(a.weight.renorm(2, 0, 0.3)),
    "copy": lambda a: a.weight.copy_(torch.arange(12.0).view(4, 3)),
    "a row": lambda a: a.weight[3].mul_(2),
    "a row by a sign": lambda a: a.weight.__setitem__(slice(1, 3), 7.0),
    "a view": lambda a: a.weight.view(-1).data[5:8].zero_(),
    "the transposed": lambda a: a.weight.t().add_(torch.arange(4.0)),
    "many at the same time": lambda a: torch._foreach_mul_(list(a.parameters()), 0.5),
    "out": lambda a: torch.add(a.weight, 1, out=a.weight.data),
    "initialisation": lambda a: (torch.manual_seed(3), nn.init.xavier_normal_(a.weight)),
    "relu in place": lambda a: nn.functional.relu(a.weight.data, inplace=True),
    "vector": vector,
    "loaded": load,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("absent", [False, True])
@torch.no_grad()
def test_changes_of_a_hook_are_written_to_all_shards(name: str, absent: bool) -> None:
    whole, half, division = divided(absent)
    CHANGES[name](whole)
    with HookWeights(division):  # type: ignore[arg-type]
        CHANGES[name](half)
        if name not in ("each element", "data", "detached", "norm"):  # invisible to the fake of the second rank
            assert torch.equal(half.weight.clone(), whole.weight)
    if not absent:
        assert torch.equal(half.weight, whole.weight[:2])
    assert torch.equal(half.bias, whole.bias)


@pytest.mark.parametrize("absent", [False, True])
def test_attributes_of_a_parameter_set_by_a_hook_are_kept(absent: bool) -> None:
    _, half, division = divided(absent)
    with HookWeights(division):  # type: ignore[arg-type]
        half.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        half.weight.requires_grad = False
        assert not half.weight.requires_grad
    assert not half.weight.requires_grad
    assert half.weight._post_accumulate_grad_hooks


def test_a_backward_that_follows_an_assignment_has_the_weights_of_its_forward() -> None:
    _, half, division = divided()
    inputs = torch.ones(1, 3, requires_grad=True)
    wanted = half.weight.sum(0)
    outputs = nn.functional.linear(inputs, half.weight)
    with HookWeights(division):  # type: ignore[arg-type]
        half.weight.data = torch.zeros(4, 3)
    outputs.sum().backward()
    torch.testing.assert_close(inputs.grad, wanted[None])
    assert not half.weight.any()


@torch.no_grad()
def test_changes_of_each_element_and_sizes_need_no_communication() -> None:
    _, half, division = divided()
    with HookWeights(division):  # type: ignore[arg-type]
        half.weight.clamp_(-1, 1)
        half.weight.data.mul_(torch.tensor(0.5))
        assert half.weight.shape == (4, 3)
        half.bias.norm()
    assert division.gathers == 0


@torch.no_grad()
def test_code_of_fabricx_within_a_hook_reads_the_local_shard() -> None:
    _, half, division = divided()
    with HookWeights(division), paused():  # type: ignore[arg-type]
        assert half.weight.shape == (2, 3)
        assert half.weight.sum().dim() == 0
    assert division.gathers == 0


def test_a_gradient_held_only_by_another_stage_is_an_error_instead_of_none() -> None:
    _, half, division = divided(absent=True)
    with HookWeights(division):  # type: ignore[arg-type]
        assert half.weight.grad is None
        division.elsewhere = True
        assert half.weight.grad is not None
        with pytest.raises(DividedGradient):
            half.weight.grad.norm()


@torch.no_grad()
def test_moments_are_whole_and_gradients_are_an_error() -> None:
    whole, half, division = divided()
    optimizer = torch.optim.SGD(half.parameters(), lr=0.0, momentum=0.9)
    half.weight.grad = half.weight.detach().clone()
    optimizer.step()
    with HookWeights(division, [optimizer]):  # type: ignore[arg-type]
        assert torch.equal(optimizer.state[half.weight]["momentum_buffer"].norm(), whole.weight.norm())
        assert half.weight.grad is not None
        with pytest.raises(DividedGradient):
            half.weight.grad.norm()
        with pytest.raises(DividedGradient, match="set a whole tensor"):
            half.weight.grad = half.weight
        half.weight.grad = torch.ones(4, 3)
    assert half.weight.grad.shape == (2, 3)
    with HookWeights(division, [optimizer]):  # type: ignore[arg-type]
        half.weight.grad = None
    assert half.weight.grad is None


@torch.no_grad()
def test_operations_without_a_single_process_result_are_an_error_with_the_remedy() -> None:
    _, half, division = divided()
    other = nn.Parameter(torch.ones(4, 3))
    with HookWeights(division):  # type: ignore[arg-type]
        row = half.weight[0]
        half.weight.mul_(2)
        with pytest.raises(DividedWeight, match="take the view again"):
            row.sum()
        with pytest.raises(DividedWeight, match="use copy_"):
            other.data = half.weight
        with pytest.raises(DividedWeight, match="Compute gradients in training_step"):
            half.weight.detach().requires_grad_()
        with pytest.raises(ValueError, match="keeps its shape"):
            half.weight.data = torch.ones(2, 3)
        set_launched_rank()
        with pytest.raises(DividedWeight, match="Read it before the call of the function"):
            rank_zero_only(half.weight.norm)()
    with HookWeights(division, apart=STAGES_APART):  # type: ignore[arg-type]
        for use in (half.weight.norm, lambda: half.weight.clamp_(-1, 1)):  # the next microbatch would differ
            with pytest.raises(DividedWeight, match="use weights in on_before_optimizer_step"):
                use()


def test_weights_are_read_and_changed_in_inference_mode() -> None:
    whole, half, division = divided()
    with torch.inference_mode(), HookWeights(division):  # type: ignore[arg-type]
        half.weight.div_(half.weight.norm())
        half.weight[0].mul_(2)
    with torch.no_grad():
        whole.weight.div_(whole.weight.norm())
        whole.weight[0].mul_(2)
    assert torch.equal(half.weight, whole.weight[:2])


def test_an_error_of_a_hook_on_an_early_stage_has_a_note_that_outputs_are_missing() -> None:
    _, _, division = divided()
    for division.ends_early in (False, True):
        with pytest.raises(IndexError) as error, HookWeights(division):  # type: ignore[arg-type]
            torch.zeros(0)[0]
        assert any("steps end before" in note for note in getattr(error.value, "__notes__", [])) is division.ends_early
