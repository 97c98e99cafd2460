"""Random seeds, and states of all random number generators."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch
from torch import nn

_LOG: Final = logging.getLogger(__name__)

GLOBAL_SEED: Final = "PL_GLOBAL_SEED"  # environment variable of Lightning with the seed of `seed_everything`


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python, numpy and torch, on all devices.

    All ranks draw the same numbers in the set-up of a run (`setup`, methods that create loaders), and the order of the
    data is the same. For the training, each rank derives its own stream from the seed.

    Args:
        seed: an integer from 0 to 2**32 - 1; None for that of the environment variable PL_GLOBAL_SEED, else 0.
        workers: recorded in the environment variable PL_SEED_WORKERS, as Lightning does; worker processes of a
            DataLoader are always seeded.
        verbose: log the seed, at level INFO.

    Returns:
        the seed.

    Raises:
        ValueError: the seed is not an integer, or out of range.
    """
    text = os.environ.get(GLOBAL_SEED, "0") if seed is None else seed
    try:
        chosen = int(text)
    except (TypeError, ValueError):
        source = f"the environment variable {GLOBAL_SEED}" if seed is None else "seed"
        raise ValueError(f"{source}={text!r}: must be an integer from 0 to {2**32 - 1}") from None
    seed_generators(chosen)
    os.environ[GLOBAL_SEED] = str(chosen)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    if verbose:
        _LOG.info("Seed set to %d", chosen)
    return chosen


def seed_generators(seed: int) -> None:
    """Seed python, numpy and torch, without a record of the seed.

    Args:
        seed: an integer from 0 to 2**32 - 1.

    Raises:
        ValueError: the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed}: must be an integer from 0 to {2**32 - 1}")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch on all devices.

    Args:
        seed: any that `torch.manual_seed` accepts.
    """
    if torch.accelerator.current_accelerator() is None:  # of torch's build
        # `torch.manual_seed` formats a stack trace for each kind of device that is not initialized: 1 to 4 ms.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def seed_often(seed: int) -> None:
    """Seed python, numpy and torch within a step.

    `torch.manual_seed` takes a stack trace for each kind of device that is not initialised, which costs more than the
    seed.

    Args:
        seed: an integer from 0 to 2**32 - 1.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def reset_seed() -> None:
    """Seed again with the seed of the newest `seed_everything`; does nothing without one."""
    if GLOBAL_SEED in os.environ:
        seed_everything(verbose=False)


@final
class RandomState:
    """Snapshot of the random number generators of this process."""

    def __init__(self) -> None:
        self.python: tuple[Any, ...] = _python_state()
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self.numpy: Any = _numpy_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        """Restore the generators to this snapshot."""
        if _python_state() is not self.python:
            random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        if self.numpy is not None:
            _set_numpy_state(self.numpy)

    def differs(self, other: RandomState) -> bool:
        """Return whether random numbers were drawn, or generators seeded, between two snapshots.

        Args:
            other: snapshot of the same process.
        """
        same = self.python == other.python and torch.equal(self.torch, other.torch)
        if self.cuda is not None and other.cuda is not None:
            same = same and torch.equal(self.cuda, other.cuda)
        if self.numpy is not None and other.numpy is not None:
            same = same and self.numpy[2:] == other.numpy[2:] and bool((self.numpy[1] == other.numpy[1]).all())
        return not same

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot as plain data and tensors."""
        version, numbers, gauss = self.python
        # Tensors: torch's safe unpickler needs 5 ms for each list of 624 numbers.
        state: dict[str, Any] = {"torch": self.torch, "python": [version, torch.tensor(numbers), gauss]}
        if self.cuda is not None:
            state["cuda"] = self.cuda
        if self.numpy is not None:
            kind, keys, position, has_gauss, cached = self.numpy
            state["numpy"] = [kind, torch.tensor(keys.tolist()), int(position), int(has_gauss), float(cached)]
        return state

    def packed(self) -> Any:
        """Return the snapshot in a form that pickles quickly, for `unpacked`."""
        version, numbers, gauss = self.python
        cuda = None if self.cuda is None else self.cuda.numpy().tobytes()
        if numbers is not _PACKED[0]:
            _PACKED[:] = [numbers, struct.pack(f"{len(numbers)}I", *numbers)]
        return version, _PACKED[1], gauss, self.torch.numpy().tobytes(), cuda, self.numpy

    def digest(self) -> int:
        """Return a number that differs between different snapshots, also of different processes."""
        version, numbers, gauss, cpu, cuda, numpy = self.packed()
        digest = zlib.crc32(cuda or b"", zlib.crc32(cpu, zlib.crc32(numbers)))
        if numpy is not None:
            digest = zlib.crc32(numpy[1].tobytes(), digest)
        return zlib.crc32(repr((version, gauss, numpy and numpy[2:])).encode(), digest)

    @classmethod
    def unpacked(cls, packed: Any) -> RandomState:
        """Return the snapshot of a packed form.

        Args:
            packed: result of `packed`.
        """
        state = cls()
        version, numbers, gauss, cpu, cuda, state.numpy = packed
        state.python = (version, struct.unpack(f"{len(numbers) // 4}I", numbers), gauss)
        state.torch = torch.frombuffer(bytearray(cpu), dtype=torch.uint8)
        state.cuda = None if cuda is None else torch.frombuffer(bytearray(cuda), dtype=torch.uint8)
        return state

    @classmethod
    def of(cls, state: dict[str, Any]) -> RandomState:
        """Return the snapshot of a state dict.

        Args:
            state: result of `state_dict`.
        """
        snapshot = cls()
        version, numbers, gauss = state["python"]
        snapshot.python = (version, tuple(torch.as_tensor(numbers).tolist()), gauss)
        snapshot.torch = state["torch"].cpu()
        snapshot.cuda = state["cuda"].cpu() if "cuda" in state else None
        snapshot.numpy = None
        if "numpy" in state:
            import numpy as np

            kind, keys, *rest = state["numpy"]
            snapshot.numpy = (kind, np.array(torch.as_tensor(keys).tolist(), dtype=np.uint32), *rest)
        return snapshot


