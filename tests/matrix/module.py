"""Module and data of the cells: fewer than 200 parameters, and a switch for each feature."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset

import fabricx as fx
from tests.matrix.cells import STREAMS, TOGETHER_RANKS, UNFREEZING, Cell

GLOBAL_BATCH = 12
SAMPLES = {
    "even": 24, "uneven": 31, "few": 25, "shuffled": 31, "iterable": 24, "ending": 31, "balanced": 31, "weighted": 31,
    "promised": 31, "combined": 36,
}  # fmt: skip
VALIDATION_SAMPLES = 5
DTYPES = {"64": torch.float64, "32": torch.float32, "bf16-mixed": torch.float32}
PRECISIONS = {"64": "64-true", "32": "32-true", "bf16-mixed": "bf16-mixed"}
CLIP = {"norm": 0.3, "value": 0.05, "module": 0.1, "none": None}


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor of which each rank may have a shard only; every rank calls it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    full = torch.view_as_real(full) if full.is_complex() else full
    return full.to_dense() if full.is_sparse else full


class Samples(Dataset[Any]):
    """Inputs of shape [4], targets [2], row numbers [2], a weight, and the number of the sample."""

    def __init__(self, samples: int, dtype: torch.dtype, seed: int = 1) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, 4, generator=chance, dtype=torch.float64).to(dtype)
        self.targets = torch.stack([self.inputs.sum(1), self.inputs[:, 0] - 1.0], 1)
        self.rows = torch.randint(0, 6, (samples, 2), generator=chance)
        self.weights = torch.randint(1, 5, (samples,), generator=chance).to(dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index], self.rows[index], self.weights[index], index


class Stream:
    """Batches of a rank, without a length: its part of each global batch.

    With `ends`, all ranks except the first have a part of only the first global batch.
    """

    def __init__(self, samples: Samples, *, ends: bool, together: int = 1) -> None:
        self.samples, self.ends, self.together = samples, ends, together

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        rank, ranks = rank // self.together, ranks // self.together
        rank_batch = GLOBAL_BATCH // ranks
        for start in range(0, len(self.samples), GLOBAL_BATCH):
            numbers = range(start + rank * rank_batch, start + (rank + 1) * rank_batch)
            if self.ends and start:
                if rank:
                    return
                numbers = range(start, min(start + GLOBAL_BATCH, len(self.samples)))
            yield [torch.stack([torch.as_tensor(v) for v in column]) for column in
                   zip(*(self.samples[number] for number in numbers), strict=True)]  # fmt: skip


class Gain(nn.Module):
    """A factor for all features, or a complex factor for each feature."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, inputs: Tensor) -> Tensor:
        gained = inputs * self.weight
        return gained.real + gained.imag if gained.is_complex() else gained  # both parts have a gradient


class Experts(nn.Module):
    """Six matrices, of which each sample is multiplied with two."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 6
        self.matrix = nn.Parameter(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(4)))

    def forward(self, inputs: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = (inputs[:, None, None] @ self.matrix[index].to(inputs.dtype)).squeeze(2)
        return (torch.tanh(output) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    """Experts that the row numbers of a sample choose: rounding can't change the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), Experts()

    def forward(self, inputs: Tensor, rows: Tensor) -> Tensor:
        output: Tensor = inputs + self.experts(inputs, rows, self.gate(inputs).sigmoid())
        return output


class OwnSchedule:
    """Changes two hyperparameters of each group, differently in each group."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] *= 0.5 + 0.3 * (number + self.count % 2)
            if "weight_decay" in group:
                group["weight_decay"] = 0.02 * self.count + 0.05 * number

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Promised(Stream):
    """A stream with a length that is wrong on all ranks but the first."""

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / GLOBAL_BATCH)


class Custom(torch.optim.Optimizer):
    """Momentum with additional state and attributes: without them its steps are wrong or fail."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.decay = 0.5
        self.history = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.history["steps"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moved"], state["count"] = torch.zeros_like(parameter), 0
                state["count"] += 1
                state["moved"].mul_(self.decay).add_(parameter.grad)
                parameter.add_(state["moved"], alpha=-group["lr"] / (1.0 + 0.5 * (state["count"] % 2)))
        return loss


def _optimizer(kind: str, parameters: list[Any]) -> torch.optim.Optimizer:
    if kind == "momentum":
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.1)
    if kind == "groups":
        half = max(1, len(parameters) // 2)
        groups: Any = [{"params": parameters[:half], "lr": 0.3}, {"params": parameters[half:]}]
        return torch.optim.SGD(groups, lr=0.1)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=0.2)
    if kind == "custom":
        return Custom(parameters, lr=0.1)
    if kind == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
    return torch.optim.SGD(parameters, lr=0.3)


