"""The blocks of a module that a pipeline divides into stages: their names, their order, and their inputs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from fabricx.distributed.sharding.grad_hooks import number_of_hooks
from fabricx.distributed.statistics.sync_batchnorm import synchronised
from fabricx.errors import nearest
from fabricx.model_parallel.nested import Path, leaves, mapped
from fabricx.model_parallel.pipeline.block_calls import intercept
from fabricx.model_parallel.pipeline.seeds import seeds_of
from fabricx.model_parallel.pipeline.trace import Trace, tracing, undisturbed

Blocks = list[tuple[str, nn.Module]]
CANDIDATES: Final = 8  # chains that "auto" examines
REPEATS: Final = 3  # runs that are timed; the shortest times count
_CONTAINERS: Final = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
SAMPLES: Final = 2  # samples of the batch of `run`


_SHARED: Final = (
    "{name} has most of the weights, and is called several times in a step: a pipeline can't divide it; use "
    "strategy=tensor or strategy=fsdp. To divide the sequence, call it in a submodule, and set blocks=['SUBMODULE']"
)


class Slot:
    """Stands for a tensor in the structure of a block's output."""


@dataclass(frozen=True)
class Chain:
    """Blocks that are called in sequence, and the inputs with which a stage computes some of them.

    Positions are -1 before the blocks, i in block i and between it and the next, n after the last of n blocks. A chain
    is plain data: rank 0 measures it and the other ranks receive it, as times differ between ranks.

    Attributes:
        blocks: names, in the order of the calls.
        uses: positions of each parameter and each buffer; none for a tensor that the step doesn't use.
        buffers: names of buffers; the other names of `uses` are parameters.
        entries: for each block, the paths of the tensors from earlier positions that a stage which begins with it
            receives. Paths of the block's arguments begin with 0 for positional and 1 for keyword arguments. Tensors
            that pass the block by are found as ("argument", block, path), ("output", block, path), or as ("module",
            name, number of the call, path) for the output of a module outside of the blocks.
        outputs: for each block, the structure of the output; tensors are `Slot`.
        joined: boundaries without a cut, with the reason; boundary b is before block b.
        changing: shapes of tensors may depend on values of the batch.
        costs: seconds of forward and backward of two samples: before the blocks, of each block, after the blocks.
        sizes: bytes of the parameters at each position, in the order of `costs`.
        saved: bytes per sample that autograd stores at each position, in the order of `costs`.
        notes: differences of several microbatches from training in a single process, for the user.
        outside: blocks after which code uses the received tensors, too.
        calls: for each block, the number of calls before it of modules whose outputs pass it by.
        seeds: for each block, the numbers of `seeds_of`.
    """

    blocks: tuple[str, ...]
    uses: Mapping[str, frozenset[int]]
    buffers: frozenset[str]
    entries: tuple[tuple[Path, ...], ...]
    outputs: tuple[Any, ...]
    joined: Mapping[int, str]
    changing: bool
    costs: tuple[float, ...]
    sizes: tuple[int, ...]
    saved: tuple[float, ...]
    notes: tuple[str, ...] = ()
    outside: frozenset[int] = frozenset()
    calls: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    seeds: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def carried(self) -> frozenset[Path]:
        """Return the paths of tensors that pass blocks by."""
        return frozenset(path for paths in self.entries for path in paths if isinstance(path[0], str))

    def stages_of(self, name: str, cuts: Sequence[tuple[int, int]], stages: int) -> tuple[int, ...]:
        """Return the stages that hold a parameter or buffer.

        Args:
            name: name of the parameter or buffer.
            cuts: (begin, end) of the blocks of each chunk; chunk c belongs to stage `c % stages`.
            stages: number of stages.
        """
        places = self.uses[name]
        if not places:
            home = (number for number, block in enumerate(self.blocks) if name.startswith(f"{block}."))
            places = frozenset([next(home, -1)])
        return tuple(sorted({chunk_of(spot, cuts) % stages for spot in places}))


