"""fabricx under the module paths of `lightning.fabric`: `from fabricx.fabric.utilities.seed import seed_everything`.

The names are those of `fabricx.pytorch.fabric`; `docs/lightning_names.md` lists them. The loop of `Fabric` is absent.
"""

from __future__ import annotations

from typing import Any

from fabricx.pytorch.modules import available, install, lookup

install()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = globals()[name] = lookup("fabric", name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *available("fabric")])
