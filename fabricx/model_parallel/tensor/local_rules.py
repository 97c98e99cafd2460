"""Functions that each rank computes with its shards only, as hand-written tensor-parallel code does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.tensor.collectives import copied, summed
from fabricx.model_parallel.tensor.feature_dims import Features, Index, indices, permuted, viewed
from fabricx.model_parallel.tensor.feature_trace import CHUNKS, NORMS, PERMUTES, SPLITS, UNBINDS, VIEWS, split_dim
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor

Rule = Callable[[Activations, Any, Sequence[Any], dict[str, Any]], Any]


def _methods(*names: str) -> set[Any]:
    """Return the functions of torch, of `torch.nn.functional` and of tensors with these names."""
    owners = (torch, F, Tensor)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


ELEMENTWISE: Final[set[Any]] = _methods(
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "square", "sqrt", "rsqrt",
    "reciprocal", "neg", "negative", "abs", "exp", "expm1", "log", "log1p", "sigmoid", "tanh", "erf", "sin", "cos",
    "relu", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh",
    "relu6", "softplus", "logsigmoid", "softsign", "tanhshrink", "clamp", "clip", "clamp_min", "clamp_max", "where",
    "maximum", "minimum", "masked_fill", "lerp", "addcmul", "sign", "round", "floor", "ceil", "isnan", "isinf",
    "isfinite", "nan_to_num", "logical_not", "logical_and", "logical_or", "eq", "ne", "lt", "le", "gt", "ge", "clone",
    "detach", "float", "double", "half", "bfloat16", "to", "type", "contiguous", "type_as",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__pow__",
    "__neg__", "__abs__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__invert__", "__and__", "__or__",
)  # fmt: skip
IN_PLACE: Final[set[Any]] = _methods(
    "add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_", "relu_", "neg_", "pow_", "sqrt_", "exp_", "zero_",
    "fill_", "copy_", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__",
)  # fmt: skip
_CONVERSIONS: Final[set[Any]] = {Tensor.to, Tensor.type_as}  # perhaps to the dtype of another tensor
SOFTMAXES: Final[set[Any]] = _methods("softmax", "log_softmax")
REDUCTIONS: Final[set[Any]] = _methods("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm", "prod")
PRODUCTS: Final[set[Any]] = _methods("matmul", "bmm", "__matmul__")


def local_result(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Compute a function on shards.

    Args:
        activations: activations of the group.
        func: function of torch.
        args: its arguments; sharded tensors are in the order of the whole tensor.
        options: its named arguments.

    Returns:
        the result; NotImplemented if there is no rule, or if the function needs elements of other ranks.
    """
    writes = options.get("out") is not None  # to a whole tensor, of which a rule would write the rank's part
    rule = _RULES.get(func) if args and not writes else None
    return NotImplemented if rule is None else rule(activations, func, args, options)


