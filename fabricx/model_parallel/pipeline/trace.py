"""Observes a run of the training step: where each parameter is used, and which tensors pass between blocks.

A *position* is a part of the step: -1 before the blocks, i in block i and in the code between it and the next block, n
after the last of n blocks. A *boundary* b is a place where the pipeline can be cut: between block b - 1 and block b.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fabricx.core.module_state.buffers import BufferMark
from fabricx.core.module_state.rng import random_kept
from fabricx.errors import FabricxError
from fabricx.model_parallel.nested import Path, leaves, mapped, named
from fabricx.model_parallel.pipeline.block_calls import intercept
from fabricx.model_parallel.pipeline.storages import kept_alive, same_values, storage_of, written_storages
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor

_CHANGING: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
OTHER: Final = "name other blocks (blocks=...), or use another strategy"


class Trace(TorchDispatchMode):
    """Records the use of parameters and buffers, and the tensors that the blocks exchange.

    A tensor is *derived* if it was computed from a parameter, or was returned by a block: another stage of a pipeline
    does not have its value, in contrast to tensors computed from the batch before the blocks.

    Args:
        names: names of the blocks, in the order of their calls.
        parameters: of the module, by name.
        buffers: returns those of the module, by name, also later, when the step may have assigned others.
        outside: boundaries b for which the code after block b may use the arguments of block b, as `x = block(x) + x`.
        carries: at these boundaries, tensors may pass blocks by, as in the U-Net: the stages between pass them on.

    Attributes:
        used_outside: such boundaries, for which it does.
        uses: positions of each parameter and buffer that the step uses.
        entries: for each block, the paths of its derived arguments, as (0, number, ...) and (1, name, ...); then the
            paths of tensors that pass the block by, as `sources` has them.
        outputs: for each block, its output.
        calls: for each block, the number of calls of each module before it, outside of the blocks.
        joined: boundaries at which the pipeline can't be cut, with the reason.
        changing: shapes, or numbers in Python, may depend on values of the batch.
        saved: bytes that autograd stores, by position, without parameters.
    """

    def __init__(
        self, names: Sequence[str], parameters: Mapping[str, Tensor], buffers: Callable[[], Mapping[str, Tensor]],
        outside: Collection[int] = (), *, carries: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[str, set[int]] = {}
        self.entries: list[tuple[Path, ...]] = [()] * len(names)
        self.outputs: list[Any] = [None] * len(names)
        self.joined: dict[int, str] = {}
        self.changing = False
        self.saved = dict.fromkeys(range(-1, len(names) + 1), 0)
        self._names, self._present, self._buffers = list(names), buffers, dict(buffers())
        self._assigned = dict(self._buffers)  # the newest tensor of each buffer
        self._state = {storage_of(tensor): name for name, tensor in {**self._buffers, **parameters}.items()}
        self._parameters = set(parameters)
        self._position, self._inside, self._calls = -1, False, 0
        self._gradients = torch.is_grad_enabled()
        self._paused = False  # for computations of this class
        self._counted: set[int] = set()
        self._made: dict[int, int] = {}  # position at which each derived storage was written last
        self._entered: list[set[int]] = [set() for _ in names]  # storages of the derived arguments of each block
        self._arguments: list[dict[int, Tensor]] = [{} for _ in names]  # derived arguments of each block, by id
        self._sources: dict[int, tuple[Tensor, Path, int]] = {}  # by id: a tensor that all stages can find, its path,
        # and the position from which on
        self._carried: list[dict[Path, None]] = [{} for _ in names]  # paths of sources that pass each boundary
        self._returns: dict[str, int] = {}  # calls of each module outside of the blocks
        self.calls: list[dict[str, int]] = [{} for _ in names]
        self._views: dict[int, tuple[Tensor, int, list[Tensor]]] = {}  # view, position at which it was made, bases
        self._current: list[Tensor] = []  # tensors of the code between blocks that a function of torch receives
        self._outside, self._carries, self.used_outside = outside, carries, set[int]()
        self._derived: set[str] = set()  # buffers with derived values
        self._values: dict[str, Tensor] = {}
        self._written: dict[str, set[int]] = {}
        self._hooks: list[Any] = []
        self._kept: list[Any] = []  # storages that have a number in the tables

    # -- calls of blocks ----------------------------------------------------------------------------------------------

    def call(self, number: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Observe the call of a block.

        Args:
            number: number of the block.
            call: call of the block.
            args, kwargs: its arguments.

        Raises:
            ValueError: the blocks are not called once each, in order.
        """
        if self._inside:
            raise ValueError(
                f"{self._names[self._position]} calls {self._names[number]}: blocks can't be nested; {OTHER}"
            )
        if number != self._calls:
            expected = self._names[self._calls] if self._calls < len(self._names) else "no further block"
            raise ValueError(
                f"the step calls {self._names[number]} where {expected} was expected: a pipeline needs blocks "
                f"that are called once in a step, one after another; {OTHER}"
            )
        if torch.is_grad_enabled() is not self._gradients:
            raise ValueError(
                f"{self._names[number]} is called without gradients, as torch.utils.checkpoint does with "
                "use_reentrant=True: pass use_reentrant=False (in transformers, "
                "gradient_checkpointing_kwargs={'use_reentrant': False})"
            )
        self._move(number)
        self._calls += 1
        self._watch(args, kwargs)
        self._enter(number, args, kwargs)
        self._add_sources(("argument", number), (args, kwargs))
        self.calls[number] = dict(self._returns)
        self._inside = True
        output = call(*args, **kwargs)
        # Within the block: it may return its argument, as dropout does in evaluations, and `detach` uses it.
        self.outputs[number] = mapped(output, _detached)  # autograd refers to `pack`: this object must hold no graph
        self._inside = False
        for _, leaf in leaves(output):
            if isinstance(leaf, Tensor) and storage_of(leaf) not in self._state:
                self._mark(storage_of(leaf), leaf)
        self._add_sources(("output", number), output)
        if number == len(self._names) - 1:
            self._move(number + 1)
        else:
            self._watch(output)
        return output

    def _watch(self, *values: Any) -> None:
        """Refuse gradients that the step computes through a block; the backward of the loss comes after the trace."""
        for _, leaf in leaves(values):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self._hooks.append(leaf.register_hook(_refuse_derivative))

    def close(self) -> None:
        """Remove the hooks of the tensors between blocks, and forget tensors that have a graph."""
        for hook in self._hooks:
            hook.remove()
        self._arguments, self._views, self._current = [{} for _ in self._names], {}, []
        self._sources = {}

    def returned(self, name: str, output: Any) -> None:
        """Observe the end of a call of a module.

        Args:
            name: name of the module.
            output: of the call.
        """
        if not self._inside and not self._paused:
            number = self._returns[name] = self._returns.get(name, 0) + 1
            self._add_sources(("module", name, number), output)

    def _add_sources(self, path: Path, values: Any) -> None:
        """Record tensors that a stage can replace by tensors of the stage before: no views of the user's code."""
        if not self._carries:
            return
        for inner, leaf in leaves(values, path):
            plain = isinstance(leaf, Tensor) and not isinstance(leaf, ShardedTensor)
            if plain and (path[0] != "argument" or not leaf._is_view()):
                _, _, known = self._sources.get(id(leaf), (None, (), self._position))
                if known == self._position:  # the newest: in evaluations, dropout returns its input
                    self._sources[id(leaf)] = (leaf, inner, known)

    def _enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        paths = []
        for path, leaf in leaves((args, kwargs)):
            if not isinstance(leaf, Tensor):
                continue
            made = self._made.get(storage_of(leaf))
            if made is None or (made >= number):
                continue
            paths.append(path)
            for boundary in range(max(made + 1, 1), number):
                if storage_of(leaf) not in self._entered[boundary] and not self._carry([leaf], boundary):
                    self._join(
                        boundary, f"{self._names[number]} takes {named(path)}, which is computed {self._place(made)} "
                        f"but {self._names[boundary]} doesn't take it",
                    )  # fmt: skip
            self._entered[number].add(storage_of(leaf))
            if number in self._outside and not isinstance(leaf, ShardedTensor):
                self._arguments[number][id(leaf)] = leaf
        self.entries[number] = tuple(paths)

    def _move(self, position: int) -> None:
        """Begin a position; find the buffers that were written or assigned in the previous position."""
        self._paused = True
        for name, tensor in self._present().items():
            if name in self._buffers and tensor is not self._assigned[name]:
                self.uses.setdefault(name, set()).add(self._position)
                self._assigned[name] = tensor
                if self._position >= 0 or storage_of(tensor) in self._made:
                    self._written.setdefault(name, set()).add(self._position)
        for name in self._buffers:
            used = self._position in self.uses.get(name, ())
            if used and not same_values(self._buffers[name], self._values.get(name)):
                if self._position >= 0 or name in self._derived:  # before the blocks, all stages write the same value
                    self._written.setdefault(name, set()).add(self._position)
                self._values[name] = self._buffers[name].detach().clone()
        self._paused, self._position = False, position

    def finish(self, *, calls_blocks: bool = True) -> None:
        """Complete the record after the step.

        Args:
            calls_blocks: the step has to call the blocks.

        Raises:
            ValueError: a block was not called.
        """
        if self._calls < len(self._names) and (calls_blocks or self._calls):
            raise ValueError(
                f"the step doesn't call {self._names[self._calls]}: a pipeline needs blocks that are called once "
                f"in a step, one after another (by block(...), not by block.forward(...)); {OTHER}"
            )
        self._move(self._position)
        for name, written in self._written.items():
            places = sorted(self.uses[name])
            other = places[0] if places[0] not in written else places[-1]
            for boundary in self._between(places[0], places[-1]):
                self._join(
                    boundary, f"the buffer {name} is written {self._place(min(written))} and also used "
                    f"{self._place(other)}",
                )  # fmt: skip
        self.entries = [(*paths, *carried) for paths, carried in zip(self.entries, self._carried, strict=True)]
        self._made.clear()
        self._kept.clear()

    # -- tensors ------------------------------------------------------------------------------------------------------

    def call_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch for the code of the step; note its tensors, and which views of them it returns.

        Args:
            func: function or method of torch.
            args, kwargs: its arguments.
        """
        if self._inside or self._paused or not self._outside:
            return func(*args, **kwargs)
        self._current = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            output = func(*args, **kwargs)
        finally:
            current, self._current = self._current, []
        for _, leaf in leaves(output):
            if isinstance(leaf, Tensor) and self._made.get(storage_of(leaf), self._position) < self._position:
                bases = [tensor for tensor in current if storage_of(tensor) == storage_of(leaf)]
                if not any(leaf is tensor for tensor in bases):
                    self._views[id(leaf)] = (leaf, self._position, bases)
        return output

    def _carry(self, tensors: Sequence[Tensor], boundary: int) -> bool:
        """Let a stage that begins at a boundary receive tensors; returns whether that is possible."""
        needed = [self._needed(tensor, boundary) for tensor in tensors]
        if boundary not in self._outside or not needed or any(paths is None for paths in needed):
            return False
        for paths in needed:
            self._carried[boundary].update(dict.fromkeys(paths or ()))
        self.used_outside.add(boundary)
        return True

    def _needed(self, tensor: Tensor, boundary: int) -> list[Path] | None:
        """Return the sources that a stage that begins at a boundary needs for a tensor; None if it can't have it.

        It is an argument of the first block, which the stage receives in any case; a source; or a view of these.
        """
        if id(tensor) in self._arguments[boundary]:
            return []
        _, path, known = self._sources.get(id(tensor), (None, (), boundary))
        if known < boundary:
            return [path]
        _, made, bases = self._views.get(id(tensor), (None, -1, []))
        needed = [self._needed(base, boundary) for base in bases]
        if made < boundary or not needed or any(paths is None for paths in needed):
            return None
        return [path for paths in needed for path in paths or ()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        if self._paused:
            return func(*args, **(kwargs or {}))
        derived = False
        inputs = [leaf for _, leaf in leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        written = written_storages(func, args, kwargs or {})
        for tensor in inputs:
            derived |= self._use(storage_of(tensor), func, written)
        if self._position < len(self._names) and any(tag in func.tags for tag in _CHANGING):
            self.changing = self.changing or _depends_on_values(func.__name__, inputs)
        if derived and not self._inside and torch.Tag.data_dependent_output in func.tags:
            for boundary in range(max(self._position + 1, 1), len(self._names)):
                self._join(
                    boundary, f"the step reads a value {self._place(self._position)} in Python, in a condition or by "
                    "item(), and later stages don't have this value",
                )  # fmt: skip
        output = func(*args, **(kwargs or {}))
        if derived:
            for _, leaf in leaves(output):
                if isinstance(leaf, Tensor):
                    self._write(leaf, any(leaf is tensor for tensor in inputs))
        return output

    def _use(self, key: int, func: Any, written: set[int]) -> bool:
        """Record the use of a storage by an operator that writes to some; returns whether its value is derived."""
        name = self._state.get(key)
        if name is not None:
            if name in self._buffers and name not in self._values:
                self._values[name] = self._buffers[name].detach().clone()
            self.uses.setdefault(name, set()).add(self._position)
            return name in self._parameters or name in self._derived
        made = self._made.get(key)
        if made is None:
            return False
        if made < self._position and not (self._inside and key in self._entered[self._position]):
            objects = [tensor for tensor in self._current if storage_of(tensor) == key and key not in written]
            for boundary in self._between(made, self._position):
                if not self._carry(objects, boundary):
                    self._join(
                        boundary, f"a tensor computed {self._place(made)} is used {self._place(self._position)} "
                        f"({func.__name__.partition('.')[0]}), but is not an argument of the blocks between",
                    )  # fmt: skip
        return True

    def _write(self, tensor: Tensor, in_place: bool) -> None:
        key = storage_of(tensor)
        if key in self._state:
            if in_place and self._state[key] in self._buffers:
                self._derived.add(self._state[key])
        elif in_place or key not in self._made:  # a view has the age of its base
            self._mark(key, tensor)

    def _mark(self, key: int, tensor: Tensor) -> None:
        if key not in self._made:
            self._kept.append(kept_alive(tensor))
        self._made[key] = self._position

    def logged(self, name: str, value: Any) -> None:
        """Record a call of `self.log`: values of the step are reported by the last stage.

        Args:
            name: name of the value.
            value: nested tensors and numbers.
        """
        for _, leaf in leaves(value):
            made = self._made.get(storage_of(leaf)) if isinstance(leaf, Tensor) else None
            made = self._position if made is None and self._position >= 0 else made
            for boundary in self._between(len(self._names) if made is None else made, len(self._names)):
                self._join(boundary, f"self.log({name!r}) logs a value that is computed {self._place(made)}, which the "
                           "last stage doesn't have; log it after the blocks")  # fmt: skip

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd stores; returns another tensor: a graph that stores its own output never ends.

        Args:
            tensor: stored.
        """
        key = storage_of(tensor)
        if key not in self._state and key not in self._counted:
            self._counted.add(key)
            self._kept.append(kept_alive(tensor))
            self.saved[self._position] += tensor.numel() * tensor.element_size()
        return tensor.detach()

    # -- texts --------------------------------------------------------------------------------------------------------

    def _between(self, first: int, last: int) -> range:
        """Return the boundaries between two positions."""
        return range(max(first + 1, 1), min(last + 1, len(self._names)))

    def _join(self, boundary: int, reason: str) -> None:
        self.joined.setdefault(boundary, reason)

    def _place(self, position: int | None) -> str:
        if position is None or position < 0:
            return "before the blocks"
        return f"in {self._names[position]}" if position < len(self._names) else "after the blocks"


