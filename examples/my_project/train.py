"""Training script of a project; the function receives the composed configuration."""

from __future__ import annotations

from typing import Any

import fabricx as fx
from fabricx.config import build


@fx.main(config_path="conf", config_name="train")
def train(cfg: Any) -> float:
    trainer, module, data = build(cfg)
    assert data is not None
    trainer.fit(module, datamodule=data)
    error = float(trainer.callback_metrics["val_loss"]) ** 0.5
    trainer.print(f"error of the forecast: {error:.3f} (noise: {data.hparams.noise})")
    return error  # minimised by sweepers


if __name__ == "__main__":
    train()
