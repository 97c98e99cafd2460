"""The configuration: YAML groups whose keys are constructor arguments."""

from __future__ import annotations

if __name__ != "fabricx.conf":
    raise ImportError(f"import this package as fabricx.conf, not {__name__}")
