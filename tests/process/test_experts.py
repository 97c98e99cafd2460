"""Expert parallelism of unchanged modules equals training in a single process; indivisible modules are errors."""

from __future__ import annotations

import functools
import importlib.util
import math
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
from fabricx.callbacks import EMA, FaultRecovery
from fabricx.errors import WorkerFailed
from fabricx.model_parallel.hidden_gradients import DividedGradient
from fabricx.strategies import DDP, ExpertMesh, Mesh
from fabricx.testing import QUIET, kill, run_ranks
from tests.process.meshes import SavesAtTheEnd
from tests.process.test_transformers import quiet
from tests.soak import SOAK, params

pytestmark = pytest.mark.usefixtures("warm_ranks")

WORDS, WIDTH, COUNT, LENGTH = 19, 8, 4, 5


class Experts(nn.Module):
    """Weights and biases of all experts as stacked parameters, as in transformers."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.num_experts, self.scaled = COUNT, scaled
        self.up = nn.Parameter(torch.randn(COUNT, WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(COUNT, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(COUNT, 2 * WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, column = torch.where(index == expert)
            scales = weights[row, column, None]
            y = F.gelu(tokens[row] @ self.up[expert] + self.bias[expert] * (scales if self.scaled else 1))
            output = output.index_add(0, row, y @ self.down[expert] * scales)
        return output


class Switch(nn.Module):
    """One expert per token, without weights; computes all tokens in a single product."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = COUNT
        self.matrix = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        return torch.bmm(x[:, None], self.matrix[expert])[:, 0].tanh()


class Mixture(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts: Any = Switch() if kind == "switch" else Experts(kind == "scaled")

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        if self.kind == "lopsided":  # all tokens are routed to the experts of the first rank
            scores = torch.cat([scores[:, :2], torch.zeros_like(scores[:, 2:])], 1)
        weights, index = scores.topk(2)
        if self.kind == "switch":
            y = self.experts(tokens, expert=index[:, 0]) * weights[:, :1]
        else:
            y = self.experts(tokens, index, weights / weights.sum(-1, keepdim=True))
        return x + y.view_as(x)


class Model(fx.Module):
    """A language model with mixture layers and a tied head."""

    def __init__(self, kind: str = "", sgd: bool = False) -> None:
        super().__init__()
        self.kind, self.sgd = kind, sgd
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Mixture(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.norms: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpointed(layer, x, use_reentrant=False) if self.kind == "checkpointed" else layer(x)  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]

    def _loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self._loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1]).argmax(-1)  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        if self.kind == "scaled":  # hooks see whole weights, and changes are applied to all shards
            weight = self.layers[0].experts.up
            self.log("norm", weight.detach().norm())
            with torch.no_grad():
                weight.div_(1 + 0.01 * weight.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.world_size > 1 and isinstance(self.trainer.strategy, Mesh):
            self.norms.append(float(self.trainer.strategy.gradient_norm([optimizer])))  # type: ignore[arg-type]
        else:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        if self.sgd:
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


SAMPLES = 27 if SOAK else 19  # the last global batch of 4 or 8 has 3 samples


def sentences(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (LENGTH + 1,), generator=generator) for _ in range(count)]


