"""Context parallelism of unchanged modules equals training in a single process; indivisible modules are errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA
from fabricx.strategies import FSDP, ContextMesh, Mesh
from fabricx.testing import QUIET, run_ranks
from tests.soak import SOAK

pytestmark = pytest.mark.usefixtures("warm_ranks")

WORDS, WIDTH, HEADS, LENGTH, MOST = 19, 16, 4, 16, 24
PADDING = -100
SAMPLES = 18 if SOAK else 10  # 5 or 3 batches of 4, of which the last has 2


class Attention(nn.Module):
    """The kinds of attention in models of users."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout, self.heads = kind, dropout, 2 if kind == "grouped" else HEADS
        if kind == "torch":
            self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            return
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * size) for heads in (HEADS, self.heads, self.heads))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(1, 1, MOST, MOST, dtype=torch.bool).tril(), persistent=False)
        angles = torch.arange(MOST)[:, None] / 10 ** torch.linspace(0, 1, size // 2)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def turned(self, x: Tensor, rotary: Any) -> Tensor:
        if rotary is None:
            return x
        a, b = x.chunk(2, -1)
        return torch.cat([a * rotary[0] - b * rotary[1], a * rotary[1] + b * rotary[0]], -1)

    def forward(self, x: Tensor, rotary: Any, mask: Any, padding: Any) -> Tensor:
        count = x.shape[1]
        if self.kind == "torch":
            forbidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if mask is None else ~mask
            return self.layer(x, x, x, attn_mask=forbidden, key_padding_mask=padding)[0]  # type: ignore[no-any-return]
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.kind == "grouped":  # positions are computed in the block
            angles = torch.arange(count, dtype=x.dtype)[:, None] / 10 ** torch.linspace(0, 1, WIDTH // HEADS // 2)
            rotary = angles.cos(), angles.sin()
        if self.kind == "table":
            rotary = self.table[:, :count]
        q, k = self.turned(q, rotary), self.turned(k, rotary)
        if self.kind == "products":  # matrix products instead of torch's attention
            return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
        options: dict[str, Any] = {"enable_gqa": self.kind == "grouped"}
        if self.kind == "own mask":
            options["attn_mask"] = torch.ones(count, count, dtype=torch.bool).tril()
        elif self.kind == "table":
            options["attn_mask"] = self.mask[:, :, :count, :count]
        elif mask is not None:
            options["attn_mask"] = mask
        else:
            options["is_causal"] = True
        if self.kind == "attention dropout":
            options["dropout_p"] = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, **options)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture of experts; the experts used by a shard of the sequence depend on its words."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.act = nn.Linear(WIDTH, 8), nn.GELU()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            [rows_of_expert] = torch.where(chosen == number)
            if len(rows_of_expert):
                output = output.index_add(
                    0, rows_of_expert, self.act(expert(rows[rows_of_expert])) * weights[rows_of_expert, None]
                )
        return output.view_as(x)


class Block(nn.Module):
    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.drop = Attention(kind, dropout), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.experts = Experts() if kind == "experts" else None
        self.scales = kind == "scaled"
        self.mixes: Any = nn.Conv1d(WIDTH, WIDTH, 3, padding=1) if kind == "convolution" else None

    def forward(self, x: Tensor, rotary: Any = None, mask: Any = None, padding: Any = None) -> Tensor:
        y = self.norms[0](x)
        if self.mixes is not None:
            y = self.mixes(y.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(y, rotary, mask, padding)
        if self.scales and (x.detach().abs() > 1.0).any():  # the largest element of all sequences
            x = x / x.detach().abs().amax()
        if self.experts is not None:
            return x + self.experts(self.norms[1](x))  # type: ignore[no-any-return]
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


class GPT(fx.Module):
    """A language model whose step shifts the words and excludes padding from the loss."""

    def __init__(
        self, kind: str = "", dropout: float = 0.0, validated: Sequence[int | None] = (None, 6, 3), blocks: int = 3
    ) -> None:  # fmt: skip
        super().__init__()
        # Lengths with a target; a length of 2 has fewer positions than pieces: each rank computes all of it.
        self.kind, self.validated = kind, validated
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(MOST, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.norms: list[float] = []
        if kind == "container":  # as in nanoGPT: without a divided sequence, the blocks begin with the embeddings
            self.net = nn.ModuleDict({"embed": self.embed, "position": self.position, "h": self.blocks})

    def forward(self, ids: Tensor) -> Tensor:
        count = ids.shape[1]
        x = self.embed(ids.clamp(min=0)) + self.position(torch.arange(count))
        options: dict[str, Any] = {}
        if self.kind in ("rotary", "torch", "checkpointed"):  # computed once, passed to all blocks
            angles = torch.arange(count, dtype=x.dtype)[:, None] / 10 ** torch.linspace(0, 1, WIDTH // HEADS // 2)
            options = {"rotary": (angles.cos(), angles.sin())}
        if self.kind == "rotary":
            options["mask"] = torch.ones(count, count, dtype=torch.bool).tril()[None, None] & (ids >= 0)[:, None, None]
        if self.kind == "heads":
            options["mask"] = torch.ones(count, count, dtype=torch.bool).tril().expand(HEADS, count, count)
        if self.kind == "torch":
            options |= {"mask": torch.ones(count, count, dtype=torch.bool).tril(), "padding": ids < 0}
        for block in self.blocks:
            if self.kind == "checkpointed" and self.training:
                x = checkpointed(block, x, use_reentrant=False, **options)
            else:
                x = block(x, **options)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _loss(self, batch: Tensor) -> Tensor:
        targets = batch[:, 1:].reshape(-1)
        return F.cross_entropy(self(batch[:, :-1]).reshape(-1, WORDS), targets, ignore_index=PADDING)

    def batch_weight(self, batch: Tensor) -> int:
        return int((batch[:, 1:] >= 0).sum())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True, batch_size=self.batch_weight(batch))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for length in self.validated:
            part = batch[:, :length]
            self.log(f"val_{length}", self._loss(part), batch_size=self.batch_weight(part))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1]).argmax(-1)  # type: ignore[no-any-return]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, Mesh):
            self.norms.append(float(self.trainer.strategy.gradient_norm([optimizer])))  # type: ignore[arg-type]
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SavesAtTheEnd(fx.Callback):
    """Saves a checkpoint at the last batch, before the run ends."""

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(f"{self.folder}/end")


def sentences(count: int, length: int = LENGTH) -> list[Tensor]:
    """Return sentences of different lengths with padding at their ends."""
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(WORDS, (LENGTH + 1,), generator=generator)[: length + 1] for _ in range(count)]
    for number, sentence in enumerate(words):
        sentence[length + 1 - number % 4 :] = PADDING
    return words