def chunk_of(position: int, cuts: Sequence[tuple[int, int]]) -> int:
    """Return the chunk that computes a position of the step.

    Args:
        position: see `Chain`.
        cuts: (begin, end) of the blocks of each chunk.

    >>> [chunk_of(position, [(0, 2), (2, 3)]) for position in (-1, 0, 1, 2, 3)]
    [0, 0, 0, 1, 1]
    """
    return next((chunk for chunk, (_, end) in enumerate(cuts) if position < end), len(cuts) - 1)


# -- which blocks -----------------------------------------------------------------------------------------------------


def find_blocks(
    module: nn.Module, blocks: str | Sequence[str], run: Callable[[], Any], *, outside: bool = False,
    carries: bool = False, streams: bool = False, single: bool = False,
) -> Blocks:  # fmt: skip
    """Return the blocks of a module, in their order.

    Args:
        module: the user's module.
        blocks: names of modules; or the name of their class; or "auto" for a run of modules in a list, a `Sequential`,
            or of the same class, that are called in sequence in the step: the run for which the largest part of
            the module that can't be divided is smallest.
        run: computes a training step.
        outside: the code after a block may use the arguments of the block, such as `x = block(x) + x`.
        carries: tensors may pass blocks by, such as those that the halves of a U-Net exchange.
        streams: a run that "auto" selects begins with a module that receives floating-point numbers, as blocks that
            divide a sequence do; embeddings of words and positions in the same container are no blocks.
        single: a single module may be the blocks. If a layer with most of the weights is called several times, as in
            ALBERT, "auto" selects the module that calls it.

    Raises:
        LookupError: the module or class does not exist.
        ValueError: fewer than two blocks, or no chain.
    """
    if blocks == "auto":
        return _detect(module, run, outside=outside, carries=carries, streams=streams, single=single)
    submodules = dict(module.named_modules())
    if isinstance(blocks, str):
        matches = [
            name for name, part in submodules.items() if any(c.__name__ == blocks for c in type(part).__mro__[:-2])
        ]
        matches = [
            name for name in matches if not any(name.startswith(f"{other}.") for other in matches if other != name)
        ]
        if not matches:
            classes = sorted({type(part).__name__ for part in submodules.values()})
            raise LookupError(f"blocks={blocks!r}: the module has no such class{_did_you_mean(blocks, classes)}")
    else:
        matches = list(blocks)
        for name in matches:
            if not name or name not in submodules:
                raise LookupError(f"blocks: the module has no part {name!r}{_did_you_mean(name, submodules)}")
    if len(matches) < (1 if single else 2) or len(set(matches)) < len(matches):
        raise ValueError(
            f"blocks={blocks!r}: a pipeline needs two or more different blocks, and this selects {matches}"
        )
    return [(name, submodules[name]) for name in matches]


def _did_you_mean(name: str, known: Any) -> str:
    close = nearest(name, known)
    return f". Did you mean {close!r}?" if close else f"; it has {', '.join(sorted(filter(None, known))[:20])}"


def _detect(
    module: nn.Module, run: Callable[[], Any], *, outside: bool, carries: bool, streams: bool, single: bool
) -> Blocks:  # fmt: skip
    calls, lookups, iterated = _calls(module, run)
    shared = next((name for name, part in module.named_modules() if part in iterated), "")
    if 2 * _size(module.get_submodule(shared)) <= _size(module):
        shared = ""
    if single and shared and (caller := _caller(module, shared, calls, lookups)):
        return caller
    candidates = _candidates(module, calls, lookups if streams else ())
    best: tuple[int, Blocks] | None = None
    refused = _SHARED.format(name=shared) if shared else "" if candidates else _repeated(module, calls)
    for blocks in candidates[:CANDIDATES]:
        if best is not None and best[0] <= _largest_part(module, blocks, calls):
            break
        names = [name for name, _ in blocks]
        try:
            received = range(outside * len(names))
            with undisturbed(module), tracing(module, names, outside=received, carries=carries) as trace:
                run()
        except ValueError as error:
            refused = refused or str(error)
            continue
        largest = _largest_part(module, blocks, calls, trace.joined)
        if len(trace.joined) < len(blocks) - 1 and (best is None or largest < best[0]):
            best = (largest, blocks)
        refused = refused or next(iter(trace.joined.values()), "")
    if best is None and shared:
        raise ValueError(f"blocks='auto' finds no chain of blocks: {refused}")
    if best is None:
        passed = "let a module return such tensors, " if candidates else ""
        raise ValueError(
            "blocks='auto' finds no chain of blocks, each of which is called once and takes the output of the one "
            f"before{f' ({refused})' * bool(refused)}; {passed}use strategy=tensor or fsdp, or name two or more "
            "modules: blocks=CLASS, or a list of names"
        )
    return best[1]


