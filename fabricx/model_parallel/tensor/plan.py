"""The tensor-parallel plan of an unchanged module, derived from a single run of the training step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from fabricx.errors import check_choice, did_you_mean
from fabricx.model_parallel.tensor.feature_trace import FeatureTrace
from fabricx.model_parallel.tensor.parallel_layers import STYLES, Kind, Layer, Style, features_of, layers_of

_NUMBER: Final = r"(?<![^.\s])\d+(?=\.)|(?<=\.)\d+(?![^.\s])"  # as a component of a dotted name
_NOTHING: Final = (
    "no layer is divided, so each rank stores and computes the whole module; use strategy=fsdp, pipeline or ddp, or "
    "divide layers by plan={'LAYER': 'colwise'}"
)
VOCABULARY: Final = 8192  # embeddings and heads with fewer rows are sharded by an override only


@dataclass(frozen=True)
class TensorPlan:
    """How each layer of a module is sharded over the ranks of a tensor-parallel group.

    Attributes:
        ranks: number of ranks.
        layers: sharded layers by name, in the order of the module.
        unsharded: layers that stay whole on each rank, and the reason.
    """

    ranks: int
    layers: dict[str, Layer] = field(default_factory=dict)
    unsharded: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain data, for other ranks; see `of`."""
        layers = {name: [layer.style, list(layer.parts)] for name, layer in self.layers.items()}
        return {"ranks": self.ranks, "layers": layers, "unsharded": dict(self.unsharded)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> TensorPlan:
        """Return the plan of plain data.

        Args:
            plain: result of `plain`.
        """
        layers = {name: Layer(style, tuple(parts)) for name, (style, parts) in plain["layers"].items()}
        return cls(plain["ranks"], layers, dict(plain["unsharded"]))

    def describe(self) -> list[str]:
        """Return lines for the main rank's output; layers with names that differ by numbers share a line."""
        lines = [f"tensor parallel on {self.ranks} ranks: {len(self.layers)} layers are sharded"]
        styles = {name: (layer.style, len(layer.parts)) for name, layer in self.layers.items()}
        for (style, parts), pattern, count in _grouped(styles):
            fused = f", {parts} parts" if parts > 1 else ""
            lines.append(f"  {style:<9} {pattern} ({count}{fused})")
        for reason, pattern, count in _grouped(self.unsharded):
            lines.append(f"  {'whole':<9} {pattern} ({count}): {reason}")
        if not self.layers:
            lines.append(f"  note: {_NOTHING}")
        return lines


def find_tensor_plan(
    module: nn.Module, run: Callable[[], Any], size: int, overrides: Mapping[str, str] | None = None
) -> TensorPlan:  # fmt: skip
    """Derive the plan of a module.

    Each linear layer is paired with the linear layers that read its output: these are "rowwise", their producers
    "colwise". Layers of a pair that can't be divided stay whole, with the reason. The plan is equal on all ranks. If
    features scale the residual stream, as in adaptive norms, the plan that divides more of the computation is returned:
    with pairs of their layers and the layers that read the stream, or without.

    Args:
        module: root module, with whole parameters.
        run: computes the training step for a few samples; called once or twice.
        size: number of ranks.
        overrides: glob of module names -> style: "colwise", "rowwise", "vocab", "head" or "replicate". They take
            precedence over what was found; of several that match, the last is used.

    Raises:
        ValueError: a style is unknown, a pattern matches no layer, a style does not fit a layer, or the module is
            compiled.
    """
    check_not_compiled(module, "tensor parallelism")
    layers: dict[str, tuple[nn.Module, Kind]] = {name: (layer, kind) for name, layer, kind in layers_of(module)}
    styles = _styles(layers, overrides or {})
    trace = _traced(module, run, size, styles)
    plan = _plan_of(module, layers, styles, trace)
    if trace.scales:
        other = _traced(module, run, size, styles, follows_scales=True)
        following = _plan_of(module, layers, styles, other)
        if _work(following, other) > _work(plan, trace):
            return following
    return plan


def _traced(
    module: nn.Module, run: Callable[[], Any], size: int, styles: Mapping[str, Any], *, follows_scales: bool = False
) -> FeatureTrace:  # fmt: skip
    """Return the trace of a step."""
    trace = FeatureTrace(module, size, follows_scales=follows_scales)
    for name, style in styles.items():
        if style == "replicate":
            trace.unfit[name] = "by the plan's override"
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with trace:
            run()
    finally:
        trace.release()
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return trace


def _work(plan: TensorPlan, trace: FeatureTrace) -> int:
    """Return the multiplications that a plan divides over ranks."""
    return sum(trace.work.get(name, 0) for name in plan.layers)


def _plan_of(
    module: nn.Module, layers: Mapping[str, tuple[nn.Module, Kind]], styles: Mapping[str, Any], trace: FeatureTrace
) -> TensorPlan:  # fmt: skip
    """Return the plan of a trace.

    Args:
        module: root module.
        layers: layers that can be sharded.
        styles: styles of the user's overrides.
        trace: of a step.

    Raises:
        ValueError: an override can't divide its layer.
    """
    size = trace.ranks
    for name, style in styles.items():
        if uneven := _uneven(layers[name][0], style, _parts(trace, name), size):
            raise ValueError(
                f"plan: {name} can't be {style}: {uneven}\n"
                f"  change the number to a multiple of {size}, or set plan={{{name!r}: 'replicate'}}"
            )
    sharded, reasons = _pairs(layers, trace, size)
    for name, style in styles.items():
        if style != "replicate":
            sharded[name] = Layer(style, _parts(trace, name) if style == "colwise" else ())
    _separate_ties(module, layers, sharded, reasons)
    return TensorPlan(
        size,
        {name: sharded[name] for name in layers if name in sharded},
        {name: reasons.get(name, "") for name in layers if name not in sharded},
    )


def check_not_compiled(module: nn.Module, what: str) -> None:
    """Refuse compiled modules.

    Args:
        module: root module.
        what: kind of parallelism, for the message.

    Raises:
        ValueError: a submodule is compiled.
    """
    for name, part in module.named_modules():
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{name or type(part).__name__} is compiled, and {what} does not support torch.compile yet; "
                f"remove compile, or use a strategy without {what}"
            )