class Net(fx.Module):
    """Two layers and the features of the cell; records values in its hooks.

    Attributes:
        trained: calls of `training_step` on this rank.
        random: digest of the random state before the first call.
        seen: per update: the rate of each group, and the norm of the gradient in `on_before_optimizer_step`.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.cell = cell
        self.automatic_optimization = not cell.manual
        kind = cell.model
        self.first = nn.Linear(4, 4)
        if kind in ("batchnorm", "sync-batchnorm"):
            self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 2)
        if cell.mixture:
            self.mixture = Mixture()
        if kind == "dropout":
            self.drop = nn.Dropout(0.4)
        if kind == "frozen":
            self.second.weight.requires_grad_(False)
            if cell.mixture:
                self.mixture.experts.requires_grad_(False)
        if kind == "tied":
            self.second.weight = self.first.weight
        if kind == "shared":
            self.again = self.second
            if cell.mixture:
                self.experts = self.mixture
        if kind == "sparse":
            self.table = nn.Embedding(6, 4, sparse=True)
        if kind == "unused":
            self.idle = nn.Linear(3, 1)
        if kind == "buffer":
            self.register_buffer("mask", torch.tensor([True, False, True, True]))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if kind == "scalar":
            self.gain = Gain(torch.tensor(1.5))
        if kind == "complex":
            real = torch.tensor([1.0, 0.5, -1.0, 0.3])
            self.gain = Gain(torch.complex(real, 0.3 * real))
            self.register_buffer("turn", torch.complex(0.5 * real, real))
        if kind == "dtypes":
            self.double()
            self.second.float()
        if cell.log == "objects":
            self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
            self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
            self.val_error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        self.trained, self.random = 0, ""
        self.seen: list[Any] = []
        self.losses = 0

    def configure_model(self) -> None:
        if self.cell.model == "late" and not hasattr(self, "scale"):
            self.scale = nn.LayerNorm(4)

    def forward(self, inputs: Tensor, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        kind = self.cell.model
        if self.cell.mixture:
            hidden = self._mixed(hidden, rows)
        if kind in ("batchnorm", "sync-batchnorm"):
            hidden = self.norm(hidden)
        if kind == "sparse":
            hidden = hidden + self.table(rows).sum(1).to(hidden.dtype)
        if kind == "recomputed":
            hidden = checkpoint(self.second, hidden, use_reentrant=False)
        elif kind == "dtypes":
            hidden = self.second(hidden.float()).double()
        else:
            hidden = self.second(hidden)
        if kind in ("scalar", "complex"):
            hidden = self.gain(hidden)
        if kind == "complex":
            hidden = hidden + (hidden * self.turn).imag
        if kind == "shared":
            hidden = self.again(torch.tanh(hidden))
        if kind == "dropout":
            hidden = self.drop(hidden)
        if kind == "buffer":
            hidden = hidden * self.mask
            if self.training:
                self.calls += 1
        if kind == "late":
            hidden = self.scale(hidden)
        output: Tensor = self.head(hidden)
        return output

    def _mixed(self, hidden: Tensor, rows: Tensor) -> Tensor:
        if self.cell.model == "recomputed":
            return checkpoint(self.mixture, hidden, rows, use_reentrant=False)  # type: ignore[no-any-return]
        mixed: Tensor = self.mixture(hidden, rows)
        return self.experts(mixed, rows) if self.cell.model == "shared" else mixed  # type: ignore[no-any-return]

    # -- a step -------------------------------------------------------------------------------------------------

    def batch_loss(self, batch: Any) -> Tensor:
        sample_loss = (self.predicted(batch) - batch[1]).square().mean(1)
        if self.cell.data == "weighted" and self.training:
            return (sample_loss * batch[3]).sum() / batch[3].sum()
        return sample_loss.mean()

    def predicted(self, batch: Any) -> Tensor:
        if self.cell.update != "manual-submodule":
            output: Tensor = self(batch[0], batch[2])
            return output
        hidden = torch.tanh(self.first(batch[0]))  # its parts are called, and it isn't
        prediction: Tensor = self.head(self.second(hidden))
        return prediction

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.random = self.random or hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        self.trained += 1
        loss = self.batch_loss(batch)
        if self.cell.loop == "no-loss" and batch_idx == 1:
            return None
        self._log_more(batch, loss.detach())
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        if self.automatic_optimization:
            return {"loss": loss, "inputs": batch[0]} if self.cell.update == "dict" else loss
        self._step_by_itself(batch, loss)
        return None

    def _log_more(self, batch: Any, loss: Tensor) -> None:
        weight = int(batch[3].sum()) if self.cell.data == "weighted" else len(batch[0])
        if self.cell.log == "objects":
            self.mean.update(loss, weight=weight)
            self.error.update(batch[0].sum(1).double(), batch[1][:, 1].double())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            self.log("error", self.error, on_step=False, on_epoch=True)
        if self.cell.log == "kinds":
            self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=weight)
            self.log("first", batch[0].sum(), on_step=True, on_epoch=False, reduce_fx="sum")
            self.log("rows", batch[2].min(), on_step=True, on_epoch=True, reduce_fx="min")
            self.log("three", 3, on_step=True, on_epoch=True)

    def _step_by_itself(self, batch: Any, loss: Tensor) -> None:
        optimizers = self.optimizers()
        for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else [optimizers]):
            optimizer.zero_grad()
            if number:
                loss = 2.0 * self.batch_loss(batch)
            self.manual_backward(loss)
            if self.cell.clip == "module":
                self.configure_gradient_clipping(optimizer)
            elif self.cell.clip != "none":
                self.clip_gradients(optimizer, CLIP[self.cell.clip], self.cell.clip)
            optimizer.step()
        schedulers = self.lr_schedulers()
        if schedulers is not None and self.cell.schedule in ("step", "every-2", "own"):
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.batch_loss(batch), batch_size=len(batch[0]))
        if self.cell.log == "objects":
            self.val_error.update(batch[0].sum(1).double(), batch[1][:, 1].double())
            self.log("val_error", self.val_error, on_step=False, on_epoch=True, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.batch_loss(batch), batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0], batch[2]).float()

    # -- optimizers ---------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        kind = self.cell.optimizer
        parameters = [p for name, p in self.named_parameters() if kind != "subset" or not name.startswith("second")]
        if self.cell.callback in UNFREEZING:
            parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if self.cell.update in ("several", "manual-two"):
            first_ids = {id(parameter) for parameter in self.first.parameters()}
            parts = [
                [p for p in parameters if id(p) in first_ids],
                [p for p in parameters if id(p) not in first_ids],
            ]
            optimizers = [_optimizer(kind, part) for part in parts]
        else:
            optimizers = [_optimizer(kind, parameters)]
        kinds = {"none": (), "two": ("step", "epoch-exponential")}.get(self.cell.schedule, (self.cell.schedule,))
        return optimizers, [self._schedule(schedule, optimizer) for optimizer in optimizers for schedule in kinds]

    def _schedule(self, kind: str, optimizer: Any) -> Any:
        if kind == "own":
            return {"scheduler": OwnSchedule(optimizer), "interval": "step"}
        if kind == "epoch-exponential":
            return ExponentialLR(optimizer, 0.7)
        if kind == "plateau":
            plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
            return {"scheduler": plateau, "monitor": "val", "interval": "epoch", "strict": False}
        interval = "epoch" if kind == "epoch" else "step"
        often = 2 if kind == "every-2" else 1
        return {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": interval, "frequency": often}


class OwnClipping(Net):
    """Clips by the largest element."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:  # fmt: skip
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        largest = max((float(whole(gradient).abs().max()) for gradient in gradients), default=0.0)
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.1 / (largest + 1e-12)))


