"""Check that ranks which compute a share of the data together have read the same batch."""

from __future__ import annotations

import zlib
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.model_parallel.nested import leaves

FIRST: Final = 8  # batches on an accelerator that are compared at the start of a run
EVERY: Final = 64  # afterwards: reading a batch back from an accelerator waits for it


@final
class SameBatches:
    """Compares the batches of ranks along the model's axes.

    Args:
        model: the ranks that compute a share of the data together.
    """

    def __init__(self, model: World) -> None:
        self._model, self._number = model, 0

    def check(self, batch: Any) -> None:
        """Raise an error if ranks have different batches; all ranks along the model's axes call it.

        Args:
            batch: batch on the device.

        Raises:
            RanksDisagree: on every rank.
        """
        if self._model.size == 1:
            return
        self._number += 1
        compares = self._model.device.type == "cpu" or self._number <= FIRST or self._number % EVERY == 0
        if not compares:
            return
        digest = 0
        for _, leaf in leaves(batch):
            if isinstance(leaf, Tensor):
                words = as_bytes(leaf.cpu())
                digest = zlib.crc32(words.numpy().data, zlib.crc32(str(tuple(leaf.shape)).encode(), digest))
        pair = torch.tensor([digest, -digest], dtype=torch.int64, device=self._model.device)
        highest, lowest = self._model.all_reduce(pair, "max").tolist()
        if highest != -lowest:
            raise RanksDisagree(
                "ranks that compute a batch together have read different samples, so that their results can't be "
                "combined: draw random numbers of the data from torch's, numpy's or python's global generator, which "
                "are seeded alike, and divide a stream by trainer.distributed_sampler_kwargs, which are equal on these "
                "ranks, or use a map-style data set"
            )
