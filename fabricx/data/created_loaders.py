"""Creation of loaders by methods of the data module and the module, and their creation again by a later run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

from fabricx.core.datamodule import DataModule
from fabricx.core.hook_calls.hooks import overrides
from fabricx.core.module_hooks import ModuleHooks
from fabricx.core.module_state.rng import RandomState, random_kept, seed_often
from fabricx.data.data_state import copied_state, equal_states
from fabricx.data.order import epoch_seed
from fabricx.errors import WrongArgument

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState


@final
class CreatedLoaders:
    """Creates loaders, and keeps what a resumed run or the replacement of a worker needs to create them again.

    Args:
        stage: "fit", "validate", "test" or "predict".
        module: the user's module.
        datamodule: of the call, if any.
        options: of the run.
        state: seed and epoch.

    Attributes:
        epochs: epochs in which the training loader and the evaluation loaders were created.
        states: states of the data module before it created these; None without a state, or if unknown.
        running: the user's method that returns a loader is running.
    """

    def __init__(
        self, stage: str, module: Module, datamodule: DataModule | None, options: TrainerOptions, state: RunState
    ) -> None:  # fmt: skip
        self._stage, self._module, self._datamodule = stage, module, datamodule
        self._options, self._state = options, state
        self.epochs = [state.epoch, state.epoch]
        self.states: list[Any] = [None, None]
        self._random: list[RandomState | None] = [None, None]  # at set-up, before the creation of these loaders
        self.running = False

    def outdated(self, kind: Literal[0, 1]) -> bool:
        """Return whether `reload_dataloaders_every_n_epochs` is due.

        Args:
            kind: 0 for the training loader, 1 for evaluation loaders.
        """
        every = self._options.reload_dataloaders_every_n_epochs
        return every > 0 and self._state.epoch - self.epochs[kind] >= every

    def default_epochs(self) -> list[int]:
        """Return the epochs in which an earlier run that has not recorded them has created its loaders."""
        every, epoch = self._options.reload_dataloaders_every_n_epochs, self._state.epoch
        return [epoch - epoch % every] * 2 if every else self.epochs

    def differ(self, epochs: Sequence[int], states: Sequence[Any], *, changed: bool) -> list[bool]:
        """Return whether the training loader and the evaluation loaders of an earlier run have to be created again.

        Args:
            epochs, states: of the earlier run.
            changed: the module has changed since it created loaders.
        """
        every, changed = self._options.reload_dataloaders_every_n_epochs, changed and self._datamodule is None
        return [
            changed or (every > 0 and then != epoch) or not (state is None or equal_states(state, own_state))
            for then, epoch, state, own_state in zip(epochs, self.epochs, states, self.states, strict=True)
        ]

    def create(self, kind: Literal[0, 1], name: str) -> Any:
        """Create a loader, and keep what a resumed run or the replacement of a worker needs to create it again.

        All ranks draw the same random numbers meanwhile: at set-up those of a single process, later those of the seed
        and the epoch.

        Args:
            kind: 0 for the training loader, 1 for evaluation loaders.
            name: method of the data module or the module.

        Returns:
            the result of the method; None if neither defines it.

        Raises:
            ValueError: the method returns None.
        """
        self.epochs[kind], self.states[kind] = self._state.epoch, copied_state(self._datamodule)
        known = self._random[kind]
        if self._stage != "fit" or (known is None and not self._state.epoch):
            self._random[kind] = RandomState()
            return self._loader(name)
        with random_kept():
            if self._state.epoch or known is None:
                seed_often(epoch_seed(self._state.seed, self._state.epoch) % 2**32)
            else:
                known.restore()
            return self._loader(name)

    def load_datamodule(self, state: Any) -> None:
        """Load a state into the data module, if there are both.

        Args:
            state: None or empty without.
        """
        if self._datamodule is not None and state:
            self._datamodule.load_state_dict(state)

    @contextlib.contextmanager
    def as_in(self, epoch: int, state: Any) -> Iterator[None]:
        """Context in which methods that create loaders read an earlier epoch, and an earlier state of the data module.

        Args:
            epoch: the earlier epoch.
            state: the earlier state; None for the present state.
        """
        self.load_datamodule(copy.deepcopy(state))
        now, self._state.epoch = self._state.epoch, epoch
        try:
            yield
        finally:
            self._state.epoch = now

    def _loader(self, name: str) -> Any:
        """Return the loader of the data module or the module; None if neither defines it.

        Raises:
            ValueError: the method returns None.
        """
        for owner, contract in ((self._datamodule, DataModule), (self._module, ModuleHooks)):
            if owner is None:
                continue
            if (method := getattr(owner, name)) is None:  # assigned by the user: the owner has no such loader
                continue
            self.running = True
            try:
                loader = method()
            finally:
                self.running = False
            if loader is not None:
                return loader
            if overrides(owner, name, contract):
                raise WrongArgument(
                    f"{type(owner).__name__}.{name}() returned None: return a loader, or [] for no "
                    "batches; remove the method where there is no such data"
                )
        return None
