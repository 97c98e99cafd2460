"""Options that all strategies with servers have."""

# Annotations are objects in this module: `fabricx.core.options.annotations` evaluates text in the module of a subclass.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fabricx.distributed.compression.codecs import check_codec
from fabricx.errors import check_choice
from fabricx.parameter_server.wire.messages import Settings

LinkKind = Literal["auto", "gloo"]
ShardBy = Literal["auto", "element", "tensor"]
Overlap = Literal["backward", "forward"]


@dataclass(kw_only=True, eq=False, repr=False)
class ServerOptions:
    """Options that all strategies with servers have.

    Args:
        servers: server processes, among which the parameters are divided by size.
        compression: compression of gradients, with error feedback: "bf16", "fp16" (half the bytes), "int8", "int4" (a
            quarter, an eighth), "topk" (the largest `compression_keep` of the elements, 8 bytes each), "sign" (1 bit
            each); the registered name or the dotted path of a `Codec` of your own; and, if the strategy has it,
            "powersgd" (two low-rank factors for each large matrix).
        compression_keep: fraction of the elements that "topk" sends.
        pull_compression: the same for the data that servers send: sums, or weight differences.
        snapshot_every: updates between two snapshots of each server. A server that dies is restarted from its newest
            snapshot and a journal of later messages, so that nothing is lost; they need the memory of 6 copies of the
            weights and 2 of the moments. 0: no snapshots; the run ends when a server dies. Not under torchrun.
        link: "auto" uses shared memory within a machine and gloo between machines; "gloo" always uses gloo.
        shard_by: "element" divides parameters among servers at any element, "tensor" keeps them whole; "auto" depends
            on the optimizers: torch's are recognised, and others are tested at set-up. One server divides nothing.
        overlap: "backward" sends gradients while `backward` is running. "forward" also pulls weights during the next
            forward, layer by layer, if servers step; callbacks between two steps then see the old weights.

    Attributes:
        compressions: valid values of `compression` besides codecs.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    compressions: ClassVar[Sequence[str]] = ()

    servers: int = 1
    compression: str | None = None
    compression_keep: float = 0.01
    pull_compression: str | None = None
    snapshot_every: int = 100
    link: LinkKind = "auto"
    shard_by: ShardBy = "auto"
    overlap: Overlap = "backward"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_codec(name, "compression", self.compression, *self.compressions)
        check_codec(name, "pull_compression", self.pull_compression)
        check_choice(name, "link", self.link, ("auto", "gloo"))
        check_choice(name, "shard_by", self.shard_by, ("auto", "element", "tensor"))
        check_choice(name, "overlap", self.overlap, ("backward", "forward"))
        if not 0.0 < self.compression_keep <= 0.5:
            raise ValueError(
                f"compression_keep={self.compression_keep}: must be a fraction, more than 0 and at most 0.5"
            )
        if self.snapshot_every < 0:
            raise ValueError(f"snapshot_every={self.snapshot_every}: must be a number of updates, or 0 for none")

    def settings(self, **special: Any) -> Settings:
        """Return the behaviour of servers, with the number of workers still open.

        Args:
            special: settings of the strategy, in place of those of the common options; see `Settings`.
        """
        common: dict[str, Any] = {
            "workers": 0, "compression": self.compression, "pull_compression": self.pull_compression,
            "keep": self.compression_keep, "snapshot_every": self.snapshot_every,
        }  # fmt: skip
        return Settings(**{**common, **special})
