"""The work that all frameworks do: models, data, losses and optimizers, and the clock of the steps."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

WARM = 10


class Gpt(nn.Module):
    """A GPT on characters: 4 layers, 128 wide, 128 characters of context."""

    def __init__(self, letters: int = 96, width: int = 128, context: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, text.device)
        states = self.tokens(text) + self.places(torch.arange(length, device=text.device))
        return self.head(self.layers(states, mask, is_causal=True))


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.path(images) + self.shortcut(images))


class ResNet(nn.Module):
    """Eight layers for images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


class Recommender(nn.Module):
    """Two tables of embeddings and three layers: a short step with much memory."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20_000, 16), nn.Embedding(20_000, 16)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, pairs: Tensor) -> Tensor:
        return self.net(torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1))


TASKS = {"gpt": (Gpt, 8), "resnet": (ResNet, 16), "recommender": (Recommender, 64)}


def arguments() -> argparse.Namespace:
    """Return the task, the number of ranks, the steps of a rank, and the task's samples in a step of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=list(TASKS), default="gpt")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    options.batch_size = TASKS[options.task][1]
    torch.set_num_threads(1)
    return options


def make_model(task: str) -> nn.Module:
    """Make a model with the same first weights in all frameworks."""
    torch.manual_seed(0)
    return TASKS[task][0]()


def make_data(options: argparse.Namespace) -> Dataset:
    """Make the samples of an epoch."""
    random = torch.Generator().manual_seed(0)
    samples = options.steps * options.ranks * options.batch_size
    if options.task == "gpt":
        text = torch.randint(96, (samples, 129), generator=random)
        return TensorDataset(text[:, :-1], text[:, 1:])
    if options.task == "resnet":
        return TensorDataset(torch.randn(samples, 3, 32, 32, generator=random), torch.arange(samples) % 10)
    return TensorDataset(torch.randint(20_000, (samples, 2), generator=random), torch.arange(samples) % 2)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of all tasks."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class Clock:
    """Notes when each step of this rank begins; rank 0 writes the result at its last step."""

    begins: list[float] = []

    @classmethod
    def tick(cls) -> None:
        cls.begins.append(time.time())
        if len(cls.begins) != int(os.environ["BENCH_STEPS"]) or (dist.is_initialized() and dist.get_rank()):
            return
        begins, out = cls.begins, Path(os.environ["BENCH_OUT"])
        record = {
            "first": begins[1] - float(os.environ["BENCH_BEGIN"]),
            "step": (begins[-1] - begins[WARM]) / (len(begins) - 1 - WARM),
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        out.write_text(json.dumps(record))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    Clock.tick()
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
