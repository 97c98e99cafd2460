"""Detects streams that each rank reads whole, by the first batches of the ranks."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from fabricx.core.tensors.transfer import tensors_of
from fabricx.distributed.world import World
from fabricx.errors import PossibleUserWarning

_COMPARED: Final = 2**14  # elements of each tensor


def digest_of(batch: Any) -> str | None:
    """Return a digest of the tensors of a batch, of up to 16384 elements each.

    None if they do not identify the samples: there is no tensor, the tensors have the same value everywhere (such as
    those of a loader that only counts steps), or they can't be read.

    Args:
        batch: any nesting of lists, tuples and dicts.

    >>> digest_of([torch.arange(3)]) == digest_of([torch.arange(3)]), digest_of(torch.zeros(3)), digest_of("text")
    (True, None, None)
    """
    try:
        parts = [tensor.detach().reshape(-1)[:_COMPARED].cpu() for tensor in tensors_of(batch)]
        if all(not part.numel() or bool((part == part[0]).all()) for part in parts):
            return None
        content = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
    except Exception:  # sparse or nested tensors, classes of the user
        return None
    return hashlib.blake2b(b"".join(content), digest_size=16).hexdigest()


def advise_on_same_batches(source: Any, digests: list[str | None], world: World) -> None:
    """Warn on the main rank if ranks have read the same first batch of an epoch.

    Args:
        source: iterable of batches that each rank reads as it is.
        digests: those of the ranks' first batches.
        world: the ranks.
    """
    known = [digest for digest in digests if digest is not None]
    if world.rank or len(set(known)) == len(known):
        return
    data = source.dataset if isinstance(source, DataLoader) else source
    warnings.warn(
        f"ranks have read the same first batch of {type(data).__name__}: it is not divided over the {len(digests)} "
        "ranks, so samples count several times. Divide it by the rank, for example in __iter__ by "
        'itertools.islice(samples, int(os.environ.get("RANK", 0)), None, int(os.environ.get("WORLD_SIZE", 1))), or use '
        "a map-style data set, which fabricx divides. If each rank should read all of it, set "
        "use_distributed_sampler=False",
        PossibleUserWarning,
        stacklevel=2,
    )
