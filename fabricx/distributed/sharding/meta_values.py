"""Detection of values that a user's code writes to parameters on the meta device, which stores no values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BUILDS: Final = ("__init__", "configure_model")
_COPIES: Final = ("aten::_to_copy", "aten::clone", "aten::lift_fresh")


@contextmanager
def meta_device(module: nn.Module | None, *, filled: bool) -> Iterator[None]:
    """Build layers on the meta device, which allocates no memory; `reset_parameters` of a layer sets its values later.

    Args:
        module: the root module, to which the layers are added; None for no check.
        filled: all values are loaded later.

    Raises:
        ValueError: user code has set values of a parameter that `reset_parameters` of the layer would replace.
    """
    writes = _Writes()
    with torch.device("meta"), writes:
        yield
    for name, owners in () if filled or module is None else _owners(module).values():
        if writes.loses(owners, getattr(owners[-1], name.rpartition(".")[2])):
            raise ValueError(
                f"{name} is given values in configure_model, and layers that are built there under strategy=fsdp have "
                f"no memory yet: reset_parameters() of {type(owners[-1]).__name__} would replace the values. Build the "
                "layer in __init__ or setup, or let a subclass of it set the values in reset_parameters()"
            )


def _owners(module: nn.Module) -> dict[int, tuple[str, list[nn.Module]]]:
    """Return the modules whose `reset_parameters` sets a tensor on the meta device, with a name, by the tensor's id."""
    by_tensor: dict[int, tuple[str, list[nn.Module]]] = {}
    for path, part in module.named_modules():
        for key, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if tensor.is_meta and hasattr(part, "reset_parameters"):
                _, owners = by_tensor.get(id(tensor), ("", []))
                by_tensor[id(tensor)] = f"{path}.{key}" if path else key, [*owners, part]
    return by_tensor


@final
class _Writes(TorchDispatchMode):
    """Records which modules were in their initialisation when a tensor on the meta device was written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By the id of a storage. A reference keeps the storage, so that no other storage has this id.
        self._authors: dict[int, tuple[Any, frozenset[int]]] = {}

    def loses(self, owners: Sequence[nn.Module], tensor: Tensor) -> bool:
        """Return whether `reset_parameters` of the last owner would not set these values.

        Args:
            owners: the modules that have the tensor.
            tensor: a parameter or buffer.
        """
        noted = self._authors.get(id(tensor.untyped_storage()))
        # Tied layers of the same kind set the same values.
        return noted is not None and not any(
            id(owner) in noted[1] and type(owner) is type(owners[-1]) for owner in owners
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        arguments = [
            (args[number] if number < len(args) else (kwargs or {}).get(argument.name), argument)
            for number, argument in enumerate(func._schema.arguments)
        ]
        written = [
            value for value, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
        ]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {id(tensor.untyped_storage()) for tensor in inputs}
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and "empty" not in func._schema.name]
        created = [tensor for tensor in made if id(tensor.untyped_storage()) not in known]
        changed = [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in (*changed, *created)):
            return outputs
        authors = self._of_copied(inputs[0]) if func._schema.name in _COPIES else _authors(sys._getframe(1))
        for tensor in (*changed, *created):
            storage = tensor.untyped_storage()
            self._authors.pop(id(storage), None)
            if authors is not None:
                self._authors[id(storage)] = storage, authors
        return outputs

    def _of_copied(self, source: Tensor) -> frozenset[int] | None:
        noted = self._authors.get(id(source.untyped_storage()))
        return frozenset() if noted is None and not source.is_meta else noted and noted[1]


def _authors(frame: FrameType | None) -> frozenset[int]:
    """Return the modules on the call stack whose `reset_parameters` will repeat the present initialisation."""
    authors = set()
    while frame is not None:
        code = frame.f_code
        first = code.co_varnames[:1] if code.co_name in ("reset_parameters", *_BUILDS) else ()
        owner = frame.f_locals.get(*first) if first else None
        if isinstance(owner, nn.Module) and _sets_again(type(owner), frame):
            authors.add(id(owner))
        frame = frame.f_back
    return frozenset(authors)


def _sets_again(kind: type[nn.Module], frame: FrameType) -> bool:
    name = frame.f_code.co_name
    if name == "reset_parameters":
        return True
    classes = kind.__mro__
    builds = next((c for c in classes if getattr(vars(c).get(name), "__code__", None) is frame.f_code), None)
    resets = next((c for c in classes if "reset_parameters" in vars(c)), None)
    return builds is not None and resets is not None and issubclass(resets, builds)
