"""The same training in plain PyTorch, without the framework: the reference for the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate

from tests.matrix.cells import STREAMS, Cell
from tests.matrix.module import CLIP, DTYPES, GLOBAL_BATCH, SAMPLES, VALIDATION_SAMPLES, Net, Samples, make_module

EPOCHS = 2
EMA_DECAY = 0.5


def covers(cell: Cell) -> bool:
    """Return whether `train_plainly` supports all features of a cell."""
    loops = ("plain", "limit", "max-steps", "val-interval", "overfit", "reload", "two-val", "evaluate", "one-val")
    drawn = cell.data in ("shuffled", *STREAMS) or cell.model == "dropout"  # random numbers, or a stream of each rank
    called = cell.change != "none" or cell.save != "none" or cell.optimizer == "lbfgs" or cell.model == "toggled"
    # Their own tests compare them with torch: tests/unit/callbacks, tests/unit/data/test_combined.py.
    called = called or cell.callback not in ("none", "ema", "scheduler") or cell.data == "combined"
    return cell.loop in loops and not drawn and not called and not cell.manual and cell.precision != "bf16-mixed"


class Plain:
    """Two epochs of a cell on a single process.

    Attributes:
        module: with the final weights; `averages` has their moving average.
        seen: per update: the rate of each group, and the norm of the gradient before it is clipped.
        loss: mean loss of the last epoch, by samples or by their weights.
        updates: of the weights.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.module: Net = make_module(cell)
        self.module.configure_model()
        if cell.model != "dtypes":
            self.module.double() if cell.precision == "64" else self.module.float()
        self.optimizers, schedules = self.module.configure_optimizers()
        kinds = {"none": (), "two": ("step", "epoch")}.get(cell.schedule, (cell.schedule,))
        self.schedules = list(zip(itertools.cycle(kinds), schedules, strict=False))
        self.averages = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}
        self.seen: list[Any] = []
        self.loss, self.updates = 0.0, 0

    def train(self) -> Plain:
        """Train, and return this object."""
        for epoch in range(EPOCHS):
            total = whole = 0.0
            batches, size = self._batches(), self.cell.accumulate
            if self.cell.callback == "scheduler" and epoch == 0:
                size = 2
            for start in range(0, len(batches), size):
                if self.cell.loop == "max-steps" and self.updates == 3:
                    return self
                for loss, weight in self._update(batches[start : start + size]):
                    total, whole = total + loss * weight, whole + weight
            self.loss = total / whole
            self._advance("epoch", epoch + 1)
        return self

    def _batches(self) -> list[Any]:
        samples = Samples(SAMPLES[self.cell.data], DTYPES[self.cell.precision])
        batches = list(DataLoader(samples, GLOBAL_BATCH))
        return batches[:1] if self.cell.loop in ("limit", "overfit") else batches

    def _update(self, window: Any) -> list[tuple[float, float]]:
        """Make an update of the mean over all samples of a window; returns (loss, weight) of each batch."""
        weighted = self.cell.data == "weighted"
        weights = [float(batch[3].sum()) if weighted else 1.0 for batch in window]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = []
        for batch, weight in zip(window, weights, strict=True):
            loss = self.module.batch_loss(batch)
            (loss * (weight / sum(weights))).backward()
            losses.append(loss.item())
        for optimizer in self.optimizers:
            self._step(optimizer)
        self.updates += 1
        self._advance("step", self.updates)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                self.averages[name].lerp_(parameter, 1.0 - EMA_DECAY)
        return list(zip(losses, weights if weighted else [len(batch[0]) for batch in window], strict=True))

    def _step(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in parameters]
        norm = sum(float(gradient.abs().double().square().sum()) for gradient in gradients) ** 0.5
        self.seen.append(([group["lr"] for group in optimizer.param_groups], norm))
        limit: Any = CLIP[self.cell.clip]
        if self.cell.clip == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        elif self.cell.clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, limit)
        elif self.cell.clip == "module":
            largest = max(float(gradient.abs().max()) for gradient in gradients)
            for parameter in parameters:
                parameter.grad.mul_(min(1.0, limit / (largest + 1e-12)))
        if self.cell.optimizer == "own-step":
            for group in optimizer.param_groups:
                group["lr"] = 0.4 if self.updates % 2 else 0.2
        optimizer.step()

    def _advance(self, interval: str, count: int) -> None:
        for kind, made in self.schedules:
            if (interval == "epoch") != (kind in ("epoch", "plateau")) or (kind == "every-2" and count % 2):
                continue
            scheduler = made["scheduler"] if isinstance(made, dict) else made
            scheduler.step(*((self.validate(),) if kind == "plateau" else ()))

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss of all validation samples, with the averages if they exist."""
        count = 1 if self.cell.loop == "one-val" else VALIDATION_SAMPLES
        samples = Samples(count, DTYPES[self.cell.precision], seed=2)
        live = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}
        if self.cell.callback == "ema":
            self.put(self.averages)
        self.module.eval()
        loss = float(self.module.batch_loss(default_collate([samples[number] for number in range(count)])))
        self.module.train()
        self.put(live)
        return loss

    @torch.no_grad()
    def put(self, weights: dict[str, Tensor]) -> None:
        """Write these weights to the module."""
        for name, weight in self.module.named_parameters():
            weight.copy_(weights[name])


class Joined:
    """Workers with compressed gradients or an outer momentum; each trains a share of each batch.

    The compression error of a worker's gradient is added to its next gradient.

    Args:
        way: of `JOINED_WAYS`.
        workers: number of workers that share each global batch.
    """

    def __init__(self, way: str, workers: int) -> None:
        self._plain = Plain(Cell("single", ranks=1))
        self.module, self._workers = self._plain.module, workers
        self._parameters = list(self.module.parameters())
        momentum: dict[str, Any] = {"lr": 0.3 * 0.5, "momentum": 0.9, "nesterov": True}  # of steps with a rate of 0.3
        outer = way.endswith("nesterov")
        self._optimizer = torch.optim.SGD(self._parameters, **(momentum if outer else {"lr": 0.3}))
        self._joins = {"topk": self._largest, "sign": self._signs, "powersgd": self._thin}.get(way.split("-")[1], _sums)
        self._lost = [[torch.zeros_like(parameter) for parameter in self._parameters] for _ in range(workers)]
        self._bases = [torch.randn(p.shape[-1], 1, generator=torch.Generator().manual_seed(p.shape[-1])).to(p)
                       for p in self._parameters]  # fmt: skip

    def train(self) -> Net:
        """Train, and return the module."""
        for _ in range(EPOCHS):
            for batch in self._plain._batches():
                shares = zip(*(column.chunk(self._workers) for column in batch), strict=True)
                losses = [self.module.batch_loss(share) / self._workers for share in shares]
                gradients = [torch.autograd.grad(loss, self._parameters) for loss in losses]
                by_worker = [
                    [a + b for a, b in zip(*pair, strict=True)] for pair in zip(gradients, self._lost, strict=True)
                ]
                for parameter, gradient in zip(self._parameters, self._joins(by_worker), strict=True):
                    parameter.grad = gradient
                self._optimizer.step()
        return self.module

    def _sent(self, gradients: list[list[Tensor]], compressed: list[Tensor]) -> list[Tensor]:
        """Return the sum of the compressed values of each worker, flat; the error is kept."""
        sizes = [parameter.numel() for parameter in self._parameters]
        sent = [
            [part.view_as(p) for part, p in zip(flat.split(sizes), self._parameters, strict=True)]
            for flat in compressed
        ]
        self._lost = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(gradients, sent, strict=True)]
        return _sums(sent)

    def _largest(self, gradients: list[list[Tensor]]) -> list[Tensor]:
        compressed = []
        for flat in map(_flat, gradients):
            places = flat.abs().topk(round(0.3 * len(flat))).indices
            compressed.append(torch.zeros_like(flat).index_copy(0, places, flat[places]))
        return self._sent(gradients, compressed)

    def _signs(self, gradients: list[list[Tensor]]) -> list[Tensor]:
        return self._sent(
            gradients, [flat.abs().mean().expand_as(flat).copysign(flat) for flat in map(_flat, gradients)]
        )

    def _thin(self, gradients: list[list[Tensor]]) -> list[Tensor]:
        results = []
        for number, several in enumerate(zip(*gradients, strict=True)):
            if several[0].dim() == 1:
                results.append(torch.stack(several).sum(0))
                continue
            side = torch.linalg.qr(torch.stack(several).sum(0) @ self._bases[number])[0]
            factors = [left.T @ side for left in several]
            self._bases[number] = torch.stack(factors).sum(0)
            for lost, left, factor in zip(self._lost, several, factors, strict=True):
                lost[number] = left - side @ factor.T
            results.append(side @ self._bases[number].T)
        return results


def _flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def _sums(gradients: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(several).sum(0) for several in zip(*gradients, strict=True)]