def _styles(layers: Mapping[str, tuple[nn.Module, Kind]], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the style of each layer that an override matches."""
    styles: dict[str, Any] = {}
    for pattern, style in overrides.items():
        check_choice("the tensor-parallel plan", f"plan[{pattern!r}]", style, STYLES)
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(
                f"plan: no layer is called {pattern!r}.{did_you_mean(pattern, layers)}\n  known: {', '.join(layers)}"
            )
        for name in names:
            layer, kind = layers[name]
            fitting = {"embedding": ("vocab",), "attention": ()}.get(kind, ("colwise", "rowwise", "head"))
            if style not in (*fitting, "replicate"):
                raise ValueError(
                    f"plan: {name} is a {type(layer).__name__}, which can't be {style}\n"
                    f"  possible: {', '.join((*fitting, 'replicate'))}"
                )
            if style == "vocab" and (refused := _refused_embedding(layer)):
                raise ValueError(f"plan: {name} can't be sharded by rows: {refused}")
            styles[name] = style
    return styles


def _pairs(
    layers: Mapping[str, tuple[nn.Module, Kind]], trace: FeatureTrace, size: int
) -> tuple[dict[str, Layer], dict[str, str]]:  # fmt: skip
    """Return the sharded layers, and for all other layers the reason."""
    reasons = {name: trace.unfit.get(name, "") for name in layers}
    readers: dict[str, tuple[str, ...]] = {}  # linear layer -> layers that produce the features that it reads
    for name, read in trace.read.items():
        for features in read:
            if features.lost:
                _add_reason(reasons, features.layers, f"{features.lost}, before {name}, may mix its features")
            else:
                readers[name] = tuple(dict.fromkeys((*readers.get(name, ()), *features.layers)))
    for name in readers:
        _add_reason(reasons, [name], _uneven(layers[name][0], "rowwise", (), size))
    for name in dict.fromkeys(writer for made in readers.values() for writer in made):
        _add_reason(reasons, [name], _uneven(layers[name][0], "colwise", _parts(trace, name), size))
        if name in readers:
            _add_reason(reasons, [name], "it is called in several roles")
    fit = _fitting(readers, reasons)
    sharded: dict[str, Layer] = {}
    for name, made in fit.items():
        sharded[name] = Layer("rowwise")
        sharded.update({writer: Layer("colwise", _parts(trace, writer)) for writer in made})
    for name, (layer, kind) in layers.items():
        if kind == "attention" and name in trace.called:
            _add_reason(reasons, [name], _refused_attention(layer, size))
            if not reasons[name]:
                sharded[name] = Layer("attention")
        elif kind == "embedding" and layer._parameters["weight"].shape[0] >= VOCABULARY:  # type: ignore[union-attr]
            _add_reason(reasons, [name], _refused_embedding(layer))
            if not reasons[name] and name in trace.called:
                sharded[name] = Layer("vocab")
        elif name in trace.logits and name not in sharded and features_of(layer)[1] >= VOCABULARY and not reasons[name]:
            sharded[name] = Layer("head")
        if name not in sharded:
            called = (
                "no linear layer reads its output"
                if name in trace.called
                else "the step does not compute it as a layer"
            )
            small = f"it has fewer than {VOCABULARY} rows"
            _add_reason(reasons, [name], small if kind == "embedding" and name in trace.called else called)
    return sharded, reasons


def _uneven(layer: nn.Module, style: str, parts: tuple[int, ...], size: int) -> str:
    """Return why a style can't divide the features of a layer over `size` ranks; "" if it can."""
    if style not in ("colwise", "rowwise"):
        return ""
    inputs, outputs = features_of(layer)
    sizes, what = ((inputs,), "inputs") if style == "rowwise" else (parts or (outputs,), "features")
    return next((f"its {number} {what} can't be divided by {size} ranks" for number in sizes if number % size), "")


def _fitting(readers: dict[str, tuple[str, ...]], reasons: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the pairs of which each layer can be divided; a layer that can't makes its whole pair stay whole."""
    fit = dict(readers)
    changes = True
    while changes:
        changes = False
        for name, made in list(fit.items()):
            blocking = next((entry for entry in (name, *made) if reasons[entry]), None)
            if blocking is not None:
                _add_reason(reasons, (name, *made), f"{blocking} stays whole")
                del fit[name]
                changes = True
    return fit


def _add_reason(reasons: dict[str, str], names: Iterable[str], reason: str) -> None:
    for name in names:
        reasons[name] = reasons[name] or reason


def _parts(trace: FeatureTrace, name: str) -> tuple[int, ...]:
    """Return the sizes of the parts that the output of a layer is cut into; () for a single part."""
    points = sorted(set(trace.cuts.get(name, ())))
    return tuple(end - begin for begin, end in itertools.pairwise(points)) if len(points) > 2 else ()


def _refused_attention(layer: Any, size: int) -> str:
    if layer.num_heads % size:
        return f"its {layer.num_heads} heads can't be divided by {size} ranks"
    if layer.bias_k is not None or layer.add_zero_attn:
        return "it has bias_k or add_zero_attn"
    return "" if isinstance(layer.out_proj.weight, nn.Parameter) else "the weight of its out_proj is computed"


def _refused_embedding(layer: Any) -> str:
    unfit = layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    return "it has max_norm, scale_grad_by_freq or sparse" if unfit else ""


def _separate_ties(
    module: nn.Module, layers: Mapping[str, tuple[nn.Module, Kind]], sharded: dict[str, Layer], reasons: dict[str, str]
) -> None:  # fmt: skip
    """Keep tied parameters whole, unless all layers that share them store the same rows on a rank."""
    owners: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    same: dict[Style, tuple[str, ...]] = {"vocab": ("vocab", "rows"), "head": ("vocab", "rows")}
    for parts in owners.values():
        names = [name if name in layers else name.rpartition(".")[0] for name in parts]
        kinds = {
            (same.get(sharded[n].style, sharded[n].style), sharded[n].parts) if n in sharded else None for n in names
        }
        if len(kinds) > 1:
            for name in names:
                sharded.pop(name, None)
                reasons[name] = "it shares a parameter with " + next(other for other in names if other != name)


def _grouped(by_name: Mapping[str, Any]) -> list[tuple[Any, str, int]]:
    """Return (value, pattern, count) for names that differ by numbers only and have equal values."""
    groups: dict[tuple[Any, str], int] = {}
    for name, value in by_name.items():
        plain = re.sub(_NUMBER, "*", name) or "(root)"
        text = re.sub(_NUMBER, "*", value) if isinstance(value, str) else value
        groups[text, plain] = groups.get((text, plain), 0) + 1
    return [(value, pattern, count) for (value, pattern), count in groups.items()]
