"""fabricx under the module paths of `lightning.pytorch`: `import fabricx.pytorch as pl`.

`pl.Trainer`, `pl.LightningModule`, `pl.callbacks.ModelCheckpoint`, `from fabricx.pytorch.utilities.rank_zero import
rank_zero_only`: a project changes its imports only. The use of an absent name is an ImportError that names its
successor; `docs/lightning_names.md` lists all names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabricx.core.rank_zero import set_launched_rank
from fabricx.pytorch.modules import available, install, lookup

if TYPE_CHECKING:
    from fabricx import callbacks as callbacks
    from fabricx import loggers as loggers
    from fabricx import strategies as strategies
    from fabricx.core.callback import Callback as Callback
    from fabricx.core.datamodule import DataModule as LightningDataModule
    from fabricx.core.module import LightningModule as LightningModule
    from fabricx.core.module_state.rng import seed_everything as seed_everything
    from fabricx.trainer.trainer import Trainer as Trainer

__version__ = "2.6.0"  # of Lightning, whose names these are
__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"]

install()
set_launched_rank()  # for `rank_zero_only` before the first Trainer


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = globals()[name] = lookup("", name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *available("")])
