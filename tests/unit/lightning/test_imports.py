from __future__ import annotations

from fabricx.lightning import imports


def test_flags_are_true_for_installed_packages() -> None:
    assert imports._OMEGACONF_AVAILABLE
    assert imports.package_available("torch")
    assert not imports.RequirementCache("torch<1.0")
