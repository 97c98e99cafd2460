"""A logger for Weights & Biases: any object with four methods is a logger.

pip install wandb; then: python wandb_logger.py [--mode online]. Offline mode needs no account, and
writes into the run's folder.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx


class WandbLogger:
    def __init__(self, project: str, mode: str = "offline"):
        self.project = project
        self.mode: Any = mode
        self.run: Any = None

    def open(self, run_dir: Path):
        import wandb  # imported only on the main rank, which logs

        if self.run is None:
            self.run = wandb.init(project=self.project, name=run_dir.name, dir=run_dir, mode=self.mode)

    def log_metrics(self, metrics, step):
        self.run.log(dict(metrics), step=step)

    def log_hyperparams(self, params):
        self.run.config.update(dict(params))

    def close(self, status):
        run, self.run = self.run, None
        if run is not None:
            run.finish(exit_code=0 if status == "success" else 1)


class Line(fx.Module):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="offline", choices=["offline", "online"])
    inputs = torch.randn(256, 3)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    logger = WandbLogger("fabricx-example", parser.parse_args().mode)
    trainer = fx.Trainer(max_epochs=2, log_every_n_steps=4, logger=logger)
    trainer.fit(Line(), data)
    print("run folder:", trainer.run_dir)
