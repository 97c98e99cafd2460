"""Plans derived from a run of the step: pairs of layers, parts of fused projections, and layers that stay whole."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.tensor.parallel_layers import Layer
from fabricx.model_parallel.tensor.plan import TensorPlan, find_tensor_plan

B, T, C, H = 2, 6, 24, 4
X = torch.randn(B, T, C, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Linear layers by size, and a function that computes with them."""

    def __init__(self, compute, **sizes):
        super().__init__()
        self.compute = compute
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs))

    def forward(self, x):
        return self.compute(self, x)


def plan_of(compute, ranks=2, overrides=None, **sizes):
    net = Net(compute, **sizes)
    return find_tensor_plan(net, lambda: net(X), ranks, overrides or {})


def styles(plan):
    return {name: (layer.style, layer.parts) for name, layer in plan.layers.items()}


def attended(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def split_evenly(net, x):
    return net.out(attended(*(part.unflatten(-1, (H, -1)) for part in net.qkv(x).split(C, dim=2))))


def split_grouped(net, x):
    q, k, v = net.qkv(x).split([C, C // 2, C // 2], -1)
    return net.out(attended(q.view(B, T, H, -1), k.view(B, T, H // 2, -1), v.view(B, T, H // 2, -1)))


def ranges(net, x):
    y = net.qkv(x)
    return net.out(attended(*(y[..., at * C : at * C + C].view(B, T, H, -1) for at in range(3))))


def viewed(net, x):
    q, k, v = net.qkv(x).view(B, T, 3, H, C // H).unbind(2)
    return net.out(attended(q, k, v))


def permuted(net, x):
    qkv = net.qkv(x).reshape(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
    y = (qkv[0] @ qkv[1].transpose(-2, -1)).softmax(-1) @ qkv[2]
    return net.out(y.transpose(1, 2).reshape(B, T, C))


def heads_first(net, x):
    q, k, v = net.qkv(x).view(B, T, H, 3 * C // H).chunk(3, dim=-1)
    return net.out(attended(q, k, v))


def heads_then_parts(net, x):
    y = net.qkv(x).view(B, T, H, 3, C // H)
    return net.out(attended(y[..., 0, :], y[..., 1, :], y[..., 2, :]))


def split_of_heads(net, x):
    q, k, v = net.qkv(x).view(B, T, 2 * H, C // H).split([H, H // 2, H // 2], dim=2)
    return net.out(attended(q, k, v))


THIRDS, GROUPED = (C, C, C), (C, C // 2, C // 2)
FUSED = [
    (split_evenly, 3 * C, THIRDS), (ranges, 3 * C, THIRDS), (viewed, 3 * C, THIRDS), (permuted, 3 * C, THIRDS),
    (split_grouped, 2 * C, GROUPED), (split_of_heads, 2 * C, GROUPED), (heads_first, 3 * C, ()),
    (heads_then_parts, 3 * C, ()),
]  # fmt: skip


@pytest.mark.parametrize(("compute", "features", "parts"), FUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_parts_of_a_fused_projection_are_those_that_the_code_splits_it_into(compute, features, parts):
    plan = plan_of(compute, qkv=(C, features), out=(C, C))
    assert plan.layers == {"qkv": Layer("colwise", parts), "out": Layer("rowwise")}


def test_gate_and_up_projections_are_both_colwise():
    plan = plan_of(lambda n, x: n.down(F.silu(n.gate(x)) * n.up(x)), gate=(C, 48), up=(C, 48), down=(48, C))
    assert styles(plan) == {"gate": ("colwise", ()), "up": ("colwise", ()), "down": ("rowwise", ())}


def test_a_single_head_of_keys_stays_whole_and_the_heads_of_the_query_are_sharded():
    def compute(net, x):
        q = net.q(x).view(B, T, H, C // H).transpose(1, 2)
        k, v = net.kv(x)[:, None].chunk(2, -1)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return net.out(y.transpose(1, 2).reshape(B, T, C))

    plan = plan_of(compute, q=(C, C), kv=(C, C // 2), out=(C, C))
    assert styles(plan) == {"q": ("colwise", ()), "out": ("rowwise", ())}
    assert plan.unsharded == {"kv": "all heads read its single head"}


def test_a_gated_linear_unit_has_two_parts():
    plan = plan_of(lambda n, x: n.down(F.glu(n.up(x))), up=(C, 96), down=(48, C))
    assert styles(plan) == {"up": ("colwise", (48, 48)), "down": ("rowwise", ())}


def test_a_convolution_over_features_is_not_followed():
    weight = torch.ones(48, 1, 1)
    plan = plan_of(lambda n, x: n.b(F.conv1d(n.a(x).mT, weight, groups=48).mT), a=(C, 48), b=(48, C))
    assert plan.unsharded["a"] == "conv1d, before b, may mix its features"


def test_a_fused_gate_has_two_parts():
    def compute(net, x):
        gate, up = net.up(x).chunk(2, -1)
        return net.down(F.silu(gate) * up)

    assert styles(plan_of(compute, up=(C, 96), down=(48, C)))["up"] == ("colwise", (48, 48))


def test_an_addition_to_the_residual_stream_or_a_norm_ends_a_path():
    def compute(net, x):
        x = net.first(x)
        x = x + net.second(F.layer_norm(x, (C,)))
        return net.third(x)

    plan = plan_of(compute, first=(C, C), second=(C, C), third=(C, C))
    assert plan.layers == {}
    assert plan.unsharded == {
        "first": "a norm reads all of its features", "second": "first stays whole", "third": "first stays whole"
    }  # fmt: skip
    plan = plan_of(lambda n, x: n.second(x + n.first(x)), first=(C, C), second=(C, C))
    assert plan.unsharded == dict.fromkeys(("first", "second"), "no linear layer reads its output")


def test_features_that_scale_the_residual_stream_end_a_path():
    """Adaptive norms (Peebles and Xie, 2023): attention is sharded, and not the layer that computes scales."""
    stream, condition = X.clone().requires_grad_(), X.clone().requires_grad_()[:, :1]

    def compute(net, _):
        shift, scale, gate = net.adaptive(F.silu(condition)).chunk(3, dim=-1)
        x = F.layer_norm(stream, (C,)) * (1 + scale) + shift
        return net.last(stream + gate * net.out(attended(*(y.unflatten(-1, (H, -1)) for y in net.qkv(x).chunk(3, -1)))))

    plan = plan_of(compute, adaptive=(C, 3 * C), qkv=(C, 3 * C), out=(C, C), last=(C, C))
    assert plan.layers == {"qkv": Layer("colwise", THIRDS), "out": Layer("rowwise")}

    def gated(net, _):  # features of both layers scale an activation of the same size, and little reads the stream
        return net.down(net.gate(stream) * stream)

    assert [layer.style for layer in plan_of(gated, gate=(C, C), down=(C, C)).layers.values()] == ["colwise", "rowwise"]
    mask = torch.ones(B, T, 48)
    plan = plan_of(lambda n, x: n.b(n.a(x) * mask), a=(C, 48), b=(48, C))  # as dropout by hand
    assert [layer.style for layer in plan.layers.values()] == ["colwise", "rowwise"]


def test_a_norm_over_the_features_of_a_head_does_not_end_a_path():
    norm = nn.RMSNorm(C // H)

    def compute(net, x):
        q, k, v = (layer(x).view(B, T, H, C // H) for layer in (net.q, net.k, net.v))
        return net.out(attended(norm(q), norm(k), v))

    plan = plan_of(compute, q=(C, C), k=(C, C), v=(C, C), out=(C, C))
    assert [layer.style for layer in plan.layers.values()] == ["colwise"] * 3 + ["rowwise"]


def test_rotary_embeddings_and_repeated_keys_are_followed():
    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    def compute(net, x):
        q = net.q(x).view(B, T, -1, C // H).transpose(1, 2)
        k, v = (layer(x).view(B, T, -1, C // H).transpose(1, 2) for layer in (net.k, net.v))
        cos = torch.ones(T, C // H)
        q, k = q * cos + rotate(q) * cos, k * cos + rotate(k) * cos
        k, v = (y[:, :, None].expand(B, H // 2, 2, T, C // H).reshape(B, H, T, C // H) for y in (k, v))
        y = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return net.out(y.transpose(1, 2).contiguous().reshape(B, T, -1))

    plan = plan_of(compute, q=(C, C), k=(C, C // 2), v=(C, C // 2), out=(C, C))
    assert [layer.style for layer in plan.layers.values()] == ["colwise"] * 3 + ["rowwise"]


def test_heads_that_do_not_divide_stay_whole_with_the_reason():
    plan = plan_of(split_evenly, 3, qkv=(C, 3 * C), out=(C, C))
    assert plan.layers == {}
    assert plan.unsharded == {"qkv": "its 4 heads can't be divided by 3 ranks", "out": "qkv stays whole"}


def test_features_that_an_operation_mixes_stay_whole_with_the_reason():
    plan = plan_of(lambda n, x: n.b(n.a(x).cumsum(-1).flip(-1).sum(1, keepdim=True)), a=(C, C), b=(C, C))
    assert "a" not in plan.layers or plan.layers["a"].style == "colwise"
    plan = plan_of(lambda n, x: n.b(n.a(x).transpose(1, 2)), a=(C, T), b=(T, C))
    assert plan.layers == {}
    assert plan.unsharded["b"] == "it is applied to each head"


def test_a_custom_autograd_function_is_not_followed():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    plan = plan_of(lambda n, x: n.b(Double.apply(n.a(x))), a=(C, C), b=(C, C))
    assert plan.unsharded["a"] == "the autograd function DoubleBackward, before b, may mix its features"


def test_a_layer_in_two_roles_stays_whole():
    plan = plan_of(lambda n, x: n.a(n.a(x)), a=(C, C))
    assert plan.layers == {}


class Tied(nn.Module):
    def __init__(self, rows=67):
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, C), nn.Linear(C, rows, bias=False)
        self.head.weight = self.embed.weight

    def loss(self):
        ids = torch.arange(8).view(2, 4)
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


def test_embeddings_and_heads_are_sharded_if_they_are_large_or_the_plan_says_so():
    small, large = Tied(), Tied(8192)
    assert find_tensor_plan(small, small.loss, 2, {}).layers == {}
    plan = find_tensor_plan(large, large.loss, 2, {})
    assert styles(plan) == {"embed": ("vocab", ()), "head": ("head", ())}
    with_overrides = find_tensor_plan(small, small.loss, 2, {"embed": "vocab", "he*": "head"})
    assert styles(with_overrides) == {"embed": ("vocab", ()), "head": ("head", ())}


def test_tied_parameters_stay_whole_unless_all_their_layers_are_sharded_alike():
    small = Tied()
    plan = find_tensor_plan(small, small.loss, 2, {"embed": "vocab"})
    assert plan.layers == {}
    assert plan.unsharded["embed"] == "it shares a parameter with head"


def test_attention_layers_of_torch_are_sharded_by_heads():
    layer = nn.TransformerEncoderLayer(C, H, 48, batch_first=True)
    plan = find_tensor_plan(layer, lambda: layer(X), 2, {})
    assert styles(plan) == {
        "self_attn": ("attention", ()), "linear1": ("colwise", ()), "linear2": ("rowwise", ())
    }  # fmt: skip
    assert find_tensor_plan(layer, lambda: layer(X), 3, {}).unsharded["self_attn"].startswith("its 4 heads")
    nn.utils.parametrizations.weight_norm(layer.self_attn.out_proj)
    whole = find_tensor_plan(layer, lambda: layer(X), 2, {}).unsharded
    assert whole["self_attn"] == "the weight of its out_proj is computed"


def test_replicate_keeps_both_layers_of_a_pair_whole():
    plan = plan_of(split_evenly, overrides={"out": "replicate"}, qkv=(C, 3 * C), out=(C, C))
    assert plan.unsharded == {"qkv": "out stays whole", "out": "by the plan's override"}
    plan = plan_of(split_evenly, overrides={"qkv": "head"}, qkv=(C, 3 * C), out=(C, C))
    assert styles(plan)["qkv"] == ("head", ())  # classes have an order


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"qvk": "colwise"}, "no layer is called 'qvk'. Did you mean 'qkv'?"),
        ({"qkv": "columnwise"}, "Did you mean 'colwise'?"),
        ({"qkv": "vocab"}, "qkv is a Linear, which can't be vocab\n  possible: colwise, rowwise, head, replicate"),
    ],
)
def test_mistakes_in_overrides_are_errors(overrides, message):
    with pytest.raises(ValueError) as error:
        plan_of(split_evenly, overrides=overrides, qkv=(C, 3 * C), out=(C, C))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        ("colwise", "its 25 features can't be divided by 2 ranks"),
        ("rowwise", "its 25 inputs can't be divided by 2 ranks"),
    ],
)
def test_an_override_that_can_t_divide_a_layer_is_an_error_with_the_remedy(style, reason):
    name = {"colwise": "a", "rowwise": "b"}[style]
    with pytest.raises(ValueError) as error:
        plan_of(lambda n, x: n.b(n.a(x)), overrides={name: style}, a=(C, 25), b=(25, C))
    assert str(error.value) == (
        f"plan: {name} can't be {style}: {reason}\n"
        f"  change the number to a multiple of 2, or set plan={{'{name}': 'replicate'}}"
    )


def test_a_compiled_module_is_refused():
    net = Net(split_evenly, qkv=(C, 3 * C), out=(C, C))
    net.qkv.compile()
    with pytest.raises(ValueError, match="qkv is compiled"):
        find_tensor_plan(net, lambda: net(X), 2, {})


def test_layers_that_differ_by_numbers_share_a_line():
    net = nn.ModuleList(Net(split_evenly, qkv=(C, 3 * C), out=(C, C)) for _ in range(3))
    plan = find_tensor_plan(net, lambda: [block(X) for block in net], 2, {})
    assert plan.describe() == [
        "tensor parallel on 2 ranks: 6 layers are sharded",
        "  colwise   *.qkv (3, 3 parts)",
        "  rowwise   *.out (3)",
    ]


def test_a_plan_that_divides_nothing_has_a_note_with_the_remedy() -> None:
    net = nn.Linear(C, C)
    lines = find_tensor_plan(net, lambda: net(X), 2, {}).describe()
    assert lines[0] == "tensor parallel on 2 ranks: 0 layers are sharded"
    assert lines[-1].startswith("  note: no layer is divided")
    assert "strategy=fsdp" in lines[-1]


def test_a_plan_is_unchanged_when_sent_to_another_rank() -> None:
    plan = TensorPlan(2, {"a": Layer("colwise", (4, 4, 4)), "b": Layer("rowwise", ())}, {"c": "no linear layer"})
    assert TensorPlan.of(json.loads(json.dumps(plan.plain()))) == plan
