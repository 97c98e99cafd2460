"""Serialisation of plain data and tensors that never executes code from the bytes that it reads."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np
import torch


def dumps(obj: Any) -> bytes:
    """Serialise numbers, text, lists, tuples, sets, dicts and tensors.

    Numbers and texts of numpy become Python's own: a schedule by a function of numpy makes them learning rates.

    Args:
        obj: nested plain data.

    Raises:
        TypeError: the object contains an unsupported type; the message names it.
    """
    try:
        try:
            return _written(obj)
        except pickle.UnpicklingError:  # the conversion is needed rarely
            return _written(_without_numpy_scalars(obj))
    except Exception as error:
        raise TypeError(reason(error)) from None


def _written(obj: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(obj, stream)
    _read(stream.getvalue())
    return stream.getvalue()


def _without_numpy_scalars(obj: Any) -> Any:
    if isinstance(obj, (np.number, np.bool_, np.str_)):
        return obj.item()
    if type(obj) in (dict, OrderedDict):
        return type(obj)((_without_numpy_scalars(name), _without_numpy_scalars(value)) for name, value in obj.items())
    if type(obj) in (list, tuple, set):
        return type(obj)(_without_numpy_scalars(value) for value in obj)
    return obj


def loads(data: bytes) -> Any:
    """Deserialise the bytes of `dumps` to an object with tensors on the CPU; the data are never executed.

    Args:
        data: may be untrusted.

    Raises:
        ValueError: the data contain more than plain data and tensors; the message names the type.
    """
    try:
        check_sizes(io.BytesIO(data), len(data))
        return _read(data)
    except Exception as error:  # torch's message suggests to disable the protection
        raise ValueError(reason(error)) from None


def check_sizes(file: Any, size: int) -> None:
    """Refuse an archive whose entries would be larger than the archive, which torch writes without compression.

    Args:
        file: path, or open file.
        size: bytes of the file.

    Raises:
        ValueError: an entry is compressed, or states a wrong size.
        zipfile.BadZipFile: the file is not an archive.
    """
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > size:
            raise ValueError("an entry of the archive states more bytes than the file has")


def _read(data: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch asks users to report files that it refuses
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def reason(error: Exception) -> str:
    """Describe why torch has refused a file, without its advice to disable the protection.

    Args:
        error: error of `torch.load`.
    """
    text = str(error)
    refused = re.search(r"GLOBAL (\S+)|class '?([\w.]+)", text)
    if refused is not None:
        return f"it contains {refused.group(1) or refused.group(2)}, whose construction would run code"
    if "weights_only" in text:
        return "its pickle does more than create plain data"
    return f"it can't be read ({type(error).__name__})"
