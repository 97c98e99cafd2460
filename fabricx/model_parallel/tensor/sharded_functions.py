"""Functions of torch on sharded activations: each has the result of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fabricx.core.tensors.tensor_properties import PROPERTIES
from fabricx.model_parallel.placement import Placement
from fabricx.model_parallel.tensor.collectives import sliced
from fabricx.model_parallel.tensor.fused_outputs import fused_output
from fabricx.model_parallel.tensor.local_rules import Rule, local_result
from fabricx.model_parallel.tensor.sharded_activations import Activations
from fabricx.model_parallel.tensor.sharded_attention import scaled_dot_product_attention
from fabricx.model_parallel.tensor.sharded_logits import logits_output
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor

DROPOUTS: Final[set[Any]] = {F.dropout, torch.dropout}
RANDOM: Final[set[Any]] = {
    F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax, F.rrelu,
    torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, Tensor.bernoulli, torch.multinomial,
    Tensor.multinomial, torch.normal, torch.feature_dropout, torch.poisson, torch.native_dropout,
}  # fmt: skip
RANDOM_IN_PLACE: Final[set[Any]] = {
    Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.geometric_,
    Tensor.cauchy_, Tensor.log_normal_,
}  # fmt: skip
FACTORIES: Final[set[Any]] = {
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor, torch.zeros_like,
    torch.ones_like, torch.full_like, torch.empty_like,
}  # fmt: skip
READS: Final[set[Any]] = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
    Tensor.__format__, Tensor.__repr__, Tensor.__array__, Tensor.__contains__, Tensor.cpu,
}  # fmt: skip
_OTHER_RESULTS: Final[set[Any]] = {torch.where, Tensor.where, Tensor.type}  # with a tensor only: indices, and a text
_tensor: Final[Any] = Tensor
DATA: Final[Any] = _tensor.data.__get__
_SET_DATA: Final[Any] = _tensor.data.__set__
_NUMPY: Final[set[Any]] = {Tensor.numpy, Tensor.__array__}
AUTOGRAD: Final[set[Any]] = {
    Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.backward, torch.autograd.grad,
    _tensor.grad.__get__, _tensor.requires_grad.__set__,
}  # fmt: skip


_ACROSS_UNITS: Final = (
    "fsdp gathers the weights of two layers separately between which tensor-parallel ranks have shards of the "
    "activation; choose submodules that contain both layers, by data=FSDP(wrap='CLASS') or wrap=NUMBER of parameters, "
    "or keep the layers whole: plan={'LAYER': 'replicate'} with their names"
)


def sharded_function(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Apply a function of torch to arguments of which some are sharded.

    Ordinary tensors among the arguments are equal on all ranks. The function is computed, in this order of preference:
    on shards, without communication or with a sum; on gathered tensors.

    Args:
        activations: activations of the group.
        func: function of torch.
        args: its arguments.
        options: its named arguments.

    Returns:
        the result of a single process, ordinary or sharded.

    Raises:
        NotImplementedError: the function changes a sharded tensor, or its gradient, in a way that has no rule.
        ValueError: the function changes the shape of a weight.
    """
    if func in PROPERTIES:
        return func(*args, **options)
    if func == DATA:  # shares memory with its tensor, as the result has to
        func = Tensor.detach
    sharded = _sharded_tensors((*args, *options.values()))
    for tensor in sharded:
        tensor.check_usable()
    if func in AUTOGRAD:
        if func == Tensor.register_hook and getattr(args[1], "__module__", "").startswith("torch.distributed.fsdp"):
            raise NotImplementedError(_ACROSS_UNITS)
        raise _refused(func, "fabricx has no rule for it")
    if (func in _OTHER_RESULTS and len(args) + len(options) == 1) or (func is Tensor.to and _moves(args, options)):
        return _on_whole_tensors(activations, func, args, options)
    if "axis" in options:  # torch's other name of `dim`
        options = {"dim" if name == "axis" else name: value for name, value in options.items()}
    if any(tensor.parts for tensor in sharded):
        first = args[0] if args else None
        if isinstance(first, ShardedTensor) and first.parts and options.get("out") is None:
            apply = fused_output if len(first.parts) > 1 else logits_output
            result = apply(activations, func, args, options)
            if result is not NotImplemented:
                return result
        if targets := _sharded_tensors(_targets(func, args, options)):
            return _change_whole(activations, func, args, options, targets)
        args, options = tree_map(activations.in_order, (args, options))
        sharded = _sharded_tensors((*args, *options.values()))
        if not sharded:
            return func(*args, **options)
    result = local_result(activations, func, args, options)
    if result is NotImplemented and (rule := _RULES.get(func)) is not None:
        result = rule(activations, func, args, options)
    if result is NotImplemented:
        if targets := _sharded_tensors(_targets(func, args, options)):
            return _change_whole(activations, func, args, options, targets)
        return _on_whole_tensors(activations, func, args, options)
    return result


