"""Functions of torch on sharded activations, where DTensor has no rule, a slow rule, or another result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fabricx.model_parallel.fused_outputs import fused_output
from fabricx.model_parallel.sharded_activations import Activations
from fabricx.model_parallel.sharded_attention import scaled_dot_product_attention
from fabricx.model_parallel.sharded_logits import logits_output

Rule = Callable[[Activations, Any, Sequence[Any], dict[str, Any]], Any]
DROPOUTS: Final[set[Any]] = {F.dropout, torch.dropout}
RANDOM: Final[set[Any]] = {
    F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax, F.rrelu,
    torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, Tensor.bernoulli, torch.multinomial,
    Tensor.multinomial, torch.normal, torch.dropout_, torch.feature_dropout, torch.poisson, torch.native_dropout,
}  # fmt: skip
RANDOM_IN_PLACE: Final[set[Any]] = {
    Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.geometric_,
    Tensor.cauchy_, Tensor.log_normal_,
}  # fmt: skip
PRODUCTS: Final[set[Any]] = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
READS: Final[set[Any]] = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
    Tensor.__format__, Tensor.__repr__, Tensor.__array__, Tensor.__contains__, Tensor.cpu,
}  # fmt: skip
SIZES: Final[set[Any]] = {
    Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel,
    *(getattr(Tensor, name).__get__ for name in ("shape",)),
}  # fmt: skip
PROPERTIES: Final[set[Any]] = {
    *SIZES, Tensor.dim, Tensor.ndimension, Tensor.is_contiguous,
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.element_size,
    Tensor.register_hook, Tensor.requires_grad_, Tensor.__hash__, Tensor.retain_grad, torch.is_tensor,
    torch.is_complex,
    *(getattr(Tensor, name).__get__ for name in (
        "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "grad_fn", "is_leaf", "is_nested",
        "is_sparse", "is_quantized", "is_meta", "grad", "_version",
    )),
}  # fmt: skip


def sharded_function(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Apply a function of torch to arguments of which some are sharded; the result is that of a single process.

    Ordinary tensors among the arguments are equal on all ranks. A scalar result is an ordinary tensor.

    Args:
        activations: of the group.
        func: function of torch.
        args: its arguments.
        options: its named arguments.

    Raises:
        NotImplementedError: the function changes a sharded tensor in a way that has no rule.
    """
    if func in PROPERTIES:
        return func(*args, **options)
    leaves = tree_leaves((args, options))
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    if any(activations.parts_of(leaf) is not None for leaf in sharded):
        marked = activations.parts_of(args[0]) if args else None
        if marked is not None:
            apply = fused_output if len(marked[1]) > 1 else logits_output
            result = apply(activations, func, args, options)
            if result is not NotImplemented:
                return result
        args, options = tree_map(functools.partial(_in_plain_order, activations), (args, options))
    rule = _RULES.get(func)
    result = NotImplemented if rule is None else rule(activations, func, args, options)
    if result is NotImplemented:
        result = _by_dtensor(activations, func, args, options, sharded)
    return tree_map(functools.partial(_scalars_whole, activations), result)


def _in_plain_order(activations: Activations, value: Any) -> Any:
    return activations.plain_order(value) if isinstance(value, DTensor) else value


def _scalars_whole(activations: Activations, value: Any) -> Any:
    return activations.whole(value) if isinstance(value, DTensor) and value.dim() == 0 else value


def _by_dtensor(
    activations: Activations, func: Any, args: Any, options: dict[str, Any], sharded: Sequence[DTensor]
) -> Any:  # fmt: skip
    """Apply a function by DTensor's rule; without a rule, to whole tensors."""
    in_place = _changes_arguments(func, options)
    if in_place and not isinstance(args[0] if args else options.get("out"), DTensor):
        return _on_whole_tensors(activations, func, args, options)  # a buffer, for example
    try:
        return func(*tree_map(activations.replicated, args), **tree_map(activations.replicated, options))
    except Exception as error:  # an error of the user's call is raised again below, for whole tensors
        if in_place:
            name = getattr(func, "__name__", func)
            raise NotImplementedError(
                f"{name} changes an activation that is sharded over the tensor-parallel ranks, and torch has no rule "
                f"for it ({error}); use the function that returns a new tensor, or keep the layers before and after "
                "it whole by the plan's override 'replicate'"
            ) from error
        if not activations.is_even(sharded):
            raise  # the error may be on this rank only, and the other ranks would not gather
    return _on_whole_tensors(activations, func, args, options)


def _changes_arguments(func: Any, options: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    augmented = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    plain = name.endswith("_") and not name.endswith("__")
    return plain or augmented or name in ("__setitem__", "__set__") or options.get("out") is not None


def _on_whole_tensors(activations: Activations, func: Any, args: Any, options: dict[str, Any]) -> Any:
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, options))):
        name = getattr(func, "__name__", str(func))
        activations.gathered[name] = activations.gathered.get(name, 0) + 1
    args, options = tree_map(activations.whole, (args, options))
    return func(*args, **options)


# -- rules: they return NotImplemented where DTensor's rule applies -----------------------------------------------