_PACKED: list[Any] = [None, b""]  # cache: python's numbers, and their packed form
_KEPT: Final = 4  # states in a cache: those of a run, and of a stream that draws numbers of its own
_PYTHON: list[tuple[bytes, Any]] = []  # cache: memory of python's generator, and its state
_PYTHON_AT: Final = 2 * ctypes.sizeof(ctypes.c_void_p)  # offset of the numbers in CPython's object, after its header
_NUMPY: list[Any] = [b"", None]  # newest memory of numpy's generator, and its state
_BYTES: Final = 625 * 4  # of the numbers and the position of a generator


def _python_state() -> tuple[Any, ...]:
    """Return python's state; `getstate` costs 15 microseconds, and the comparison with the cached memory costs 1."""
    generator: Any = random._inst  # type: ignore[attr-defined]
    if sys.implementation.name != "cpython":
        return random.getstate()
    now = ctypes.string_at(id(generator) + _PYTHON_AT, _BYTES)
    for memory, state in _PYTHON:
        if memory == now and state[2] == generator.gauss_next:
            return state  # type: ignore[no-any-return]
    known = random.getstate()
    # Verify the memory layout (an index, then the numbers); with another layout, cache nothing.
    if now == struct.pack("625I", known[1][-1], *known[1][:-1]):
        _PYTHON[:] = [(now, known), *_PYTHON[: _KEPT - 1]]
    return known


def _numpy_state() -> Any:
    """Return numpy's state; `get_state` costs 30 microseconds, and the comparison with the newest memory costs 1."""
    import numpy as np

    address = _numpy_address()
    if address is None:
        return np.random.get_state()
    now = ctypes.string_at(address, _BYTES)
    if now != _NUMPY[0] or _NUMPY[1][3]:  # numpy may return a cached normal number without any change of this memory
        _NUMPY[:] = [now, np.random.get_state()]
    return _NUMPY[1]


def _set_numpy_state(state: Any) -> None:
    """Restore numpy's state; `set_state` costs 30 microseconds, and a copy of the memory costs 1."""
    import numpy as np

    now, address = _numpy_state(), _numpy_address()
    if address is None:
        np.random.set_state(state)
        return
    memory = _numpy_memory(state)
    # Neither state has a cached normal number, which is not in this memory. The layout of the memory is verified.
    if not now[3] and not state[3] and _NUMPY[0] == _numpy_memory(now):
        ctypes.memmove(address, memory, _BYTES)
    else:
        np.random.set_state(state)
    _NUMPY[:] = [memory, state]


def _numpy_address() -> Any:
    """Return the address of the state of numpy's generator; None if its layout is not known."""
    import numpy as np

    generator: Any = np.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    return generator.ctypes.state_address if type(generator) is np.random.MT19937 else None


def _numpy_memory(state: Any) -> bytes:
    return state[1].tobytes() + struct.pack("i", state[2])  # type: ignore[no-any-return]


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Context that restores all random number generators at its end."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


def generators_of(module: nn.Module) -> Iterator[Callable[[], object]]:
    """Yield a function for each generator in an attribute of a module, that restores its present state.

    Args:
        module: root module; attributes of submodules are included.
    """
    values = {id(value): value for part in module.modules() for value in vars(part).values()}
    for value in values.values():
        if isinstance(value, torch.Generator):
            yield functools.partial(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            yield functools.partial(value.setstate, value.getstate())
        # of numpy; the type is asked, since an object may search for similar names, as a trainer does
        elif hasattr(type(value), "bit_generator") and hasattr(bits := value.bit_generator, "state"):
            yield functools.partial(setattr, bits, "state", bits.state)
