"""Random seeds and states of all generators."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any, Final, final

import torch


def seed_everything(seed: int, workers: bool = False) -> int:
    """Seed python, numpy and torch, on all devices.

    Ranks other than the first get a stream of their own when a run starts; the order of data is the same on all.

    Args:
        seed: a whole number from 0 to 2**32 - 1.
        workers: accepted for users of Lightning; processes of a DataLoader are always seeded.

    Raises:
        ValueError: the seed is outside of that range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: a whole number from 0 to {2**32 - 1}")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    return seed


@final
class RandomState:
    """Where the random numbers of this process stood when it was made."""

    def __init__(self) -> None:
        self.python: tuple[Any, ...] = _python_state()
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self.numpy: Any = _numpy_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        """Go back there."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        if self.numpy is not None:
            import numpy as np

            np.random.set_state(self.numpy)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors."""
        version, numbers, gauss = self.python
        state: dict[str, Any] = {"torch": self.torch, "python": [version, list(numbers), gauss]}
        if self.cuda is not None:
            state["cuda"] = self.cuda
        if self.numpy is not None:
            kind, keys, position, has_gauss, cached = self.numpy
            state["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
        return state

    def packed(self) -> Any:
        """Return what `unpacked` needs, in a form that is pickled quickly."""
        version, numbers, gauss = self.python
        cuda = None if self.cuda is None else self.cuda.numpy().tobytes()
        if numbers is not _PACKED[0]:
            _PACKED[:] = [numbers, struct.pack(f"{len(numbers)}I", *numbers)]
        return version, _PACKED[1], gauss, self.torch.numpy().tobytes(), cuda, self.numpy

    @classmethod
    def unpacked(cls, packed: Any) -> RandomState:
        """Return what has given this `packed`."""
        found = cls()
        version, numbers, gauss, cpu, cuda, found.numpy = packed
        found.python = (version, struct.unpack(f"{len(numbers) // 4}I", numbers), gauss)
        found.torch = torch.frombuffer(bytearray(cpu), dtype=torch.uint8)
        found.cuda = None if cuda is None else torch.frombuffer(bytearray(cuda), dtype=torch.uint8)
        return found

    @classmethod
    def of(cls, state: dict[str, Any]) -> RandomState:
        """Return what has given this `state_dict`."""
        found = cls()
        version, numbers, gauss = state["python"]
        found.python, found.torch = (version, tuple(numbers), gauss), state["torch"].cpu()
        found.cuda = state["cuda"].cpu() if "cuda" in state else None
        found.numpy = None
        if "numpy" in state:
            import numpy as np

            kind, keys, *rest = state["numpy"]
            found.numpy = (kind, np.array(keys, dtype=np.uint32), *rest)
        return found


_PACKED: list[Any] = [None, b""]  # python's numbers when they were packed last
_PYTHON: list[Any] = [b"", None]  # the same of python's generator as below
_PYTHON_AT: Final = 2 * ctypes.sizeof(ctypes.c_void_p)  # where CPython keeps its numbers, behind an object's header
_NUMPY: list[Any] = [b"", None]  # numpy's numbers when its state was asked for last, and that state


def _python_state() -> tuple[Any, ...]:
    """Return python's state; asking for it takes 15 microseconds, and looking whether anything was drawn takes one."""
    generator: Any = random._inst  # type: ignore[attr-defined]
    if sys.implementation.name != "cpython":
        return random.getstate()
    now = ctypes.string_at(id(generator) + _PYTHON_AT, 625 * 4)
    known = _PYTHON[1]
    if known is None or now != _PYTHON[0] or known[2] != generator.gauss_next:
        state = random.getstate()
        # An index, and the numbers; if they lie elsewhere, what is there is asked for again each time.
        found = now == struct.pack("625I", state[1][-1], *state[1][:-1])
        _PYTHON[:] = [now if found else b"", state]
    return _PYTHON[1]  # type: ignore[no-any-return]


def _numpy_state() -> Any:
    """Return numpy's state; asking for it takes 30 microseconds, and looking whether anything was drawn takes one."""
    import numpy as np

    generator: Any = np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return np.random.get_state()
    now = ctypes.string_at(generator.ctypes.state_address, 625 * 4)
    if now != _NUMPY[0] or _NUMPY[1][3]:  # half of a pair of normal numbers is given without drawing anything
        _NUMPY[:] = [now, np.random.get_state()]
    return _NUMPY[1]


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Let what happens inside draw random numbers without a trace."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
