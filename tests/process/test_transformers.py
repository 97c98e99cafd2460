"""Models of Hugging Face's transformers on the ranks of a tensor-parallel group, from tiny configurations."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx
from fabricx.testing import QUIET, run_ranks
from tests.process.test_tensor_parallel import CLOSE, compare, sgd

pytestmark = [
    pytest.mark.usefixtures("warm_ranks"),
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]
ROWS = 67  # as in the batches of test_tensor_parallel
SMALL = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0
}  # fmt: skip
T5 = {
    "vocab_size": ROWS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
HEAD = {"net.lm_head": "head", "net.model.embed_tokens": "vocab"}

# name -> class, arguments of its configuration, overrides of the plan, number of sharded layers
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str], int]] = {
    "llama": ("LlamaForCausalLM", GROUPED, HEAD, 16),
    "llama, eager": ("LlamaForCausalLM", {**GROUPED, "attn_implementation": "eager", "attention_dropout": 0.2}, {}, 14),
    "gpt2": ("GPT2LMHeadModel", GPT2, {}, 8),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, {}, 14),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, {}, 14),
    "bert": ("BertForMaskedLM", SMALL, {}, 12),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}, {}, 8),
    "t5": ("T5ForConditionalGeneration", T5, {}, 32),
}


@contextmanager
def quiet() -> Iterator[Any]:
    """Import transformers, which changes the environment and warns."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        library: Any = importlib.import_module("transformers")
        library.logging.set_verbosity_error()
        yield library


class Wrapped(nn.Module):
    def __init__(self, kind: str, options: dict[str, Any]):
        super().__init__()
        with quiet() as library:
            model = getattr(library, kind)
            self.net = model(model.config_class(**options)).double()
        self.logged: list[Any] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(input_ids=batch, labels=batch).loss
        self.logged.append(loss.item())
        return loss


def all_models() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (kind, options, overrides, _) in MODELS.items():
        with quiet():
            results[name] = compare(functools.partial(Wrapped, kind, options), overrides, False, sgd, 3)
    return results


def test_models_of_transformers_train_as_in_a_single_process() -> None:
    [results, _] = run_ranks(all_models, 2)
    for name, differences in results.items():
        # The library computes the loss in float32: sums over sharded classes are rounded in a different order.
        close = 1e-4 if MODELS[name][2] else CLOSE
        for quantity in ("losses", "norms", "weights", "random"):
            assert differences[quantity] < close, (name, quantity, differences)
        assert differences["layers"] == MODELS[name][3], (name, differences)


class Routed(fx.Module):
    def __init__(self) -> None:
        super().__init__()
        with quiet() as library:
            options = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
            self.net = library.MixtralForCausalLM(library.MixtralConfig(**options))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(input_ids=batch[0], labels=batch[0])
        # Recorded by hooks that the class registers for its outputs in the process.
        self.losses.append(outputs.aux_loss.item())
        return outputs.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_recorded_outputs_of_transformers_are_available_on_ranks() -> None:
    def train(devices: int) -> list[float]:
        torch.manual_seed(0)
        module, ids = Routed(), torch.arange(32).view(4, 8) % ROWS
        trainer = fx.Trainer(**QUIET, max_epochs=1, devices=devices, strategy="ddp" if devices > 1 else "single")
        trainer.fit(module, DataLoader(TensorDataset(ids.repeat(2, 1)), 4 // devices))
        return module.losses

    assert len(train(2)) == len(train(1)) == 2
