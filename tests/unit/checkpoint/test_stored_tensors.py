"""Tensors of modules that override `state_dict`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fabricx.checkpoint.stored_tensors import stored_tensors


class _WithoutParameters(nn.Linear):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for name, value in super().state_dict().items() if name != "bias"}


class _Renames(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"of.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


def test_the_tensors_are_those_of_the_module_under_the_names_of_its_state_dict() -> None:
    net, renames = _WithoutParameters(2, 2), _Renames(2, 2)
    assert {name: id(value) for name, value in stored_tensors(net).items()} == {"weight": id(net.weight)}
    assert [id(value) for value in stored_tensors(renames).values()] == [id(renames.weight), id(renames.bias)]
    assert list(stored_tensors(renames)) == ["of.weight", "of.bias"]