def train(
    strategy: Any, batch: int, options: dict[str, Any], modules: list[dict[str, Any]], folder: str = "",
    ckpt_path: str | None = None, ema: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train modules successively in the present ranks; return weights, metrics and gradient norms of each."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    results = []
    try:
        for module in modules:
            fx.seed_everything(3)
            model = GPT(**{name: value for name, value in module.items() if name != "length"})
            length = module.get("length", LENGTH)
            trainer = fx.Trainer(
                devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
                strategy=strategy, default_root_dir=folder or None,
                callbacks=[EMA(0.8)] * ema + ([SavesAtTheEnd(folder, options["max_steps"])] if folder else []),
                **{**QUIET, "max_epochs": 2, "gradient_clip_val": 0.5, **options},
            )  # fmt: skip
            data = DataLoader(sentences(SAMPLES, length), batch, shuffle=True)  # type: ignore[arg-type]
            trainer.fit(model, data, DataLoader(sentences(3, length), 2), ckpt_path=ckpt_path)  # type: ignore[arg-type]
            whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
            results.append({
                "weights": {name: weight.detach() for name, weight in whole.items()}, "norms": model.norms,
                "metrics": {n: float(v) for n, v in trainer.callback_metrics.items()},
            })  # fmt: skip
        return results
    finally:
        torch.set_default_dtype(before)


def far(first: Any, second: Any) -> float:
    """Return the largest difference of weights, metrics and norms."""
    weights = [float((value - second["weights"][name]).abs().max()) for name, value in first["weights"].items()]
    metrics = [abs(value - second["metrics"][name]) for name, value in first["metrics"].items()]
    assert len(first["norms"]) == len(second["norms"]) > 0
    return max(weights + metrics + [abs(a - b) for a, b in zip(first["norms"], second["norms"], strict=True)])


KINDS = ["", "grouped", "table", "torch", "checkpointed", "experts", "scaled"]


def test_context_parallelism_trains_the_weights_of_a_single_process() -> None:
    modules: list[dict[str, Any]] = [
        {"kind": "rotary", "length": 13}, *({"kind": kind, "length": LENGTH - (kind == "torch")} for kind in KINDS),
        {"dropout": 0.3, "length": 14}, {"kind": "heads", "length": HEADS},
    ]  # fmt: skip
    epochs, beside = (4, 3) if SOAK else (1, 1)  # 20 or 3 steps; number of modules on the larger meshes
    options: dict[bool, dict[str, Any]] = {
        False: {"max_epochs": epochs}, True: {"max_epochs": epochs, "accumulate_grad_batches": 2},
    }  # fmt: skip
    results = {
        False: train("single", 4, options[False], modules), True: train("single", 4, options[True], modules[:beside]),
    }  # fmt: skip
    for name, (strategy, ranks, shares, accumulates) in {
        "context": (ContextMesh(), 2, 1, False),
        "ring": (ContextMesh(context_method="ring"), 2, 1, False),
        "of 4": (Mesh(context=4), 4, 1, False),
        "ring of 4": (Mesh(context=4, context_method="ring"), 4, 1, False),
        "ddp": (Mesh(context=2), 4, 2, True),
        "fsdp": (ContextMesh(context=2, data="fsdp"), 4, 2, True),
        "tensor": (Mesh(context=2, tensor=2), 4, 1, False),
        "ring x tensor": (Mesh(context=2, tensor=2, context_method="ring"), 4, 1, False),
    }.items():
        if name in ("ddp", "of 4", "ring of 4", "ring x tensor") and not SOAK:  # the other meshes run the same code
            continue
        alone = results[accumulates]
        count = len(modules) if name == "context" or (name == "ring" and SOAK) else beside
        by_rank = run_ranks(train, ranks, strategy, 4 // shares, options[accumulates], modules[:count])
        for number, module in enumerate(modules[:count]):
            assert far(alone[number], by_rank[0][number]) < 1e-9, (name, module)
            for other in by_rank[1:]:
                weights = by_rank[0][number]["weights"].items()
                assert all(torch.equal(other[number]["weights"][n], weight) for n, weight in weights), name


def test_stages_of_a_pipeline_compute_shards_of_the_sequence() -> None:
    modules: list[dict[str, Any]] = [
        {"kind": "rotary", "length": 15, "validated": (3,)},  # a length that each rank computes completely
        *({"kind": kind, "validated": (None,)} for kind in (KINDS if SOAK else ("checkpointed",))),
    ]
    options = {"max_epochs": 2 if SOAK else 1, "accumulate_grad_batches": 2}
    alone = train("single", 4, options, modules)
    meshes = {
        "context": (Mesh(context=2, pipeline=2, microbatches=2), 4, 1),
        "ring": (Mesh(context=2, pipeline=2, context_method="ring"), 4, 1),
        "zero bubble": (Mesh(context=2, pipeline=2, schedule="zero_bubble", microbatches=4), 4, 1),
        "ddp": (Mesh(context=2, pipeline=2, microbatches=2), 8, 2),
        "fsdp": (Mesh(context=2, pipeline=2, microbatches=2, data="fsdp"), 8, 2),
        "tensor": (Mesh(context=2, pipeline=2, microbatches=2, tensor=2), 8, 1),
    }
    for name in meshes if SOAK else ("context",):
        strategy, ranks, shares = meshes[name]
        count = 2 if name == "tensor" else len(modules)  # the number of heads allows both axes
        by_rank = run_ranks(train, ranks, strategy, 4 // shares, options, modules[:count])
        for number, module in enumerate(modules[:count]):
            assert far(alone[number], by_rank[0][number]) < 1e-9, (name, module)
            weights = by_rank[0][number]["weights"].items()
            for other in by_rank[1:]:
                assert all(torch.equal(other[number]["weights"][n], weight) for n, weight in weights), name


def test_dropout_of_sharded_sequences_in_stages_equals_that_of_whole_sequences() -> None:
    module = [{"kind": "container", "dropout": 0.3, "validated": (None,)}]
    expected, sharded = (
        run_ranks(train, ranks, Mesh(context=ranks // 2, pipeline=2, microbatches=2), 4, {"max_epochs": 1}, module)
        for ranks in (2, 4)
    )
    assert far(expected[0][0], sharded[0][0]) < 1e-9


def test_checkpoints_move_between_strategies(tmp_path: Path) -> None:
    module: list[dict[str, Any]] = [{"kind": "rotary", "validated": (None,)}]  # stages call the blocks once
    options = {"max_epochs": 2 if SOAK else 1}
    alone = train("single", 4, options, module, ema=True)[0]
    meshes: dict[str, tuple[Any, int]] = {
        "context": (ContextMesh(), 2), "fsdp": (FSDP(), 2), "fsdp x context": (Mesh(context=2, data="fsdp"), 4),
        "context x pipeline": (Mesh(context=2, pipeline=2, microbatches=2), 4),
    }  # fmt: skip
    short = ("context", "fsdp x context", "context x pipeline")
    routes = [(*short, "context"), ("context", "fsdp")] if SOAK else [short]
    for route in routes:  # a run moves within an epoch: after one step, and after a second step
        saved = None
        for leg, name in enumerate(route, 1):
            # Global batch: the batch size times the number of shares at the start of the run.
            (strategy, ranks), folder = meshes[name], str(tmp_path / f"{len(route)}-{leg}")
            last = leg == len(route)
            limit, target = (options, "") if last else ({"max_steps": leg}, folder)
            end = run_ranks(train, ranks, strategy, 4, limit, module, target, saved, True)[0][0]
            if not last:
                saved = f"{folder}/end"
                state = checkpoint.load(saved)["strategy"]
                moments = state["optimizers"][0]["state"]["blocks.0.up.weight"]["exp_avg"]
                assert state["module"]["blocks.0.up.weight"].shape == moments.shape == (4 * WIDTH, WIDTH)
        assert max(float((end["weights"][n] - w).abs().max()) for n, w in alone["weights"].items()) < 1e-9, route


def test_attention_dropout_is_reproducible_and_a_resumed_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    module = [{"kind": "attention dropout", "dropout": 0.2}]
    options = {"max_epochs": 2 if SOAK else 1}
    whole = run_ranks(train, 2, ContextMesh(), 4, options, module)
    assert all(torch.equal(whole[1][0]["weights"][n], weight) for n, weight in whole[0][0]["weights"].items())
    run_ranks(train, 2, ContextMesh(), 4, {"max_steps": 2}, module, str(tmp_path))
    again = run_ranks(train, 2, ContextMesh(), 4, options, module, "", str(tmp_path / "end"))
    assert again[0][0]["metrics"] == whole[0][0]["metrics"]
    assert all(torch.equal(again[0][0]["weights"][n], weight) for n, weight in whole[0][0]["weights"].items())
    both = run_ranks(train, 4, Mesh(context=2, tensor=2), 4, options, module)
    assert all(torch.equal(b[0]["weights"][n], weight) for n, weight in both[0][0]["weights"].items() for b in both)


def predicted(strategy: Any) -> list[Any]:
    trainer = fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_epochs": 1})
    model = GPT()
    data = DataLoader(sentences(8), 4)  # type: ignore[arg-type]
    trainer.fit(model, data)
    return [trainer.predict(model, data), trainer.validate(model, data)]


def test_outputs_and_metrics_count_once() -> None:
    (outputs, metrics), _ = run_ranks(predicted, 2, ContextMesh())
    assert [tuple(output.shape) for output in outputs] == [(4, LENGTH)] * 2
    assert metrics[0]["val_None"] > 0


def refusal(cases: list[tuple[Any, dict[str, Any], int, dict[str, Any]]]) -> list[str]:
    """Return the error messages of fits that are refused at set-up."""
    messages = []
    for strategy, module, length, options in cases:
        data = DataLoader([sentence[:length] for sentence in sentences(8)], 4)  # type: ignore[arg-type]
        try:
            fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_epochs": 1, **options}).fit(GPT(**module), data)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}")
        else:
            messages.append("")
    return messages


def test_modules_that_cannot_be_divided_are_errors_with_the_remedy() -> None:
    whole = LENGTH + 1
    cases: dict[str, tuple[Any, dict[str, Any], int, dict[str, Any]]] = {
        "kernel [3] combines neighbouring positions": (ContextMesh(), {"kind": "convolution"}, whole, {}),
        "first output that differs is that of blocks.0.attention.out": (ContextMesh(), {"kind": "products"}, whole, {}),
        "compute the mask before the blocks": (ContextMesh(), {"kind": "own mask"}, whole, {}),
        "use longer samples or a smaller context": (ContextMesh(), {}, 4, {}),
        "remove compile": (ContextMesh(), {}, whole, {"compile": True}),
        "Did you mean 'Block'": (ContextMesh(blocks="Blocks"), {}, whole, {}),
        "no argument with a sequence in dim 3": (ContextMesh(sequence_dim=3), {}, whole, {}),
    }
    for expected, message in zip(cases, run_ranks(refusal, 2, list(cases.values()))[0], strict=True):
        assert expected in message
        assert "plan=" not in message  # a remedy of the tensor axis
