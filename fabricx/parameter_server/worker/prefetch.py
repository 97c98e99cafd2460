"""Weights that are pulled during the forward: each submodule waits only for the parameters that it owns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast, final

import torch
from torch import Tensor, nn

from fabricx.parameter_server.wire.link import LINK_ERRORS
from fabricx.parameter_server.wire.messages import Pull, Reply
from fabricx.parameter_server.wire.request_channel import Channel
from fabricx.parameter_server.worker.buffers import ExchangeBuffers


@final
class PrefetchTask:
    """Background pull from a server.

    Args:
        buffers: the server's buffers.
        pull: the request, which is sent at construction.
        threads: pool with a thread for the receive.
    """

    def __init__(self, buffers: ExchangeBuffers[Channel], pull: Pull, threads: ThreadPoolExecutor) -> None:
        self._buffers = buffers
        self._arrived = 0  # bytes
        self._lost: BaseException | None = None
        self._changed = threading.Condition()
        buffers.link.arrived = self._note
        buffers.link.send(pull)
        self._reply = threads.submit(self._receive)

    def _note(self, stop: int) -> None:
        with self._changed:
            self._arrived = stop
            self._changed.notify_all()

    def _receive(self) -> Reply:
        try:
            reply: Reply = self._buffers.link.recv()
            self._buffers.unpack(reply, sums=False)
            return reply
        except LINK_ERRORS as error:
            self._lost = error
            raise
        finally:
            self._buffers.link.arrived = None
            self._note(self._buffers.link.inbox.nbytes)

    def wait_for(self, piece: int) -> None:
        """Wait for a piece.

        Args:
            piece: number of the piece.

        Raises:
            EOFError, OSError, RuntimeError: the server has died.
        """
        stop = self._buffers.bytes_needed(piece)
        with self._changed:
            self._changed.wait_for(lambda: self._arrived >= stop)
        if self._lost is not None:
            raise self._lost

    def reply(self) -> Reply:
        """Wait for the complete reply and return it; raises the errors of `wait_for`."""
        return self._reply.result()


@final
class PrefetchHooks:
    """Forward hooks that wait for a submodule's parameters before the submodule is called.

    Args:
        module: the user's module.
        parameters: parameters by number.
        fetch: waits for parameters, by number.

    Attributes:
        names: names of the parameters, by number.
        missed: parameters that were received after the forward, which therefore must not have used them.
        direct: parameters of the root module, not of submodules.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor], fetch: Callable[[set[int]], None]) -> None:
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self.names = dict.fromkeys(numbers.values(), "")
        self.missed: set[int] = set()
        self.direct = {numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers}
        self._handles = []
        self.names |= {numbers[id(p)]: name for name, p in module.named_parameters() if id(p) in numbers}
        for part in module.modules():
            direct = {numbers[id(p)] for p in part.parameters(recurse=False) if id(p) in numbers}
            if direct and part is not module:
                self._handles.append(part.register_forward_pre_hook(_before(direct, fetch), prepend=True))
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._checked(number)))

    def _checked(self, number: int) -> Callable[[Tensor], None]:
        def check(parameter: Tensor) -> None:
            if number in self.missed:
                raise self.error({number})

        return check

    def error(self, numbers: set[int]) -> RuntimeError:
        """Return the error for parameters that were used before they were received.

        Args:
            numbers: numbers of the parameters.
        """
        names = ", ".join(sorted(self.names[number] for number in numbers))
        return RuntimeError(
            f"{names}: used before the newest value was received, because the submodule that owns it was not called: "
            "call the submodule, or set overlap='backward'"
        )

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _before(numbers: set[int], fetch: Callable[[set[int]], None]) -> Callable[..., None]:
    def wait(part: nn.Module, args: object) -> None:
        fetch(numbers)

    return cast(Callable[..., None], torch.compiler.disable(wait))
