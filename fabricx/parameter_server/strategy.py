"""The strategy with parameter servers in all its modes; strategies by name are its presets."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.averaging import AverageRule
from fabricx.core.strategy import Strategy, Traits, warn_of_lost_residuals
from fabricx.distributed.collective_guard import OWN_PACE, apart
from fabricx.distributed.generations import membership
from fabricx.distributed.sync_batchnorm import synchronised
from fabricx.distributed.world import World
from fabricx.errors import did_you_mean
from fabricx.parameter_server.divisible import needs_whole_tensors
from fabricx.parameter_server.totals import Totals
from fabricx.parameter_server.wire.codecs import KINDS
from fabricx.parameter_server.wire.messages import Counts, Settings
from fabricx.parameter_server.wire.powersgd import LowRank
from fabricx.parameter_server.worker.asynchronous import Asynchronous
from fabricx.parameter_server.worker.client import Client
from fabricx.parameter_server.worker.local_rounds import Rounds
from fabricx.parameter_server.worker.prefetch import PrefetchHooks
from fabricx.parameter_server.worker.protocol import ServerStep, WorkerProtocol, WorkerStep
from fabricx.parameter_server.worker.running_statistics import RunningStatistics
from fabricx.parameter_server.worker.shared_memory_sum import SharedMemorySum
from fabricx.parameter_server.worker.shared_memory_weights import Sharing

LinkKind = Literal["auto", "gloo"]
ShardBy = Literal["auto", "element", "tensor"]
Overlap = Literal["backward", "forward"]


def check_choice(strategy: str, option: str, value: object, known: Sequence[str | None]) -> None:
    """Raise an error that names the nearest word, if a value isn't one of those that are known."""
    if value not in known:
        words = [str(word) for word in known]
        raise ValueError(
            f"{option}={value!r} isn't known to {strategy}.{did_you_mean(str(value), words)}\n"
            f"  known: {', '.join(words)}"
        )


