"""A GAN on eight clouds of points: two optimizers that take turns, stepped by hand."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx

ANGLES = torch.arange(8) * (2 * math.pi / 8)
CENTRES = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)  # on a circle of radius 1
SPREAD = 0.05


def net(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class GAN(fx.Module):
    """The generator makes points out of noise; the critic tells them from real ones (Goodfellow et al., 2014)."""

    def __init__(self, noise: int = 4, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.critic = net(noise, 64, 64, 2), net(2, 64, 64, 1)

    def forward(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, self.hparams.noise, device=self.device))

    def training_step(self, batch: list[Tensor]) -> None:
        [real] = batch
        for_generator, for_critic = self.optimizers()

        self.toggle_optimizer(for_critic)
        judged_real, judged_fake = self.critic(real), self.critic(self(len(real)).detach())
        critic_loss = nn.functional.softplus(-judged_real).mean() + nn.functional.softplus(judged_fake).mean()
        for_critic.zero_grad()
        self.manual_backward(critic_loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)

        self.toggle_optimizer(for_generator)
        generator_loss = nn.functional.softplus(-self.critic(self(len(real)))).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.log_dict({"critic": critic_loss, "generator": generator_loss}, prog_bar=True)

    def validation_step(self, batch: list[Tensor]) -> None:
        distance, nearest = torch.cdist(self(len(batch[0])), CENTRES.to(self.device)).min(1)
        self.log("near a cloud", (distance < 4 * SPREAD).float().mean(), prog_bar=True)
        self.log("clouds found", float(nearest[distance < 4 * SPREAD].unique().numel()), prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(part.parameters(), self.hparams.lr, (0.5, 0.99)) for part in (self.generator, self.critic)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    fx.seed_everything(0)
    points = CENTRES[torch.randint(8, (16_384,))] + SPREAD * torch.randn(16_384, 2)
    data = TensorDataset(points)
    trainer = fx.Trainer(max_epochs=args.epochs, devices=args.devices, check_val_every_n_epoch=10)
    trainer.fit(
        GAN(), DataLoader(data, 256 // args.devices, shuffle=True), DataLoader(TensorDataset(points[:2000]), 2000)
    )


if __name__ == "__main__":
    main()
