"""Models without any code for a pipeline train in stages as in one process: transformers, encoders, convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from fabricx.testing import run_ranks
from tests.process.stages import STEPS, Language, alone, compare, make, staged

pytestmark = pytest.mark.usefixtures("warm_ranks")

WORDS, LENGTH, ROWS = 61, 10, 5
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": WORDS,
    "max_position_embeddings": 32, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Transformers(nn.Module):
    """A model of transformers, by the name of its class."""

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
    """`nn.TransformerEncoder` with a mask of padding, and tied weights."""

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
    """Stages of different shapes, with a memory that all blocks take and change, and a frozen stem."""

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


def tokens(rows: int = ROWS) -> list[Any]:
    """Batches with padding, of two lengths."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(STEPS):
        ids = torch.randint(3, WORDS, (rows, LENGTH - number % 2), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -3:] = number % 3 > 0
        images = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
        found.append({"ids": ids, "mask": mask, "labels": ids, "image": images})
    return found


def sentences() -> list[Tensor]:
    return [batch["ids"] % 29 for batch in tokens() if batch["ids"].shape[1] == LENGTH - 1]


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


def test_models_of_users_train_in_stages_what_they_train_in_one_process() -> None:
    pytest.importorskip("transformers")
    by_rank = run_ranks(train_all, 2)
    for number, (name, cls, model, _) in enumerate(CASES):
        compare([rank[number] for rank in by_rank], alone(make(cls, **model), data_of(name)))
