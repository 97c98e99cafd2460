"""Configuration: YAML groups with constructor arguments as keys."""

from __future__ import annotations

if __name__ != "fabricx.conf":
    raise ImportError(f"import this package as fabricx.conf, not {__name__}")
