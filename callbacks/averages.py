"""Averages of weights beside the trained weights: their place in validation, checkpoints and the trained module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fabricx.core.callback import Callback
from fabricx.core.module_state.placeholder import is_placeholder
from fabricx.distributed.sharding.dtensors import is_dtensor

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
        # The module's parameters and places of its buffers, in the order of `averages`; empty between runs.
        self._parameters: list[Tensor] = []
        self._buffers: list[tuple[dict[str, Tensor | None], str]] = []
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

    def check_fit(self, trainer: TrainerProtocol, pl_module: Module, global_batch: int | None) -> None:
        several = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, Averages)]
        if len(several) > 1:
            raise ValueError(
                f"several averages of weights ({', '.join(several)}): a module and a checkpoint hold a single average; "
                "remove all callbacks but one"
            )

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._trains = stage == "fit"
        if self._trains:  # discard the averages of an earlier fit; a checkpoint is restored after `setup`
            self.averages, self._live, self.updates = {}, {}, 0

    def on_train_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._find_tensors(trainer, pl_module)
        self._trainer = trainer
        self._start_averaging(trainer)
        if self._live:  # a checkpoint was loaded, which stores the averages as the module's weights
            self._swap_out()

    def _move_averages(self) -> None:
        """Move the averages to the devices of the weights."""
        devices = zip(self.averages.items(), self._tensors(), strict=True)
        self.averages = {name: average.to(tensor.device) for (name, average), tensor in devices}

    def _broadcast_buffers(self, trainer: TrainerProtocol) -> None:
        """Use the main rank's averages of buffers; collective."""
        for name, _ in trainer.session.module.named_buffers():
            if name in self.averages:
                trainer.world.axis("data").broadcast(self.averages[name])

    def _find_tensors(self, trainer: TrainerProtocol, module: nn.Module) -> None:
        """Find the tensors that have averages; averages that were loaded for different tensors begin anew."""
        parameters: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if averageable(p)}
        buffers = {name: b for name, b in module.named_buffers() if averageable(b)} if self.use_buffers else {}
        self._parameters = list(parameters.values())
        places = ((module.get_submodule(owner), key) for owner, _, key in (name.rpartition(".") for name in buffers))
        self._buffers = [(owner._buffers, key) for owner, key in places]
        tensors = parameters | buffers
        if self.averages.keys() == tensors.keys():  # in another order if stages of a pipeline have saved them
            self.averages = {name: self.averages[name] for name in tensors}
            return
        if self.averages:
            others = ", ".join(sorted(self.averages.keys() ^ tensors.keys())[:3])
            trainer.session.warn_once(
                "averages of other tensors",
                f"{self.state_key} begins anew with the present weights: its averages in the checkpoint are those of "
                f"other tensors than the module's ({others})",
            )
        self.averages, self._live = {name: precise(tensor) for name, tensor in tensors.items()}, {}

    def _tensors(self) -> list[Tensor]:
        """Return the module's present tensors, in the order of `averages`; empty between runs.

        A module may assign other tensors to `parameter.data`, and to the names of buffers. The average of a buffer of
        another shape begins anew.
        """
        tensors = list(self._parameters)
        names = list(self.averages)[len(tensors) :] if self._buffers else []
        for name, (buffers, key) in zip(names, self._buffers, strict=True):
            buffer = buffers.get(key)
            if buffer is None:
                buffer = self.averages[name]
            elif buffer.shape != self.averages[name].shape and not self._live:
                self.averages[name] = precise(buffer)
            tensors.append(buffer)
        return tensors

    # -- swapping: by value, because optimizers and compiled code hold references to the module's tensors -------

    @torch.no_grad()
    def _swap_in(self) -> None:
        """Copy the averages into the module, and save its weights."""
        if (tensors := self._tensors()) and not self._live:
            self._live = {name: tensor.clone() for name, tensor in zip(self.averages, tensors, strict=True)}
            self._put(tensors, self.averages)

    @torch.no_grad()
    def _swap_out(self) -> None:
        """Restore the saved weights of the module."""
        if (tensors := self._tensors()) and self._live:
            self._put(tensors, self._live)
            self._live = {}

    def restore_weights(self) -> None:
        self._swap_out()

    @contextmanager
    @torch.no_grad()
    def trained_weights(self) -> Iterator[None]:
        if not self._live:
            yield
            return
        shown = {name: tensor.clone() for name, tensor in zip(self.averages, self._tensors(), strict=True)}
        self._swap_out()
        try:
            yield
        finally:
            self._swap_in()
            self._put(self._tensors(), shown)

    def _put(self, tensors: list[Tensor], values: Mapping[str, Tensor]) -> None:
        """Write values to the module's tensors; a buffer whose shape has changed is replaced."""
        written = [values[name] for name in self.averages]
        for number, (buffers, key) in enumerate(self._buffers, len(self._parameters)):
            if tensors[number].shape != written[number].shape:
                tensors[number] = buffers[key] = torch.empty_like(written[number], dtype=tensors[number].dtype)
        torch._foreach_copy_(local(tensors), local(written))

    def on_validation_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if self._validate:
            self._join_ranks()
            self._swap_in()

    def on_validation_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._swap_out()

    def on_train_end(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        self._join_ranks()
        if self.apply_at_end:
            self._swap_in()

    def on_exception(self, trainer: TrainerProtocol, pl_module: Module, exception: BaseException) -> None:
        self._swap_out()
        self._parameters, self._buffers, self._trainer = [], [], None

    def teardown(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._parameters, self._buffers, self._live, self._trainer = [], [], {}, None

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: TrainerProtocol, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if self._trainer is None or self._live:  # between runs, or the module holds the averages already
            return
        self._join_ranks()  # in place: the tensors that `state_dict` returned are updated too
        weights = _weights(checkpoint)
        state = checkpoint.get("callbacks", {}).get(self.state_key)  # None if the checkpoint has only weights
        for name, alias in _aliases(pl_module, self.averages):
            if alias in weights:
                if state is not None:
                    state["live"][name] = weights[alias]
                weights[alias] = self.averages[name].to(weights[alias].dtype)

    def on_load_checkpoint(self, trainer: TrainerProtocol, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        """Resume training from the trained weights, not the averages: servers copy the module's weights at start."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if not self._trains or not state:
            return
        if not state["live"]:
            if state.get("ended") and self.apply_at_end:
                warn_of_averages(trainer, self.state_key)
            return
        weights, live = _weights(checkpoint), state["live"]
        averages = {name: tensor for name, tensor in state["averages"].items() if name in live}
        for name, alias in _aliases(pl_module, averages):
            if alias in weights:
                weights[alias] = live[name]
        state["live"] = {}

    def state_dict(self) -> dict[str, Any]:
        self._update()
        return {
            "averages": dict(self.averages), "live": dict(self._live), "updates": self.updates,
            "ended": self._trainer is None,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = dict(state_dict["averages"])
        self._live = dict(state_dict["live"])
        self.updates = state_dict["updates"]
        if self._trainer is not None:  # the run rolled back to an earlier state
            # Strategies divide the weights of a replacement, or move those of all ranks, when it joins.
            self._find_tensors(self._trainer, self._trainer.session.module)
            self._start_averaging(self._trainer)


def warn_of_averages(trainer: TrainerProtocol, key: str) -> None:
    """Warn that a run resumes from a checkpoint that has averages in place of the weights.

    Args:
        trainer: of the run.
        key: of the callback that averages.
    """
    trainer.session.warn_once(
        "averages without weights",
        f"the checkpoint was saved after a fit and has only the averages of {key}, from which training continues with "
        "optimizers of the weights that were averaged; to continue as before, resume from a checkpoint that was saved "
        "during the fit, such as by ModelCheckpoint",
    )


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


def precise(tensor: Tensor) -> Tensor:
    """Return a copy, in float32 instead of half precision, which would round small updates away.

    Args:
        tensor: weights of any dtype.
    """
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32) if half else tensor.detach().clone()


def _weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, which other hooks may have replaced."""
    weights: dict[str, Tensor] = checkpoint.get("state_dict", checkpoint["strategy"]["module"])
    return weights


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
