"""Steps that a division would change are refused before the first update; steps with random numbers are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.errors import WorkerFailed
from fabricx.strategies import PipelineMesh, TensorMesh
from fabricx.testing import QUIET, run_ranks
from tests.soak import SOAK

pytestmark = pytest.mark.usefixtures("warm_ranks")

WIDTH, LENGTH, IGNORED = 6, 5, -100


class Block(nn.Module):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.up, self.down, self.always = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), always

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.3, self.always))


class Steps(fx.Module):
    """Classifies words; its steps are of several kinds."""

    def __init__(self, training: str = "", validation: str = "") -> None:
        super().__init__()
        self.kinds = training, validation
        self.inputs, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(training == "dropout") for _ in range(2))
        self.lengths: list[Any] | None = None
        self.state, self.outputs = {"steps": 0}, list[Tensor]()
        self.inputs.requires_grad_(training != "unfreezes")
        self.in_step = False

    def forward(self, x: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x) + noise
        x = x.detach() if self.kinds[0] == "detach" else x
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        self.in_step = True
        if self.kinds[0] == "count":
            x = x * 0.9 ** self.state["steps"]  # type: ignore[operator]
        noise = torch.randn(x.shape) if "noise" in self.kinds[0] else torch.zeros(x.shape)
        outputs = self(x + noise)
        self.in_step = False
        if self.kinds[0] == "count":
            self.state["steps"] += 1  # type: ignore[operator]
            self.outputs.append(outputs.detach())
        if self.kinds[0] == "unfreezes":
            self.inputs.requires_grad_(self.global_step > 0)
        if self.kinds[0] == "masks":  # a mean over different numbers of elements in each sample
            return ((outputs - noise) * (torch.rand(len(x), LENGTH, 1) < 0.5)).square().sum() / 7
        if self.kinds[0] == "noise":
            return F.mse_loss(outputs, noise)
        if self.kinds[0] == "masked mean":
            return (outputs - x).square()[torch.rand(len(x), LENGTH) < 0.5].mean()
        if self.kinds[0] == "contrast":  # compares the samples of a batch with each other
            return F.cross_entropy(outputs.mean(1) @ outputs.mean(1).T, torch.arange(len(x)))
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def on_validation_epoch_start(self) -> None:
        self.lengths = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, labels = batch
        scale = 1.0
        if self.kinds[1] == "number of a weight":  # of another stage
            scale = float(self.inputs.weight.detach().abs().sum())
        if self.kinds[1] == "list":
            assert self.lengths is not None
            self.lengths.append(len(x))
        if self.kinds[1] == "list, number":
            assert self.lengths is not None
            scale = float(self.inputs.weight.detach().abs().sum())
        loss = F.cross_entropy(self(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        self.log("val", loss * scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weighted(Steps):
    def batch_weight(self, batch: tuple[Tensor, Tensor]) -> float:
        return float((batch[1] != IGNORED).sum())


def samples(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return samples with labels for the first words only; a length of 0 is a sample with a loss of NaN."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(lengths), LENGTH, WIDTH, generator=generator)
    labels = torch.randint(WIDTH, (len(lengths), LENGTH), generator=generator)
    for words, label, length in zip(x, labels, lengths, strict=True):
        label[length or LENGTH :] = IGNORED
        words.mul_(1.0 if length else torch.nan)
    return list(zip(x, labels, strict=True))


# Cases in `make test`; `make soak` runs all.
ALWAYS = (
    "one microbatch",
    "fewer words later",
    "weights",
    "noise",
    "masked mean",
    "dropout",
    "list, number",
    "nan later",
    "nan",
    "contrast, weights",
    "count",
)
EQUAL, LATER = [LENGTH] * 8, [LENGTH] * 7 + [2]  # the first samples have equally many words
# name -> strategy, module, words of the samples, part of the message; "" for an accepted run
CASES: dict[str, tuple[Any, Callable[[], Any], list[int], str]] = {
    "equal samples": (PipelineMesh(), Steps, EQUAL, ""),
    "fewer words later": (PipelineMesh(), Steps, LATER, "define batch_weight(self, batch)"),
    "one microbatch": (PipelineMesh(microbatches=1), Steps, LATER, ""),
    "weights": (PipelineMesh(), Weighted, LATER, ""),
    "fewer words, tensor": (TensorMesh(), Steps, LATER, ""),
    "noise": (PipelineMesh(), lambda: Steps("noise"), EQUAL, ""),
    "masks": (PipelineMesh(), lambda: Steps("masks"), EQUAL, "which would change the loss"),
    "masked mean": (PipelineMesh(), lambda: Steps("masked mean"), EQUAL, "which would change the loss"),
    "contrast, weights": (PipelineMesh(), lambda: Weighted("contrast"), EQUAL, "weighted by batch_weight, has"),
    "nan later": (PipelineMesh(), Steps, [*EQUAL[1:], 0], ""),
    "nan": (PipelineMesh(), Steps, [0] * 8, "for the first two samples of the loader the loss is nan"),
    "count": (PipelineMesh(), lambda: Steps("count"), EQUAL, "depends on state.steps of the module"),
    "dropout": (PipelineMesh(), lambda: Steps("dropout"), EQUAL, ""),
    "dropout, tensor": (TensorMesh(), lambda: Steps("dropout"), EQUAL, ""),
    "number of a weight": (PipelineMesh(), lambda: Steps("", "number of a weight"), EQUAL, "the logged 'val' has"),
    "number of a weight, tensor": (TensorMesh(), lambda: Steps("", "number of a weight"), EQUAL, ""),
    "list of a hook": (PipelineMesh(), lambda: Steps("", "list"), EQUAL, ""),
    "list, number": (PipelineMesh(), lambda: Steps("", "list, number"), EQUAL, "the step reads a value before"),
}


def begin(names: list[str]) -> dict[str, str]:
    """Return the messages of refused runs, "" for accepted runs."""
    messages = {}
    for name in names:
        strategy, module, lengths, _ = CASES[name]
        torch.manual_seed(0)
        trainer = fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_epochs": 1})
        data = samples(lengths)
        try:
            trainer.fit(module(), DataLoader(data, 4), DataLoader(data, 4))  # type: ignore[arg-type]
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        else:
            messages[name] = ""
    return messages


def test_exactly_the_steps_that_a_division_would_change_are_refused() -> None:
    names = list(CASES) if SOAK else [*ALWAYS]
    for messages in run_ranks(begin, 2, names):
        for name in names:
            expected = CASES[name][3]
            assert (expected in messages[name]) if expected else not messages[name], (name, messages[name])


def counted(strategy: Any, devices: int) -> dict[str, Any]:
    """Return the state after a step that counts in an attribute."""
    torch.manual_seed(0)
    module = Steps("count").double()
    data = [(x.double(), labels) for x, labels in samples(EQUAL)]
    fx.Trainer(devices=devices, strategy=strategy, **{**QUIET, "max_epochs": 1}).fit(module, DataLoader(data, 4))  # type: ignore[arg-type]
    assert module.state == {"steps": 2}
    assert len(module.outputs) == 2
    return module.state_dict()


def test_the_trial_does_not_count_in_attributes_of_the_module() -> None:
    state, expected = counted(TensorMesh(), 2), counted("single", 1)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("unfreezes", "changes requires_grad after it has called the blocks"),
        ("detach", r"does not depend on the output of blocks.0.*Freeze them by requires_grad_\(False\)"),
    ],
)
def test_steps_that_the_last_stage_refuses_end_all_ranks(kind: str, message: str) -> None:
    trainer = fx.Trainer(devices=2, strategy=PipelineMesh(), **{**QUIET, "max_epochs": 1})  # type: ignore[arg-type]
    with pytest.raises(WorkerFailed, match=message):
        trainer.fit(Steps(kind), DataLoader(samples(EQUAL), 4))


class Averages(fx.Module):
    """Assigns new tensors to a buffer, and registers another buffer in its first step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        self.register_buffer("average", torch.zeros(4, dtype=torch.float64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.average = 0.5 * self.average + 1.0
        if not hasattr(self, "steps"):
            self.register_buffer("steps", torch.zeros(()))
        self.steps += 1.0
        return (self.net(batch[0]) * self.average.mean() - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def averages(strategy: Any, devices: int) -> dict[str, Tensor]:
    """Return the state after three batches."""
    generator = torch.Generator().manual_seed(1)
    data = [tuple(torch.randn(width, generator=generator, dtype=torch.float64) for width in (4, 2)) for _ in range(6)]
    module = Averages()
    fx.Trainer(devices=devices, strategy=strategy, max_epochs=1, **QUIET).fit(module, DataLoader(data, 2))
    return module.state_dict()


@pytest.mark.parametrize("strategy", [TensorMesh(), PipelineMesh(microbatches=1)], ids=["tensor", "pipeline"])
def test_a_buffer_that_the_step_assigns_has_its_initial_value_after_the_trial(strategy: Any) -> None:
    state, expected = averages(strategy, 2), averages("single", 1)
    assert state["average"].tolist() == expected["average"].tolist() == [1.75] * 4
    assert state.keys() == expected.keys()
    for name, value in expected.items():  # sums in a different order
        torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)
