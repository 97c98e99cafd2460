"""Training in one process on one device."""

from __future__ import annotations

from typing import final

from fabricx.core.strategy import Strategy, Traits


@final
class Single(Strategy):
    """Train in one process on one device, without communication."""

    traits = Traits(max_ranks=1)
