"""Registries keep the classes that packages register when they are imported."""

from __future__ import annotations

import pytest

import fabricx as fx
from fabricx.testing import QUIET


def test_registries_take_classes_of_packages_for_other_devices() -> None:
    from fabricx.pytorch import accelerators, strategies

    class CustomAccelerator(accelerators.Accelerator):
        def __init__(self, number: int = 0) -> None:
            self.number = number

    for registry in (accelerators.AcceleratorRegistry, strategies.StrategyRegistry):
        registry.register("mine", CustomAccelerator, description="of a package", number=2)
        try:
            assert registry.get("mine").number == 2
            assert "mine" in registry.available_strategies()
            with pytest.raises(ValueError, match="'mine' is registered already"):
                registry.register("mine", CustomAccelerator)
            assert registry.register("mine", override=True)(CustomAccelerator) is CustomAccelerator
        finally:
            registry.remove("mine")
        assert registry.get("mine", 1) == 1
        with pytest.raises(KeyError, match="'mine' is not registered"):
            registry.get("mine")
    with pytest.raises(ValueError, match="mine"):
        fx.Trainer(**{**QUIET, "accelerator": "mine"})
