"""Messages between neighbouring chunks of a pipeline: shapes, activations and gradients."""

from __future__ import annotations

import json
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.distributed.point_to_point import Expected, Transfers

_TAGS: Final = {"header": 0, "activation": 1, "gradient": 2}
Header = dict[str, Any]


@final
class Links:
    """Messages between neighbouring chunks of a pipeline.

    Args:
        transfers: between the ranks of the pipeline.
        rank, stages: of the pipeline.
        device: device of the tensors.

    Attributes:
        headers: shapes by chunk and signature of the batch, announced once.
    """

    def __init__(self, transfers: Transfers, rank: int, stages: int, device: torch.device) -> None:
        self.transfers, self.rank, self.stages, self.device = transfers, rank, stages, device
        self.headers: dict[tuple[int, Any], Header] = {}

    def post(self, tensor: Tensor, kind: str, chunk: int, to: int, microbatch: int) -> int:
        """Begin to send a tensor to a neighbouring chunk; returns the number of the send.

        Args:
            tensor: without a graph.
            kind: "header", "activation" or "gradient".
            chunk: chunk of the sender.
            to: chunk of the receiver.
            microbatch: microbatch for error messages.
        """
        event = f"send of the {kind} of microbatch {microbatch} from stage {self.rank} to stage {to % self.stages}"
        return self.transfers.begin_send(tensor, to % self.stages, self._channel(chunk, to), self._tag(kind, to), event)

    def expect(self, tensor: Tensor, kind: str, source: int, chunk: int, microbatch: int) -> Expected:
        """Begin to receive a tensor from a neighbouring chunk.

        Args:
            tensor: written when `transfers.complete` returns.
            kind: same as at the sender.
            source: chunk of the sender.
            chunk: chunk of the receiver.
            microbatch: microbatch for error messages.
        """
        rank = source % self.stages
        event = f"receive of the {kind} of microbatch {microbatch} at stage {self.rank} from stage {rank}"
        return self.transfers.expect(tensor, rank, self._channel(source, chunk), self._tag(kind, chunk), event)

    def post_header(self, header: Header, chunk: int, microbatch: int) -> None:
        """Send the shapes of a chunk's activations to the next chunk.

        Args:
            header: plain data.
            chunk: chunk of the sender.
            microbatch: microbatch for error messages.
        """
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8).to(self.device)
        length = torch.tensor([text.numel()], device=self.device)
        self.post(length, "header", chunk, chunk + 1, microbatch)
        self.post(text, "header", chunk, chunk + 1, microbatch)

    def receive_header(self, chunk: int, microbatch: int) -> Header:
        """Receive the shapes of the activations for a chunk.

        Args:
            chunk: chunk of the receiver.
            microbatch: microbatch for error messages.
        """
        length = self._received(torch.zeros(1, dtype=torch.int64, device=self.device), chunk, microbatch)
        text = self._received(torch.zeros(int(length), dtype=torch.uint8, device=self.device), chunk, microbatch)
        header: Header = json.loads(bytes(text.tolist()))
        return header

    def _received(self, tensor: Tensor, chunk: int, microbatch: int) -> Tensor:
        return self.transfers.complete(self.expect(tensor, "header", chunk - 1, chunk, microbatch))

    def _channel(self, source: int, to: int) -> str:
        wraps = source % self.stages != to % self.stages - (1 if to > source else -1)
        return ("forward" if to > source else "backward") + (" wrap" if wraps else "")

    def _tag(self, kind: str, to: int) -> int:
        return _TAGS[kind] + len(_TAGS) * to
