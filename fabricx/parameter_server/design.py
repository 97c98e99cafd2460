"""The design of a strategy with servers: all that follows from its options, before there are workers or parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fabricx.core.strategy import Traits
from fabricx.parameter_server.options import ServerOptions
from fabricx.parameter_server.wire.messages import Settings
from fabricx.parameter_server.worker.asynchronous import Asynchronous


@final
@dataclass(frozen=True)
class Design:
    """Whether servers or workers step, by which protocol, and what is impossible then.

    Attributes:
        settings: behaviour of the servers.
        asynchronous: protocol of workers at their own pace; None for workers in lockstep.
        servers_step: servers step the user's optimizers; otherwise they sum, and workers step.
        rank: rank of the low-rank factors in place of gradients (PowerSGD), if workers step; None for none.
    """

    settings: Settings
    asynchronous: Asynchronous | None
    servers_step: bool
    rank: int | None = None

    def check(self, options: ServerOptions) -> None:
        """Refuse options that exclude each other.

        Args:
            options: of the strategy.

        Raises:
            ValueError: names the options and the remedy.
        """
        alone = self.lockstep and not self.compresses and options.link == "auto" and options.overlap == "backward"
        if options.servers < 0 or (options.servers == 0 and not alone):
            raise ValueError(
                f"servers={options.servers}: must be 1 or more processes; 0, where the workers of a machine keep the "
                "parameters in shared memory, needs mode='sync', link='auto', overlap='backward' and no compression"
            )
        if options.overlap == "forward" and (not self.servers_step or self.settings.outer is not None):
            raise ValueError(
                "overlap='forward' needs servers that step the optimizer (workers that step need the complete sum "
                "first): set overlap='backward', or optimizer='server'"
            )

    @property
    def compresses(self) -> bool:
        """Return whether gradients or weights are compressed."""
        return self.settings.compresses or self.rank is not None

    @property
    def lockstep(self) -> bool:
        """Return whether all workers train each global batch together."""
        return self.asynchronous is None

    @property
    def workers_step(self) -> bool:
        """Return whether each worker steps with the sum of all gradients; else a worker has not all of them."""
        return self.lockstep and not self.servers_step

    @property
    def traits(self) -> Traits:
        """Return the properties of the strategy."""
        return Traits(
            synchronous=self.lockstep,
            lockstep=self.lockstep,
            unreplicated=self.lockstep and (self.servers_step or self.compresses),
            elastic=True,
            checkpoint_averages=self.lockstep and self.servers_step and self.settings.pull_compression is not None,
        )

    @property
    def whole_updates(self) -> bool:
        """Return whether an update has the gradients of a whole global batch."""
        return self.lockstep or self.settings.aggregate

    def norm_clipping_refused(self, servers: int, workers: int) -> str:
        """Return why the norm of a gradient can't be limited; "" if it can.

        Args:
            servers: number of servers.
            workers: number of workers.
        """
        if self.lockstep or not self.settings.aggregate or servers == 1 or workers == 1:
            return ""
        return (
            f"the norm of a gradient can't be limited with servers={servers} and mode='bounded': each server "
            "has a part of it, and none waits for the others. Use servers=1, gradient_clip_algorithm='value', or "
            "mode='sync'"
        )

    @property
    def batch_weight_refused(self) -> str:
        """Return why batches can't have a weight; "" if they can."""
        if self.lockstep or not (self.settings.aggregate or self.settings.outer):
            return ""
        return (
            "batch_weight needs the weight of the global batch in each update, but no worker waits for the weights of "
            "other workers: use parameter_server with mode='sync' and backup_workers=0, or strategy=ddp or fsdp"
        )

    @property
    def lost_with_worker(self) -> list[str]:
        """Return the names of state that is lost with a worker."""
        if self.asynchronous is None:
            return []
        lost = ["the error feedback of their compressed gradients"] if self.settings.compression else []
        if self.asynchronous.statistics.layers:
            lost.append("their changes of running statistics since all workers met")
        return lost