class ServedStrategy(Strategy):
    """Workers bring gradients to servers, and weights or sums from them.

    Args:
        pace: of workers that don't go together; None if they do.
        servers: processes beside the workers; each keeps a part of the parameters. 0: workers sum by themselves.
        servers_step: the servers step the user's optimizers; else they sum, and workers step.
        settings: what servers are told, but for the number of workers.
        link: "auto" is shared memory where a server is on the worker's machine, and gloo elsewhere; "gloo" is gloo.
        shard_by: "element" cuts parameters anywhere, "tensor" nowhere; "auto" looks at the optimizers.
        overlap: what goes on while gradients and weights travel: "backward" (gradients leave as they are computed),
            or "forward" too (weights come while the next step begins, where servers step).
        rank: of the matrices that travel in the place of gradients (PowerSGD), where workers step; None for none.
    """

    def __init__(
        self, pace: Asynchronous | None, *, servers: int, servers_step: bool, settings: Settings, link: LinkKind,
        shard_by: ShardBy, overlap: Overlap = "backward", rank: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        name = type(self).__name__
        alone = pace is None and not settings.compresses and rank is None and link == "auto" and overlap == "backward"
        if servers < 0 or (servers == 0 and not alone):
            raise ValueError(
                f"servers={servers}: 1 or more processes keep the parameters; without any, workers of one machine do "
                "it in memory that all see (mode='sync', link='auto', no compression, overlap='backward')"
            )
        check_choice(name, "link", link, ("auto", "gloo"))
        check_choice(name, "compression", settings.compression, (*KINDS, None))
        check_choice(name, "pull_compression", settings.pull_compression, (*KINDS, None))
        if not 0.0 < settings.keep <= 0.5:
            raise ValueError(f"compression_keep={settings.keep}: a part of the elements, more than 0 and at most 0.5")
        check_choice(name, "shard_by", shard_by, ("auto", "element", "tensor"))
        if settings.snapshot_every < 0:
            raise ValueError(f"snapshot_every={settings.snapshot_every}: a number of updates, or 0 for no snapshots")
        self.servers = servers
        self.link = link
        self.shard_by: ShardBy = shard_by
        self._compresses = settings.compresses or rank is not None
        self.traits = Traits(
            synchronous=pace is None,
            private=pace is None and (servers_step or self._compresses),
            elastic=True,
            joins=pace is None and servers_step and settings.pull_compression is not None,
        )
        self._settings = settings
        self._servers_step = servers_step
        self._apart = pace
        self._pace: WorkerProtocol | None = self._apart
        self._client: Client | None = None
        self._optimizers: list[Optimizer] = []
        self._several_backwards = False
        self._parameters: list[Tensor] = []
        check_choice(name, "overlap", overlap, ("backward", "forward"))
        if overlap == "forward" and (not servers_step or settings.outer is not None):
            raise ValueError("overlap='forward' needs servers that step: workers that do need the whole sum first")
        self._overlap = overlap
        self._rank = rank
        self._kept: Any = None  # what compression has kept, as a checkpoint has it
        self._told: Totals | None = None  # what was measured when it was asked for last
        self._undo: list[Callable[[], None]] = []
        self._statistics: RunningStatistics | None = None  # of workers that go at their own pace

    # -- set up -------------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        super().setup(module)
        self._several_backwards = several_backwards
        if several_backwards and (self._servers_step or self._apart is not None):
            raise ValueError(
                "servers step once a batch, and a manually optimised module steps by itself: take "
                "strategy=parameter_server with optimizer=worker, strategy=ddp, or automatic optimization"
            )
        if self._apart is not None and synchronised(module):
            raise ValueError(
                "SyncBatchNorm needs all ranks in each forward, and here each goes at its own pace: use BatchNorm (its "
                "statistics are joined for validation and checkpoints), or strategy=ddp"
            )
        for name, parameter in module.named_parameters():
            if parameter.is_complex():
                raise ValueError(f"{name} is complex, and servers keep real numbers: train its view_as_real")
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.broadcast(tensor.data)

    def take_over(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        if self._apart is not None and self.world.size > 1 and self.world.main_rank:
            _warn_of_momentum(optimizers, self._settings)
        if self._apart is not None or not self.world.newcomer:
            self._connect()

    def _connect(self) -> None:
        """Meet the servers, with those that are here now."""
        optimizers = self._optimizers
        tables = _tables(self.module, self._parameters) if self._settings.outer is None else {}
        whole = self.shard_by == "tensor"
        if self._servers_step:
            _check_tables(optimizers, [self._parameters[number] for number in tables.values()])
            parts = self.servers or self.world.size
            whole = needs_whole_tensors(
                optimizers, self._parameters, parts, self.shard_by, frozenset(tables.values())
            )  # fmt: skip
        low_rank = None if self._rank is None else LowRank(self._parameters, self._rank)
        pace = self._pace = self._apart or self._together(low_rank, whole)
        for option, value in (("compensation", self._settings.compensation), ("compression='powersgd'", self._rank)):
            if tables and value is not None:
                raise ValueError(f"{option} knows no sparse gradients: say sparse=False, or leave it out")
        carriers = self._parameters if low_rank is None else low_rank.carriers
        # Of workers that go together, one that waits for a server has to hear when another is gone.
        links = membership().opening() if self._apart is None else contextlib.nullcontext()
        with links:
            self._client = self._meet(carriers, whole, frozenset(tables.values()))
        pace.begin(self.world, self._client, self._parameters, optimizers)
        if self._settings.outer is None:
            self._undo.append(self._client.watch())
        if self._overlap == "forward" and self.module is not None:
            pace.lookout = PrefetchHooks(self.module, self._parameters, self._client.bring)
            self._undo.append(pace.lookout.end)
        if self._servers_step:
            self._undo += [self._look_up_before(part, number, pace) for part, number in tables.items()]

    def _meet(self, parameters: list[Tensor], whole: bool, tables: frozenset[int]) -> Client:
        world, key = self.world, self.world.key("exchange")
        views = not self._several_backwards and self._settings.outer is None and self._rank is None
        if not self.servers:
            if self._servers_step and tables:
                raise ValueError("servers=0 with optimizer='server' knows no sparse gradients: say servers=1")
            neighbours = SharedMemorySum(world, key, parameters, views=views, tables=tables, weights=self._servers_step)
            return cast(Client, neighbours)  # it does what is asked of a client where all go together
        if world.store is None:
            raise ValueError(f"{type(self).__name__} needs servers, which are started with the workers")
        return Client(
            world.store, key, world.secret, world.rank, parameters, self.servers, whole=whole, views=views,
            tables=tables, over_gloo=self.link == "gloo", sums=self._apart is None and not self._servers_step,
            compression=self._settings.compression, back=self._settings.pull_compression, keep=self._settings.keep,
            generation=world.generation if self._apart is None else None,
        )  # fmt: skip

    def _look_up_before(self, part: nn.Module, number: int, pace: WorkerProtocol) -> Callable[[], None]:
        """Bring the rows that a table is asked for, before each forward in training; returns what ends that."""

        def bring(part: nn.Module, args: tuple[Any, ...]) -> None:
            if pace.computing:
                pace.client.pull_rows({number: args[0].detach().unique().cpu()})

        return part.register_forward_pre_hook(bring).remove

    def _together(self, low_rank: LowRank | None, whole: bool) -> WorkerProtocol:
        if self._servers_step:
            return ServerStep(self._settings) if self.servers else Sharing(self._settings, whole=whole)
        return WorkerStep(self._settings, several=self._several_backwards, low_rank=low_rank)

    def starts(self, step: int, ranks: int) -> None:
        assert self._pace is not None
        self._take_up_kept(self._pace)
        if self._apart is not None:
            self._apart.planned = ranks
        self._pace.starts(step)
        if self._apart is not None and self.module is not None:
            self._statistics = RunningStatistics(self.module)
        self._told = None

    def teardown(self) -> None:
        self._disconnect(done=True)
        self._parameters, self._optimizers, self._statistics = [], [], None
        super().teardown()

    def _disconnect(self, *, done: bool) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        if self._pace is not None and self._client is not None:
            self._pace.end()
            self._pace.lookout = None
            self._client.close(done=done)
        for parameter in self._parameters:
            parameter.grad = None  # it may lie in memory that servers see too
        self._client = None

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def in_training(*args: Any) -> Any:
            pace = self._pace
            if pace is None:
                return step(*args)
            if self._statistics is not None:
                self._statistics.computed()
            with pace.computes(), apart(OWN_PACE) if self._apart is not None else contextlib.nullcontext():
                return step(*args)

        return in_training

    # -- one step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _window_goes_on(self) -> Iterator[None]:
        with super()._window_goes_on():
            self._hear(closing=False)
            try:
                yield
            finally:
                self._hear(closing=True)

    def _hear(self, *, closing: bool) -> None:
        if self._client is not None:
            self._client.hears = closing

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        assert self._pace is not None
        self._pace.backward(compute or loss.backward, closing=self.closes)

    def backward_nothing(self, *company: Any) -> bool:
        assert self._pace is not None
        return self._pace.complete() if self.closes else True

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        assert self._pace is not None
        if self.norm_clipping_refused:
            raise ValueError(self.norm_clipping_refused)
        clipped = list(parameters)
        norm = self._pace.clip_norm(clipped, max_norm)
        return super().clip_norm(clipped, max_norm) if norm is None else norm

    def hooks_see_gradients(self) -> contextlib.AbstractContextManager[Any]:
        assert self._pace is not None
        return self._pace.hooks_see_gradients()

    @property
    def hides_gradients(self) -> bool:
        return self._pace is not None and self._pace.brings_parts

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        assert self._pace is not None
        return self._pace.nonfinite_gradients(parameters)

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        assert self._pace is not None
        self._pace.drop_gradients(parameters)

    @property
    def norm_clipping_refused(self) -> str:  # type: ignore[override]
        if self._apart is None or not self._settings.aggregate or self.servers == 1 or self.world.size == 1:
            return ""
        return (
            f"the norm of a gradient can't be limited with servers={self.servers} and mode='bounded': each has a "
            "part of it, and none waits for the others. Take servers=1, gradient_clip_algorithm='value', or mode='sync'"
        )

    @property
    def batch_weight_refused(self) -> str:  # type: ignore[override]
        if self._apart is None or not (self._settings.aggregate or self._settings.outer):
            return ""
        return (
            "batch_weight needs the weight of the global batch in each update, and here no worker waits for the "
            "others': take parameter_server with mode='sync' and backup_workers=0, or strategy=ddp or fsdp"
        )

    @property
    def _gradient_is_here(self) -> bool:
        return self._pace is not None and self._apart is None and not self._pace.servers_step

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        return super().gradient_norm(optimizers) if self._gradient_is_here else None

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        assert self._pace is not None
        clipped = list(parameters)
        if not self._pace.clip_value(clipped, limit):
            super().clip_value(clipped, limit)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        assert self._pace is not None
        self._pace.check_parameters()
        return self._pace.step(optimizer, closure)

    def updated(self, step: int) -> int:
        assert self._pace is not None
        return self._pace.updated(step)

    def weights_step(self, step: int) -> int:
        return step if self._pace is None else self._pace.weights_step(step)

    def keep_average(self, rule: AverageRule, step: int, averages: Mapping[str, Tensor]) -> frozenset[str]:
        if self.module is None or not self._servers_see_more:
            return frozenset()
        names = self._names(self.module)
        if self.world.main_rank and not self.world.newcomer and self._client is not None:
            given = [averages.get(name, p) for name, p in zip(names, self._parameters, strict=True)]
            self._client.keep_average(rule, step, given)
        return frozenset(names)

    def kept_average(self) -> tuple[dict[str, Tensor], int]:
        if self._client is None or self.module is None:
            return {}, 0
        averages, updates = self._client.averages()
        return dict(zip(self._names(self.module), averages, strict=True)), updates

    @property
    def _servers_see_more(self) -> bool:
        """Return whether a worker lacks the weights of some updates, or some of the weights of an update."""
        if not self._servers_step or not self.servers:
            return False
        partial = self._settings.pull_compression is not None or bool(_tables(self.module, self._parameters))
        return self._apart is not None or partial

    @property
    def lost_with_a_worker(self) -> list[str]:
        if self._apart is None:
            return []
        found = ["what compression had kept of their gradients"] if self._settings.compression else []
        if self._statistics is not None and self._statistics.layers:
            found.append("what they had added to running statistics since all met")
        return found

    @property
    def steps_globally(self) -> bool:  # type: ignore[override]
        return self._apart is None or self._settings.aggregate

    @property
    def weights_brought(self) -> int | None:  # type: ignore[override]
        if not self._servers_step and self._apart is None:
            return None
        return 0 if self._client is None else self._client.brought

    def _names(self, module: nn.Module) -> list[str]:
        """Return the names of the parameters that servers have, in their order."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(self._parameters)]

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        return self._client.waited_s if self._client is not None else 0.0

    @property
    def pushed_s(self) -> float:  # type: ignore[override]
        return self._client.pushed_s if self._client is not None else 0.0

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        return self._client.pushes if self._client is not None else super().pushes

    @property
    def waits_for_servers(self) -> bool:  # type: ignore[override]
        return self.servers > 0

    @property
    def updates_per_batch(self) -> int:
        if self._apart is None or self._settings.aggregate:
            return 1
        return self._apart.planned or self.world.size

    # -- between the ranks --------------------------------------------------------------------------------------

    @property
    def dealer(self) -> Asynchronous | None:
        return self._apart

    def world_changed(self, world: World) -> None:
        self.world = world
        if self._apart is not None:
            self._apart.world_changed(world)
            return
        self._disconnect(done=False)
        self._connect()
        if self.traits.alike and self._pace is not None:
            self._pace.starts(0)  # from where they are doesn't matter: nobody but workers counts

    def quiesce(self, copies: Mapping[str, Tensor] | None = None) -> None:
        if self._pace is not None and self._client is not None and self.module is not None:
            self._pace.meet()
            if self._statistics is not None:
                self._statistics.pool(self.world)
        super().quiesce(copies)

    def counts(self) -> list[Counts]:
        """Return what each server has seen: updates, staleness, what was dropped."""
        return self._client.counts() if self._client is not None else []

    def measured(self) -> dict[str, float]:
        if self._client is None:
            return {}
        workers = self.world.gather_objects((*self.traffic, self._client.waited_s))
        servers = self.counts()
        now = Totals(workers, servers)
        before, self._told = self._told, now
        return now.since(before) if self.world.main_rank else {}

    @property
    def traffic(self) -> tuple[int, int]:
        """Return the bytes of gradients and weights that this worker has sent and received."""
        return self._client.traffic if self._client is not None else (0, 0)

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        if self._pace is None or self._client is None or not optimizers:
            return super().state_dict(module, optimizers)
        with self._pace.whole_states(optimizers):
            state = super().state_dict(module, optimizers)
        if self._compresses:
            state["kept"] = {"workers": self.world.gather_objects(self._pace.kept()), "servers": self._client.lost()}
        if self._settings.outer != "nesterov":
            return state
        velocity = {id(p): moving for p, moving in zip(self._parameters, self._client.velocity(), strict=True)}
        flat = [velocity[id(p)].reshape(-1) for p in module.parameters() if id(p) in velocity]
        return {**state, "outer": {"0": torch.cat(flat)}}  # as `local_sgd` with one fragment has it

    def own_state(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        pace, client = self._pace, self._client
        assert pace is not None
        assert client is not None
        own = pace.own()  # and with it the weights that were on their way
        kept = pace.kept() if self._compresses else None
        lost = client.lost() if self._compresses and self.world.main_rank else ()
        return {**super().state_dict(module, optimizers), "own": own, "kept": kept, "lost": lost}

    def load_own_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        pace, first = self._pace, states[0]
        assert pace is not None
        super().load_state_dict(first, module, optimizers)
        pace.take_own([state["own"] for state in states])
        if self._compresses:
            pace.owed = first["lost"]  # of sums, for whatever number of workers
            if own:
                pace.keep(first["kept"])
            else:
                warn_of_lost_residuals(self.world)
        pace.starts(0)

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        super().load_state_dict(state, module, optimizers)
        self._kept = state.get("kept")
        if isinstance(self._apart, Rounds):
            self._apart.velocity = self._velocity(module, state.get("outer", {}).get("0"))

    def _take_up_kept(self, pace: WorkerProtocol) -> None:
        """Go on with what compression has kept, if as many have kept it as there are now."""
        kept, self._kept, pace.owed = self._kept, None, ()
        if kept is None:
            return
        if len(kept["workers"]) != self.world.size or len(kept["servers"]) != self.servers:
            if self.world.main_rank:
                warnings.warn(
                    f"the checkpoint is of {len(kept['workers'])} workers and {len(kept['servers'])} servers: what "
                    "compression had kept for later gradients is lost",
                    stacklevel=2,
                )
            return
        pace.keep(kept["workers"][self.world.rank])
        pace.owed = kept["servers"]

    def _velocity(self, module: nn.Module, saved: Tensor | None) -> list[Tensor] | None:
        """Return what a checkpoint has of the outer momentum, by parameter; None if it is of other parameters."""
        mine = {id(parameter) for parameter in self._parameters}
        ordered = [parameter for parameter in module.parameters() if id(parameter) in mine]
        if saved is None or saved.numel() != sum(parameter.numel() for parameter in ordered):
            return None
        parts = saved.split([parameter.numel() for parameter in ordered])
        found = {id(p): part.view(p.shape) for p, part in zip(ordered, parts, strict=True)}
        return [found[id(parameter)] for parameter in self._parameters]


def _warn_of_momentum(optimizers: Sequence[Optimizer], settings: Settings) -> None:
    """Warn if momentum adds to that of delays, which act like one (Mitliagkas et al., Allerton 2016)."""
    strongest = max((group.get("momentum", 0.0) for one in optimizers for group in one.param_groups), default=0.0)
    if strongest >= 0.5 and settings.outer is None and not settings.aggregate and not settings.damp:
        warnings.warn(
            f"momentum={strongest} with gradients that are applied as they come, at their whole size: delays act like "
            "more momentum, and training may diverge. Say damp=true, a small max_staleness, or less momentum",
            stacklevel=2,
        )


def _tables(module: nn.Module | None, parameters: Sequence[Tensor]) -> dict[nn.Module, int]:
    """Return the embeddings whose gradients are sparse, and the numbers of their parameters.

    Raises:
        ValueError: one of them changes its weights by itself.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    found: dict[nn.Module, int] = {}
    for name, part in module.named_modules() if module is not None else ():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and id(part.weight) in numbers:
            if part.max_norm is not None:
                raise ValueError(f"{name} has max_norm, which changes rows where servers don't see it: leave it out")
            found[part] = numbers[id(part.weight)]
    return found


def _check_tables(optimizers: Sequence[Optimizer], tables: Sequence[Tensor]) -> None:
    """Check that optimizers can step tables of which only some rows have gradients, on servers.

    Raises:
        ValueError: one has momentum, which moves rows without a gradient, and is sparse: servers can't divide it.
    """
    sparse = {id(table) for table in tables}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if group.get("momentum") and any(id(parameter) in sparse for parameter in group["params"]):
            raise ValueError(
                "momentum moves rows of a sparse embedding that have no gradient, and servers have gradients of rows: "
                "say momentum=0 for the table (in a group of its own), sparse=False, or take optimizer='worker'"
            )
