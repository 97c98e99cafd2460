"""Detects that hooks have changed weights in work that recovery in place would repeat, and so would change again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from fabricx.consistency.hook_effects import fingerprint


@final
class NotedWeights:
    """The weights at the point from which unfinished work is repeated.

    At each step only torch's version counters of the parameters are read, which miss writes to `.data`. At the first
    update of an epoch, a validation and the end of an epoch, digests of the values are compared; if weights have
    changed before the first update of an epoch, the other batches count as having changed them.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: list[Tensor] = []
        self._versions: list[int] | None = None
        self._digest: Tensor | None = None
        self._changing = False  # weights have changed before the epoch's first update

    def note(self, *, values: bool) -> None:
        """Note the present weights.

        Args:
            values: take a digest, too, which reads all parameters.
        """
        if values:
            self._parameters = list(self._module.parameters())
            self._digest = fingerprint(self._module)
        else:
            self._digest = None
        self._versions = [parameter._version for parameter in self._parameters]

    def forget(self) -> None:
        """Forget the weights: an update has changed them, and what follows is not repeated."""
        self._versions = self._digest = None

    def before_update(self) -> None:
        """Compare the values before the first update of an epoch."""
        if self._digest is not None:
            self._changing = self.changed()

    def changed(self) -> bool:
        """Return whether the weights have changed since the point; False without a point."""
        if self._versions is None:
            return False
        if self._digest is not None:
            now = fingerprint(self._module)
            return now.shape != self._digest.shape or not torch.equal(now, self._digest)
        return self._changing or self._versions != [parameter._version for parameter in self._parameters]

    @contextmanager
    def in_validation(self) -> Iterator[None]:
        """Return a context of a validation: callbacks may exchange the weights, and give them back."""
        versions, digest, changed = self._versions, self._digest, self.changed()
        if changed:
            yield
            return
        self.note(values=True)
        yield
        given_back = not self.changed()
        if versions is None:
            self.forget()
        elif given_back:
            self.note(values=digest is not None)
        else:  # the window of this validation would be repeated with other weights
            self._versions, self._digest = versions, digest
