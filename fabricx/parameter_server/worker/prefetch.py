"""Weights that are received during the forward: each module waits for its own only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast, final

import torch
from torch import Tensor, nn

from fabricx.parameter_server.wire.channel import LOST
from fabricx.parameter_server.wire.messages import Pull, Reply
from fabricx.parameter_server.wire.request_channel import Channel
from fabricx.parameter_server.worker.buffers import ExchangeBuffers


@final
class PrefetchTask:
    """One server's part of the weights.

    Args:
        boxes: where it comes.
        pull: what the server is asked; it has been sent.
        threads: one of which receives.
    """

    def __init__(self, boxes: ExchangeBuffers[Channel], pull: Pull, threads: ThreadPoolExecutor) -> None:
        self._boxes = boxes
        self._come = 0  # bytes
        self._lost: BaseException | None = None
        self._changed = threading.Condition()
        boxes.link.arrived = self._note
        boxes.link.send(pull)
        self._reply = threads.submit(self._receive)

    def _note(self, stop: int) -> None:
        with self._changed:
            self._come = stop
            self._changed.notify_all()

    def _receive(self) -> Reply:
        try:
            reply: Reply = self._boxes.link.recv()
            self._boxes.unpack(reply, sums=False)
            return reply
        except LOST as error:
            self._lost = error
            raise
        finally:
            self._boxes.link.arrived = None
            self._note(self._boxes.link.inbox.nbytes)

    def wait_for(self, piece: int) -> None:
        """Wait for a piece.

        Raises:
            EOFError, OSError, RuntimeError: the server has gone.
        """
        stop = self._boxes.needs(piece)
        with self._changed:
            self._changed.wait_for(lambda: self._come >= stop)
        if self._lost is not None:
            raise self._lost

    def reply(self) -> Reply:
        """Wait for all, and return the answer; raises like `wait_for`."""
        return self._reply.result()


@final
class PrefetchHooks:
    """Brings parameters before the submodules that have them are called.

    Args:
        module: the user's.
        parameters: by number.
        bring: what brings some, by number.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor], bring: Callable[[set[int]], None]) -> None:
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self.names = dict.fromkeys(numbers.values(), "")
        self.missed: set[int] = set()  # parameters that came after the forward, so that it can't have seen them
        self.own = {numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers}
        self._handles = []
        self.names |= {numbers[id(p)]: name for name, p in module.named_parameters() if id(p) in numbers}
        for part in module.modules():
            mine = {numbers[id(p)] for p in part.parameters(recurse=False) if id(p) in numbers}
            if mine and part is not module:
                self._handles.append(part.register_forward_pre_hook(_before(mine, bring), prepend=True))
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._checked(number)))

    def _checked(self, number: int) -> Callable[[Tensor], None]:
        def check(parameter: Tensor) -> None:
            if number in self.missed:
                raise self.complaint({number})

        return check

    def complaint(self, numbers: set[int]) -> RuntimeError:
        """Return the error that says that parameters were used too early."""
        names = ", ".join(sorted(self.names[number] for number in numbers))
        return RuntimeError(
            f"{names}: used without the module being called that has it, before the newest value had come; say "
            "overlap='backward', or call the module"
        )

    def end(self) -> None:
        """Look out no more."""
        for handle in self._handles:
            handle.remove()


def _before(numbers: set[int], bring: Callable[[set[int]], None]) -> Callable[..., None]:
    def wait(part: nn.Module, args: object) -> None:
        bring(numbers)

    return cast(Callable[..., None], torch.compiler.disable(wait))
