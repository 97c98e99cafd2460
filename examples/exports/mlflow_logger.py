"""A logger for MLflow: any object with four methods is a logger.

pip install mlflow-skinny; then: python mlflow_logger.py [--uri http://...]. Without a server, it writes to mlruns/.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx


class MLflowLogger:
    def __init__(self, experiment: str, uri: str):
        self.experiment, self.uri = experiment, uri
        self.client: Any = None
        self.run: Any = None

    def open(self, run_dir: Path):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow refuses folders by default
        import mlflow  # imported only on the main rank, which logs

        if self.run is None:
            self.client = mlflow.MlflowClient(self.uri)
            existing = self.client.get_experiment_by_name(self.experiment)
            number = existing.experiment_id if existing else self.client.create_experiment(self.experiment)
            self.run = self.client.create_run(number, run_name=run_dir.name).info.run_id

    def log_metrics(self, metrics, step):
        for name, value in metrics.items():
            self.client.log_metric(self.run, name, value, step=step)

    def log_hyperparams(self, params):
        for name, value in params.items():
            self.client.log_param(self.run, name, value)

    def close(self, status):
        run, self.run = self.run, None
        if run is not None:
            self.client.set_terminated(run, "FINISHED" if status == "success" else "FAILED")


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
    parser.add_argument("--uri", default="mlruns")
    inputs = torch.randn(256, 3)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    logger = MLflowLogger("fabricx-example", parser.parse_args().uri)
    trainer = fx.Trainer(max_epochs=2, log_every_n_steps=4, logger=logger)
    trainer.fit(Line(), data)
    print("run folder:", trainer.run_dir)
