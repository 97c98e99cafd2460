"""A Llama of Hugging Face transformers, not changed, whose matrices are divided over two ranks. Needs transformers."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import fabricx as fx


class Llama(fx.Module):
    def __init__(self, words: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        # A real run has LlamaForCausalLM.from_pretrained(folder) here.
        config = LlamaConfig(
            vocab_size=words, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def counting(samples: int, words: int, length: int = 16) -> TensorDataset:
    """Return sequences that count in steps of 1 to 3."""
    return TensorDataset(torch.stack([(torch.arange(length) * (1 + n % 3) + 7 * n) % words for n in range(samples)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    fx.seed_everything(0)
    module = Llama()
    loader = DataLoader(counting(256, module.hparams.words), 16, shuffle=True)
    trainer = fx.Trainer(
        max_epochs=args.epochs, devices=args.devices, strategy="tensor" if args.devices > 1 else "single"
    )
    trainer.fit(module, loader)
    print(f"loss of the last epoch: {trainer.callback_metrics['loss_epoch']:.6f}")


if __name__ == "__main__":
    main()
