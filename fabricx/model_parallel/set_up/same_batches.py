"""Check that ranks which compute a share of the data together have read the same batch, and draw the same numbers."""

from __future__ import annotations

import zlib
from typing import Any, Final, final

import torch
from torch import Tensor

from fabricx.core.module_state.rng import RandomState
from fabricx.distributed.messages.tensor_bytes import as_bytes
from fabricx.distributed.world import World
from fabricx.errors import RanksDisagree
from fabricx.model_parallel.nested import leaves

FIRST: Final = 8  # batches on an accelerator that are compared at the start of a run
EVERY: Final = 64  # afterwards: reading a batch back from an accelerator waits for it


@final
class SameBatches:
    """Compares the batches of ranks along the model's axes, and their random number generators.

    Args:
        model: the ranks that compute a share of the data together.
    """

    def __init__(self, model: World) -> None:
        self._model, self._number = model, 0

    def check(self, batch: Any) -> None:
        """Raise an error if ranks have different batches; all ranks along the model's axes call it.

        If a hook has drawn random numbers on some ranks only, all take over the generators of the first rank.

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
        random = RandomState()
        values = [sign * number for number in (digest, random.digest()) for sign in (1, -1)]
        pairs = torch.tensor(values, dtype=torch.int64, device=self._model.device)
        highest, lowest, highest_random, lowest_random = self._model.all_reduce(pairs, "max").tolist()
        if highest != -lowest:
            raise RanksDisagree(
                "ranks that compute a batch together have read different samples, so that their results can't be "
                "combined: draw random numbers of the data from torch's, numpy's or python's global generator, which "
                "are seeded alike, and divide a stream by trainer.distributed_sampler_kwargs, which are equal on these "
                "ranks, or use a map-style data set"
            )
        if highest_random != -lowest_random:
            RandomState.unpacked(self._model.broadcast_object(random.packed())).restore()