def train(
    strategy: Any, batch: int, options: dict[str, Any], modules: list[Any], folder: str = "",
    ckpt_path: str | None = None, callbacks: tuple[Any, ...] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Train modules successively in the present ranks; return weights, metrics, norms and predictions of each."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    results = []
    try:
        for module in modules:
            fx.seed_everything(3)
            model = module() if callable(module) else Model(**module)
            trainer = fx.Trainer(
                devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
                strategy=strategy, default_root_dir=folder or None,
                callbacks=[*callbacks] + ([SavesAtTheEnd(folder, options["max_steps"])] if folder else []),
                **{**QUIET, "max_epochs": 2, "gradient_clip_val": 0.5, **options},
            )  # fmt: skip
            data = DataLoader(sentences(SAMPLES), batch, shuffle=True)  # type: ignore[arg-type]
            trainer.fit(model, data, DataLoader(sentences(5), 2), ckpt_path=ckpt_path)  # type: ignore[arg-type]
            metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
            predicted: Any = trainer.predict(model, DataLoader(sentences(5), 2))  # type: ignore[arg-type]
            assert all("forward" not in vars(part) for part in model.modules())  # forwards are restored
            results.append({
                "weights": {name: weight.detach() for name, weight in model.named_parameters()}, "norms": model.norms,
                "metrics": metrics,
                "predicted": torch.cat(predicted),
            })  # fmt: skip
        return results
    finally:
        torch.set_default_dtype(before)


def far(first: Any, second: Any) -> float:
    """Return the largest difference of weights, metrics and norms."""
    weights = [float((value - second["weights"][name]).abs().max()) for name, value in first["weights"].items()]
    metrics = [abs(value - second["metrics"][name]) for name, value in first["metrics"].items()]
    assert len(metrics) > 1
    assert len(first["norms"]) == len(second["norms"]) > 0
    return max(weights + metrics + [abs(a - b) for a, b in zip(first["norms"], second["norms"], strict=True)])


KINDS: list[dict[str, Any]] = [
    {"kind": "scaled"}, {"kind": "switch", "sgd": True}, {"kind": "lopsided"}, {"kind": "checkpointed"},
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "ranks"), params([(Mesh(expert=2), 4)], [(ExpertMesh(), 2), (ExpertMesh(), 4)]))
def test_divided_experts_train_the_weights_of_a_single_process(strategy: Any, ranks: int) -> None:
    options = {"max_epochs": 5 if SOAK else 2}  # the last global batch has 3 samples: some ranks have no sample
    alone = train("single", 8, options, KINDS, "", None, (EMA(0.8),))
    by_rank = run_ranks(train, ranks, strategy, 8 // ranks, options, KINDS, "", None, (EMA(0.8),))
    for number, module in enumerate(KINDS):
        assert far(alone[number], by_rank[0][number]) < 1e-9, module
        assert torch.equal(alone[number]["predicted"], by_rank[0][number]["predicted"])
        for other in by_rank[1:]:
            weights = by_rank[0][number]["weights"].items()
            assert all(torch.equal(other[number]["weights"][name], weight) for name, weight in weights)
    accumulated = {**options, "accumulate_grad_batches": 3}
    alone = train("single", 4, accumulated, KINDS[:1])
    assert far(alone[0], run_ranks(train, ranks, strategy, 4 // ranks, accumulated, KINDS[:1])[0][0]) < 1e-9


def moves(folder: str, options: dict[str, Any]) -> list[Any]:
    """Stop within an epoch, and continue under the same strategy and under ddp; also from ddp's checkpoint."""
    module, average = [{"kind": "scaled"}], (EMA(0.8),)
    whole = train(ExpertMesh(), 4, options, module, "", None, average)[0]
    train(ExpertMesh(), 4, {"max_steps": 2}, module, f"{folder}/expert", None, average)
    train("ddp", 4, {"max_steps": 2}, module, f"{folder}/ddp", None, average)
    ends = [(ExpertMesh(), "expert"), (DDP(), "expert"), (ExpertMesh(), "ddp")]
    return [whole, *(train(to, 4, options, module, "", f"{folder}/{path}/end", average)[0] for to, path in ends)]


def test_checkpoints_move_between_strategies_and_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    options = {"max_epochs": 2}
    whole, again, *others = run_ranks(moves, 2, str(tmp_path), options)[0]
    assert again["metrics"] == whole["metrics"]
    assert all(torch.equal(again["weights"][name], weight) for name, weight in whole["weights"].items())
    others.append(train("single", 4, options, [{"kind": "scaled"}], "", f"{tmp_path}/expert/end", (EMA(0.8),))[0])
    for other in others:
        assert max(float((other["weights"][n] - w).abs().max()) for n, w in whole["weights"].items()) < 1e-9
    saved = checkpoint.load(tmp_path / "expert" / "end")["strategy"]
    name = "layers.0.experts.up"
    moments = saved["optimizers"][0]["state"][name]["exp_avg"]
    assert saved["module"][name].shape == moments.shape == (COUNT, WIDTH, 2 * WIDTH)


class Deviates(Model):
    """Deviates from the protocol, or from the loop of other ranks, depending on `kind`."""

    def __init__(self, kind: str = "") -> None:
        super().__init__("" if kind in ("hook", "idle", "once", "odd", "tied", "compiled", "normal") else kind)
        self.odd = kind
        if kind == "odd":
            for layer in self.layers:
                layer.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))
        if kind == "tied":
            self.layers[1].experts.up = self.layers[0].gate.stacked = self.layers[0].experts.up
        if kind == "compiled":
            self.layers[1] = torch.compile(self.layers[1], backend="eager")
        if kind == "normal":
            for layer in self.layers:
                layer.experts.register_forward_hook(lambda part, args, output: output - output.mean())
                layer.experts.forward = functools.partial(mean_free, layer.experts)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.odd == "once" and batch_idx == 1 and self.trainer.world.rank == 0:
            self.layers[0](self.embed(batch))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.odd == "idle":
            self.layers[0].experts.up.norm()

    def on_after_backward(self) -> None:
        if self.odd == "hook":
            assert self.embed.weight.grad is not None
            self.norms.append(float(self.embed.weight.grad.norm()))  # the gradient of a replicated parameter
            self.layers[0].experts.up.grad.norm()


def mean_free(part: Any, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts whose outputs depend on all tokens."""
    output = type(part).forward(part, tokens, index, weights)
    return output - output.mean(0) if len(output) else output


def refusal(cases: list[tuple[Any, Any, dict[str, Any]]]) -> list[str]:
    """Return the error messages of fits that are refused at set-up."""
    messages = []
    for strategy, kind, options in cases:
        torch.manual_seed(0)
        trainer = fx.Trainer(devices=2, strategy=strategy, **{**QUIET, "max_epochs": 1, **options})
        try:
            trainer.fit(Deviates(kind), DataLoader(sentences(9), 4))  # type: ignore[arg-type]
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("")
    return messages


def test_modules_that_cannot_be_divided_are_errors_with_the_remedy() -> None:
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "no submodule has experts to divide: a module of experts has": (ExpertMesh(), "odd", {}),
        "layers.0.gate.stacked is tied to the experts": (ExpertMesh(), "tied", {}),
        "Did you mean 'Experts'": (ExpertMesh(experts="Expert"), "", {}),
        "layers.0.gate has no attribute num_experts": (ExpertMesh(experts=["layers.0.gate"]), "", {}),
        "by experts=CLASS or a list": (ExpertMesh(), "normal", {}),
        "remove compile": (ExpertMesh(), "", {"compile": True}),
        "layers.1 is compiled, and expert parallelism": (ExpertMesh(), "compiled", {}),
        DividedGradient.__name__: (ExpertMesh(), "hook", {}),
    }
    for expected, message in zip(cases, run_ranks(refusal, 2, list(cases.values()))[0], strict=True):
        assert expected in message


def deviate(kind: str) -> None:
    trainer = fx.Trainer(devices=2, strategy=ExpertMesh(), **{**QUIET, "max_epochs": 1})
    trainer.fit(Deviates(kind), DataLoader(sentences(9), 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "idle",
            "a collective at a batch of which some ranks have no sample",
        ),  # rank 1 has no sample of the last batch
        ("once", r"rank 0: call 3 in the step, of layers.0.experts; rank 1: begins the backward"),
    ],
)
def test_a_rank_that_deviates_from_the_other_ranks_is_an_error_without_waiting(kind: str, message: str) -> None:
    with pytest.raises(WorkerFailed, match=message):
        run_ranks(deviate, 2, kind)


class WithoutLossOrWeight(Model):
    """Returns no loss for a batch on any rank, or has batches of weight 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self._loss(batch)
        return loss if batch_idx != 1 else None

    def batch_weight(self, batch: Tensor) -> int:
        return int((batch[:, 0] > WORDS // 2).sum())


def test_batches_without_a_loss_or_a_weight_are_skipped_as_under_ddp() -> None:
    options = {"max_epochs": 2, "gradient_clip_val": None}
    trained = run_ranks(train, 2, ExpertMesh(), 1, options, [functools.partial(WithoutLossOrWeight, "")])
    expected = run_ranks(train, 2, "ddp", 1, options, [functools.partial(WithoutLossOrWeight, "")])[0][0]
    weights = trained[0][0]["weights"]
    assert max(float((expected["weights"][name] - weight).abs().max()) for name, weight in weights.items()) < 1e-9


@pytest.mark.parametrize(("rank", "moment"), params([(1, "backward")], [(0, "forward"), (1, "optimizer")]))
def test_a_worker_that_dies_is_replaced_in_place(rank: int, moment: Any) -> None:
    options = {"max_epochs": 2}
    expected = train("single", 4, options, [{"kind": ""}])[0]

    def run(faults: list[Any]) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            fx.seed_everything(3)
            trainer = fx.Trainer(
                devices=2, strategy=ExpertMesh(), callbacks=[FaultRecovery(), *faults],
                **{**QUIET, "max_epochs": 2, "gradient_clip_val": 0.5},
            )  # fmt: skip
            model = Model()
            trainer.fit(model, DataLoader(sentences(SAMPLES), 2, shuffle=True), DataLoader(sentences(5), 2))  # type: ignore[arg-type]
            return model, trainer
        finally:
            torch.set_default_dtype(torch.float32)

    model, trainer = run([kill(rank).during(moment, step=3)])
    assert len(trainer.failures) == 1
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert max(float((weights[name] - value).abs().max()) for name, value in expected["weights"].items()) < 1e-9
    assert math.isclose(float(trainer.callback_metrics["val"]), expected["metrics"]["val"], rel_tol=1e-9)


class Transformers(Model):
    """A mixture of experts of Hugging Face's transformers, from a tiny configuration."""

    def __init__(self, kind: str, implementation: str) -> None:
        super().__init__()
        options = {
            "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "num_experts": 4,
            "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8,
            "pad_token_id": 0, "experts_implementation": implementation, "shared_expert_intermediate_size": 12,
            "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        }  # fmt: skip
        if kind == "DeepseekV3ForCausalLM":
            del options["head_dim"]  # the model has its own size of rotated features
        with quiet() as library:
            built = getattr(library, kind)
            self.net = built(built.config_class(**options))
        if implementation == "grouped_mm":  # torch has no float64 kernel for grouped_mm
            self.net.float()
        del self.layers, self.embed, self.head, self.unused

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_mixtures_of_transformers_train_the_weights_of_a_single_process() -> None:
    kinds = [("MixtralForCausalLM", "eager"), ("MixtralForCausalLM", "grouped_mm")]
    more = [("Qwen3MoeForCausalLM", "eager"), ("Qwen2MoeForCausalLM", "batched_mm"), ("GptOssForCausalLM", "eager")]
    more += [("DeepseekV2ForCausalLM", "eager"), ("DeepseekV3ForCausalLM", "eager")]
    modules = [functools.partial(Transformers, *kind) for kind in [*kinds, *(more if SOAK else [])]]
    options = {"max_epochs": 5 if SOAK else 1}  # 20 or 4 updates
    alone, sharded = train("single", 8, options, modules), run_ranks(train, 2, ExpertMesh(), 4, options, modules)[0]
    for expected, actual in zip(alone, sharded, strict=True):  # the library rounds norms and the router to float32
        assert far(expected, actual) < 1e-5