@final
class _Functions(TorchFunctionMode):
    """Passes calls of functions of torch to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        return self._trace.call_function(func, args, kwargs or {})


@contextlib.contextmanager
def tracing(
    module: nn.Module, names: Sequence[str], *, calls_blocks: bool = True, outside: Collection[int] = (),
    carries: bool = False,
) -> Iterator[Trace]:  # fmt: skip
    """Observe the step that runs in this context.

    Args:
        module: the user's module.
        names: names of its blocks, in the order of their calls.
        calls_blocks: the step has to call the blocks.
        outside, carries: see `Trace`.
    """
    trace = Trace(
        names, dict(module.named_parameters()), lambda: dict(module.named_buffers()), outside, carries=carries
    )  # fmt: skip
    parts = {part: name for name, part in module.named_modules()}

    def returned(part: nn.Module, inputs: Any, output: Any) -> None:
        if part in parts:
            trace.returned(parts[part], output)

    with contextlib.ExitStack() as stack:
        stack.callback(register_module_forward_hook(returned).remove)
        for number, name in enumerate(names):
            call = functools.partial(trace.call, number)
            stack.callback(intercept(module.get_submodule(name), call))
        stack.callback(trace.close)
        stack.enter_context(log_calls(module, trace.logged))
        stack.enter_context(trace)
        stack.enter_context(_Functions(trace))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(trace.pack, lambda tensor: tensor))
        yield trace
    trace.finish(calls_blocks=calls_blocks)


@contextlib.contextmanager
def log_calls(module: Any, logged: Callable[[str, Any], None]) -> Iterator[None]:
    """Context in which values of `self.log` and `self.log_dict` are also passed to a function.

    Args:
        module: the user's module.
        logged: called with the name and the value.
    """
    before = {name: vars(module).get(name) for name in ("log", "log_dict") if callable(getattr(module, name, None))}

    def log(call: Callable[..., Any], name: str, value: Any, *args: Any, **options: Any) -> Any:
        logged(name, value)
        return call(name, value, *args, **options)

    def log_dict(call: Callable[..., Any], values: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        for name, value in values.items():
            logged(name, value)
        return call(values, *args, **options)

    for name in before:
        vars(module)[name] = functools.partial(log if name == "log" else log_dict, getattr(module, name))
    try:
        yield
    finally:
        for name, logger in before.items():
            if logger is None:
                del vars(module)[name]
            else:
                vars(module)[name] = logger


def _refuse_derivative(gradient: Tensor) -> None:
    raise FabricxError(
        "training_step differentiates through the model, for example with torch.autograd.grad for a gradient penalty, "
        "and no rank of a pipeline, or of a divided sequence, has the graph of all blocks: use strategy=ddp or "
        "strategy=fsdp, or a penalty without derivatives, such as finite differences in one call of the model"
    )


def _depends_on_values(name: str, inputs: Sequence[Tensor]) -> bool:
    """Return whether an operator with a tag of `_CHANGING` has shapes, or a number, that depend on values."""
    if name == "index.Tensor":  # with a mask only
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
    return not (name == "_local_scalar_dense.default" and inputs[0].dtype is torch.bool)  # a condition


def _detached(path: Path, leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Restore random numbers, buffers and gradients at the end.

    Args:
        module: the user's module.
    """
    buffers = BufferMark(module)
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with random_kept():
        try:
            yield
        finally:
            buffers.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient
