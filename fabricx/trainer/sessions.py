"""The sessions of a trainer in this process: that of the newest run, and that of the newest fit."""

from __future__ import annotations

from typing import final

from fabricx.session.session import Session


@final
class Sessions:
    """The newest sessions of a trainer. Sessions belong to their process: a pickle, or a deep copy, has none.

    Attributes:
        newest: session of the newest run; None before the first run in this process.
        fit: session of the newest fit; None before the first fit in this process.
    """

    def __init__(self) -> None:
        self.newest: Session | None = None
        self.fit: Session | None = None

    def __reduce__(self) -> tuple[type[Sessions], tuple[()]]:
        return Sessions, ()

    def begin(self, session: Session, *, fits: bool) -> None:
        """Set the newest session.

        Args:
            session: this rank's session.
            fits: the run trains the module.
        """
        self.newest = session
        if fits:
            self.fit = session
