"""Data of other processes is never executed."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabricx.distributed.messages.plain_data import dumps, loads, reason


class Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_plain_data_and_tensors_are_decoded_unchanged() -> None:
    data = {"a": [1, 2.5, None, "text", b"bytes"], ("b", 1): {True}, "t": torch.arange(3, dtype=torch.bfloat16)}
    back = loads(dumps(data))
    assert torch.equal(back.pop("t"), data.pop("t"))
    assert back == data


def test_an_object_is_refused_where_it_is_sent_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"it contains \S*Path"):
        dumps({"where": Path("x")})
    with pytest.raises(TypeError, match=r"it can't be read|it contains"):
        dumps(lambda: None)


def bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    return stream.getvalue()


def evil() -> bytes:
    stream = io.BytesIO()
    torch.save(Runs(), stream)
    return stream.getvalue()


@pytest.mark.parametrize("make", [evil, bomb, lambda: pickle.dumps(Runs()), lambda: b"", lambda: dumps([1])[:-5]])
def test_malicious_bytes_are_refused_and_not_executed(make: Any, own_folder: Path) -> None:
    with pytest.raises(ValueError) as error:
        loads(make())
    assert not Path("ran").exists()
    assert error.value.__suppress_context__
    assert "weights_only" not in str(error.value)  # torch's advice to switch the protection off


def test_numpy_numbers_and_strings_become_python_values() -> None:
    values = {"lr": np.float64(0.1), "steps": [np.int64(3), (np.float32(0.5), np.bool_(True))], "name": np.str_("a")}
    read = loads(dumps(values))
    assert read == {"lr": 0.1, "steps": [3, (0.5, True)], "name": "a"}
    assert [type(read["lr"]), type(read["steps"][0]), type(read["name"])] == [float, int, str]


def test_a_reason_has_the_whole_name_of_a_class() -> None:
    error = pickle.UnpicklingError("Can only SETITEM for dict, Counter, but got <class 'collections.defaultdict'>\n")
    assert reason(error) == "it contains collections.defaultdict, whose construction would run code"