def _calls(
    module: nn.Module, run: Callable[[], Any]
) -> tuple[dict[nn.Module, list[tuple[int, int]]], set[nn.Module], set[nn.Module]]:  # fmt: skip
    """Return the (begin, end) of the calls of each module, as numbers in the order of time; modules that receive
    integers only, as embeddings do; and modules that receive their own output, as layers that share weights do."""
    calls: dict[nn.Module, list[tuple[int, int]]] = {}
    lookups: set[nn.Module] = set()
    iterated: set[nn.Module] = set()
    outputs: dict[nn.Module, list[Tensor]] = {}  # of the newest call
    begun: list[tuple[nn.Module, int]] = []
    clock = [0]

    def begin(part: nn.Module, args: Any, kwargs: Any) -> None:
        clock[0] += 1
        begun.append((part, clock[0]))
        tensors = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor.is_floating_point() for tensor in tensors):
            lookups.add(part)
        if any(tensor is output for output in outputs.get(part, ()) for tensor in tensors):
            iterated.add(part)

    def end(part: nn.Module, _: Any, output: Any) -> None:
        outputs[part] = [leaf for _, leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        while begun:
            other, at = begun.pop()
            if other is part:
                clock[0] += 1
                calls.setdefault(part, []).append((at, clock[0]))
                return

    with contextlib.ExitStack() as stack:
        for part in module.modules():
            stack.callback(part.register_forward_pre_hook(begin, with_kwargs=True).remove)
            stack.callback(part.register_forward_hook(end).remove)
        with undisturbed(module):
            run()
    return calls, lookups, iterated


def _candidates(
    module: nn.Module, calls: dict[nn.Module, list[tuple[int, int]]], excluded: Collection[nn.Module]
) -> list[Blocks]:  # fmt: skip
    """Return runs of modules that are called in sequence, the most promising first.

    Args:
        module: root module.
        calls: result of `_calls`.
        excluded: modules that begin no run.
    """
    matches: list[Blocks] = []
    for path, parent in module.named_modules():
        mixed = isinstance(parent, _CONTAINERS)
        runs: list[Blocks] = [[]]
        for name, child in _members(parent, calls):
            after = calls[runs[-1][-1][1]][0][1] if runs[-1] else 0
            once = len(calls.get(child, ())) == 1
            alike = mixed or not runs[-1] or type(child) is type(runs[-1][-1][1])
            if not (once and alike and calls[child][0][0] > after):
                runs.append([])
            if once and (runs[-1] or child not in excluded):
                runs[-1].append((f"{path}.{name}" if path else name, child))
        matches += [blocks for blocks in runs if sum(_size(block) > 0 for _, block in blocks) > 1]
    return sorted(matches, key=lambda blocks: (_largest_part(module, blocks, calls), -len(blocks)))


def _members(parent: nn.Module, calls: Mapping[nn.Module, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module, with those of lists that are not called in the place of the lists."""
    for name, child in parent.named_children():
        if isinstance(child, _CONTAINERS) and isinstance(parent, _CONTAINERS) and child not in calls:
            yield from ((f"{name}.{inner}", part) for inner, part in _members(child, calls))
        else:
            yield name, child


def _repeated(module: nn.Module, calls: dict[nn.Module, list[tuple[int, int]]]) -> str:
    """Return what a user can do about modules in a list that are called several times; "" if there are none."""
    for path, parent in module.named_modules():
        for name, child in parent.named_children() if isinstance(parent, nn.ModuleList | nn.Sequential) else ():
            if (times := len(calls.get(child, ()))) > 1 and _size(child):
                return (
                    f"{path}.{name} is called {times} times in a step: call the model once, with all inputs in one "
                    "batch, or use strategy=tensor or strategy=fsdp"
                )
    return ""


def _caller(module: nn.Module, name: str, calls: Mapping[nn.Module, Any], lookups: Collection[nn.Module]) -> Blocks:
    """Return the innermost module around a layer that is called once, and receives floating-point numbers."""
    while name := name.rpartition(".")[0]:
        part = module.get_submodule(name)
        if len(calls.get(part, ())) == 1 and part not in lookups:
            return [(name, part)]
    return []


def _largest_part(
    module: nn.Module, blocks: Blocks, calls: dict[nn.Module, list[tuple[int, int]]], joined: Collection[int] = ()
) -> int:  # fmt: skip
    """Return the elements of the parameters in the largest part that a pipeline of these blocks can't divide.

    Code before the blocks runs on all stages, so it counts twice.

    Args:
        module: root module.
        blocks: blocks of the pipeline.
        calls: result of `_calls`.
        joined: boundaries without a cut.
    """
    inside = {part for _, block in blocks for part in block.modules()}
    begin = calls[blocks[0][1]][0][0]
    before = after = 0
    for part in module.modules():
        if part not in inside:
            size = _size(part, deep=False)
            if calls.get(part, [(0, 0)])[0][0] < begin:
                before += size
            else:
                after += size
    parts: list[int] = []
    for number, (_, block) in enumerate(blocks):
        if number in joined:
            parts[-1] += _size(block)
        else:
            parts.append(_size(block))
    return max(2 * before, after, *parts)


def _size(part: nn.Module, *, deep: bool = True) -> int:
    """Return the number of elements of the parameters of a module, without embeddings, which need no time."""
    return sum(
        parameter.numel()
        for inner in (part.modules() if deep else [part])
        if not isinstance(inner, (nn.Embedding, nn.EmbeddingBag))
        for parameter in inner.parameters(recurse=False)
    )


# -- their inputs ------------------------------------------------------------------------------------------------------


def trace_chain(module: nn.Module, blocks: Blocks, run: Callable[[], Any], *, carries: bool = False) -> Chain:
    """Observe a step, and measure its parts.

    Args:
        module: the user's module.
        blocks: result of `find_blocks`.
        run: computes a training step on two samples, in training mode; returns the step's result. Random numbers,
            buffers and gradients are restored.
        carries: see `find_blocks`.

    Raises:
        ValueError: the blocks form no chain, or the module can't be trained in a pipeline; the message has the remedy.
    """
    if synchronised(module):
        raise ValueError(
            "SyncBatchNorm can't be computed in a pipeline, whose microbatches have statistics of their own: don't set "
            "sync_batchnorm, or use GroupNorm or LayerNorm"
        )
    names = [name for name, _ in blocks]
    with undisturbed(module):
        with tracing(module, names, outside=range(len(names)), carries=carries) as trace:
            run()
        costs = _measure(module, names, run)
    places = range(-1, len(names) + 1)
    parameters = dict(module.named_parameters())
    sizes = dict.fromkeys(places, 0)
    for name, parameter in parameters.items():
        for spot in trace.uses.get(name, ()):
            sizes[spot] += parameter.numel() * parameter.element_size()
    return Chain(
        blocks=tuple(names),
        uses={name: frozenset(trace.uses.get(name, ())) for name in (*parameters, *dict(module.named_buffers()))},
        buffers=frozenset(name for name, _ in module.named_buffers()),
        entries=tuple(trace.entries),
        outputs=tuple(mapped(output, _slot) for output in trace.outputs),
        joined=dict(sorted(_nested(module, names, trace).items())),
        outside=frozenset(trace.used_outside),
        calls={
            number: {path[1]: trace.calls[number][path[1]] for path in paths if path[0] == "module"}
            for number, paths in enumerate(trace.entries)
        },
        changing=trace.changing,
        costs=costs,
        sizes=tuple(sizes.values()),
        saved=tuple(trace.saved[spot] / SAMPLES for spot in places),
        notes=(*_notes(module), *_passing(names, trace.entries)),
        seeds=seeds_of(module, names),
    )


def _slot(path: Path, leaf: Any) -> Any:
    """Return the substitute for a leaf of an output on a stage that doesn't compute it."""
    return Slot() if isinstance(leaf, Tensor) else leaf


def _nested(module: nn.Module, names: Sequence[str], trace: Trace) -> dict[int, str]:
    """Return the boundaries without a cut, also after blocks with an output that can't be described."""
    joined = dict(trace.joined)
    for number, output in enumerate(trace.outputs[:-1]):
        for _, leaf in leaves(output):
            if not isinstance(leaf, (Tensor, int, float, str, type(None))):
                joined.setdefault(
                    number + 1, f"{names[number]} returns an object of class {type(leaf).__name__}, which other stages "
                    "don't have",
                )  # fmt: skip
    return joined


def _notes(module: nn.Module) -> Iterator[str]:
    batch = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if batch:
        yield (
            f"{batch[0]} normalises each microbatch by its own statistics, as with accumulate_grad_batches: set "
            "microbatches=1 for the statistics of the whole batch"
        )
    if hooked := [name for name, parameter in module.named_parameters() if number_of_hooks(parameter)]:
        yield (
            f"gradient hooks of {hooked[0]} receive the gradient of a microbatch, as with accumulate_grad_batches: "
            "set microbatches=1 if they need the gradient of the whole batch"
        )
    spectral = [name for name, part in module.named_modules() if _normalises_spectrally(part)]
    if spectral:
        yield f"{spectral[0]} runs a power iteration per microbatch: set microbatches=1 for one iteration per batch"


def _passing(names: Sequence[str], entries: Sequence[tuple[Path, ...]]) -> Iterator[str]:
    """Yield a note of tensors that pass blocks by."""
    for paths in entries:
        for kind, source, *_ in paths:
            if isinstance(kind, str):
                of = f"{kind} of {source if kind == 'module' else names[source]}".replace("module of", "output of")
                yield f"some tensors pass blocks by, such as the {of}: the stages between receive and send them, too"
                return


def _normalises_spectrally(part: nn.Module) -> bool:
    parts = (part, *part._forward_pre_hooks.values())
    return any(type(entry).__name__.strip("_") == "SpectralNorm" for entry in parts)


# -- their times ------------------------------------------------------------------------------------------------------


class _Clock:
    """Times of a step: forward until each block begins, backward until the gradient of the inputs is computed.

    Args:
        entries: see `Chain`.
        device: device of the module.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._device = device
        self.forward = [0.0] * (number + 1)
        self.backward = [0.0] * (number + 1)

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def call(self, number: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.forward[number]:  # a checkpointed block computes again, in the backward
            return call(*args, **kwargs)
        self.watch(number, (args, kwargs))
        self.forward[number] = self.now()
        output = call(*args, **kwargs)
        if number == len(self.forward) - 2:
            self.forward[-1] = self.now()
            self.watch(number + 1, output)
        return output

    def watch(self, number: int, values: Any) -> None:
        for _, leaf in leaves(values):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(functools.partial(self._reached, number))

    def _reached(self, number: int, gradient: Tensor) -> None:
        if not self.backward[number]:  # of several inputs, the first: further inputs may bypass the blocks
            self.backward[number] = self.now()


def _measure(module: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> tuple[float, ...]:
    """Return the shortest of several times of each part of a step, forward and backward."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    shortest = [float("inf")] * (len(names) + 2)
    for _ in range(REPEATS):
        clock = _Clock(len(names), device)
        with contextlib.ExitStack() as stack:
            for number, name in enumerate(names):
                stack.callback(intercept(module.get_submodule(name), functools.partial(clock.call, number)))
            begin = clock.now()
            outputs = run()
            middle = clock.now()
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.sum().backward()
            end = clock.now()
        forward = [begin, *clock.forward, middle]
        times = [late - early for early, late in itertools.pairwise(forward)]
        if all(clock.backward):
            backward = [end, *clock.backward, middle]
            for number, (late, early) in enumerate(itertools.pairwise(backward)):
                times[number] += max(late - early, 0.0)
        else:  # parts are frozen: the usual ratio
            times = [3 * spent for spent in times]
        shortest = [min(old, new) for old, new in zip(shortest, times, strict=True)]
    return tuple(shortest)