def _whole(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    return _on_whole_tensors(activations, func, args, options)


def _random_in_place(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, DTensor):
        return NotImplemented
    drawn = func(torch.empty(target.shape, dtype=target.dtype, device=target.device), *args[1:], **options)
    return target.copy_(activations.replicated(drawn))


def _attention(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    result = scaled_dot_product_attention(activations, *args, **options)
    return _on_whole_tensors(activations, func, args, options) if result is NotImplemented else result


def _dropout(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Draw the mask of the whole tensor on every rank, as a single process does."""
    return _dropped(activations, *args, **options)


def _dropped(
    activations: Activations, input: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False,
    train: bool | None = None,
) -> Any:  # fmt: skip
    if not (training if train is None else train) or p == 0.0:
        return input
    ones = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device).fill_(1)
    mask = F.dropout(ones, p)
    dim = activations.dim_of(input)
    if dim is None:
        factor = activations.replicated(mask)
    else:
        begin = dim_begin(activations, input, dim)
        local = mask.narrow(dim, begin, input.to_local().shape[dim])
        factor = DTensor.from_local(
            local, activations.mesh, input.placements, run_check=False, shape=input.shape, stride=input.stride()
        )
    return input.mul_(factor) if inplace else input * factor


def dim_begin(activations: Activations, tensor: DTensor, dim: int) -> int:
    """Return the first index of this rank's shard.

    Args:
        activations: of the group.
        tensor: sharded in `dim`.
        dim: of the tensor.
    """
    each = -(-tensor.shape[dim] // activations.world.size)
    return min(activations.world.rank * each, tensor.shape[dim])


def _product(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Multiply the matrices of each head; DTensor's rule would merge heads and batch, and gather for it."""
    if options or len(args) != 2:
        return NotImplemented
    dims, (first, second) = [activations.dim_of(arg) for arg in args], args
    if dims[0] is None or dims[0] != dims[1] or first.dim() != second.dim() or dims[0] >= first.dim() - 2:
        return NotImplemented
    if first.shape[:-2] != second.shape[:-2] or first.shape[dims[0]] % activations.world.size:
        return NotImplemented
    return activations.sharded(func(first.to_local(), second.to_local()), dims[0])


def _einsum(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Sum products of tensors that are sharded in the same index, if the result has this index."""
    if len(args) < 2 or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
        return NotImplemented
    operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    inputs, output = args[0].replace(" ", "").split("->")
    dims = [activations.dim_of(operand) for operand in operands]
    names = inputs.split(",")
    sharded = {name[dim] for name, dim in zip(names, dims, strict=True) if dim is not None}
    if len(sharded) != 1 or any((sharded & set(name)) and dim is None for name, dim in zip(names, dims, strict=True)):
        return NotImplemented
    [index] = sharded
    if index not in output or not activations.is_even(operands):
        return NotImplemented
    if any(dim is None for dim in dims):
        return NotImplemented
    return activations.sharded(func(args[0], *(operand.to_local() for operand in operands)), output.index(index))


def _repeat_interleave(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Repeat each head of keys and values for the heads of the query that share it."""
    tensor, repeats = args[0], args[1] if len(args) > 1 else options.get("repeats")
    dim = args[2] if len(args) > 2 else options.get("dim")
    at = activations.dim_of(tensor)
    if at is None or not isinstance(repeats, int) or dim is None or tensor.shape[at] % activations.world.size:
        return NotImplemented
    return activations.sharded(torch.repeat_interleave(tensor.to_local(), repeats, dim), at)


def _concatenation(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Leave out empty vectors, which torch accepts beside tensors of any shape: caches of keys begin with one."""
    tensors, *rest = args or [options.pop("tensors")]
    kept = [tensor for tensor in tensors if tensor.shape != (0,)]
    return NotImplemented if len(kept) == len(tensors) else sharded_function(activations, func, [kept, *rest], options)


_RULES: Final[dict[Any, Rule]] = {
    F.scaled_dot_product_attention: _attention,
    torch.cat: _concatenation,
    torch.einsum: _einsum,
    torch.repeat_interleave: _repeat_interleave,
    Tensor.repeat_interleave: _repeat_interleave,
    **dict.fromkeys(DROPOUTS, _dropout),
    **dict.fromkeys(RANDOM | READS, _whole),
    **dict.fromkeys(RANDOM_IN_PLACE, _random_in_place),
    **dict.fromkeys(PRODUCTS, _product),
}


class ShardedFunctions(TorchFunctionMode):
    """While active, functions of torch accept sharded activations and weights.

    Args:
        activations: of the group.
        layer: called with a function and its arguments first; returns NotImplemented unless the function is the
            computation of a sharded layer.
        weight: called with each ordinary tensor; returns a DTensor for a sharded weight, otherwise the tensor.
    """

    def __init__(
        self, activations: Activations, layer: Callable[..., Any], weight: Callable[[Any], Any]
    ) -> None:  # fmt: skip
        super().__init__()
        self._activations, self._layer, self._weight = activations, layer, weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        result = self._layer(func, args, options)
        if result is not NotImplemented:
            return result
        if func not in PROPERTIES:
            args, options = _each_tensor(self._weight, args), _each_tensor(self._weight, options)
        if not (_has_dtensor(args) or _has_dtensor(options.values())):
            return func(*args, **options)
        return sharded_function(self._activations, func, args, options)


def _has_dtensor(values: Any) -> bool:
    for value in values:
        if isinstance(value, DTensor):
            return True
        if isinstance(value, (list, tuple)) and _has_dtensor(value):
            return True
    return False


def _each_tensor(function: Callable[[Any], Any], values: Any) -> Any:
    """Return arguments with each tensor replaced by the function's result; most often nothing changes."""
    if isinstance(values, dict):
        return {name: _each_tensor(function, [value])[0] for name, value in values.items()} if values else values
    changed = [
        function(value) if isinstance(value, Tensor)
        else _each_tensor(function, value) if type(value) in (list, tuple)
        else value
        for value in values
    ]  # fmt: skip
    return tuple(changed) if isinstance(values, tuple) else changed