def _moves(args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Return whether `Tensor.to` moves a tensor to another device, on which the ranks may not communicate."""
    if not isinstance(args[0], ShardedTensor):
        return False
    empty: Any = args[0].local[:0]
    others = [value.local[:0] if isinstance(value, ShardedTensor) else value for value in args[1:]]
    return bool(empty.to(*others, **options).device != empty.device)


def _refused(func: Any, reason: str) -> NotImplementedError:
    if func is Tensor.requires_grad_:
        remedy = "make parameters in __init__ or configure_model, and change a weight by weight.copy_(...) in no_grad"
    else:
        remedy = (
            "use a function that returns a new tensor, or keep the layers before and after it whole: set "
            "plan={'LAYER': 'replicate'} with their names"
        )
    return NotImplementedError(
        f"{getattr(func, '__name__', func)} was called on an activation or a weight of which each tensor-parallel rank "
        f"has a part, and {reason}; {remedy}"
    )


def _changes_arguments(func: Any, options: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    augmented = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
    plain = name.endswith("_") and not name.endswith("__")
    return plain or augmented or name in ("__setitem__", "__set__") or options.get("out") is not None


def _targets(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tensors that a function changes, as a list; the tensors of a list as a nested list."""
    if not _changes_arguments(func, options):
        return ()
    if options.get("out") is not None:
        return (options["out"],)
    return (args[0] if args else next(iter(options.values()), None),)  # nn.init passes its tensor by name


def _change_whole(
    activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any], weights: list[ShardedTensor]
) -> Any:
    """Change whole weights, alike on each rank, and keep this rank's parts.

    Raises:
        NotImplementedError: a tensor is no weight, or autograd would record the change.
        ValueError: the shape of a weight would change.
    """
    world, sharded = activations.world, _sharded_tensors((*args, *options.values()))
    unrecorded = func == _SET_DATA or getattr(func, "__module__", "") == "torch.nn.init" or not torch.is_grad_enabled()
    records = not unrecorded and any(tensor.requires_grad for tensor in sharded)
    if records or not all(activations.weight_of(tensor.local) for tensor in weights):
        raise _refused(func, "no rule changes it in place")
    with torch.no_grad():
        wholes = {id(tensor): activations.whole(tensor) for tensor in sharded}
        changed, named = tree_map(lambda value: wholes.get(id(value), value), (tuple(args), options))
        result = func(*changed, **named)
        for tensor in weights:
            whole, local = wholes[id(tensor)], tensor.local
            if whole.shape != tensor.shape:
                raise ValueError(
                    f"the shape of {activations.weight_of(local)} can't change from {list(tensor.shape)} to "
                    f"{list(whole.shape)}, since it is divided over tensor-parallel ranks: assign a tensor "
                    "of the same shape"
                )
            parts = tensor.parts or (tensor.shape[tensor.sharded_dim],)
            shard = Placement(tuple(tensor.shape), tensor.sharded_dim, parts, world.size).shard(whole, world.rank)
            if func == _SET_DATA:  # not written in place: a backward that follows needs the elements before
                local.data = shard.clone()
            else:
                local.copy_(shard)
    return next((tensor for tensor in weights if result is wholes[id(tensor)]), result)


