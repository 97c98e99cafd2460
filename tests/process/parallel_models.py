"""Models without any code for parallelism, for tests of model parallelism."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

ROWS, C, H, LAYERS, T = 67, 32, 4, 2, 8


class Fused(nn.Module):
    """Attention as in nanoGPT: a fused projection, and sizes read from x."""

    def __init__(self, dropout: float, manual: bool = False):
        super().__init__()
        self.qkv, self.out, self.n_head = nn.Linear(C, 3 * C), nn.Linear(C, C), H
        self.p, self.drop, self.manual = dropout, nn.Dropout(dropout), manual

    def forward(self, x):
        b, length, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (y.view(b, length, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        if self.manual:
            scores = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
            scores = scores.masked_fill(torch.ones(length, length).tril() == 0, float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), self.p, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).contiguous().view(b, length, c)))


class Grouped(nn.Module):
    """Attention as in Llama: half as many key heads as query heads, and norms over the features of a head."""

    def __init__(self, dropout: float):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(C, C),
            nn.Linear(C, C // 2),
            nn.Linear(C, C // 2),
            nn.Linear(C, C),
        )
        self.norm = nn.RMSNorm(C // H)

    def forward(self, x):
        b, length, _ = x.shape
        q = self.norm(self.wq(x).view(b, length, H, C // H)).transpose(1, 2)
        k, v = (w(x).view(b, length, H // 2, C // H).transpose(1, 2) for w in (self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(b, length, C))


class GeLU(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(C, 4 * C), nn.Linear(4 * C, C), nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.drop(F.gelu(self.up(x))))


class SwiGLU(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.gate_up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(2 * C, C, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, kind: str, dropout: float):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn = Grouped(dropout) if kind == "llama" else Fused(dropout, kind == "manual")
        self.mlp = SwiGLU(dropout) if kind == "llama" else GeLU(dropout)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    """A language model; subclasses compute the features of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[Any] = []

    def features(self, ids):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        logits = self.head(self.features(batch[:, :-1]))
        loss = F.cross_entropy(logits.reshape(-1, ROWS), batch[:, 1:].reshape(-1))
        self.logged += [loss.item(), float(loss.detach())]
        return loss


class LanguageModel(Model):
    def __init__(self, kind: str = "gpt", dropout: float = 0.0, tied: bool = False, recompute: bool = False):
        super().__init__()
        self.embed, self.pos = nn.Embedding(ROWS, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block(kind, dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, ROWS, bias=False)
        self.recompute = recompute
        self.unused = nn.Linear(C, C)
        self.blocks[0].n1.weight.requires_grad_(False)
        self.blocks[1].mlp.down.weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(C))
        if tied:
            self.head.weight = self.embed.weight

    def features(self, ids):
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.norm(x) * self.scale


class Penalised(LanguageModel):
    """Reads sharded weights in the step, and activations between the layers of a pair."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        weights = sum(p.pow(2).sum() for p in self.parameters() if p.requires_grad)
        hidden = self.blocks[0].mlp.up(self.embed(batch))
        self.logged += [float(f"{hidden.abs().mean():.12f}"), hidden.max().item(), hidden.detach().std()]
        return loss + 1e-3 * weights + 1e-2 * hidden.sigmoid().mean()


class OneHead(Model):
    """Attention whose heads share a key head, a gated linear unit, and a learned attention bias."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, C), nn.Linear(C, ROWS)
        self.q, self.kv, self.out = nn.Linear(C, C), nn.Linear(C, 2 * C // H), nn.Linear(C, C)
        self.gate_up, self.down = nn.Linear(C, 4 * C), nn.Linear(2 * C, C)
        self.slopes = nn.Parameter(torch.rand(H, 1, 1))

    def features(self, ids):
        x = self.embed(ids)
        b, length, _ = x.shape
        q = self.q(x).view(b, length, H, C // H).transpose(1, 2)
        k, v = self.kv(x)[:, None].chunk(2, -1)
        bias = self.slopes * torch.arange(length).to(x.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, length, C))
        return x + self.down(F.glu(self.gate_up(x)))


class Logits(LanguageModel):
    """Reads the logits in several ways; one row of the embedding is padding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, C, padding_idx=40)

    def training_step(self, batch, batch_idx):
        logits, targets = torch.tanh(self.head(self.features(batch[:, :-1])) / 3.0) * 3.0, batch[:, 1:-1]
        shifted = logits[:, :-1, :].contiguous().view(-1, logits.size(-1))
        ignored = targets.masked_fill(targets > ROWS // 2, -100).reshape(-1)
        loss = (
            F.cross_entropy(shifted, ignored)
            + 0.1 * F.cross_entropy(shifted, ignored, reduction="none").square().mean()
        )
        loss = (
            loss + F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, label_smoothing=0.1, reduction="sum") / 100
        )
        self.logged += [(logits[:, :-1].argmax(-1) == targets).float().mean(), float(logits[:, -1].softmax(-1).max())]
        return loss


class HandTied(LanguageModel):
    """Computes logits from the embedding's weight, without an output layer."""

    def __init__(self):
        super().__init__()
        del self.head

    def training_step(self, batch, batch_idx):
        logits = F.linear(self.features(batch[:, :-1]), self.embed.weight)
        return F.cross_entropy(logits.reshape(-1, ROWS), batch[:, 1:].reshape(-1))


class Torch(Model):
    """Encoder and decoder layers of torch, with masks, and an attention that returns its weights."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        options: dict[str, Any] = {"dropout": dropout, "batch_first": True}
        self.embed, self.head = nn.Embedding(ROWS, C), nn.Linear(C, ROWS)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(C, H, 2 * C, **options), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoderLayer(C, H, 2 * C, norm_first=True, **options)
        self.attention = nn.MultiheadAttention(C, H, dropout, kdim=C, vdim=C, bias=False)

    def features(self, ids):
        x, length = self.embed(ids), ids.shape[1]
        padding = torch.arange(length).expand(len(ids), -1) >= length - 1
        causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        memory = self.encoder(x, src_key_padding_mask=padding.to(x.dtype) * -1e9)
        x = self.decoder(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)
        y, weights = self.attention(*(x.transpose(0, 1),) * 3, attn_mask=causal < 0)
        return x + y.transpose(0, 1) * (1 + weights.square().mean())


class Hidden(NamedTuple):
    features: torch.Tensor
    mean: torch.Tensor


class Calls(nn.Module):
    """Calls layers with computed weights and in inference mode, and reads the weights of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.attention = GeLU(0.0), nn.MultiheadAttention(C, H, batch_first=True)
        self.computed = nn.MultiheadAttention(C, H, batch_first=True)
        weight_norm(self.computed.out_proj)

    def forward(self, x):
        x = x + self.mlp(x) + self.attention(x, x, x)[0] + self.computed(x, x, x)[0]
        with torch.inference_mode():
            teacher = self.mlp(x * 2)
        x = x + teacher.clone()
        q = F.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias)[..., :C]
        larger = {name: weight * 1.5 for name, weight in self.mlp.named_parameters()}
        x = x + torch.func.functional_call(self.mlp, larger, (self.attention.out_proj(q),))
        return Hidden(x, x.mean())


class Called(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, C), nn.Linear(C, ROWS)
        self.blocks = nn.ModuleList(Calls() for _ in range(2))

    def features(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).features
        return x
