"""Follow the output features of each linear layer through a run of the step to the layers that read them.

Source: the idea of pairing layers by their dataflow is that of Megatron-LM (Shoeybi et al., 2019, section 3), whose
pairs are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fabricx.model_parallel.tensor.feature_dims import (
    Features,
    Index,
    broadcast,
    indices,
    merges,
    narrowed,
    permuted,
    sections,
    viewed,
)  # fmt: skip
from fabricx.model_parallel.tensor.parallel_layers import kind_of, layers_of

ADDS: Final[set[Any]] = {
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_,
}  # fmt: skip
PRODUCTS: Final[set[Any]] = {
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul_, torch.multiply,
    Tensor.multiply,
}  # fmt: skip
VIEWS: Final[set[Any]] = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, torch.unflatten, Tensor.flatten, torch.flatten,
    Tensor.view_as, Tensor.reshape_as, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze, torch.unsqueeze,
}  # fmt: skip
PERMUTES: Final[set[Any]] = {
    Tensor.permute, torch.permute, Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims,
    torch.swapdims, Tensor.movedim, torch.movedim, Tensor.moveaxis, torch.moveaxis, Tensor.t, torch.t,
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
}  # fmt: skip
SPLITS: Final[set[Any]] = {torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes}
CHUNKS: Final[set[Any]] = {torch.chunk, Tensor.chunk, torch.tensor_split, Tensor.tensor_split}
UNBINDS: Final[set[Any]] = {torch.unbind, Tensor.unbind}
SOFTMAXES: Final[set[Any]] = {
    F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax, F.normalize,
}  # fmt: skip
MIXING: Final[set[Any]] = {  # of features in any dim; shapes do not always show it
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.batch_norm,
    F.group_norm, F.instance_norm, F.local_response_norm, torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod,
    torch.flip, Tensor.flip, torch.roll, Tensor.roll, torch.sort, Tensor.sort, F.unfold, F.fold, F.interpolate,
    F.pixel_shuffle,
}  # fmt: skip
NORMS: Final[set[Any]] = {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm}


def split_dim(func: Any, args: Sequence[Any], options: dict[str, Any]) -> int:
    """Return the dim that a function splits or unbinds.

    Args:
        func: function of `SPLITS`, `CHUNKS` or `UNBINDS`.
        args: its arguments, the tensor first.
        options: its named arguments.
    """
    number = 1 if func in UNBINDS else 2
    dim: int = args[number] if len(args) > number else options.get("dim", options.get("axis", 0))
    return dim % int(args[0].dim())


class FeatureTrace(TorchFunctionMode):
    """Follows output features of linear layers while the step runs in this context.

    Args:
        module: root module, with whole parameters.
        ranks: number of ranks that heads would be divided by.
        follows_scales: follow features that scale the residual stream, as those of adaptive norms do, to the layers
            that read the stream; otherwise they end there.

    Attributes:
        ranks: see the argument.
        called: names of layers that were called, in order.
        read: features in the input of a linear layer, by its name, for each call.
        cuts: features at which the output of a layer is cut into parts.
        unfit: layers that can't be sharded, and the reason.
        logits: layers whose output was an input of `cross_entropy`.
        scales: layers whose features have scaled the residual stream.
        work: multiplications of each layer.
    """

    def __init__(self, module: nn.Module, ranks: int, *, follows_scales: bool = False) -> None:
        super().__init__()
        self.ranks, self._follows_scales = ranks, follows_scales
        self.called: dict[str, None] = {}
        self.read: dict[str, list[Features]] = {}
        self.cuts: dict[str, list[int]] = {}
        self.unfit: dict[str, str] = {}
        self.logits: dict[str, None] = {}
        self.scales: dict[str, None] = {}
        self.work: dict[str, int] = {}
        self._layers: dict[int, dict[str, str]] = {}  # by weight: names of the layers, by kind
        self._biases: dict[str, nn.Parameter | None] = {}
        for name, layer, kind in layers_of(module):
            weights = layer._parameters.values() if kind == "attention" else [layer._parameters["weight"]]
            for weight in weights:
                self._layers.setdefault(id(weight), {}).setdefault(kind_of(layer), name)
            self._biases[name] = layer._parameters.get("bias")
        self._features: dict[int, Features] = {}
        self._kept: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        out = func(*args, **options)
        if func is F.linear and self._linear(out, *args, **options):
            return out
        if func is torch.addmm and self._addmm(out, *args, **options):
            return out
        if func is F.embedding:
            self._note_call(args[1] if len(args) > 1 else options["weight"], "embedding")
        elif func is F.multi_head_attention_forward:
            self._attention(args, options)
        else:
            self._follow(func, args, options, out)
        return out

    def release(self) -> None:
        """Release the tensors of the run."""
        self._kept, self._features = [], {}

    # -- layers -------------------------------------------------------------------------------------------------

    def _note_call(self, weight: Any, kind: str) -> str:
        name = self._layers.get(id(weight), {}).get(kind, "")
        if name:
            self.called[name] = None
        return name

    def _linear(self, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        return self._layer(out, input, bias, self._note_call(weight, "linear"))

    def _addmm(self, out: Tensor, bias: Tensor, mat1: Tensor, mat2: Tensor, **_: Any) -> bool:
        return self._layer(out, mat1, bias, self._note_call(mat2, "conv1d"))

    def _layer(self, out: Tensor, inputs: Tensor, bias: Tensor | None, name: str) -> bool:
        """Note a call of a layer; returns False for an operation like any other."""
        features = self._features_of(inputs)
        last = inputs.dim() - 1
        self.work[name] = self.work.get(name, 0) + out.numel() * inputs.shape[-1]
        if not name or (features is not None and features.dims and last not in features.dims[:1]):
            if name:
                self.unfit.setdefault(name, "it is applied to each head")
            return False
        if bias is not None and bias is not self._biases[name]:
            self.unfit[name] = "its bias is computed"
        if features is not None:
            self.read.setdefault(name, []).append(features)
            if features.dims == (last,):
                return True  # a rowwise layer: its output is whole on each rank
        self._put(out, Features(((name, 0, out.shape[-1]),), (out.dim() - 1,)))
        return True

    def _attention(self, args: Sequence[Any], options: dict[str, Any]) -> None:
        packed = args[5] if len(args) > 5 else options["in_proj_weight"]
        weight = packed if packed is not None else options.get("q_proj_weight")
        self._note_call(weight, "attention")

    # -- all other functions ------------------------------------------------------------------------------------

    def _put(self, tensor: Tensor, features: Features) -> None:
        self._kept.append(tensor)
        self._features[id(tensor)] = features

    def _features_of(self, tensor: Tensor) -> Features | None:
        features = self._features.get(id(tensor))
        if features is not None and isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
            return features.without_dims(f"the autograd function {type(tensor.grad_fn).__name__}")
        return features

    def _follow(self, func: Any, args: Any, options: dict[str, Any], out: Any) -> None:
        read = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        pairs = [(tensor, self._features_of(tensor)) for tensor in read]
        tracked = [(tensor, features) for tensor, features in pairs if features is not None]
        if not tracked:
            return
        if func is F.cross_entropy:
            self.logits.update(dict.fromkeys(name for _, features in tracked for name in features.layers))
            return
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        first, features = tracked[0]
        rule = self._rule(func) if first is args[0] and len(tracked) == 1 and features.dims else None
        if rule is not None:
            for tensor, after in zip(outs, rule(features, func, args, options, outs), strict=True):
                self._put(tensor, after)
        elif not self._ends(func, args, options, read, tracked, outs):
            for tensor in outs:
                self._put(tensor, self._joined(func, tracked, tensor))

    def _rule(self, func: Any) -> Callable[..., list[Features]] | None:
        if func in VIEWS:
            return self._view
        if func in PERMUTES:
            return self._permute
        if func in SPLITS or func in CHUNKS or func in UNBINDS:
            return self._split
        return self._index if func is Tensor.__getitem__ else None

    def _ends(
        self, func: Any, args: Any, options: dict[str, Any], read: list[Tensor], tracked: list[tuple[Tensor, Features]],
        outs: list[Tensor],
    ) -> bool:  # fmt: skip
        """Return whether the features become part of the residual stream, which is whole on each rank."""
        tensor, features = tracked[0]
        if not features.dims:
            return False
        if func in NORMS and tensor is read[0]:
            shape = args[1] if len(args) > 1 else options["normalized_shape"]
            ends = features.dims[0] >= tensor.dim() - len(shape)
            for name in features.layers if ends else ():
                self.unfit.setdefault(name, "a norm reads all of its features")
            return ends
        if func not in ADDS | PRODUCTS or not features.is_flat(tensor.shape):
            return False
        others = [other for other in read if id(other) not in self._features]
        if func in PRODUCTS:  # a mask, as of dropout, is not computed from weights
            others = [other for other in others if other.requires_grad]
        ends = any(other.shape == outs[0].shape and not isinstance(other, nn.Parameter) for other in others)
        if ends and func in PRODUCTS:
            self.scales.update(dict.fromkeys(features.layers))
            return not self._follows_scales
        return ends

    def _joined(self, func: Any, tracked: list[tuple[Tensor, Features]], out: Tensor) -> Features:
        """Return the features after an operation on single elements, or a product of matrices."""
        operation = getattr(func, "__name__", str(func))
        spans = tuple(dict.fromkeys(span for _, features in tracked for span in features.spans))
        lost = next((features.lost for _, features in tracked if not features.dims), "")
        if lost or func in MIXING:
            return Features(spans, (), lost or operation)
        if func is F.glu:
            return self._gated(tracked[0][1], tracked[0][0], out)
        if func is F.scaled_dot_product_attention:
            return self._attended(spans, tracked, out)
        candidates = [broadcast(features, tensor.shape, out.shape) for tensor, features in tracked]
        if func in SOFTMAXES:
            candidates = [
                candidate
                for candidate in candidates
                if candidate is not None and not self._normalised(func, tracked, candidate, out)
            ]
        if any(candidate is None for candidate in candidates) or not candidates:
            return Features(spans, (), operation)
        dims = [candidate.dims for candidate in candidates if candidate is not None]
        if len({candidate[0] for candidate in dims}) > 1:
            return Features(spans, (), operation)
        return Features(spans, max(dims, key=len))

    def _attended(self, spans: Any, tracked: list[tuple[Tensor, Features]], out: Tensor) -> Features:
        """Return the features after attention, which is computed for each head; k and v may have fewer heads than q."""
        several = [(tensor, features) for tensor, features in tracked if features.dims[0] != tensor.dim() - 1]
        if len(several) < len(tracked) and several and several[0][0] is tracked[0][0]:
            for _, features in tracked:  # a single head of keys, which all ranks compute for their heads of the query
                if features.dims[0] not in (head_features.dims[0] for _, head_features in several):
                    for name in features.layers:
                        self.unfit.setdefault(name, "all heads read its single head")
            tracked, spans = several, tuple(span for _, features in several for span in features.spans)
        for tensor, features in tracked:
            self._require_whole_heads(features, tensor.shape[features.dims[0]])
        heads = {features.dims[0] - tensor.dim() for tensor, features in tracked}
        if heads != {-3}:
            return Features(spans, (), "attention over a dim that is not heads")
        return Features(spans, (out.dim() - 3, out.dim() - 1))

    def _gated(self, features: Features, tensor: Tensor, out: Tensor) -> Features:
        """Return the features after a gated linear unit, which multiplies the halves of a dim."""
        [dim] = [at for at in range(out.dim()) if out.shape[at] != tensor.shape[at]]
        if dim != features.dims[0]:
            return features
        size = tensor.shape[dim]
        halves = [self._taken(features, tensor.shape, [Index(dim, at, at + size // 2)]) for at in (0, size // 2)]
        spans = tuple(span for half in halves for span in half.spans)
        return replace(halves[0], spans=spans) if halves[0].dims else halves[0]

    @staticmethod
    def _normalised(func: Any, tracked: Any, features: Features, out: Tensor) -> bool:
        """Return whether a softmax may be over the outermost dim of the features; it is over the last dim mostly."""
        return features.dims[0] == out.dim() - 1

    # -- rules --------------------------------------------------------------------------------------------------

    def _view(self, features: Features, func: Any, args: Any, _: Any, outs: list[Tensor]) -> list[Features]:
        before, after = args[0].shape, outs[0].shape
        if merges(features, before, after):
            self._require_whole_heads(features, before[features.dims[0]])
        return [viewed(features, before, after) or features.without_dims(f"{func.__name__} to {list(after)}")]

    def _permute(self, features: Features, func: Any, args: Any, options: Any, _: Any) -> list[Features]:
        return [permuted(features, func, args, options)]

    def _split(self, features: Features, func: Any, args: Any, options: Any, outs: list[Tensor]) -> list[Features]:
        dim = split_dim(func, args, options)
        shape, drops = args[0].shape, func in UNBINDS
        ends = sections(shape[dim], tuple(1 if drops else out.shape[dim] for out in outs))
        pieces = []
        for begin, end in ends:
            entries = [Index(dim, begin, end, 1, drops)]
            taken = self._taken(features, shape, entries)
            pieces.append(_moved(taken, entries) if drops else taken)
        return pieces

    def _index(self, features: Features, _: Any, args: Any, __: Any, ___: list[Tensor]) -> list[Features]:
        entries = indices(args[0].shape, args[1])
        if entries is None:
            return [features.without_dims("an index that is a tensor")]
        return [_moved(self._taken(features, args[0].shape, entries), entries)]

    def _taken(self, features: Features, shape: Sequence[int], entries: list[Index]) -> Features:
        """Return the features in a range or an element of some dims, numbered as before; notes where layers are cut."""
        for entry in entries:
            if not features.dims or entry.dim not in features.dims:
                continue
            size, (outer, *inner) = shape[entry.dim], features.dims
            if entry.dim != outer:
                if entry.drops:
                    features = replace(features, dims=tuple(dim for dim in features.dims if dim != entry.dim))
                continue
            if (entry.begin, entry.end, entry.step) != (0, size, 1):
                divisible = all((stop - start) % size == 0 for _, start, stop in features.spans)
                if entry.step != 1 or not divisible or not (inner or features.is_flat(shape)):
                    return features.without_dims("an index")
                features = narrowed(features, size, entry.begin, entry.end)
                for name, start, stop in features.spans:
                    self.cuts.setdefault(name, []).extend((start, stop))
            if entry.end - entry.begin == 1 and (inner or entry.drops):
                features = replace(features, dims=tuple(inner), lost="" if inner else "an index")
        return features

    def _require_whole_heads(self, features: Features, heads: int) -> None:
        if heads % self.ranks:
            for name in features.layers:
                self.unfit.setdefault(name, f"its {heads} heads can't be divided by {self.ranks} ranks")


def _moved(features: Features, entries: list[Index]) -> Features:
    """Return the features with their dims after an index has dropped dims and made new dims."""
    if len(entries) == 1 and entries[0].drops:  # `unbind`: all other dims stay
        dropped = entries[0].dim or 0
        return replace(features, dims=tuple(dim - (dim > dropped) for dim in features.dims))
    dim_after, after = {}, 0
    for entry in entries:
        if entry.dim is not None and not entry.drops:
            dim_after[entry.dim] = after
        after += not entry.drops
    return replace(features, dims=tuple(dim_after[dim] for dim in features.dims))