def _on_whole_tensors(activations: Activations, func: Any, args: Any, options: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    activations.gathered[name] = activations.gathered.get(name, 0) + 1

    def whole(value: Any) -> Any:
        gathered = activations.whole(value)
        if isinstance(value, ShardedTensor) and (weight := activations.weight_of(value.local)):
            gathered.gathered_weight = weight
        return gathered

    changed = args[0] if options.get("inplace") else None  # of torch.nn.functional
    args, options = tree_map(whole, (args, options))
    result = func(*args, **options)
    if isinstance(changed, ShardedTensor):
        changed.local.copy_(sliced(result, activations.world, changed.sharded_dim))
        return changed
    if func in _NUMPY:
        result.setflags(write=False)  # changes would be lost
    return result


def _check_not_gathered(func: Any, target: Any) -> None:
    """Refuse a change of a view of a gathered weight, which would be lost."""
    base = target._base if isinstance(target, Tensor) and target._base is not None else target
    if name := getattr(base, "gathered_weight", ""):
        raise NotImplementedError(
            f"{getattr(func, '__name__', func)} changes a view of {name}, of which each tensor-parallel rank has a "
            "part: change the weight itself, for example by `weight[0] = new` or `weight.copy_(new)` in no_grad, or "
            "change the view in on_train_batch_start, on_before_optimizer_step or on_train_batch_end, where weights "
            "are whole"
        )


# -- rules --------------------------------------------------------------------------------------------------------


def _random_in_place(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, ShardedTensor):
        return NotImplemented
    drawn = func(torch.empty(target.shape, dtype=target.dtype, device=target.device), *args[1:], **options)
    target.local.copy_(sliced(drawn, activations.world, target.sharded_dim))
    return target


def _attention(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    result = scaled_dot_product_attention(activations, *args, **options)
    return _on_whole_tensors(activations, func, args, options) if result is NotImplemented else result


def _dropout(activations: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    return _dropped(activations, *args, **options)


def _dropped(
    activations: Activations, input: ShardedTensor, p: float = 0.5, training: bool = True, inplace: bool = False,
    train: bool | None = None,
) -> Any:  # fmt: skip
    """Draw the mask of the whole tensor on every rank, as a single process does, and use this rank's shard."""
    if not (training if train is None else train) or p == 0.0:
        return input
    ones = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device=input.device).fill_(1)
    factor = sliced(F.dropout(ones, p), activations.world, input.sharded_dim)
    if inplace:
        input.local.mul_(factor)
        return input
    return activations.sharded(input.local * factor, input.sharded_dim, (), input.shape)


def _new(_: Activations, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return an ordinary tensor."""
    example = torch.empty((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
    return func(example, *args[1:], **options)


_RULES: Final[dict[Any, Rule]] = {
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys(DROPOUTS, _dropout),
    **dict.fromkeys(FACTORIES, _new),
    **dict.fromkeys(RANDOM | READS, _on_whole_tensors),
    **dict.fromkeys(RANDOM_IN_PLACE, _random_in_place),
}


class ShardedFunctions(TorchFunctionMode):
    """While active, functions of torch accept sharded activations and weights.

    Args:
        activations: activations of the group.
        layers: functions that may be the computation of a sharded layer.
        layer: called with such a function and its arguments; returns NotImplemented if it is not.
        weights: sharded weights by id.
        weight: returns a sharded weight as a sharded tensor.
    """

    def __init__(
        self, activations: Activations, layers: Set[Any], layer: Callable[..., Any], weights: Mapping[int, Any],
        weight: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self._activations, self._layers, self._layer = activations, layers, layer
        self._weights, self._weight = weights, weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = kwargs or {}
        if func in self._layers:
            result = self._layer(func, args, options)
            if result is not NotImplemented:
                return result
        if func in PROPERTIES:
            return func(*args, **options)
        if self._reads_weight(args) or (options and self._reads_weight(options.values())):
            if func in AUTOGRAD:  # of the parameter object
                return func(*args, **options)
            args, options = tree_map(self._as_sharded, (args, options))
        elif not _has_sharded(args) and not (options and _has_sharded(options.values())):
            for target in _targets(func, args, options):
                for tensor in target if isinstance(target, (list, tuple)) else (target,):
                    _check_not_gathered(func, tensor)
            return func(*args, **options)
        return sharded_function(self._activations, func, args, options)

    def _reads_weight(self, values: Iterable[Any]) -> bool:
        weights = self._weights
        for value in values:
            if id(value) in weights or (isinstance(value, (list, tuple)) and self._reads_weight(value)):
                return True
        return False

    def _as_sharded(self, value: Any) -> Any:
        return self._weight(value) if id(value) in self._weights else value


def _has_sharded(values: Iterable[Any]) -> bool:
    for value in values:
        if type(value) is ShardedTensor or (isinstance(value, (list, tuple)) and _has_sharded(value)):
            return True
    return False


def _sharded_tensors(values: Iterable[Any]) -> list[ShardedTensor]:
    """Return the sharded tensors among arguments, also in lists."""
    matches: list[ShardedTensor] = []
    for value in values:
        if type(value) is ShardedTensor:
            matches.append(value)
        elif isinstance(value, (list, tuple)):
            matches += _sharded_tensors(value)
    return matches
