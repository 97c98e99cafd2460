"""The sessions of a trainer in this process: that of the newest run, and that of the newest fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from fabricx import by_value
from fabricx.core.module_state.rng import random_kept
from fabricx.session.session import Session
from fabricx.trainer.attributes import Digest, NotSent, small

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fabricx.core.optimizers import Schedule

_REMEDY: Final = "read them in hooks, or in a checkpoint of the run"


@dataclass
class Returned:
    """Optimizers and schedules of a fit in workers, whose parameters are those of the caller's module.

    Attributes:
        optimizers, schedules: with their states.
        missing: the reason why they remain in the workers; "" otherwise.
    """

    optimizers: list[Optimizer] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    missing: str = ""


def returned(optimizers: Sequence[Optimizer], schedules: Sequence[Schedule], *, whole: bool) -> Returned:
    """Return the optimizers of a fit in a form that can be sent, or the reason why they can't.

    Args:
        optimizers, schedules: of the main rank, after the run.
        whole: this rank has the whole state.
    """
    if not whole:
        return Returned(missing="no rank has their whole state with this strategy")
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state.update({name: value.cpu() for name, value in state.items() if hasattr(value, "cpu")})
    try:
        by_value.dump((optimizers, schedules), Digest(), home=True, reduce=small)
    except NotSent as error:
        return Returned(missing=f"their state is {error}")
    except Exception as error:
        return Returned(missing=f"they can't be pickled ({error})")
    return Returned(list(optimizers), list(schedules))


@final
class LoaderMethods:
    """Creates loaders with a size that a search has found, for attributes that are read before the next run.

    Args:
        stage: call of the Trainer for which the size is.
        owners: objects with the methods; the first that returns a loader counts.
    """

    def __init__(self, stage: str, *owners: Any) -> None:
        self.stage = stage
        self._owners = owners
        self._created: dict[str, Any] = {}

    def create(self, name: str) -> Any:
        """Return the loaders of a method, which is called once.

        Args:
            name: method of a module or a data module.
        """
        if name not in self._created:
            with random_kept():
                returned = (getattr(owner, name)() for owner in self._owners)
                self._created[name] = next((loaders for loaders in returned if loaders is not None), None)
        return self._created[name]


@final
class Sessions:
    """The newest sessions of a trainer. Sessions belong to their process: a pickle, or a deep copy, has none.

    Attributes:
        searched: creates the loaders after a search for a batch size, until the next run begins.
        newest: session of the newest run; None before the first run in this process.
        fit: session of the newest fit; None before the first fit in this process.
        returned: optimizers of the newest fit in workers.
    """

    def __init__(self, returned: Returned | None = None) -> None:
        self.newest: Session | None = None
        self.fit: Session | None = None
        self.returned = returned or Returned()
        self.searched: LoaderMethods | None = None

    def __reduce__(self) -> tuple[type[Sessions], tuple[Returned]]:
        return Sessions, (Returned(self.returned.optimizers, self.returned.schedules),)

    def begin(self, session: Session, *, fits: bool) -> None:
        """Set the newest session.

        Args:
            session: this rank's session.
            fits: the run trains the module.
        """
        self.newest = session
        if fits:
            self.fit, self.returned = session, Returned()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers of the newest fit.

        Raises:
            RuntimeError: they remain in workers.
        """
        if self.fit is not None:
            return self.fit.optimizers
        return self._found().optimizers

    @property
    def schedules(self) -> list[Schedule]:
        """Return the learning rate schedules of the newest fit.

        Raises:
            RuntimeError: they remain in workers.
        """
        if self.fit is not None:
            return self.fit.lr_schedulers
        return self._found().schedules

    def _found(self) -> Returned:
        if self.returned.missing:
            raise RuntimeError(
                f"the optimizers and schedules remain in the worker processes: {self.returned.missing}; {_REMEDY}"
            )
        return self.returned