def _own_step(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = 0.4 if self.global_step % 2 else 0.2
    optimizer.step(optimizer_closure)


def _weight(self: Any, batch: Any) -> Any:
    return batch[3].sum()


def _side_by_side(self: Any, batch: Any, dataloader_idx: int) -> Any:
    """Return the samples of both loaders as a batch."""
    if not isinstance(batch, dict):
        return batch
    return [torch.cat(columns) for columns in zip(batch["long"], batch["short"], strict=True)]


def _skip_rest(self: Any, batch: Any, batch_idx: int) -> int | None:
    return -1 if batch_idx == 1 and self.current_epoch == 0 else None


def make_module(cell: Cell) -> Net:
    """Return a new module of a cell with only the overrides that the cell needs, and with fixed initial weights."""
    more: dict[str, Any] = {}
    if cell.optimizer == "own-step":
        more["optimizer_step"] = _own_step
    if cell.data == "weighted":
        more["batch_weight"] = _weight
    if cell.data == "combined":
        more["on_after_batch_transfer"] = _side_by_side
    if cell.loop == "skip-rest":
        more["on_train_batch_start"] = _skip_rest
    if cell.callback == "backbone":
        more["backbone"] = property(lambda self: self.first)
    kind = OwnClipping if cell.clip == "module" else Net
    made: Any = type("Made", (kind,), more)
    return made(cell)


def make_loaders(cell: Cell, began: int) -> tuple[Any, Any]:
    """Return the loaders of a rank; global batches are equal for any number of ranks.

    Args:
        cell: of the matrix.
        began: data ranks at the start of the run: a resumed run keeps its global batch.
    """
    dtype = DTYPES[cell.precision]
    samples = Samples(SAMPLES[cell.data], dtype)
    if cell.loop == "nan":
        samples.targets[13] = torch.nan  # of the second global batch
    train: Any = (Promised if cell.data == "promised" else Stream)(
        samples, ends=cell.data != "iterable", together=TOGETHER_RANKS.get(cell.way, 1)
    )
    if cell.data not in STREAMS:
        train = DataLoader(samples, GLOBAL_BATCH // began, shuffle=cell.data == "shuffled")
    if cell.data == "combined":
        rank_batch = GLOBAL_BATCH // 2 // began
        long, short = Subset(samples, range(24)), Subset(samples, range(24, 36))  # the shorter loader is read twice
        train = {"long": DataLoader(long, rank_batch), "short": DataLoader(short, rank_batch)}
    validation: Any = DataLoader(
        Samples(1 if cell.loop == "one-val" else VALIDATION_SAMPLES, dtype, seed=2), 6 // cell.data_ranks
    )
    if cell.loop == "two-val":
        validation = [validation, DataLoader(Samples(4, dtype, seed=4), 1)]
    return train, validation
