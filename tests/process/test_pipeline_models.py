"""Models without code for pipelines train in stages as in a single process: transformers, encoders, convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.strategies import Mesh
from fabricx.testing import QUIET, LayeredModule, layered_data, run_ranks
from tests.process.stages import STEPS, Language, alone, compare, make, staged

pytestmark = pytest.mark.usefixtures("warm_ranks")

WORDS, LENGTH, ROWS = 61, 10, 5
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": WORDS,
    "max_position_embeddings": 32, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Transformers(nn.Module):
    """A model of transformers, selected by its class name."""

    def __init__(self, name: str, config: dict[str, Any], checkpointed: bool | None = None) -> None:
        super().__init__()
        import transformers

        model: Any = getattr(transformers, name)
        self.model = model(model.config_class(**config))
        if checkpointed is not None:
            self.model.activation_checkpointing_enable({"use_reentrant": checkpointed})

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        logits = self.model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), "logits": logits}


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a padding mask, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.encoder = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        logits = self.head(self.encoder(self.embed(batch["ids"]), src_key_padding_mask=batch["mask"] == 0))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), "logits": logits}


class Images(nn.Module):
    """Stages of different shapes, with a state that all blocks receive and change, and a frozen stem."""

    class Stage(nn.Module):
        def __init__(self, inner: int, outer: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(inner, outer, 3, 2, 1), nn.BatchNorm2d(outer), nn.ReLU())

        def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, int]:
            x = self.layers(x)
            return x, memory + x.mean((1, 2, 3)), x.shape[-1]

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.stages = nn.ModuleList(self.Stage(4 * n, 4 * n + 4) for n in range(1, 4))
        self.head = nn.Linear(16, WORDS)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        x = self.stem(batch["image"])
        memory, size = self.scale * x.mean((1, 2, 3)), x.shape[-1]
        for stage in self.stages:
            x = x * size
            x, memory, size = stage(x, memory=memory)
        logits = self.head(x.mean((2, 3))) + memory[:, None] * size
        return {"loss": F.cross_entropy(logits, batch["labels"][:, 0]), "logits": logits}


class Checkpointed(Language):
    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return x


def tokens(rows: int = ROWS, count: int = STEPS) -> list[Any]:
    """Batches with padding, of two lengths."""
    generator, batches = torch.Generator().manual_seed(1), []
    for number in range(count):
        ids = torch.randint(3, WORDS, (rows, LENGTH - number % 2), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -3:] = number % 3 > 0
        images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
        batches.append({"ids": ids, "mask": mask, "labels": ids, "image": images})
    return batches


def sentences() -> list[Tensor]:
    return [batch["ids"] % 29 for batch in tokens(count=2 * STEPS) if batch["ids"].shape[1] == LENGTH - 1]


GPT2 = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": 32}
GPT2 |= {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}

CASES: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [  # name, class, its options, options of the pipeline
    ("gpt2", Transformers, {"name": "GPT2LMHeadModel", "config": GPT2}, {}),
    ("gpt2 checkpointed", Transformers, {"name": "GPT2LMHeadModel", "config": GPT2, "checkpointed": True}, {}),
    ("llama", Transformers, {"name": "LlamaForCausalLM", "config": LLAMA}, {"schedule": "zero_bubble"}),
    ("llama checkpointed", Transformers, {"name": "LlamaForCausalLM", "config": LLAMA, "checkpointed": False}, {}),
    ("encoder", Encoder, {}, {}),
    ("images", Images, {}, {"microbatches": 1}),  # statistics of the whole batch
    ("checkpointed", Checkpointed, {}, {"schedule": "zero_bubble"}),
]


def data_of(name: str) -> list[Any]:
    return sentences() if name == "checkpointed" else tokens()


def train_all() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [staged(make(cls, **model), data_of(name), **options) for name, cls, model, options in CASES]


def test_models_of_users_in_pipeline_stages_train_the_weights_of_a_single_process() -> None:
    pytest.importorskip("transformers")
    by_rank = run_ranks(train_all, 2)
    for number, (name, cls, model, _) in enumerate(CASES):
        compare([rank[number] for rank in by_rank], alone(make(cls, **model), data_of(name)))


# -- through the Trainer ----------------------------------------------------------------------------------------------


class Trained(fx.Module):
    """A user's module around a model; validates with the loss of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self.model.training_step(batch, batch_idx)
        self.log("loss", outputs["loss"], on_epoch=True)
        return outputs["loss"]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        outputs = self.model.training_step(batch, batch_idx)
        self.log_dict({"val": outputs["loss"], "first": outputs["logits"].flatten()[0]})

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model.training_step(batch, batch_idx)["logits"].argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Vision(Transformers):
    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        logits = self.model(pixel_values=batch["image"]).logits
        return {"loss": F.cross_entropy(logits, batch["labels"][:, 0] % 2), "logits": logits}


