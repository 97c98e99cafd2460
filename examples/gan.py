"""A GAN on eight clusters of points: manual optimization with two alternating optimizers."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx

CENTRES = torch.tensor([(math.cos(k * math.pi / 4), math.sin(k * math.pi / 4)) for k in range(8)])  # on a circle
SPREAD = 0.05


def net(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    bend = nn.LeakyReLU(0.2)
    return nn.Sequential(nn.Linear(inputs, width), bend, nn.Linear(width, width), bend, nn.Linear(width, outputs))


class GAN(fx.Module):
    """The generator transforms noise into points; the critic distinguishes them from data (Goodfellow et al., 2014)."""

    def __init__(self, noise: int = 4, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.critic = net(noise, 2), net(2, 1)

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.hparams.noise, device=self.device))

    def training_step(self, batch: list[Tensor]) -> None:
        real = batch[0]
        for_generator, for_critic = self.optimizers()

        self.toggle_optimizer(for_critic)
        critic_loss = (softplus(-self.critic(real)) + softplus(self.critic(self(len(real)).detach()))).mean()
        self.update(for_critic, critic_loss)
        self.untoggle_optimizer(for_critic)

        self.toggle_optimizer(for_generator)
        generator_loss = softplus(-self.critic(self(len(real)))).mean()
        self.update(for_generator, generator_loss)
        self.untoggle_optimizer(for_generator)
        self.log_dict({"critic": critic_loss, "generator": generator_loss}, prog_bar=True)

    def update(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch: list[Tensor]) -> None:
        distance, nearest = torch.cdist(self(len(batch[0])), CENTRES.to(self.device)).min(1)
        near = distance < 4 * SPREAD
        self.log_dict({"near": near.float().mean(), "clouds": float(nearest[near].unique().numel())}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        nets = self.generator, self.critic
        return [torch.optim.Adam(part.parameters(), self.hparams.lr, betas=(0.5, 0.99)) for part in nets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    fx.seed_everything(0)
    points = TensorDataset(CENTRES[torch.randint(8, (16_384,))] + SPREAD * torch.randn(16_384, 2))
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices, check_val_every_n_epoch=5)
    trainer.fit(GAN(), DataLoader(points, 256 // args.devices, shuffle=True), DataLoader(points, 4096))


if __name__ == "__main__":
    main()
