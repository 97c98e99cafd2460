"""Claims of the papers on stale and compressed gradients, on handwritten digits: test errors, and their order.

Workers are simulated under a virtual clock: a batch lasts between 1 and 1.5, uniformly distributed, so that
the delays are realistic, and equal on every machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from fabricx.demo.digits import DigitsData
from fabricx.distributed.compression.codecs import make_codec
from fabricx.parameter_server.optimizer_parts import sliced
from fabricx.parameter_server.wire.messages import ServerInit, Settings
from fabricx.parameter_server.wire.partition import divide
from fabricx.testing.simulated_server import simulate

BATCH, LR = 16, 0.2


class Task:
    """Digits and a network with a hidden layer, as a function of a flat vector."""

    def __init__(self, seed: int, epochs: int) -> None:
        data = DigitsData()
        data.prepare_data()
        data.setup("fit")
        data.setup("test")
        parts = [loader.dataset for loader in (data.train_dataloader(), data.test_dataloader())]
        self.train, self.test = (next(iter(torch.utils.data.DataLoader(part, len(part)))) for part in parts)
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        orders = [torch.randperm(len(self.train[1])).split(BATCH) for _ in range(epochs)]
        self.batches = [places for order in orders for places in order]
        self.start = nn.utils.parameters_to_vector(self.net.parameters()).detach().clone()

    def gradient(self, lease: int, weights: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(weights.clone(), self.net.parameters())
        self.net.zero_grad()
        places = self.batches[lease]
        nn.functional.cross_entropy(self.net(self.train[0][places]), self.train[1][places]).backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.net.parameters()])

    def error(self, weights: Tensor) -> float:
        """Return the part of the test images that are mistaken, in percent."""
        nn.utils.vector_to_parameters(weights.clone(), self.net.parameters())
        with torch.no_grad():
            wrong = self.net(self.test[0]).argmax(1) != self.test[1]
        return 100.0 * float(wrong.float().mean())


def error(seed: int, epochs: int, workers: int, codec: tuple[str, bool] | None = None, **settings: Any) -> float:
    task = Task(seed, epochs)
    parameter = nn.Parameter(task.start.clone())
    size = parameter.numel()
    [shard] = divide([[size]], 1)
    copies, pieces = sliced([torch.optim.SGD([parameter], lr=LR)], [parameter], shard)
    server_settings = Settings(workers, aggregate=False, **settings)
    begin = ServerInit(server_settings, copies, pieces, shard, torch.float32, 0)
    rng = random.Random(seed)
    coders = {worker: make_codec(codec[0], keep=0.01, feedback=codec[1]) for worker in range(workers)} if codec else {}
    room = torch.zeros(4 * size, dtype=torch.uint8)

    def gradient(lease: int, weights: Tensor) -> Tensor:
        value = task.gradient(lease, weights)
        if coders:
            scale = coders[0].encode(value, room)
            value = coders[0].decode(room, size, scale, torch.float32)
        return value

    server, _, _ = simulate(begin, len(task.batches), gradient, lambda worker, lease: 1.0 + rng.random() / 2)
    return task.error(server.values)


ROWS: dict[str, dict[str, Any]] = {
    "one after the other": {"workers": 1},
    "8 workers, DC-ASGD adaptive": {"workers": 8, "compensation": "dc-adaptive", "dc_lambda": 2.0},
    "8 workers, divided by the staleness": {"workers": 8, "damp": True},
    "8 workers, as they come": {"workers": 8},
    "the largest 1 %, with feedback": {"workers": 1, "codec": ("topk", True)},
    "the largest 1 %, without": {"workers": 1, "codec": ("topk", False)},
    "signs, with feedback": {"workers": 1, "codec": ("sign", True)},
    "signs, without": {"workers": 1, "codec": ("sign", False)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=25)
    args = parser.parse_args()
    print(f"\ntest error on digits, %, mean of {args.seeds} seeds (and its standard error)")
    for name, options in ROWS.items():
        errors = [error(seed, args.epochs, **options) for seed in range(args.seeds)]
        spread = statistics.stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else 0.0
        print(f"  {name:<36}  {statistics.mean(errors):6.2f} ({spread:.2f})", flush=True)


if __name__ == "__main__":
    main()