class UNet(nn.Module):
    """The halves exchange tensors, and a condition is used after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.condition, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, WORDS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(6))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        x = self.embed(batch["ids"])
        condition, kept = self.condition(x.mean(1, keepdim=True)), list[Tensor]()
        for number, block in enumerate(self.blocks):
            x = block(x if number < 3 else x + kept.pop())
            kept.append(x)
        logits = self.head(x * condition)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), "logits": logits}


VIT = {**SIZES, "image_size": 8, "patch_size": 4}
TRAINED: list[tuple[Any, dict[str, Any]]] = [
    (Transformers, {"name": "GPT2LMHeadModel", "config": GPT2}),
    (Transformers, {"name": "LlamaForCausalLM", "config": LLAMA}),
    (Vision, {"name": "ViTForImageClassification", "config": VIT}),
    (Encoder, {}),
    (UNet, {}),
]


def samples(count: int) -> list[Any]:
    batches = [batch for batch in tokens(1, 20) if batch["ids"].shape[1] == LENGTH]
    return [{name: value[0] for name, value in batch.items()} for batch in (batches * 3)[:count]]


def fit(strategy: Any, devices: int) -> list[Any]:
    torch.set_num_threads(1)
    results = []
    for cls, options in TRAINED:
        module = Trained(make(cls, **options))
        trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=2, gradient_clip_val=0.5, **QUIET)
        trainer.fit(module, DataLoader(samples(21), 5), DataLoader(samples(7), 2))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(module, DataLoader(samples(3), 2))
        weights = {name: value.detach().clone() for name, value in module.named_parameters()}
        results.append((metrics, weights, [] if predicted is None else [part.tolist() for part in predicted]))
    return results


class NamedByLoader(LayeredModule):
    """Logs one name per validation loader, and a common name."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log(f"loss_{dataloader_idx}", loss, add_dataloader_idx=False)
        self.log("all", loss, add_dataloader_idx=False)


def validated(strategy: Any, devices: int) -> list[dict[str, float]]:
    torch.manual_seed(0)
    module, loaders = NamedByLoader(), [DataLoader(layered_data(rows), 4) for rows in (8, 12)]
    return fx.Trainer(devices=devices, strategy=strategy, **QUIET).validate(module, loaders)


def test_validation_results_contain_the_names_of_their_own_loader_only() -> None:
    """Regression: the main rank, which has the first stage, had logged nothing."""
    alone = validated("single", 1)
    assert [sorted(result) for result in alone] == [["all", "loss_0"], ["all", "loss_1"]]
    for results in run_ranks(validated, 2, Mesh(pipeline=2), 2):
        for result, expected in zip(results, alone, strict=True):
            assert result == pytest.approx(expected, abs=1e-6)


def test_models_of_users_train_validate_and_predict_through_the_trainer() -> None:
    pytest.importorskip("transformers")
    alone = fit("single", 1)
    strategy = Mesh(pipeline=2, microbatches=3)
    for rank in run_ranks(fit, 2, strategy, 2):
        for (metrics, weights, predicted), (expected, whole, labels) in zip(rank, alone, strict=True):
            assert metrics == pytest.approx(expected, abs=1e-6), "logged values are stored in float32"
            assert predicted == labels
            for name, value in whole.items():
                assert torch.allclose(weights[name], value, rtol=0, atol=1e-9), name
