"""Copies of attributes as numbers, texts, tensors, lists and dicts, for another process and for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fabricx.core.module_state.attribute_copies import Absent, Copy, Key, Length, Same, equal, of_items, shown


def packed(copies: Mapping[Key, Any]) -> list[Any]:
    """Return attributes as numbers, texts, tensors and lists for another process, and for a checkpoint.

    Args:
        copies: result of `TrackedAttributes.changed`.
    """
    return [[*key, _packed_copy(copy)] for key, copy in copies.items() if not isinstance(copy, Length)]


def unpacked(attributes: list[Any]) -> dict[Key, Any]:
    """Return copies for `TrackedAttributes.restore`.

    Args:
        attributes: result of `packed`.
    """
    return {(owner, name): _unpacked_copy(entry) for owner, name, entry in attributes}


def differing(copies: list[Any], earlier: list[Any]) -> list[Any]:
    """Return the attributes that are not equal in earlier copies.

    Args:
        copies, earlier: results of `packed`.
    """
    before = unpacked(earlier)
    return packed(
        {key: copy for key, copy in unpacked(copies).items() if not (key in before and equal(copy, before[key]))}
    )


def joined(attributes: list[Any], before: list[Any], later: list[Any]) -> tuple[list[Any], dict[str, bool]]:
    """Return attributes of a rank as they are after hooks that only another rank has run.

    An attribute that differed between the two ranks before these hooks, such as a sum of a rank's own batches, keeps
    the value of this rank.

    Args:
        attributes: of this rank, before the hooks; result of `packed`.
        before: of the other rank, before the hooks.
        later: those of the other rank that the hooks have changed.

    Returns:
        the attributes; and for the names of those that the hooks have changed, whether the value is that of the other
        rank.
    """
    copies, others, changed = unpacked(attributes), unpacked(before), unpacked(later)
    unchanged = object()
    taken = {
        key: copy for key, copy in changed.items() if equal(copies.get(key, unchanged), others.get(key, unchanged))
    }
    return packed({**copies, **taken}), {shown(key): key in taken for key in changed}


def _packed_copy(copy: Any) -> Any:
    """Return a copy as numbers, texts, tensors, lists and dicts, without its source.

    Args:
        copy: result of `copied`, `Absent` or `Same`.
    """
    if isinstance(copy, Absent):
        return {"absent": True}
    if isinstance(copy, Same):
        return {"same": list(copy.key)}
    if isinstance(copy, (complex, bytes)):
        return {"complex": [copy.real, copy.imag]} if isinstance(copy, complex) else {"bytes": list(copy)}
    if not isinstance(copy, Copy):
        return copy
    content = copy.content
    if copy.kind == "object":
        content = {name: _packed_copy(value) for name, value in content.items()}
    elif isinstance(content, np.ndarray):
        return {"kind": copy.kind, "content": content.tolist(), "dtype": str(content.dtype)}
    elif isinstance(content, Tensor):
        content = content.cpu()
    elif isinstance(content, list):
        content = of_items(_packed_copy, content)
    return {"kind": copy.kind, "content": content}


def _unpacked_copy(entry: Any) -> Any:
    """Return a copy without a source.

    Args:
        entry: result of `_packed_copy`.
    """
    if not isinstance(entry, dict):
        return entry
    if "absent" in entry:
        return Absent()
    if "same" in entry:
        owner, name = entry["same"]
        return Same((owner, name))
    if "complex" in entry:
        return complex(*entry["complex"])
    if "bytes" in entry:
        return bytes(entry["bytes"])
    content = entry["content"]
    if "dtype" in entry:
        content = np.array(content, dtype=entry["dtype"])
    elif isinstance(content, dict):
        content = {name: _unpacked_copy(value) for name, value in content.items()}
    elif isinstance(content, list):
        content = of_items(_unpacked_copy, content)
    return Copy(entry["kind"], content)
