"""Context parallelism of an unchanged module: each rank computes the blocks for a shard of the sequence.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; Dubey et al., "The
Llama 3 Herd of Models", 2024 (section 3.3.2: keys and values are gathered, and the sequence divided from both ends).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from fabricx.distributed.world import World
from fabricx.model_parallel.context.functions import ContextFunctions
from fabricx.model_parallel.context.sequence_shard import SequenceShard, joined
from fabricx.model_parallel.context.shard_outputs import ShardOutputs
from fabricx.model_parallel.context.stored_positions import StoredPositions
from fabricx.model_parallel.nested import leaves, mapped, named
from fabricx.model_parallel.pipeline.chain import Blocks, find_blocks
from fabricx.model_parallel.recomputation import recomputing
from fabricx.model_parallel.trial import Record, StepChanged, check_unchanged, fingerprint, recorded_step

REMEDY: Final = (
    "Under context parallelism blocks compute each position by itself, except in F.scaled_dot_product_attention and "
    "nn.MultiheadAttention. Convolutions and sums over the sequence, attention by products of matrices (in "
    "transformers attn_implementation='eager') or flex_attention, and losses inside of blocks are not supported: use "
    "attn_implementation='sdpa' in the configuration where the model has it, choose other blocks by blocks=CLASS or a "
    "list of names, or use strategy=tensor"
)


def context_blocks(module: nn.Module, blocks: str | Sequence[str], run: Callable[[], Any]) -> Blocks:
    """Return the blocks that compute shards of the sequence, in their order.

    Args:
        module: the user's module.
        blocks: as in `find_blocks`.
        run: computes a training step.

    Raises:
        LookupError: a module or class of `blocks` does not exist.
        ValueError: the blocks are not a chain.
    """
    return find_blocks(module, blocks, run, streams=True, single=True)


@final
class ContextParallel:
    """Shards the sequence from the first to the last block; the rest of a step is computed whole on each rank.

    The step thus sees whole batches, logits and losses, which are equal on all ranks. Gradients of parameters have to
    be averaged over the ranks.

    Args:
        module: root module, whole, with equal weights on all ranks.
        blocks: names and modules in the order of their calls; the first tensor argument of the first has the sequence.
        world: ranks along the context axis.
        dim: dimension of the sequence in that argument.
        ring: attention passes keys and values from rank to rank; otherwise it gathers them.
        ordinary: returns an activation as an ordinary tensor, if it is sharded along a further axis, too.
    """

    def __init__(
        self, module: nn.Module, blocks: Blocks, world: World, *, dim: int = 1, ring: bool = False,
        ordinary: Callable[[Any], Any] = lambda value: value,
    ) -> None:  # fmt: skip
        self._module, self._blocks, self._world, self._dim, self._ordinary = module, blocks, world, dim, ordinary
        self._mode = ContextFunctions(world, dim, module.buffers(), ring=ring)
        self._ring = ring
        self._stored = StoredPositions(blocks)
        self._active = self._learns = False
        self._length = 0  # of the whole sequence, in the blocks
        self._dims: dict[tuple[int, tuple[Any, ...]], int] = {}  # of the sequence, by block and path of the argument
        self._shards: dict[tuple[int, int, torch.device], SequenceShard] = {}
        self._hooks: list[Any] = []
        for number, (_, block) in enumerate(blocks):
            enter: Any = functools.partial(self._enter, number)
            self._hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._hooks.append(blocks[-1][1].register_forward_hook(self._leave))

    def describe(self) -> list[str]:
        """Return lines for the main rank to print."""
        first, last = self._blocks[0][0], self._blocks[-1][0]
        keys = "pass from rank to rank" if self._ring else "are gathered"
        parts = f"{first} computes" if first == last else f"{first} to {last} compute"
        return [
            f"context: {parts} {self._world.size} shards of the sequence, whose keys and values "
            f"{keys}; all else is computed whole on each rank"
        ]

    def undo(self) -> None:
        """Remove the hooks from the blocks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- the step ------------------------------------------------------------------------------------------------

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step in which blocks compute this rank's shard; the outputs are of the whole sequence.

        Args:
            step: training, validation, test or predict step of the module.
        """

        @functools.wraps(step)
        def sharded_step(*args: Any, **options: Any) -> Any:
            self._mode.within = False
            with self._activated(None):
                return step(*args, **options)

        return sharded_step

    @contextmanager
    def _activated(self, shard: SequenceShard | None) -> Iterator[None]:
        before, fast_path = (self._active, self._mode.shard), torch.backends.mha.get_fastpath_enabled()
        self._active, self._mode.shard = True, shard
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with self._mode, recomputing(lambda: self._activated(self._mode.shard)):
                yield
        finally:
            self._active, self._mode.shard = before
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def _enter(self, number: int, block: nn.Module, args: Any, options: Any) -> Any:
        """Divide the arguments of a block along the sequence."""
        if not self._active:
            return None
        if number == 0:
            self.begin((args, options))
        if self._learns:
            self._learn(number, (args, options))
        if self._mode.shard is None:
            return None
        return mapped((args, options), lambda path, leaf: self._part(number, path, leaf))

    def begin(self, inputs: Any) -> None:
        """Begin a sequence; stages of a pipeline that do not compute the first block call it, too.

        Args:
            inputs: arguments of the first block, with the whole sequence.

        Raises:
            ValueError: the sequence can't be divided.
        """
        path, stream = self._stream(inputs)
        self._mode.shard, self._length = None, stream.shape[self._dim]
        self._mode.length = self._length
        self._dims[0, path] = self._dim
        shard = self._shard(stream, self._other_lengths(path, inputs))
        stale = self._stored.begin(self._length, shard, inputs)
        if stale is not None:
            self._mode.stale = stale
        self._mode.shard, self._mode.within = shard, True

    def _other_lengths(self, stream: tuple[Any, ...], inputs: Any) -> set[int]:
        """Return lengths of second sequences, such as the memory of a decoder, which no shard may have."""
        others = set(self._mode.memories)
        for path, leaf in leaves(inputs):
            dim = self._dims.get((0, path), self._dim)
            if path != stream and isinstance(leaf, Tensor) and dim < leaf.dim():
                others.add(leaf.shape[dim])
        return others

    def _shard(self, stream: Tensor, others: set[int]) -> SequenceShard | None:
        """Return the shard of a sequence that is computed; None for the whole sequence."""
        ranks = self._world.size
        if self._learns or (not torch.is_grad_enabled() and self._length < 2 * ranks):
            return None  # a short evaluation, such as the next word of a text, is computed whole on each rank
        piece = -(-self._length // (2 * ranks))
        while 2 * piece in (*others, self._length):  # a larger shard is recognised by its number of positions, too
            piece += 1
        key = (self._length, piece, stream.device)
        if key not in self._shards:
            try:
                self._shards[key] = SequenceShard(self._length, ranks, self._world.rank, stream.device, piece)
            except ValueError as error:
                raise ValueError(
                    f"{error}. The sequence is dim {self._dim} of {list(stream.shape)}, the first argument of "
                    f"{self._blocks[0][0]}; if the sequence is another dim, set sequence_dim; to divide other blocks, "
                    "set blocks=CLASS"
                ) from None
        return self._shards[key]

    def _stream(self, inputs: Any) -> tuple[tuple[Any, ...], Tensor]:
        for path, leaf in leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                if leaf.dim() <= self._dim:
                    break
                return path, leaf
        raise ValueError(
            f"the first block, {self._blocks[0][0]}, has no argument with a sequence in dim {self._dim} "
            f"(sequence_dim). {REMEDY}"
        )

    def _learn(self, number: int, values: Any) -> None:
        """Record which dim of each tensor has the length of the sequence; the last of several are the keys of masks."""
        stream = True  # the first tensor is the residual stream
        for path, leaf in leaves(values):
            if not isinstance(leaf, Tensor) or self._length not in leaf.shape:
                continue
            dims = [dim for dim, size in enumerate(leaf.shape) if size == self._length]
            # Of three, the first is equal by chance, such as the number of heads.
            self._dims[number, path] = self._dim if stream and self._dim in dims else dims[max(0, len(dims) - 2)]
            stream = stream and not leaf.is_floating_point()

    def _part(self, number: int, path: tuple[Any, ...], leaf: Any) -> Any:
        """Return this rank's part of an argument of a block; tensors without a sequence stay."""
        shard = self._mode.shard
        if shard is None or not isinstance(leaf, Tensor):
            return leaf
        dim = self._dims.get((number, path))
        if dim is None or leaf.dim() <= dim or leaf.shape[dim] in (1, shard.local):
            return leaf
        if leaf.shape[dim] == shard.length:
            return shard.part(self._ordinary(leaf), dim)
        raise ValueError(
            f"{named(path)} of {self._blocks[number][0]} has {leaf.shape[dim]} positions in dim {dim}, but the "
            f"sequence has {shard.length}. {REMEDY}"
        )

    def _leave(self, block: nn.Module, args: Any, output: Any) -> Any:
        """Gather the outputs of the last block."""
        end, self._mode.within = len(self._blocks), False
        if self._active and self._learns:
            self._learn(end, output)
        shard = self._mode.shard if self._active else None
        if shard is None:
            return None
        self._mode.shard = None

        def whole(path: tuple[Any, ...], leaf: Any) -> Any:
            dim = self._dims.get((end, path))
            if dim is None or not isinstance(leaf, Tensor) or leaf.shape[dim] != shard.local:
                return leaf
            return joined(self._ordinary(leaf), self._world, shard, dim)

        return mapped(output, whole)

    # -- the trial -----------------------------------------------------------------------------------------------

    def check(self, step: Callable[[], Any]) -> None:
        """Run a step whole and in shards, and compare both; all ranks call it.

        Args:
            step: computes the training step for two samples.

        Raises:
            StepChanged: the results differ; the message names the first module that differs.
            ValueError: the sequence can't be divided.
        """
        run = self.wrap_step(step)
        outputs = ShardOutputs(self._world, lambda: self._mode.shard, self._ordinary)
        before = self._learn_from(run, outputs.of_whole)
        self._mode.in_trial = True
        try:
            after = recorded_step(
                self._module, run, mark=outputs.of_shard, complete=self.average_gradients, remedy=REMEDY
            )  # fmt: skip
        finally:
            self._mode.in_trial = False
        outputs.combine(before, after)
        try:
            check_unchanged(before, after, [], self._world.size, remedy=REMEDY)
            difference = ""
        except StepChanged as error:
            difference = str(error)
        if differences := [text for text in self._world.gather_objects(difference) if text]:
            raise StepChanged(differences[0])

    def _learn_from(self, run: Callable[[], Any], mark: Callable[[str, Any], list[float]]) -> Record:
        self._mode.in_trial = self._learns = True
        try:
            return recorded_step(self._module, run, mark=mark, remedy=REMEDY)
        finally:
            self._mode.in_trial = self._learns = False

    @property
    def lengths(self) -> list[list[int]]:
        """Return the sequence lengths of the trial, for `adopt` on other ranks, as plain data."""
        return self._mode.lengths

    def adopt(self, step: Callable[[], Any], lengths: Sequence[Sequence[int]]) -> None:
        """Prepare the step as `check` does, without the comparison, which other ranks have made already.

        Args:
            step: computes the training step for two samples.
            lengths: result of `lengths` on a different rank.
        """
        self._learn_from(self.wrap_step(step), lambda name, output: fingerprint(self._ordinary(output)))
        self._mode.lengths = [list(numbers) for numbers in lengths]

    def world_changed(self, world: World) -> None:
        """Continue with other processes along the context axis, in the same places.

        Args:
            world: ranks along the context axis.
        """
        self._world = self._mode.world = world
        self._shards.clear()

    def average_gradients(self) -> None:
        """Average the gradients over the context ranks; training averages over context and data ranks together.

        A rank whose positions do not use a parameter, such as an expert, takes part with zeros.
        """
        parameters = list(self._module.parameters())
        used = self._world.gather_objects([parameter.grad is not None for parameter in parameters])
        for parameter, of_ranks in zip(parameters, zip(*used, strict=True), strict=True):
            if any(of_ranks):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._world.all_reduce(parameter.grad).div_(self._world.size)
