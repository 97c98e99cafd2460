"""Names of the arguments of `fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from fabricx.errors import WrongArgument, nearest

_MODULES: Final = ("pl_module", "lightning_module", "net", "network")
_DATA: Final = ("data_module", "dm", "data", "lightning_datamodule")
_CHECKPOINTS: Final = ("checkpoint", "checkpoint_path", "resume_from_checkpoint", "ckpt", "resume_from")
_OF_TRAINER: Final = ("max_epochs", "max_steps", "callbacks", "logger", "devices", "strategy", "precision")


def check_names(call: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Refuse keywords that a call of the Trainer does not have.

    Args:
        call: method of the Trainer.
        unknown: names of the keywords.

    Raises:
        WrongArgument: names the right keyword.
    """
    for name in unknown:
        parameters = inspect.signature(call).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        raise WrongArgument(f"trainer.{call.__name__} has no argument {name!r}: {_remedy(name, known)}")


def _remedy(name: str, known: list[str]) -> str:
    """Return the right keyword, and all keywords."""
    shown = f"\n  known: {', '.join(known)}"
    if name in _OF_TRAINER:
        return f"pass it to the constructor, Trainer({name}=...){shown}"
    meant = _meant(name, known)
    return f"pass {meant}=...{shown}" if meant else shown.strip()


def _meant(name: str, known: list[str]) -> str | None:
    for right, wrong in (("model", _MODULES), ("datamodule", _DATA), ("ckpt_path", _CHECKPOINTS)):
        if name in wrong:
            return right
    if "load" not in name:
        return nearest(name, known)
    # train_dataloader and val_dataloader of Lightning 1, train_loader, valid_loader, dataloader
    kinds = [parameter for parameter in known if "loaders" in parameter]
    if len(kinds) == 1 or name.startswith(("tr", "data", "load")):
        return kinds[0]
    return kinds[1] if name.startswith(("val", "eval", "dev")) else None
