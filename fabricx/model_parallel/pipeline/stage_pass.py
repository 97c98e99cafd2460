"""One forward of a chunk: the user's step, entered at the first block of the chunk and ended after its last."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.distributed.point_to_point import Expected
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.model_parallel.nested import leaves, mapped
from fabricx.model_parallel.pipeline.chain import Chain
from fabricx.model_parallel.pipeline.cuts import Cuts
from fabricx.model_parallel.pipeline.links import Header, Links
from fabricx.model_parallel.pipeline.received import Received, attach, refuse_gradient
from fabricx.model_parallel.recomputation import is_checkpointed
from fabricx.model_parallel.tensor.sharded_tensor import ShardedTensor

_PLAIN: Final = (bool, int, float, str, type(None))
_SENT: Final = ("tensor", "shard")  # kinds of arguments that have a message


class StageEnd(BaseException):
    """Ends the user's step after the last block of a stage; no `Exception`, which users' code may catch."""


@final
class Pass:
    """The forward of a chunk for one microbatch, with the tensors that its backward needs.

    Args:
        chain: chain of the module.
        cuts: blocks of all chunks.
        chunk: number of the chunk in the pipeline.
        microbatch: number of the microbatch.
        links: links to the neighbouring chunks.
        key: signature of the microbatch; None if shapes are announced in each pass.
        seed: seeds random numbers, by a number of `Chain.seeds`.
    """

    def __init__(
        self, chain: Chain, cuts: Cuts, chunk: int, microbatch: int, links: Links, key: Any,
        seed: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.chunk, self.microbatch = chunk, microbatch
        self.ended = False  # whether the step was left after the last block
        self.output: Any = None  # of the step, on the last stage
        self.sent: list[Tensor] = []  # derived arguments of the next chunk
        self._received: list[tuple[Tensor, Received]] = []  # tensors that have a gradient
        self._sends: list[int] = []  # numbers of the sends of `sent`
        self._chain, self._links, self._key, self._seed = chain, links, key, seed
        self._begin, self._end = cuts[chunk]
        self._last = chunk == len(cuts) - 1
        self._next = 0  # block that is expected next
        self._again = False  # in the backward: checkpointed blocks compute again
        # None before the receive has begun, which a schedule does ahead of the computation where shapes are known.
        self._header: Header | None = None  # of the chunk before
        self._arguments: list[Expected] | None = None  # tensors on the way from the chunk before
        self._gradients: list[Expected | None] | None = None  # of `sent`, on the way from the chunk after
        self._marks: Expected | None = None  # which of these exist
        self._outputs: dict[int, list[Any]] = {}  # description of the outputs of own blocks
        self._values: dict[Any, Any] = {}  # received arguments by path
        self._replaced: dict[int, tuple[Any, Any]] = {}  # arguments of the user's code, and what was received instead
        self._sources: dict[Any, Tensor] = {}  # tensors of `Chain.carried`
        self._returns: dict[str, int] = {}  # calls of modules outside of the blocks
        self._inside = False  # within an own block
        self._stand_ins: list[tuple[Tensor, int]] = []  # of outputs of earlier blocks, until the first block

    @property
    def reached(self) -> bool:
        """Return whether the step has called the blocks."""
        return self._next > self._begin

    def call(self, number: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a block of this chunk; return substitutes for the outputs of any other block.

        Args:
            number: number of the block.
            call: call of the block.
            args, kwargs: arguments.

        Raises:
            StageEnd: all blocks of the chunk were computed.
            ValueError: the blocks are called in another order than in the trial run.
        """
        if not self._again:
            self._check_order(number)
        before, after = self._chain.seeds[number]
        self._note(("argument", number), (args, kwargs))
        if number < self._begin:
            output = self._stand_in(number, args, kwargs)
            self._note(("output", number), output)
            self._seed(after)
            return output
        if number == self._begin and self.chunk:
            args, kwargs = self._enter(args, kwargs)
        elif self._replaced:
            args, kwargs = mapped((args, kwargs), self._replacement)
        if number == self._end:
            self._send(args, kwargs)
            self.ended = True
            raise StageEnd
        self._seed(before)  # also where a checkpointed block computes again
        self._inside = True
        try:
            output = call(*args, **kwargs)
        finally:
            self._inside = False
        self._note(("output", number), output)
        self._seed(after)
        if not self._again and not self._last and self._announces():
            self._outputs[number] = [_described(leaf) for _, leaf in leaves(output)]
        return output

    def returned(self, name: str, output: Any) -> Any:
        """Find the tensors of `Chain.carried` in the output of a module outside of the blocks.

        Args:
            name: name of the module.
            output: of its call.

        Returns:
            the output; tensors that this stage will receive are leaves of the graph without a base, so that they can be
            replaced.
        """
        if self._inside:
            return output
        received = self._chain.entries[self._begin] if self.chunk else ()
        if self._again:  # the number of the call is unknown
            self._check_outside(replaced=all(path[:2] != ("module", name) for path in received))
            return output
        number = self._returns[name] = self._returns.get(name, 0) + 1
        path = ("module", name, number)
        if any(entry[:3] == path for entry in received):
            output = mapped(output, lambda inner, leaf: _leaf(leaf) if (*path, *inner) in received else leaf)
        self._note(path, output)
        return output

    def _note(self, path: Any, values: Any) -> None:
        """Find the tensors of `Chain.carried` in arguments or outputs."""
        if self._chain.carried:
            for inner, leaf in leaves(values, path):
                if inner in self._chain.carried and isinstance(leaf, Tensor):
                    self._sources[inner] = leaf

    @contextlib.contextmanager
    def computing_again(self) -> Iterator[None]:
        """Context of the backward, in which checkpointed blocks may compute again."""
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def _check_order(self, number: int) -> None:
        if number != self._next:
            names = self._chain.blocks
            raise ValueError(
                f"the step calls {names[number]} where {names[self._next] if self._next < len(names) else 'no block'} "
                "was expected: in a pipeline each block is called once in a step, in the order of the trial run. Call "
                "the model once in each training, validation, test and predict step; generate text in one process"
            )
        self._next += 1

    # -- arguments from the chunk before --------------------------------------------------------------------------

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the first block with received tensors."""
        begin = self._chain.entries[self._begin]
        if not self._again:
            self._check_calls()
            arguments = {**dict(leaves((args, kwargs))), **self._sources}
            for path, value in zip(begin, self._received_arguments(), strict=True):
                self._values[path] = value
                own = arguments.get(path)
                if isinstance(own, Tensor):
                    self._values[path] = self._replace(own, value)
        else:  # tensors of the code that a checkpoint contains are other objects when it computes again
            for path, own in (*leaves((args, kwargs)), *self._sources.items()):
                value = self._values.get(path)
                if isinstance(own, Tensor) and isinstance(value, Tensor) and own is not value:
                    self._check_outside(replaced=self._receive_into(own, value))
        replaced = set(self._sources)

        def change(path: Any, leaf: Any) -> Any:
            replaced.add(path)
            return self._values.get(path, leaf)

        changed = mapped((args, kwargs), change)
        if not replaced >= self._values.keys():
            raise ValueError(
                f"{self._chain.blocks[self._begin]} is called with other arguments than in the trial run; call the "
                "model in the same way in all steps"
            )
        if not self._again:
            self._refuse_stand_ins()
        self._stand_ins = []
        return changed

    def _refuse_stand_ins(self) -> None:
        """Make the use of stand-ins an error, or visible: this stage does not have the outputs of earlier blocks."""
        for tensor, number in self._stand_ins:
            if tensor.is_floating_point() and not any(tensor is value for value in self._values.values()):
                tensor.data.fill_(float("nan"))
                replaced, _ = self._replaced.get(id(tensor), (None, None))  # in the arguments of own blocks
                if torch.is_grad_enabled() and tensor.is_leaf and replaced is not tensor:
                    # A leaf: another node of the graph would change the version that a checkpoint has stored.
                    tensor.requires_grad_().register_hook(
                        functools.partial(refuse_gradient, self._chain.blocks[number])
                    )

    def _check_calls(self) -> None:
        """Refuse other calls of modules whose outputs pass blocks by than in the trial run: paths have their number."""
        for name, count in self._chain.calls.get(self._begin, {}).items():
            if self._returns.get(name, 0) != count:
                raise ValueError(
                    f"{name} is called {self._returns.get(name, 0)} times before {self._chain.blocks[self._begin]}, "
                    f"and {count} times in the trial run. Its output passes blocks by, so that a stage of the "
                    "pipeline would replace another output: call it as often in each step, or use strategy=tensor or "
                    "strategy=fsdp"
                )

    def _replace(self, own: Tensor, value: Any) -> Any:
        """Replace an argument of the user's code by what was received; returns the value of the argument.

        The argument itself becomes the received tensor, since the code after the block may use it, too. If this is
        impossible, and the trial run has not shown such a use, blocks of this stage receive the tensor in its place.

        Args:
            own: argument that the user's code has passed to the first block.
            value: received.

        Raises:
            ValueError: the code after the block uses the argument, and it can't be replaced.
        """
        if any(own is other for other in self._values.values()):  # passed as two arguments
            return own
        if self._receive_into(own, value):
            self._received = [(own if tensor is value else tensor, gradient) for tensor, gradient in self._received]
            return own
        self._check_outside(replaced=False)
        self._replaced[id(own)] = (own, value)
        return value

    def _check_outside(self, *, replaced: bool) -> None:
        if not replaced and self._begin in self._chain.outside:
            raise ValueError(
                f"{self._chain.blocks[self._begin]} takes a tensor that the code after the block uses, too, and that "
                "autograd has stored before, as activation checkpointing does. A stage can't replace it by the tensor "
                "of the stage before: pass a copy (tensor.clone()), checkpoint only the block, set other blocks "
                "(blocks=...), or under tensor parallelism keep the layers whole that read it: plan={'LAYER': "
                "'replicate'}"
            )

    def _receive_into(self, own: Tensor, value: Any) -> bool:
        """Make a tensor of the user's code the received tensor; returns whether that was possible.

        Args:
            own: placeholder.
            value: received.
        """
        if isinstance(own, ShardedTensor) or isinstance(value, ShardedTensor):
            return False
        received = value.detach()  # no transfer refers to this object
        try:
            torch.utils.swap_tensors(own, received)
        except RuntimeError:  # autograd refers to the object
            if self._begin not in self._chain.outside or (is_checkpointed() and own.grad_fn is not None):
                return False
            try:
                own.detach_().data = received
            except RuntimeError:  # a view
                return False
            if value.requires_grad:  # a leaf: another node in the graph would change the version that autograd stored
                own.requires_grad_().register_hook(self._gradient_of(value).add)
            return True
        if value.requires_grad:
            attach(own, self._gradient_of(value))
        return True

    def _gradient_of(self, value: Tensor) -> Received:
        [gradient] = [gradient for tensor, gradient in self._received if tensor is value]
        return gradient

    def _replacement(self, path: Any, leaf: Any) -> Any:
        """Return the received tensor for a tensor that the user's code passes to several blocks."""
        before, value = self._replaced.get(id(leaf), (None, None))
        return value if before is leaf and before is not None else leaf

    def expect_arguments(self) -> bool:
        """Begin to receive the arguments of the first block; returns False if their shapes are not known yet."""
        if self._arguments is None and self.chunk:
            known = self._links.headers.get((self.chunk - 1, self._key)) if self._key is not None else None
            if known is None:
                return False
            self._arguments = self._expected(known)
        return True

    def _expected(self, header: Header) -> list[Expected]:
        tensors = [
            torch.empty(content[0], dtype=getattr(torch, content[1]), device=self._links.device)
            for kind, *content in header["arguments"]
            if kind in _SENT
        ]
        return [
            self._links.expect(tensor, "activation", self.chunk - 1, self.chunk, self.microbatch) for tensor in tensors
        ]

    def _received_arguments(self) -> list[Any]:
        """Return the tensors and values that the previous chunk has sent, by the entries of the chain."""
        header = self._received_header()
        arriving = self._arguments if self._arguments is not None else self._expected(header)
        self._arguments, values = arriving, []
        rest = iter(arriving)
        for kind, *content in header["arguments"]:
            if kind == "value":
                values.append(content[0])
                continue
            tensor = self._links.transfers.complete(next(rest))
            if content[2]:
                self._received.append((tensor, Received()))
                attach(tensor, self._received[-1][1])
            values.append(tensor if kind == "tensor" else _sharded(tensor, *content[3:]))
        return values

    def _received_header(self) -> Header:
        if self._header is None:
            known = self._links.headers.get((self.chunk - 1, self._key)) if self._key is not None else None
            self._header = known or self._links.receive_header(self.chunk, self.microbatch)
            if self._key is not None:
                self._links.headers[self.chunk - 1, self._key] = self._header
        return self._header

    def _stand_in(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an output with the structure and the shapes of a block that another stage computes."""
        described = list(self._received_header()["outputs"][number])
        arguments = [leaf for _, leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        template = self._chain.outputs[number]
        if len(described) != sum(1 for _ in leaves(template)):
            raise ValueError(
                f"{self._chain.blocks[number]} returns another structure than in the trial run; call the model in the "
                "same way in all steps"
            )
        rest = iter(described)

        def change(path: Any, leaf: Any) -> Any:
            kind, *content = next(rest)
            if kind == "value":
                return content[0]
            if kind == "other":
                return leaf
            shape = content[3] if kind == "shard" else content[0]
            tensor = _like(arguments, shape, getattr(torch, content[1]), self._links.device)
            if not isinstance(tensor, ShardedTensor):
                self._stand_ins.append((tensor, number))
            return tensor

        return mapped(template, change)

    def pass_by(self) -> None:
        """Exchange the messages of a step that has not called the blocks, which the next stage may expect already."""
        if self._key is None:
            return
        if self.chunk and (self.chunk - 1, self._key) in self._links.headers:
            self.expect_arguments()
            for arriving in self._arguments or ():
                self._links.transfers.complete(arriving)
        if not self._last and (self.chunk, self._key) in self._links.headers:
            for kind, *content in self._links.headers[self.chunk, self._key]["arguments"]:
                if kind in _SENT:
                    empty = torch.zeros(content[0], dtype=getattr(torch, content[1]), device=self._links.device)
                    self._links.post(empty, "activation", self.chunk, self.chunk + 1, self.microbatch)

    # -- gradients ------------------------------------------------------------------------------------------------

    def expect_gradients(self) -> None:
        """Begin to receive the gradients of the sent tensors, if they were sent."""
        if self._gradients is None and self.ended:
            if (count := sum(tensor.requires_grad for tensor in self.sent)) > 1:
                marks = torch.empty(count, device=self._links.device)
                self._marks = self._links.expect(marks, "gradient", self.chunk + 1, self.chunk, self.microbatch)
            self._gradients = [
                self._links.expect(
                    torch.empty_like(tensor, memory_format=torch.contiguous_format), "gradient", self.chunk + 1,
                    self.chunk, self.microbatch,
                ) if tensor.requires_grad else None
                for tensor in self.sent
            ]  # fmt: skip

    def gradients(self) -> list[Tensor | None]:
        """Receive the gradients of the tensors that were sent; None for those that the loss doesn't depend on."""
        self.expect_gradients()
        marks = None if self._marks is None else self._links.transfers.complete(self._marks).tolist()
        gradients = [expected and self._links.transfers.complete(expected) for expected in self._gradients or ()]
        if any(gradient is not None for gradient in gradients):  # the next stage has received what was sent before
            while self._sends:
                self._links.transfers.end_send(self._sends.pop())
        if marks is not None:
            numbers = iter(marks)
            gradients = [
                gradient if gradient is not None and next(numbers) else None for gradient in gradients
            ]  # fmt: skip
        return gradients

    def send_gradients(self, *, computed: bool = True) -> None:
        """Send the gradients of the received tensors, and forget all tensors.

        Of several tensors, marks come first: zeros in the place of no gradient would change weights by weight decay.

        Args:
            computed: gradients were computed; False for a microbatch or a batch of weight 0.

        Raises:
            ValueError: the loss does not depend on the only tensor that has a gradient.
        """
        if computed and len(self._received) == 1 and not self._received[0][1].exists:
            raise ValueError(
                f"the loss does not depend on the output of {self._chain.blocks[self._begin - 1]}, for example because "
                "of detach(), so that weights before it have no gradient. Freeze them by requires_grad_(False), or "
                "compute them within torch.no_grad()"
            )
        if len(self._received) > 1:
            marks = torch.tensor([float(received.exists) for _, received in self._received], device=self._links.device)
            self._links.post(marks, "gradient", self.chunk, self.chunk - 1, self.microbatch)
        for tensor, received in self._received:
            self._links.post(received.gradient(tensor), "gradient", self.chunk, self.chunk - 1, self.microbatch)
        self.sent, self._received, self._gradients, self._marks, self._arguments = [], [], None, None, None
        self._values, self._replaced, self._sources = {}, {}, {}

    def take_output(self) -> Any:
        """Return the output of the step without its graph, and forget it."""
        output, self.output = mapped(self.output, _detached), None
        return output

    # -- arguments for the chunk after ----------------------------------------------------------------------------

    def _announces(self) -> bool:
        return self._key is None or (self.chunk, self._key) not in self._links.headers

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send the derived arguments of the first block of the next chunk, and the tensors that pass it by."""
        arguments = {**dict(leaves((args, kwargs))), **self._sources}
        values = [arguments.get(path) for path in self._chain.entries[self._end]]
        described = [_described(value) for value in values]
        if any(entry[0] == "other" for entry in described):
            raise ValueError(
                f"{self._chain.blocks[self._end]} has an argument that can't be sent to another stage; pass tensors, "
                "numbers and strings to blocks"
            )
        if self._announces():
            outputs = [*self._received_header()["outputs"]] if self.chunk else []
            outputs += [self._outputs[number] for number in range(self._begin, self._end)]
            header = {"arguments": described, "outputs": outputs}
            self._links.post_header(header, self.chunk, self.microbatch)
            if self._key is not None:
                self._links.headers[self.chunk, self._key] = header
        elif self._links.headers[self.chunk, self._key]["arguments"] != described:
            raise ValueError(
                f"the arguments of {self._chain.blocks[self._end]} are {described}, and were "
                f"{self._links.headers[self.chunk, self._key]['arguments']} for an earlier batch of the same shapes: "
                "in a pipeline, shapes may depend on the shapes of the batch only; pad the tensors to a fixed size"
            )
        for value in values:
            if isinstance(value, Tensor):
                local = value.local if isinstance(value, ShardedTensor) else value
                send = self._links.post(local, "activation", self.chunk, self.chunk + 1, self.microbatch)
                self._sends.append(send)
                self.sent.append(local)


def _described(leaf: Any) -> list[Any]:
    """Return plain data about a leaf: ["tensor", shape, dtype, has a gradient], ["value", value] or ["other"].

    A tensor of which this tensor rank has a shard is ["shard", shape, dtype, has a gradient, whole shape, dim, parts]:
    the shard is sent to the same tensor rank of the other stage.
    """
    if isinstance(leaf, ShardedTensor):
        leaf.check_usable()
        return ["shard", *_described(leaf.local)[1:], list(leaf.shape), leaf.sharded_dim, list(leaf.parts)]
    if isinstance(leaf, Tensor):
        if leaf.is_nested or leaf.layout is not torch.strided or is_dtensor(leaf):
            raise ValueError(
                "a block takes or returns a nested, sparse or distributed tensor, which a pipeline can't send; for "
                "nn.TransformerEncoder set enable_nested_tensor=False"
            )
        return ["tensor", list(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.requires_grad]
    return ["value", leaf] if isinstance(leaf, _PLAIN) else ["other"]


def _sharded(local: Tensor, shape: Sequence[int], dim: int, parts: Sequence[int]) -> ShardedTensor:
    return ShardedTensor(local, dim, tuple(shape), tuple(parts))


def _leaf(value: Any) -> Any:
    """Return a tensor without graph and without base: the same object, if it is no view; other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.data if value._is_view() else value.detach_()


def _detached(path: Any, leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _like(arguments: Sequence[Tensor], shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a stand-in for a tensor, which is no view: an argument of the same shape, else zeros."""
    for tensor in arguments:
        if list(tensor.shape) == shape and tensor.dtype == dtype:
            return tensor.detach() if isinstance(tensor, ShardedTensor) else tensor.detach().clone()
    return torch.zeros(shape, dtype=dtype, device=device)
