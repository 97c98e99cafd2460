"""Names of Lightning that fabricx does not have."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fabricx import Callback
from fabricx.pytorch.modules import lookup


def test_an_absent_name_may_be_imported_annotated_and_compared() -> None:
    absent: Any = lookup("strategies", "DeepSpeedStrategy")
    assert not isinstance(1, absent)
    assert not isinstance(1, (absent, str))
    assert not issubclass(Callback, absent)
    assert str(absent | None).replace("Optional", "") == str(None | absent).replace("Optional", "")
    assert absent.__name__ == "DeepSpeedStrategy"
    assert not hasattr(absent, "registered")
    assert repr(pickle.loads(pickle.dumps(absent))) == repr(absent)


def test_its_use_names_the_successor() -> None:
    absent: Any = lookup("strategies", "DeepSpeedStrategy")
    successor = 'fabricx has no DeepSpeedStrategy of Lightning: set strategy="fsdp"'
    with pytest.raises(ImportError, match=successor):
        absent(stage=3)
    with pytest.raises(ImportError, match=successor):
        type("Own", absent.__mro_entries__(()), {})
    with pytest.raises(AttributeError, match=successor):
        absent.register()
