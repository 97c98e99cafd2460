"""Hooks see whole weights, although each rank stores a part of each weight, or only the weights of a stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from fabricx.core.module_state.rng import RandomState
from fabricx.core.tensors.tensor_properties import PROPERTIES, SIZES
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.model_parallel.hidden_gradients import DividedGradient, HiddenGradient, hidden
from fabricx.model_parallel.set_up.division import Division
from fabricx.model_parallel.tensor.sharded_functions import AUTOGRAD

_tensor: Final[Any] = Tensor
_get: Final[Any] = {name: getattr(Tensor, name).__get__ for name in ("data", "grad")}
_set: Final[Any] = {name: getattr(Tensor, name).__set__ for name in ("data", "grad")}
ALIASES: Final[set[Any]] = {Tensor.detach, torch.detach, _get["data"]}
EACH_ELEMENT: Final[set[Any]] = {
    getattr(Tensor, name)
    for name in (
        "add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "neg_", "abs_", "pow_", "sqrt_",
        "square_", "exp_", "tanh_", "sign_", "round_", "zero_", "fill_", "nan_to_num_", "__iadd__", "__isub__",
        "__imul__", "__itruediv__",
    )
}  # fmt: skip
OWN: Final[set[Any]] = {  # of the parameter object, not of the elements
    Tensor.register_post_accumulate_grad_hook, Tensor.share_memory_, Tensor.is_shared, _tensor.retains_grad.__get__,
    _tensor.grad.__delete__,
}  # fmt: skip
NORMS: Final[set[Any]] = {torch.norm, Tensor.norm, torch.linalg.vector_norm, torch._foreach_norm}
_RANK_ZERO: Final = "lightning_utilities.core.rank_zero"

_ONE_RANK = (
    "a function decorated with rank_zero_only reads {name}, which is divided over ranks: all ranks have to read it, "
    "since each has only a part. Read it before the call of the function, for example with weight.norm() or "
    "weight.detach().cpu()"
)
STAGES_APART: Final = (
    "stages of a pipeline call this hook at different moments, for each microbatch: use weights in "
    "on_before_optimizer_step or on_train_batch_end"
)
FAILED_APART: Final = (
    "only this rank has failed, so other ranks don't run this hook and send no parts. Save checkpoints during the run, "
    "for example with ModelCheckpoint"
)
_STALE = "{name} has changed since this view of it was taken, and the weight is divided over ranks: take the view again"
_MOMENTS = (
    "a single stage of the pipeline has the optimizer's state of {name}: hooks can't read it; under strategy=ddp they "
    "can read the states of all weights"
)
BETWEEN: Final = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")  # forward and backward
_REBOUND: Final = (
    "{hook} assigns to parameter.data between forward and backward: a single process would compute gradients with the "
    "weights of the forward, but fsdp with the new weights. Change weights in on_train_batch_start or "
    "on_train_batch_end"
)
_NO_COPY: Final = "FSDP does not support deepcopy"  # in a message of torch
_COPIED: Final = (
    "a hook copies a module whose weights fsdp has sharded, for example with copy.deepcopy or AveragedModel: call "
    "AveragedModel in __init__ or configure_model and update_parameters in the hook, use the callback EMA or "
    "WeightAveraging, or copy the weights: {name: value.detach().clone() for name, value in self.state_dict().items()}"
)
_MIXED: Final = ("mixed torch.Tensor and DTensor", "require placement changes")  # in messages of torch
_GRADIENT: Final = (
    "a hook computes with a gradient that fsdp has sharded in a way that torch does not support for shards. Numbers "
    "and functions out of place work (gradient * mask for masks of gradient); for another tensor, shard it: "
    "torch.distributed.tensor.distribute_tensor(tensor, gradient.device_mesh, gradient.placements); or use strategy=ddp"
)
_WHOLE: Final = (
    "{hook} computes with a weight that fsdp has sharded, or a copy of it, and with an ordinary tensor, such as an "
    "average that was loaded from a checkpoint, which has whole tensors: shard that tensor first, by "
    "torch.distributed.tensor.distribute_tensor(tensor, weight.device_mesh, weight.placements); or use the callback "
    "EMA or WeightAveraging, or strategy=ddp"
)
_OF_GRADIENTS: Final = frozenset(
    ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
)
_SETS: Final = "aten.set_."  # in a message of torch
_SET: Final = "a hook changes the memory of a weight that fsdp has sharded, by set_: use weight.copy_(values)"
_EARLY: Final = (
    "on this rank, steps end before the code after the blocks of the pipeline: lists that they extend there, and their "
    "outputs, are empty in hooks. Call self.log in the step, or skip such code in the hook where they are empty"
)
_TIED = "another tensor can't share the memory of {name}, which is divided over ranks: use copy_"
_GRADIENTS = (
    "gradients of {name} in a hook: the weight is divided over ranks, and weight.detach() or weight.data has no "
    "gradient here. Compute gradients in training_step"
)


class DividedWeight(RuntimeError):
    """A hook uses a weight that is divided over ranks in a way that has no result of one process."""


@dataclass(frozen=True)
class Weight:
    """A parameter, buffer or optimizer moment that is divided over ranks.

    Attributes:
        name: name of the parameter or buffer.
        local: part on this rank; for a moment, the part of the moment.
        absent: whether the tensor is stored on other stages only.
        moment: whether the tensor is a moment of the optimizer.
    """

    name: str
    local: Tensor
    absent: bool = False
    moment: bool = False


@dataclass
class Gathered:
    """A whole copy of a weight; changes of the copy are written to the parts of all ranks.

    Attributes:
        weight: divided weight.
        whole: copy with all elements.
        weights: context of the hook.
        written: versions of the weight (changes by torch, changes by hooks) and of the copy when both were equal.
    """

    weight: Weight
    whole: Tensor
    weights: HookWeights
    written: tuple[tuple[int, int], int] = field(init=False)

    def __post_init__(self) -> None:
        self._note()

    def _note(self) -> None:
        self.written = self.weights.version(self.weight), self.whole._version

    def check(self) -> None:
        """Refuse the use of a view of elements that have changed.

        Raises:
            DividedWeight: the weight has changed since it was gathered.
        """
        if self.weights.version(self.weight) != self.written[0]:
            raise DividedWeight(_STALE.format(name=self.weight.name))

    @property
    def changed(self) -> bool:
        """Return whether a function has changed the elements since they were written."""
        return self.whole._version != self.written[1]

    def write(self) -> None:
        """Write the elements to the parts of all ranks, if a function has changed them."""
        if self.changed:
            self.weights.write(self.weight, self.whole)
            self._note()


class _Alias(Tensor):
    """The elements of a weight without its gradient, such as `weight.detach()`: functions see the whole weight."""

    weight: Weight
    weights: HookWeights
    local: Tensor  # shares memory with the part of this rank

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alias = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, _Alias))
        return alias.weights.call(func, args, kwargs or {})


class _View(Tensor):
    """A view of some elements of a gathered weight; changes of the view are written to the weight."""

    gathered: Gathered

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [value for value in tree_leaves((args, kwargs)) if isinstance(value, _View)]
        for view in views:
            view.gathered.check()
        if func == _get["data"]:  # a separate version counter would hide changes
            func = Tensor.detach
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            for view in views:
                view.gathered.write()
            return result if _is_one_of(result, views) else _as_views(result, [view.gathered for view in views])

    def __reduce_ex__(self, protocol: Any) -> Any:  # an ordinary tensor, for torch.save
        return self.clone().__reduce_ex__(protocol)


@final
class HookWeights(TorchFunctionMode):
    """Context of a hook, in which functions of torch see whole weights; the hook's changes reach the parts.

    Elementwise functions in place, such as `weight.clamp_(-1, 1)`, are computed with the parts. Other functions gather
    the weights that they read, so all ranks of the model have to call the hook.

    Args:
        division: division of the module.
        optimizers: optimizers of the module; their moments are divided like the weights.
        apart: reason why ranks call the hook at different moments, and can't gather; "" if all call it together.
        hook: name of the hook, if fsdp shards the weights.
    """

    def __init__(
        self, division: Division, optimizers: Sequence[Optimizer] = (), *, apart: str = "", hook: str = ""
    ) -> None:  # fmt: skip
        super().__init__()
        self._division, self._optimizers, self._apart, self._hook = division, optimizers, apart, hook
        self._known: dict[int, Weight] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if _PAUSES else self.call(func, args, kwargs or {})

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if isinstance(error, Exception) and self._division.ends_early:
            error.add_note(_EARLY)
        if isinstance(error, AssertionError) and _NO_COPY in str(error):
            raise DividedWeight(_COPIED) from error
        if isinstance(error, RuntimeError) and _SETS in str(error):  # torch passes set_ to no mode
            raise DividedWeight(_SET) from error
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _MIXED):
            text = _GRADIENT if self._hook in _OF_GRADIENTS else _WHOLE.format(hook=self._hook)
            raise DividedWeight(text) from error

    def call(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Apply a function of torch to arguments that include divided weights.

        Args:
            func: function of torch.
            args: positional arguments.
            options: named arguments.

        Raises:
            DividedWeight: the function has no result of one process here.
            DividedGradient: the function replaces a gradient by another part.
        """
        if func == _set["data"] and self._hook in BETWEEN and isinstance(args[0], nn.Parameter):
            raise DividedWeight(_REBOUND.format(hook=self._hook))
        if not self._has_divided((*args, *options.values())):
            return func(*args, **options)
        first = self._weight(args[0]) if args else None
        if first is not None and any(func in known for known in (PROPERTIES, AUTOGRAD, OWN, ALIASES, _set.values())):
            return self._of_parameter(first, func, args, options)
        if first is not None and func in EACH_ELEMENT and _plain((*args[1:], *options.values()), first):
            if self._apart == STAGES_APART:
                raise DividedWeight(f"a hook changes {first.name}, and {self._apart}")
            if not first.absent:
                func(_local(args[0]), *args[1:], **options)
            self._division.changes[first.name] += 1
            return args[0]
        if func in NORMS and not self._division.divides and len(args) <= 2 and options.keys() <= {"p", "ord"}:
            return self._of_shards(func, args, options)
        return self._of_whole(func, args, options)

    def write(self, weight: Weight, whole: Tensor) -> None:
        """Change this rank's part of a weight.

        Args:
            weight: weight to change.
            whole: new elements, equal on all ranks.
        """
        self._division.write(weight.name, weight.local, whole, absent=weight.absent)
        self._division.changes[weight.name] += 1

    def version(self, weight: Weight) -> tuple[int, int]:
        """Return numbers that differ after each change of a weight.

        Args:
            weight: weight of the hook's module.
        """
        return weight.local._version, self._division.changes[weight.name]

    # -- functions -----------------------------------------------------------------------------------------------

    def _of_parameter(self, weight: Weight, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return a property, gradient or alias, without elements of other ranks."""
        if func in SIZES:
            return func(self._division.empty(weight.name, weight.local), *args[1:], **options)
        if func in ALIASES:
            return self._alias(weight, _local(args[0]).detach())
        if func == _set["data"]:
            return self._set_data(weight, args[0], args[1])
        if func == _set["grad"]:
            return self._set_gradient(weight, args[0], args[1])
        if (func in AUTOGRAD or func in OWN) and isinstance(args[0], _Alias) and func != _get["grad"]:
            raise DividedWeight(_GRADIENTS.format(name=weight.name))
        result = func(_local(args[0]), *args[1:], **options)
        if func == _get["grad"] and result is None and weight.absent:
            result = weight.local if self._division.gradient_elsewhere(weight.local) else None
        if func == _get["grad"] and result is not None and self._division.divides:
            return hidden(result)
        return args[0] if result is weight.local else result

    def _alias(self, weight: Weight, local: Tensor) -> Tensor:
        shape = self._division.empty(weight.name, weight.local).shape
        alias = torch.zeros((), dtype=local.dtype, device=local.device).expand(shape).as_subclass(_Alias)
        alias.weight, alias.weights, alias.local = weight, self, local
        return alias

    def _set_data(self, weight: Weight, target: Tensor, value: Tensor) -> None:
        other = self._weight(value)
        whole = _whole_shard(value) if other is None else self._gather(other).whole
        if tuple(whole.shape) != tuple(self._division.empty(weight.name, weight.local).shape):
            raise ValueError(
                f"{weight.name}.data = ...: a divided weight keeps its shape, and a tensor of shape "
                f"{list(whole.shape)} was assigned"
            )
        if weight.absent or is_dtensor(weight.local):
            self.write(weight, whole)
        else:  # not written in place: a backward that follows may need the elements before
            _local(target).data = self._division.part_of(weight.name, weight.local, whole).detach().clone()
            self._division.changes[weight.name] += 1

    def _set_gradient(self, weight: Weight, parameter: Tensor, value: Any) -> None:
        if value is not None and self._has_divided([value]):
            raise DividedGradient(f"the gradient of {weight.name} is divided over ranks: set a whole tensor, or None")
        if value is None or isinstance(value, HiddenGradient) or is_dtensor(value):
            parameter.grad = value
        elif not weight.absent:
            parameter.grad = self._division.part_of(weight.name, weight.local, value.detach())

    def _of_shards(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return norms of weights that data parallelism shards, without whole weights in memory."""
        for value in tree_leaves(args):
            if (weight := self._weight(value)) is not None:
                self._check_readable(weight)
                self._division.meet(weight.name)
        with torch.no_grad():
            return tree_map(_whole_shard, func(*tree_map(_local, tuple(args)), **options))

    def _of_whole(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Apply a function to gathered weights, and write its changes to the parts."""
        if func == _set["data"]:
            raise DividedWeight(_TIED.format(name=next(w.name for w in map(self._weight, args) if w is not None)))
        gathered: dict[int, tuple[Any, Gathered]] = {}

        def replaced(value: Any) -> Any:
            weight = self._weight(value)
            if weight is None and is_dtensor(value) and not self._division.divides:
                weight = Weight("a shard", value)  # such as a gradient
            if weight is None:
                return value
            if id(value) not in gathered:
                gathered[id(value)] = value, self._gather(weight)
            return gathered[id(value)][1].whole

        before = RandomState()
        result = func(*tree_map(replaced, tuple(args)), **tree_map(replaced, options))
        if self._hook and before.differs(RandomState()):  # such as nn.init: data ranks draw different numbers
            for _, copy in gathered.values():
                if copy.changed:
                    self._division.from_first(copy.whole)
        changed = [(value, copy.whole) for value, copy in gathered.values() if copy.changed]
        for _, copy in gathered.values():
            copy.write()
        for value, whole in changed:
            if result is whole:
                return value
        return _as_views(result, [copy for _, copy in gathered.values()])

    def _gather(self, weight: Weight) -> Gathered:
        """Return the whole weight; all ranks of the model call it."""
        self._check_readable(weight)
        with torch.inference_mode(False), torch.no_grad():
            return Gathered(weight, self._division.whole_weight(weight.name, weight.local), self)

    def _check_readable(self, weight: Weight) -> None:
        """Refuse to read a weight at a moment at which other ranks do not.

        Raises:
            DividedWeight: the other ranks would not gather the weight.
        """
        if self._apart:
            raise DividedWeight(f"a hook reads {weight.name}, which is divided over ranks, and {self._apart}")
        if weight.moment and self._division.staged:
            raise DividedWeight(_MOMENTS.format(name=weight.name))
        if _of_rank_zero():
            raise DividedWeight(_ONE_RANK.format(name=weight.name))

    # -- arguments -----------------------------------------------------------------------------------------------

    def _weight(self, value: Any) -> Weight | None:
        if isinstance(value, _Alias):
            return value.weight
        if self._known is None:
            self._known = {id(weight.local): weight for weight in self._weights()}
        weight = self._known.get(id(value))
        return weight if weight is not None and weight.local is value else None

    def _weights(self) -> Iterator[Weight]:
        for name, tensor, absent in self._division.divided_tensors(also_shared=self._apart == STAGES_APART):
            yield Weight(name, tensor, absent)
            for optimizer in self._optimizers:
                for value in optimizer.state[tensor].values() if tensor in optimizer.state else ():
                    if isinstance(value, Tensor) and value.shape == tensor.shape and value.dim():
                        yield Weight(name, value, moment=True)

    def _has_divided(self, values: Iterable[Any]) -> bool:
        return any(
            self._has_divided(value.values() if isinstance(value, dict) else value)
            if isinstance(value, (list, tuple, dict))
            else isinstance(value, Tensor) and self._weight(value) is not None
            for value in values
        )


_PAUSES: Final[list[None]] = []


def is_paused() -> bool:
    """Return whether fabricx's code runs that a hook calls."""
    return bool(_PAUSES)


@contextmanager
def paused() -> Iterator[None]:
    """Context of fabricx's code that a hook calls, which works with the parts."""
    _PAUSES.append(None)
    try:
        yield
    finally:
        _PAUSES.pop()


@contextmanager
def resumed() -> Iterator[None]:
    """Context of user code that fabricx's code calls within a hook: it sees whole weights again."""
    pauses = list(_PAUSES)
    _PAUSES.clear()
    try:
        yield
    finally:
        _PAUSES[:] = pauses


def _local(value: Any) -> Tensor:
    """Return the part of an argument, as an ordinary tensor or a parameter."""
    return value.local if isinstance(value, _Alias) else value  # type: ignore[no-any-return]


def _whole_shard(value: Any) -> Any:
    return value.full_tensor() if is_dtensor(value) else value


def _plain(values: Iterable[Any], weight: Weight) -> bool:
    """Return whether further arguments are equal for all elements of a weight."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not tensors or (all(value.dim() == 0 for value in tensors) and not is_dtensor(weight.local))


def _is_one_of(result: Any, values: Sequence[Any]) -> bool:
    return any(result is value for value in values)


def _as_views(result: Any, gathered: Sequence[Gathered]) -> Any:
    """Return a result in which tensors and arrays with the memory of a copy are views of the weight."""
    memory = {copy.whole.untyped_storage().data_ptr(): copy for copy in gathered if copy.whole.numel()}

    def as_view(value: Any) -> Any:
        if hasattr(value, "setflags") and hasattr(value, "__array_interface__"):
            value.setflags(write=False)  # changes of an array would not reach the weight
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        copy = memory.get(value.untyped_storage().data_ptr())
        if copy is None:
            return value
        view = value.as_subclass(_View)
        view.gathered = copy
        return view

    return tree_map(as_view, result)


def _of_rank_zero() -> bool:
    """Return whether a function decorated with `rank_zero_only` is running."""
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != _RANK_ZERO:
        frame = frame.f_back
    return frame is not None
