"""Connects a worker: chooses the exchange and the protocol for the options of a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.distributed.membership.generations import membership
from fabricx.distributed.world import World
from fabricx.parameter_server.design import Design
from fabricx.parameter_server.divisible import needs_whole_tensors
from fabricx.parameter_server.options import ServerOptions
from fabricx.parameter_server.sparse_embeddings import TableReads, check_servers_can_step, sparse_embeddings
from fabricx.parameter_server.wire.powersgd import LowRank
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.buffers import dtype_of
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.exchange import Exchange, NoExchange
from fabricx.parameter_server.worker.lockstep import ServerStep, WorkerStep
from fabricx.parameter_server.worker.protocol import NoProtocol, WorkerProtocol
from fabricx.parameter_server.worker.pull_timing import BeforeStep, DuringForward, NoPulls, PullTiming
from fabricx.parameter_server.worker.servers import VectorOptions
from fabricx.parameter_server.worker.shared_memory_sum import SharedMemorySum
from fabricx.parameter_server.worker.shared_memory_weights import SharedWeights, check_shareable
from fabricx.parameter_server.worker.weight_pulls import WeightPulls


@dataclass(frozen=True)
class Trained:
    """The module, parameters and optimizers that a worker trains.

    Attributes:
        module: the user's module.
        parameters: parameters of all optimizers, by number.
        optimizers: the user's optimizers.
        several_backwards: a step may call `backward` several times, each for different parameters.
    """

    module: nn.Module | None
    parameters: list[Tensor]
    optimizers: list[Optimizer]
    several_backwards: bool


@final
@dataclass
class Connection:
    """A worker's part in the exchange of a generation of workers; by default of no exchange.

    Attributes:
        protocol: decides when this worker pushes gradients and pulls weights.
        exchange: with the other workers.
        parameters: parameters of which gradients are exchanged.
        undo: functions that remove hooks.
        reads: context of a step, in which rows of tables arrive before they are read.
        tables: pulls the rows of tables that a worker in lockstep lacks; None without tables.
    """

    protocol: WorkerProtocol[Any] = field(default_factory=NoProtocol)
    exchange: Exchange = field(default_factory=NoExchange)
    parameters: list[Tensor] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    reads: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    tables: WeightPulls | None = None

    def close(self, *, done: bool) -> None:
        """Leave the exchange.

        Args:
            done: this worker has finished.
        """
        for undo in self.undo:
            undo()
        self.protocol.disconnect()
        self.exchange.close(done=done)
        for parameter in self.parameters:
            parameter.grad = None  # it may be a view of memory that processes share


def connect(options: ServerOptions, design: Design, world: World, trained: Trained) -> Connection:
    """Connect a worker to the servers, or to the other workers.

    Args:
        options: the strategy's options.
        design: the strategy's design.
        world: the workers, which train different shares of the data.
        trained: parameters and optimizers.

    Raises:
        ValueError: options do not support the module or its optimizers.
    """
    parameters, optimizers = trained.parameters, trained.optimizers
    tables = sparse_embeddings(trained.module, parameters) if design.settings.outer is None else {}
    numbers = frozenset(tables.values())
    _check_tables(design, tables)
    if options.servers and (design.servers_step or not design.lockstep):
        _check_dtypes(parameters)
    whole = options.shard_by == "tensor"
    if design.servers_step:
        check_servers_can_step(optimizers, [parameters[number] for number in numbers])
        parts = options.servers or world.size
        whole = needs_whole_tensors(optimizers, parameters, parts, options.shard_by, numbers)
    # In lockstep, a worker that waits for a server must be interrupted when another worker dies.
    with membership().opening() if design.asynchronous is None else contextlib.nullcontext():
        if not options.servers:
            return _join_workers(design, world, trained, numbers, whole=whole)
        client, low_rank = _join_servers(options, design, world, trained, numbers, whole=whole)
    connection = _choose_protocol(options, design, world, trained, client, low_rank)
    if design.servers_step and tables:
        connection.reads = TableReads({number: parameters[number] for number in numbers}, client.weights)
        connection.tables = client.weights if design.asynchronous is None else None
    return connection


def _check_tables(design: Design, tables: dict[nn.Module, int]) -> None:
    for option, value in (("compensation", design.settings.compensation), ("compression='powersgd'", design.rank)):
        if tables and value is not None:
            raise ValueError(f"{option} does not support sparse gradients: set sparse=False, or remove {option}")


def _check_dtypes(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters of 16 bits, which servers store in 32 bits: checkpoints would have rounded weights."""
    narrow = sorted({str(parameter.dtype) for parameter in parameters if parameter.dtype.itemsize < 4})
    if narrow:
        raise ValueError(
            f"servers would store the weights as {dtype_of(parameters)}, and the module has {', '.join(narrow)}: "
            "checkpoints would be rounded, and a resumed run or the replacement of a worker would differ. Set "
            "precision='bf16-mixed' in place of 'bf16-true', or use strategy=ddp, or strategy=parameter_server with "
            "optimizer=worker"
        )


