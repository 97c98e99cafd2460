"""Averages of weights beside the trained weights: their place in validation, checkpoints and the trained module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fabricx.core.callback import Callback
from fabricx.core.placeholder import is_placeholder
from fabricx.distributed.dtensors import is_dtensor

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


class Averages(Callback):
    """Maintains averages of the weights; a derived class determines when and how they change.

    During validation in `fit`, the module holds the averages. Checkpoints store the averages as the module's weights,
    so that a loaded checkpoint contains them; the weights to resume training from are in this callback's state.

    Args:
        use_buffers: also average real and complex buffers; False uses the buffers of the module.
        validate: validate the averages rather than the weights.
        apply_at_end: copy the averages into the module when training ends.

    Raises:
        ValueError: the run has several such callbacks.
    """

    needs_all_ranks: ClassVar[bool] = True
    keeps_weights: ClassVar[bool] = True
    every_batch: ClassVar[bool] = True  # a rank averages every update, also if it has no sample of the batch

    def __init__(self, *, use_buffers: bool, validate: bool, apply_at_end: bool) -> None:
        self.use_buffers = use_buffers
        self.apply_at_end = apply_at_end
        self.updates = 0
        self.averages: dict[str, Tensor] = {}
        self._validate = validate
        self._live: dict[str, Tensor] = {}  # the trained weights, while the module holds the averages
        self._tensors: list[Tensor] = []  # the module's tensors, in the order of `averages`; empty between runs
        self._trains = False
        self._trainer: TrainerProtocol | None = None  # None between runs

    @abstractmethod
    def _start_averaging(self, trainer: TrainerProtocol) -> None:
        """Begin averaging from the present state: at the start of training, or after a rollback."""

    @abstractmethod
    def _update(self) -> None:
        """Update the averages if the module has newer weights."""

    @abstractmethod
    def _join_ranks(self) -> None:
        """Make the averages equal on all ranks: collective, called when all ranks hold equal weights."""

    def check_fit(self, trainer: TrainerProtocol, module: Module, global_batch: int | None) -> None:
        several = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, Averages)]
        if len(several) > 1:
            raise ValueError(
                f"several averages of weights ({', '.join(several)}): a module and a checkpoint hold a single average; "
                "remove all callbacks but one"
            )

    def setup(self, trainer: TrainerProtocol, module: Module, stage: str) -> None:
        self._trains = stage == "fit"
        if self._trains:  # discard the averages of an earlier fit; a checkpoint is restored after `setup`
            self.averages, self._live, self.updates = {}, {}, 0

    def on_train_start(self, trainer: TrainerProtocol, module: Module) -> None:
        tensors = self._averaged(module)
        if self.averages.keys() != tensors.keys():
            self.averages, self._live = {name: _precise(tensor) for name, tensor in tensors.items()}, {}
        self._tensors = [tensor.detach() for tensor in tensors.values()]
        self._trainer = trainer
        self._start_averaging(trainer)
        if self._live:  # a checkpoint was loaded, which stores the averages as the module's weights
            self._swap_out()

    def _move_averages(self) -> None:
        """Move the averages to the devices of the weights."""
        devices = zip(self.averages.items(), self._tensors, strict=True)
        self.averages = {name: average.to(tensor.device) for (name, average), tensor in devices}

    def _broadcast_buffers(self, trainer: TrainerProtocol) -> None:
        """Use the main rank's averages of buffers; collective."""
        for name, _ in trainer.session.module.named_buffers():
            if name in self.averages:
                trainer.world.axis("data").broadcast(self.averages[name])

    def _averaged(self, module: Module) -> dict[str, Tensor]:
        averaged: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if averageable(p)}
        if self.use_buffers:
            averaged |= {name: b for name, b in module.named_buffers() if averageable(b)}
        return averaged

    # -- swapping: by value, because optimizers and compiled code hold references to the module's tensors -------

    @torch.no_grad()
    def _swap_in(self) -> None:
        """Copy the averages into the module, and save its weights."""
        if self._tensors and not self._live:
            self._live = {name: tensor.clone() for name, tensor in zip(self.averages, self._tensors, strict=True)}
            torch._foreach_copy_(local(self._tensors), local(self.averages.values()))

    @torch.no_grad()
    def _swap_out(self) -> None:
        """Restore the saved weights of the module."""
        if self._tensors and self._live:
            torch._foreach_copy_(local(self._tensors), local(self._live[name] for name in self.averages))
            self._live = {}

    def on_validation_start(self, trainer: TrainerProtocol, module: Module) -> None:
        if self._validate:
            self._join_ranks()
            self._swap_in()

    def on_validation_end(self, trainer: TrainerProtocol, module: Module) -> None:
        self._swap_out()

    def on_train_end(self, trainer: TrainerProtocol, module: Module) -> None:
        self._join_ranks()
        if self.apply_at_end:
            self._swap_in()

    def on_exception(self, trainer: TrainerProtocol, module: Module, exception: BaseException) -> None:
        self._swap_out()
        self._tensors, self._trainer = [], None

    def teardown(self, trainer: TrainerProtocol, module: Module, stage: str) -> None:
        self._tensors, self._live, self._trainer = [], {}, None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: TrainerProtocol, module: Module, checkpoint: dict[str, Any]) -> None:
        if not self._tensors or self._live:  # between runs, or the module holds the averages already
            return
        self._join_ranks()  # in place: the tensors that `state_dict` returned are updated too
        weights = checkpoint["strategy"]["module"]
        state = checkpoint.get("callbacks", {}).get(self.state_key)  # None if the checkpoint has only weights
        for name, alias in _aliases(module, self.averages):
            if alias in weights:
                if state is not None:
                    state["live"][name] = weights[alias]
                weights[alias] = self.averages[name].to(weights[alias].dtype)

    def on_load_checkpoint(self, trainer: TrainerProtocol, module: Module, checkpoint: dict[str, Any]) -> None:
        """Resume training from the trained weights, not the averages: servers copy the module's weights at start."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not self._trains or not state or not state["live"]:
            return
        weights, live = checkpoint["strategy"]["module"], state["live"]
        averages = {name: tensor for name, tensor in state["averages"].items() if name in live}
        for name, alias in _aliases(module, averages):
            if alias in weights:
                weights[alias] = live[name]
        state["live"] = {}

    def state_dict(self) -> dict[str, Any]:
        self._update()
        return {"averages": dict(self.averages), "live": dict(self._live), "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = dict(state_dict["averages"])
        self._live = dict(state_dict["live"])
        self.updates = state_dict["updates"]
        if self._tensors and self._trainer is not None:  # the run rolled back to an earlier state
            # Strategies divide the weights of a replacement, or move those of all ranks, when it joins.
            self._tensors = [tensor.detach() for tensor in self._averaged(self._trainer.session.module).values()]
            self._start_averaging(self._trainer)


def local(tensors: Iterable[Any]) -> list[Tensor]:
    """Return the local shards of sharded tensors, and other tensors unchanged: averaging is elementwise.

    Args:
        tensors: ordinary tensors and DTensors.
    """
    return [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in tensors]


def averageable(tensor: Tensor) -> bool:
    """Return whether a tensor has an average on this rank: real or complex numbers, which no other stage holds.

    Args:
        tensor: parameter or buffer.
    """
    return (tensor.is_floating_point() or tensor.is_complex()) and not is_placeholder(tensor)


def _precise(tensor: Tensor) -> Tensor:
    """Return a copy, in float32 instead of half precision, which would round small updates away."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32) if half else tensor.detach().clone()


def _aliases(module: Module, averages: dict[str, Tensor]) -> list[tuple[str, str]]:
    """Return (name of the average, name in the module) for every name; tied weights have several names."""
    first: dict[int, str] = {}
    pairs: list[tuple[str, str]] = []
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for alias, tensor in named:
        name = first.setdefault(id(tensor), alias)
        if name in averages:
            pairs.append((name, alias))
    return pairs
