"""Layers that tensor parallelism can shard, and the placement of their parameters for each style."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from torch import Tensor, nn

from fabricx.model_parallel.placement import Placement

Style = Literal["colwise", "rowwise", "vocab", "head", "attention"]
STYLES: Final = ("colwise", "rowwise", "vocab", "head", "replicate")  # of a plan's overrides
Kind = Literal["linear", "conv1d", "embedding", "attention", ""]


@dataclass(frozen=True)
class Layer:
    """How a layer is sharded.

    Attributes:
        style: "colwise": a rank computes a share of the output features; "rowwise": it computes with a share of the
            input features, and outputs are summed over ranks; "vocab": rows of an embedding; "head": as "colwise", for
            the logits of a vocabulary; "attention": heads of `nn.MultiheadAttention`.
        parts: numbers of output features of the parts of a fused projection; () for a single part.
    """

    style: Style
    parts: tuple[int, ...] = field(default=())


def kind_of(module: nn.Module) -> Kind:
    """Return the kind of layer that a module's parameters belong to; "" if no style applies to them.

    Args:
        module: any module; of subclasses, the parameters decide, not the forward.
    """
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return ""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear):
        return "linear"
    return "conv1d" if type(module).__name__ == "Conv1D" else ""  # of GPT-2: a linear layer with weight [in, out]


def layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, Kind]]:
    """Yield name, module and kind of all layers that could be sharded, without parts of an attention layer.

    Args:
        module: root module.
    """
    inside: set[int] = set()
    for name, layer in module.named_modules():
        kind = kind_of(layer)
        if kind == "attention":
            inside |= {id(part) for part in layer.modules() if part is not layer}
        if kind and id(layer) not in inside:
            yield name, layer, kind


def features_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer.

    Args:
        layer: layer of kind "linear" or "conv1d".
    """
    outputs, inputs = layer._parameters["weight"].shape  # type: ignore[union-attr]
    return (outputs, inputs) if kind_of(layer) == "conv1d" else (inputs, outputs)


def placements_of(module: nn.Module, layer: Layer, ranks: int) -> dict[str, Placement]:
    """Return the placement of each sharded parameter of a layer, by its name in the layer.

    Args:
        module: the layer, with whole parameters.
        layer: sharding of the layer.
        ranks: number of ranks.

    Raises:
        ValueError: the style does not fit the kind of layer.
    """
    kind = kind_of(module)
    fitting = {"embedding": ("vocab",), "attention": ("attention",)}.get(kind, ("colwise", "rowwise", "head"))
    if layer.style not in fitting:
        raise ValueError(
            f"a {type(module).__name__} can't be sharded as {layer.style}; it can be: {', '.join(fitting)}"
        )
    if layer.style == "attention":
        return _of_attention(module, ranks)
    weight = module._parameters["weight"]
    assert weight is not None
    if layer.style == "rowwise":
        return {"weight": _along(weight, 0 if kind == "conv1d" else 1, (), ranks)}
    placements = {"weight": _along(weight, 1 if kind == "conv1d" else 0, layer.parts, ranks)}
    bias = module._parameters.get("bias")
    if bias is not None:
        placements["bias"] = _along(bias, 0, layer.parts, ranks)
    return placements


def _of_attention(module: nn.Module, ranks: int) -> dict[str, Placement]:
    placements = {"out_proj.weight": _along(module.get_parameter("out_proj.weight"), 1, (), ranks)}
    for name, parameter in module._parameters.items():
        if parameter is not None and name.startswith("in_proj"):
            third = parameter.shape[0] // 3
            placements[name] = _along(parameter, 0, (third, third, third), ranks)
        elif parameter is not None and name.endswith("_proj_weight"):
            placements[name] = _along(parameter, 0, (), ranks)
    return placements


def _along(whole: Tensor, dim: int, parts: tuple[int, ...], ranks: int) -> Placement:
    return Placement(tuple(whole.shape), dim, parts or (whole.shape[dim],), ranks)