def _join_workers(
    design: Design, world: World, trained: Trained, tables: frozenset[int], *, whole: bool
) -> Connection:  # fmt: skip
    """Connect to the other workers of this machine, which share memory."""
    parameters = trained.parameters
    if design.servers_step and tables:
        raise ValueError("servers=0 with optimizer='server' does not support sparse gradients: set servers=1")
    if design.servers_step:
        check_shareable(parameters)
    exchange = SharedMemorySum(
        world, world.key("exchange"), parameters, views=not trained.several_backwards, tables=tables,
        memory=design.servers_step,
    )  # fmt: skip
    protocol: SharedWeights | WorkerStep
    if design.servers_step:
        protocol = SharedWeights(design.settings, whole=whole)
    else:
        protocol = WorkerStep(design.settings, several=trained.several_backwards, low_rank=None)
    protocol.connect(world, exchange, parameters, trained.optimizers, NoPulls())
    return Connection(protocol, exchange, parameters, [exchange.register_grad_hooks()])


def _join_servers(
    options: ServerOptions, design: Design, world: World, trained: Trained, tables: frozenset[int], *, whole: bool
) -> tuple[Client, LowRank | None]:
    """Connect to the servers."""
    if world.store is None:
        raise ValueError(
            f"{type(options).__name__} needs servers, which fit starts with the workers; for a single process use "
            "strategy=single"
        )
    settings = design.settings
    low_rank = None if design.rank is None else LowRank(trained.parameters, design.rank)
    vectors = VectorOptions(
        whole=whole,
        sums=design.asynchronous is None and not design.servers_step,
        views=not trained.several_backwards and settings.outer is None and low_rank is None,
        tables=tables,
        compression=settings.compression, reply_compression=settings.pull_compression, keep=settings.keep,
    )  # fmt: skip
    client = Client(
        world.store, world.key("exchange"), world.secret, world.rank,
        trained.parameters if low_rank is None else low_rank.carriers, options.servers, vectors,
        over_gloo=options.link == "gloo",
        generation=world.generation if design.asynchronous is None else None,
    )  # fmt: skip
    return client, low_rank


def _choose_protocol(
    options: ServerOptions, design: Design, world: World, trained: Trained, client: Client, low_rank: LowRank | None
) -> Connection:
    """Begin the protocol of a worker with servers."""
    parameters, module = trained.parameters, trained.module
    timing: PullTiming = BeforeStep(client.weights, parameters)
    if options.overlap == "forward" and module is not None:
        timing = DuringForward(client.weights, parameters, module)
    protocol: Asynchronous | ServerStep | WorkerStep
    if design.asynchronous is not None:
        protocol = design.asynchronous
    elif design.servers_step:
        protocol = ServerStep(design.settings)
    else:
        protocol = WorkerStep(design.settings, several=trained.several_backwards, low_rank=low_rank)
    protocol.connect(world, client, parameters, trained.optimizers, timing)
    hooks = [client.register_grad_hooks()] if design.settings.outer is None else []
    return Connection(protocol, client, parameters, hooks)


def parameters_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the distinct parameters of optimizers, in their order.

    Args:
        optimizers: the user's optimizers.
    """
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return list({id(parameter): parameter for parameter in parameters}.values())