def _elementwise(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    if func in _CONVERSIONS and isinstance(other := args[1] if len(args) > 1 else options.get("other"), Tensor):
        how = {name: value for name, value in options.items() if name != "other"}
        if not isinstance(args[0], ShardedTensor):
            return args[0].to(other.device, other.dtype, *args[2:], **how)
        local = args[0].local.to(other.device, other.dtype, *args[2:], **how)
        return _with_size(activations, local, args[0].sharded_dim, args[0])
    values = [*args, *options.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(isinstance(value, (list, tuple)) for value in values):
        return NotImplemented
    first = args[0]
    if len(tensors) == 1 and tensors[0] is first and isinstance(first, ShardedTensor):
        return _with_size(activations, func(first.local, *args[1:], **options), first.sharded_dim, first)
    sharded_dim = _common_dim(tensors)
    if sharded_dim is None:
        return NotImplemented
    shape = _broadcast_shape(tensors)
    if shape[sharded_dim] == 1 or _repeats_shard(tensors, sharded_dim, shape[sharded_dim]):
        return NotImplemented
    operands = [_operand(activations, value, sharded_dim, shape[sharded_dim]) for value in values]
    local_options = dict(zip(options, operands[len(args) :], strict=True))
    local = func(*operands[: len(args)], **local_options)
    return activations.sharded(local, len(shape) + sharded_dim, (), shape)


def _broadcast_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape that operands broadcast to; `torch.broadcast_shapes` takes longer than the operation."""
    shape = max((tensor.shape for tensor in tensors), key=len)
    if all(tensor.shape == shape for tensor in tensors):
        return shape
    return tuple(
        next((size for size in sizes if size != 1), 1)
        for sizes in zip(*((1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape) for tensor in tensors), strict=True)
    )


def _common_dim(tensors: Sequence[Tensor]) -> int | None:
    """Return the sharded dim as a negative number; None if operands are sharded in different dims."""
    dims = {tensor.sharded_dim - tensor.dim() for tensor in tensors if isinstance(tensor, ShardedTensor)}
    return dims.pop() if len(dims) == 1 else None


def _repeats_shard(tensors: Iterable[Any], sharded_dim: int, size: int) -> bool:
    """Return whether a sharded dim of one element, which only one rank has, is broadcast to more."""
    return any(isinstance(tensor, ShardedTensor) and tensor.shape[sharded_dim] != size for tensor in tensors)


def _operand(activations: Activations, value: Any, sharded_dim: int, size: int) -> Any:
    """Return this rank's part of an operand; gradients of elements that all ranks read are summed."""
    if isinstance(value, ShardedTensor):
        return value.local
    if not isinstance(value, Tensor) or value.dim() == 0:
        return _read_by_all(activations, value)
    if value.dim() + sharded_dim < 0 or value.shape[sharded_dim] != size:
        return _read_by_all(activations, value)
    return activations.shard_of(value, value.dim() + sharded_dim)


def _read_by_all(activations: Activations, value: Any) -> Any:
    return copied(value, activations.world) if isinstance(value, Tensor) and value.requires_grad else value


def _in_place(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, ShardedTensor):
        return NotImplemented
    tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
    sharded_dim = _common_dim(tensors)
    if sharded_dim is None or _broadcast_shape(tensors) != target.shape:
        return NotImplemented
    size = target.shape[sharded_dim]
    if _repeats_shard(tensors, sharded_dim, size):
        return NotImplemented
    operands = [_operand(activations, value, sharded_dim, size) for value in args[1:]]
    func(
        target.local,
        *operands,
        **{name: _operand(activations, value, sharded_dim, size) for name, value in options.items()},
    )
    return target


def _view(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensor: ShardedTensor = args[0]
    if not isinstance(tensor, ShardedTensor) or not activations.is_even(tensor):
        return NotImplemented
    sizes = tuple(
        arg.shape if isinstance(arg, Tensor) else tuple(arg) if isinstance(arg, list) else arg for arg in args[1:]
    )
    view = Tensor.reshape if func in (Tensor.view_as, Tensor.reshape_as) else func
    dim, whole = _shape_after(view, tensor.shape, tensor.sharded_dim, sizes, tuple(options.items()))
    if dim is None or whole[dim] % activations.world.size:
        return NotImplemented
    shape = list(whole)
    shape[dim] //= activations.world.size
    local = tensor.local.view(shape) if func is Tensor.view else tensor.local.reshape(shape)
    return activations.sharded(local, dim, (), whole)


@functools.lru_cache(4096)
def _shape_after(
    func: Any, shape: tuple[int, ...], dim: int, args: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[int | None, tuple[int, ...]]:  # fmt: skip
    """Return the sharded dim and the shape after a view; None for the dim if other elements are needed."""
    if any(isinstance(arg, torch.dtype) for arg in (*args, *dict(options).values())):
        return None, ()
    whole = tuple(func(torch.empty(shape, device="meta"), *args, **dict(options)).shape)
    after = viewed(Features((), (dim,)), shape, whole)
    return (None if after is None else after.dims[0]), whole


def _permute(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensor: ShardedTensor = args[0]
    if not isinstance(tensor, ShardedTensor):
        return NotImplemented
    dims = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args[1:])
    moved = _dim_after(func, tensor.dim(), tensor.sharded_dim, dims, tuple(options.items()))
    return _with_size(activations, func(tensor.local, *args[1:], **options), moved, tensor)


@functools.lru_cache(4096)
def _dim_after(func: Any, dims: int, dim: int, args: tuple[Any, ...], options: tuple[Any, ...]) -> int:
    probe = torch.empty((1,) * dims, device="meta")
    return permuted(Features((), (dim,)), func, (probe, *args), dict(options)).dims[0]


def _split(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensor: ShardedTensor = args[0]
    dim = split_dim(func, args, options)
    if dim == tensor.sharded_dim:
        return NotImplemented
    moved = tensor.sharded_dim - (func in UNBINDS and dim < tensor.sharded_dim)
    pieces = func(tensor.local, *args[1:], **options)
    return tuple(_with_size(activations, piece, moved, tensor) for piece in pieces)


def _with_size(activations: Activations, local: Tensor, dim: int, before: ShardedTensor) -> ShardedTensor:
    shape = list(local.shape)
    shape[dim] = before.shape[before.sharded_dim]
    return activations.sharded(local, dim, (), shape)


def _index(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensor, index = args
    entries, shard = _entries_of_shard(tensor, index)
    if shard is None:
        return NotImplemented
    local = tensor.local[tuple(basic_index(entry, entry is shard) for entry in entries)]
    moved = sum(not entry.drops for entry in entries[: entries.index(shard)])
    return _with_size(activations, local, moved, tensor)


def _set_index(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensor, index, value = args
    entries, shard = _entries_of_shard(tensor, index)
    if shard is None:
        return NotImplemented
    sharded_dim = -sum(not entry.drops for entry in entries[entries.index(shard) :])
    if isinstance(value, ShardedTensor) and value.sharded_dim - value.dim() != sharded_dim:
        return NotImplemented
    if _repeats_shard([value], sharded_dim, tensor.shape[tensor.sharded_dim]):
        return NotImplemented
    local_value = _operand(activations, value, sharded_dim, tensor.shape[tensor.sharded_dim])
    tensor.local[tuple(basic_index(entry, entry is shard) for entry in entries)] = local_value
    return None


def _entries_of_shard(tensor: Any, index: Any) -> tuple[list[Index], Index | None]:
    """Return the entries of an index, and the entry of the sharded dim; None unless it takes that dim whole."""
    entries = indices(tensor.shape, index) if isinstance(tensor, ShardedTensor) else None
    if entries is None:
        return [], None
    [shard] = [entry for entry in entries if entry.dim == tensor.sharded_dim]
    whole = (shard.begin, shard.end, shard.step) == (0, tensor.shape[tensor.sharded_dim], 1)
    return entries, shard if whole and not shard.drops else None


def basic_index(entry: Index, everything: bool = False) -> Any:
    """Return an entry as an argument of an index.

    Args:
        entry: entry of `indices`.
        everything: whether the whole dim is taken, of which a rank has a shard.
    """
    if entry.dim is None:
        return None
    if entry.drops:
        return entry.begin
    return slice(None) if everything else slice(entry.begin, entry.end, entry.step)


def _concatenate(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensors, *rest = args
    kept = [tensor for tensor in tensors if tensor.shape != (0,)]  # caches of keys begin with an empty vector
    dim = (rest[0] if rest else options.get("dim", 0)) % kept[0].dim()
    sharded_dim = _common_dim(kept)
    if sharded_dim is None or dim == kept[0].dim() + sharded_dim or len({tensor.dim() for tensor in kept}) > 1:
        return NotImplemented
    example = next(tensor for tensor in kept if isinstance(tensor, ShardedTensor))
    shards = [activations.shard_of(tensor, example.sharded_dim) for tensor in kept]
    return _with_size(activations, torch.cat(shards, dim), example.sharded_dim, example)


def _expand(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensor: ShardedTensor = args[0]
    if options or not isinstance(tensor, ShardedTensor):
        return NotImplemented
    sizes = list(args[1] if isinstance(args[1], (tuple, list)) else args[1:])
    dim = tensor.sharded_dim + len(sizes) - tensor.dim()
    if sizes[dim] not in (-1, tensor.shape[tensor.sharded_dim]):
        return NotImplemented
    sizes[dim] = -1
    return _with_size(activations, tensor.local.expand(sizes), dim, tensor)


def _softmax(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    dim = args[1] if len(args) > 1 else options.get("dim")
    if dim is None or not isinstance(dim, int) or dim % args[0].dim() == args[0].sharded_dim:
        return NotImplemented
    return _with_size(activations, func(args[0].local, *args[1:], **options), args[0].sharded_dim, args[0])


def _norm(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    tensor, shape = args[0], args[1] if len(args) > 1 else options["normalized_shape"]
    if not isinstance(tensor, ShardedTensor) or tensor.sharded_dim >= tensor.dim() - len(shape):
        return NotImplemented
    if any(isinstance(value, ShardedTensor) for value in (*args[2:], *options.values())):
        return NotImplemented
    parameters = [_read_by_all(activations, value) for value in args[2:]]
    named = {name: _read_by_all(activations, value) for name, value in options.items()}
    return _with_size(activations, func(tensor.local, *args[1:2], *parameters, **named), tensor.sharded_dim, tensor)


def _reduce(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Reduce other dims than the sharded dim without communication."""
    tensor = args[0]
    if not isinstance(tensor, ShardedTensor):
        return NotImplemented
    reduced = args[1] if len(args) > 1 else options.get("dim")
    if isinstance(reduced, (bool, torch.dtype, float)) or (reduced is None and args[1:]):
        return NotImplemented
    several = reduced if isinstance(reduced, (tuple, list)) else range(tensor.dim()) if reduced is None else [reduced]
    dims = [dim % tensor.dim() for dim in several] or list(range(tensor.dim()))
    if tensor.sharded_dim in dims:
        return _sum_over_ranks(activations, func, tensor, args, options)
    if func in (torch.norm, Tensor.norm):
        return NotImplemented
    local = func(tensor.local, *args[1:], **options)
    dropped = 0 if local.dim() == tensor.dim() else sum(dim < tensor.sharded_dim for dim in dims)
    return _with_size(activations, local, tensor.sharded_dim - dropped, tensor)


def _sum_over_ranks(
    activations: Activations, func: Any, tensor: ShardedTensor, args: Sequence[Any], options: dict[str, Any]
) -> Any:  # fmt: skip
    """Sum this rank's elements, then over ranks; a mean is the sum of the ranks' means, which overflows no dtype."""
    if func not in (torch.sum, Tensor.sum, torch.mean, Tensor.mean) or not tensor.numel():
        return NotImplemented
    if func in (torch.mean, Tensor.mean) and tensor.local.numel():
        part = Tensor.mean(tensor.local, *args[1:], **options) * (tensor.local.numel() / tensor.numel())
    else:
        part = Tensor.sum(tensor.local, *args[1:], **options)
    return summed(part, activations.world)


def _product(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Multiply the matrices of each head."""
    if options or len(args) != 2:
        return NotImplemented
    first, second = args
    sharded_dim = _common_dim([first, second])
    if sharded_dim is None or sharded_dim > -3 or first.dim() != second.dim() or first.shape[:-2] != second.shape[:-2]:
        return NotImplemented
    shards = [activations.shard_of(tensor, tensor.dim() + sharded_dim) for tensor in (first, second)]
    example = first if isinstance(first, ShardedTensor) else second
    return _with_size(activations, func(*shards), example.sharded_dim, example)


def _einsum(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Sum products of tensors that are sharded in the same index, if the result has this index."""
    if len(args) < 2 or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
        return NotImplemented
    operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    inputs, output = args[0].replace(" ", "").split("->")
    pairs = list(zip(inputs.split(","), operands, strict=True))
    sharded = {name[operand.sharded_dim] for name, operand in pairs if isinstance(operand, ShardedTensor)}
    if len(sharded) != 1 or not sharded <= set(output):
        return NotImplemented
    [index] = sharded
    if any(name.count(index) > 1 for name, _ in pairs):  # a diagonal
        return NotImplemented
    size = max(operand.shape[name.index(index)] for name, operand in pairs if index in name)
    if any(isinstance(operand, ShardedTensor) and operand.shape[operand.sharded_dim] != size for operand in operands):
        return NotImplemented
    shards = [
        _operand(activations, operand, name.index(index) - len(name), size)
        if index in name
        else _read_by_all(activations, operand)
        for name, operand in pairs
    ]
    example = next(operand for operand in operands if isinstance(operand, ShardedTensor))
    return _with_size(activations, func(args[0], *shards), output.index(index), example)


def _repeat_interleave(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Repeat each head of keys and values for the heads of the query that share it."""
    tensor, repeats = args[0], args[1] if len(args) > 1 else options.get("repeats")
    dim = args[2] if len(args) > 2 else options.get("dim")
    if not isinstance(repeats, int) or dim is None or not activations.is_even(tensor):
        return NotImplemented
    return activations.sharded(torch.repeat_interleave(tensor.local, repeats, dim), tensor.sharded_dim)


def _linear(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Apply a whole layer to a tensor that is sharded in another dim than the features."""
    tensor = args[0] if args else None
    if not isinstance(tensor, ShardedTensor) or tensor.sharded_dim == tensor.dim() - 1:
        return NotImplemented
    if any(isinstance(value, ShardedTensor) for value in (*args[1:], *options.values())):
        return NotImplemented
    parameters = [_read_by_all(activations, value) for value in (*args[1:], *options.values())]
    local = F.linear(
        tensor.local, *parameters[: len(args) - 1], **dict(zip(options, parameters[len(args) - 1 :], strict=True))
    )
    return _with_size(activations, local, tensor.sharded_dim, tensor)


_RULES: Final[dict[Any, Rule]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(IN_PLACE, _in_place),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(PERMUTES, _permute),
    **dict.fromkeys(SPLITS | CHUNKS | UNBINDS, _split),
    **dict.fromkeys(SOFTMAXES, _softmax),
    **dict.fromkeys(NORMS, _norm),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(PRODUCTS, _product),
    Tensor.__getitem__: _index,
    Tensor.__setitem__: _set_index,
    torch.cat: _concatenate,
    torch.concat: _concatenate,
    Tensor.expand: _expand,
    torch.einsum: _einsum,
    torch.repeat_interleave: _repeat_interleave,
    Tensor.repeat_interleave: _repeat_interleave,
    F.linear: _linear,
}
