"""A context in which a module is in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Context in evaluation mode, such as without dropout; afterwards each submodule has the mode that it had before.

    Args:
        module: root module.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
