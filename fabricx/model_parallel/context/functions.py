"""Functions of torch whose result for a shard of the sequence depends on the whole sequence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fabricx.core.tensors.tensor_properties import PROPERTIES
from fabricx.distributed.world import World
from fabricx.model_parallel.context.addressed_dims import combined_dims, selected_dims
from fabricx.model_parallel.context.attention import own_stream, scaled_dot_product_attention, whole_mask
from fabricx.model_parallel.context.sequence_shard import SequenceShard, gathered


@final
class ContextFunctions(TorchFunctionMode):
    """While active and within a shard, positions and attention are those of the whole sequence.

    All other functions compute each position by itself, or the trial run refuses the module.

    Args:
        world: ranks along the context axis.
        dim: dimension of the sequence in activations.
        tables: buffers of the module, which may have a row for each position.
        ring: keys and values pass from rank to rank, in place of a gather.

    Attributes:
        shard: shard of the sequence that is computed; None outside of the blocks.
        length: length of the newest whole sequence.
        in_trial: attention has no dropout, which equals that of one process in distribution only; numbers that the
            user's code takes for lengths are recorded, and dimensions that functions combine.
        within: blocks are computed, whole or for a shard.
        memories: lengths of second sequences, whose keys the blocks have attended to in the trial.
        stale: names of tensors that blocks have stored for other positions than those that are computed, by `id`.
    """

    def __init__(self, world: World, dim: int, tables: Iterable[Tensor], *, ring: bool = False) -> None:
        super().__init__()
        self.world, self.dim, self._ring = world, dim, ring
        self.shard: SequenceShard | None = None
        self.length, self.in_trial, self.within = 0, False, False
        self.memories: set[int] = set()
        self.stale: Mapping[int, str] = {}
        self._whole_dims: dict[int, set[int]] = {}  # of sequences in the trial's whole tensors, by number of dims
        self._tables = {id(table): table for table in tables}
        self._numbers: tuple[set[int], set[int]] = (set(), set())  # that a whole sequence and a shard have used
        self._combined: set[tuple[Any, ...]] = set()  # functions of the trial, with dimensions that they combine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if self.stale and func not in PROPERTIES:
            self._check_stale((*args, *options.values()))
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **options)
        return rule(self, *args, **options)

    def counts_positions(self, number: Any) -> bool:
        """Return whether a number is the length of the shard, so that it counts positions.

        Args:
            number: number of the user's code.

        Raises:
            ValueError: the number has another meaning, too, and is equal by chance.
        """
        if self.in_trial and isinstance(number, int):
            self._numbers[self.shard is not None].add(number)
        if self.shard is None or number != self.shard.local:
            return False
        if not self.in_trial and number in self._numbers[0] & self._numbers[1]:
            raise ValueError(
                f"a shard has {number} positions, and the module also uses {number} where it does not mean the length "
                "of the sequence; the two uses can't be distinguished: compute positions before the blocks and pass "
                "them to the blocks, or use sequences of another length"
            )
        return True

    @property
    def lengths(self) -> list[list[int]]:
        """Return the numbers of elements that the user's code has used in the trial: whole, and in shards."""
        return [sorted(numbers) for numbers in self._numbers]

    @lengths.setter
    def lengths(self, numbers: list[list[int]]) -> None:
        self._numbers = (set(numbers[0]), set(numbers[1]))

    # -- rules ---------------------------------------------------------------------------------------------------

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """Compute `F.scaled_dot_product_attention` over the whole sequence.

        Args:
            query, key, value: of the shard, shape [..., positions, features].
            args, options: further arguments of that function.

        Returns:
            the output for the positions of the shard, shape [..., positions, features].
        """
        named = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)), **options}
        if self.in_trial:
            named["dropout_p"] = 0.0
        if self.shard is None:
            self._learn_keys(key.shape[-2])
            whole: Tensor = F.scaled_dot_product_attention(query, key, value, **named)
            return whole
        return scaled_dot_product_attention(self.world, self.shard, query, key, value, ring=self._ring, **named)

    def arange(self, *args: Any, **options: Any) -> Tensor:
        """Return the positions of the shard for `torch.arange(length)`, or after an offset.

        Args:
            args, options: of `torch.arange`.
        """
        output = torch.arange(*args, **options)
        named = dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args, strict=False)) | options
        start, end = named.get("start", 0), named["end"]
        if named.get("step", 1) != 1 or not isinstance(start, int) or not isinstance(end, int):
            return output
        if not self.counts_positions(end - start):
            return output
        assert self.shard is not None
        positions: Tensor = self.shard.positions + start
        return positions.to(output.device, output.dtype)

    def index(self, tensor: Tensor, index: Any) -> Any:
        """Return rows of the shard's positions for `table[:length]`, if the table is a buffer.

        Args:
            tensor: indexed tensor.
            index: its index.

        Raises:
            ValueError: the index selects positions of a shard, such as `x[:, -1:]`.
        """
        if id(tensor) not in self._tables:
            if self.within and (dims := selected_dims(tensor, index)):
                self._check_positions("an index", "selects", tensor.shape, dims)
            return tensor[index]
        indices = list(index) if isinstance(index, tuple) else [index]
        begins = 0  # dims of the table before the index
        for number, entry in enumerate(indices):
            if entry is Ellipsis:
                begins = tensor.dim() - sum(other is not None for other in indices[number + 1 :])
                continue
            cuts = isinstance(entry, slice) and entry.start in (0, None) and entry.step in (1, None)
            if cuts and self.counts_positions(entry.stop):
                assert self.shard is not None
                self._check_rows(tensor, begins)
                indices[number] = slice(0, self.shard.length)
                for after in range(number + 1, len(indices)):  # of a square mask: keys of the whole sequence
                    if isinstance(indices[after], slice) and indices[after].stop == self.shard.local:
                        indices[after] = slice(0, self.shard.length)
                kept = sum(not isinstance(other, int) for other in indices[:number])
                whole = tensor[tuple(indices)]
                return self.shard.part(whole, kept if Ellipsis not in indices[:number] else begins)
            begins += entry is not None
        return tensor[index]

    def _check_rows(self, table: Tensor, dim: int) -> None:
        assert self.shard is not None
        if table.shape[dim] < self.shard.length:
            raise ValueError(
                f"a buffer has {table.shape[dim]} positions, but the sequence has {self.shard.length}: enlarge the "
                "buffer, or crop the samples"
            )

    def dropout(
        self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
    ) -> Any:  # fmt: skip
        """Draw the mask of the whole sequence on every rank, as a single process does.

        Args:
            input, p, training, inplace, train: of `F.dropout`, or of `torch.dropout`.
        """
        active = training if train is None else train
        dim = self._sequence_dim(input)
        if self.shard is None or dim is None or not active or p == 0.0:
            return F.dropout(input, p, active, inplace)
        shape = list(input.shape)
        shape[dim] = self.shard.length
        order = sorted(range(input.dim()), key=lambda axis: (-input.stride()[axis], axis))
        ones = input.new_ones([shape[axis] for axis in order])
        ones = ones.permute([order.index(axis) for axis in range(input.dim())])  # a mask is drawn in memory's order
        factor = self.shard.part(F.dropout(ones, p), dim)
        return input.mul_(factor) if inplace else input * factor

    def convolution(self, function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """Refuse a convolution along the sequence.

        The effect of a single layer on the loss of the trial may be smaller than what rounding explains, as in a model
        with attention and state-space layers whose states are small at first.

        Args:
            function: the convolution.
            args, options: of the function: input, weight of shape [out, in, *kernel], and others.

        Raises:
            ValueError: the kernel has several positions.
        """
        named = dict(zip(("input", "weight"), args, strict=False)) | options
        input, weight = named["input"], named["weight"]
        spatial = range(2, weight.dim())
        local = 0 if self.shard is None else self.shard.local
        # The input may be padded already.
        beyond = [(input.shape[dim - weight.dim()] - local, weight.shape[dim]) for dim in spatial]
        if local and any(kernel > 1 and 0 <= more <= 2 * (kernel - 1) for more, kernel in beyond):
            raise ValueError(
                f"a convolution with the kernel {list(weight.shape[2:])} combines neighbouring positions of the "
                "sequence, and a shard does not have all of them"
            )
        return function(*args, **options)

    def reduction(self, function: Callable[..., Tensor], op: Literal["max", "min"], *args: Any, **options: Any) -> Any:
        """Reduce all elements over all shards, such as `torch.isinf(x).any()`; tensors that ranks share may be reduced.

        Args:
            function: `any`, `all`, `amax`, `amin`, `max` or `min`.
            op: operation over ranks.
            args, options: of the function; with a dimension, nothing is reduced over ranks.

        Raises:
            ValueError: the result needs a gradient.
        """
        if len(args) + len(options) > 1:
            return self.combination(function, 1, None, *args, **options)
        result = function(*args, **options)
        if self.shard is None:
            return result
        if result.requires_grad:
            raise ValueError(
                f"{function.__name__} of all elements within a block depends on the whole sequence, and "
                "strategy=context has no gradient of it: use it on x.detach(), or before the blocks"
            )
        narrow = result.dtype if result.dtype in (torch.bool, torch.float16, torch.bfloat16) else None
        total = self.world.all_reduce(result.clone() if narrow is None else result.float(), op)
        return total if narrow is None else total.to(narrow)

    def combination(
        self, function: Callable[..., Any], position: int, default: int | None, *args: Any, **options: Any
    ) -> Any:  # fmt: skip
        """Refuse a function that combines positions of the sequence, if the trial does not show that it may.

        The trial shows it for functions that it has called, but for scans, such as a `cumsum` that counts the tokens of
        an expert: their result may be used for few samples only. Functions that select positions may be right for the
        length of the trial only: the last position is the last one of each shard, if a shard ends with repeats.

        Args:
            function: combines elements along dimensions, such as `sum`.
            position: index of the argument `dim`.
            default: its default; None for all dimensions.
            args, options: of the function.

        Raises:
            ValueError: the function combines positions.
        """
        tensor = args[0] if args else options.get("input")
        if self.within and isinstance(tensor, Tensor):
            dims = combined_dims(tensor, position, args, options, default)
            verb = "selects" if function.__name__ in _SELECTIONS else "combines"
            self._check_positions(function.__name__, verb, tensor.shape, dims)
        return function(*args, **options)

    def _check_positions(self, name: str, verb: str, shape: torch.Size, dims: tuple[int, ...] | None) -> None:
        if self.in_trial:
            self._combined.add((name, len(shape), dims))
            self._combined.update((name, len(shape), dim, shape[dim]) for dim in dims or ())
        if self.shard is not None and self._combines_positions(name, shape, dims):
            raise ValueError(
                f"{name} within a block {verb} positions of the sequence, of which a shard does not have all"
                f"{'' if self.in_trial else ', and the trial run before training has not called it'}: compute it "
                "before or after the blocks, choose other blocks, or use strategy=tensor"
            )

    def _combines_positions(self, name: str, shape: torch.Size, dims: tuple[int, ...] | None) -> bool:
        """Return whether a function combines positions of the sequence, which the trial does not show to be right."""
        assert self.shard is not None
        ndim, local = len(shape), self.shard.local
        if self.in_trial:
            return name in (*_SCANS, *_SELECTIONS) and any(
                shape[dim] % local == 0 and (name, ndim, dim, shape[dim] // local * self.shard.length) in self._combined
                for dim in dims or ()
            )
        if (name, ndim, dims) in self._combined:
            return False
        return any(
            dim < ndim and shape[dim] == local and (dims is None or dim in dims)
            for dim in ((self.dim, ndim - 2) if ndim > 3 else (self.dim,))
        )

    def _check_stale(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and id(value) in self.stale:
                raise ValueError(
                    f"{self.stale[id(value)]} was computed within a block for the positions of another sequence, and "
                    "is used for this one: compute it before the blocks, register it in __init__ as a buffer for the "
                    "longest sequence, or use sequences of a single length; generate text with use_cache=False"
                )
            if isinstance(value, (list, tuple)):
                self._check_stale(value)

    def _sequence_dim(self, tensor: Tensor) -> int | None:
        """Return the dim of the sequence in a tensor of a shard; of several dims of this size, one of the trial."""
        local = self.length if self.shard is None else self.shard.local
        dims = [d for d in (self.dim, tensor.dim() - 2) if 0 <= d < tensor.dim() and tensor.shape[d] == local]
        known = self._whole_dims.setdefault(tensor.dim(), set())
        if self.shard is None:
            known.update(dims if self.in_trial else ())
            return None
        return next(iter([d for d in dims if d in known] or dims), None)

    def multi_head_attention(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Compute `F.multi_head_attention_forward`, the function of `nn.MultiheadAttention`.

        Args:
            args, options: of that function.
        """
        named = dict(zip(_MULTI_HEAD, args, strict=False)) | options
        query, key, value = (named[name] for name in ("query", "key", "value"))
        shard = self.shard
        if self.in_trial:
            named["dropout_p"] = 0.0
        if shard is None:
            self._learn_keys(key.shape[0])
        if shard is None or query.shape[0] != shard.local:
            return F.multi_head_attention_forward(**named)
        if named.get("bias_k") is not None or named["add_zero_attn"]:
            if key.shape[0] != shard.local:  # whole on each rank
                return F.multi_head_attention_forward(**named)
            raise ValueError(
                "add_bias_kv and add_zero_attn of nn.MultiheadAttention add a key that belongs to no shard of the "
                "sequence: under context parallelism set both to False, or use strategy=tensor or strategy=pipeline"
            )
        batched = query.dim() == 3
        weights = [named.get(f"{name}_proj_weight") for name in "qkv"]
        if not named.get("use_separate_proj_weight"):
            weights = list(named["in_proj_weight"].chunk(3))
        biases = [None] * 3 if named["in_proj_bias"] is None else list(named["in_proj_bias"].chunk(3))
        projected = []
        for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True):
            assert weight is not None
            output = F.linear(tensor if batched else tensor.unsqueeze(1), weight, bias)
            projected.append(output.unflatten(-1, (named["num_heads"], -1)).permute(1, 2, 0, 3))
        q, k, v = projected
        mask = self._added_mask(named.get("attn_mask"), named.get("key_padding_mask"), q)
        dropout = named["dropout_p"] if named.get("training", True) else 0.0
        shown = None
        if named.get("need_weights", True):
            attended, shown = self._attend_with_weights(q, k, v, mask, dropout)
            if named.get("average_attn_weights", True):
                shown = shown.mean(1)
            shown = shown if batched else shown.squeeze(0)
        else:
            causal = named.get("is_causal", False) and mask is None
            attended = scaled_dot_product_attention(
                self.world, shard, q, k, v, mask, dropout, causal, ring=self._ring
            )  # fmt: skip
        attended = attended.permute(2, 0, 1, 3).flatten(-2)
        output = F.linear(attended, named["out_proj_weight"], named["out_proj_bias"])
        return output if batched else output.squeeze(1), shown

    def _learn_keys(self, length: int) -> None:
        if self.in_trial and self.within and length != self.length:
            self.memories.add(length)

    def _added_mask(self, attention: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
        """Return the sum of the masks of torch's layer (True: do not attend)."""
        total = None
        if attention is not None:
            total = _added(attention, query.dtype)
            total = total.view(query.shape[0], -1, *total.shape[1:]) if total.dim() == 3 else total
        if padding is not None:
            assert self.shard is not None
            if padding.shape[-1] == self.shard.local:
                padding = whole_mask(self.world, self.shard, padding)
            padding = _added(padding, query.dtype).view(-1, 1, 1, padding.shape[-1])
            total = padding if total is None else total + padding
        return total

    def _attend_with_weights(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        shard = self.shard
        assert shard is not None
        if key.shape[2] == shard.local:
            key, value = (gathered(tensor, self.world, shard, 2) for tensor in (key, value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if dropout:
            with own_stream(self.world, weights, dropout):
                weights = F.dropout(weights, dropout)
        return weights @ value, weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to attention scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _combination(
    combination: Any, position: int, default: int | None, functions: ContextFunctions, *args: Any, **options: Any
) -> Any:  # fmt: skip
    return functions.combination(combination, position, default, *args, **options)


def _reduction(reduction: Any, op: Any, functions: ContextFunctions, *args: Any, **options: Any) -> Any:
    return functions.reduction(reduction, op, *args, **options)


def _convolution(convolution: Any, functions: ContextFunctions, *args: Any, **options: Any) -> Tensor:
    return functions.convolution(convolution, *args, **options)


_MULTI_HEAD: Final = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias",
)  # fmt: skip
_SCANS: Final = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
_SELECTIONS: Final = (
    "an index", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
)  # fmt: skip
_COMBINING: Final[dict[str, tuple[int, int | None]]] = {  # index of the argument `dim`, and its default
    **dict.fromkeys(
        (*_SCANS, "sum", "mean", "prod", "nansum", "nanmean", "std", "var", "std_mean", "var_mean", "median",
         "nanmedian", "logsumexp", "count_nonzero", "argmax", "argmin", "softmax", "log_softmax", "flip", "aminmax"),
        (1, None),
    ),
    **dict.fromkeys(("norm", "quantile", "nanquantile", "roll"), (2, None)),
    **dict.fromkeys(("sort", "argsort", "mode"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue", "diff"), (2, -1)),
    **dict.fromkeys(("select", "narrow", "unbind"), (1, 0)),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split"), (2, 0)),
}  # fmt: skip
_RULES: Final[dict[Any, Callable[..., Any]]] = {
    F.scaled_dot_product_attention: ContextFunctions.attention,
    F.multi_head_attention_forward: ContextFunctions.multi_head_attention,
    F.dropout: ContextFunctions.dropout,
    torch.arange: ContextFunctions.arange,
    Tensor.__getitem__: ContextFunctions.index,
    **{
        function: functools.partial(_reduction, function, "max" if name in ("any", "amax", "max") else "min")
        for name in ("any", "all", "amax", "amin", "max", "min")
        for function in (getattr(torch, name), getattr(Tensor, name))
    },
    **{
        function: functools.partial(_combination, function, position, default)
        for name, (position, default) in _COMBINING.items()
        for function in (getattr(torch, name, None), getattr(Tensor, name, None), getattr(F, name, None))
        if function is not None
    },
    F.normalize: functools.partial(_combination, F.normalize, 2, 1),
    torch.linalg.vector_norm: functools.partial(_combination, torch.linalg.vector_norm, 2, None),
    **{function: functools.partial(_convolution, function) for function in (torch.conv1d, torch.conv2d, torch.conv3d)},
}
