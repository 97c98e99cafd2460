"""The result of a run, transferred from the training process to the caller's objects."""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fabricx.trainer.run_request import Job
    from fabricx.trainer.trainer import Trainer


@dataclass
class Outcome:
    """What a job left, on the main rank; plain data once it is `portable`."""

    results: Any = None
    weights: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)

    def portable(self, trainer: Trainer, weights: dict[str, Any]) -> Outcome:
        """Gather what the caller's objects have to take over."""
        module = trainer.module
        self.weights = weights
        keys = ("state", "interrupted", "terminated", "run_dir", "num_training_batches", "num_val_batches", "published",
                "stop_wanted", "stopped")  # fmt: skip
        self.trainer = {key: getattr(trainer, key) for key in keys}
        self.attributes = picklable_part(
            {k: v for k, v in vars(module).items() if not k.startswith("_") and not inspect.ismethod(v)}
        )
        self.callbacks = [picklable_part(vars(callback)) for callback in trainer.callbacks]
        return self

    def absorb(self, trainer: Trainer, job: Job) -> None:
        """Bring the caller's module, trainer and callbacks to where the job has brought the workers'."""
        own = job.module.state_dict(keep_vars=True)
        for name, tensor in self.weights.items():
            if name in own and own[name].shape == tensor.shape:
                with torch.no_grad():
                    own[name].data = own[name].data.to(tensor.dtype)  # another one with precision="64-true"
                    own[name].copy_(tensor)
        if set(own) != set(self.weights):  # layers that were built in configure_model or setup
            job.module.configure_model()
            job.module.load_state_dict(self.weights)
        vars(job.module).update(self.attributes)
        vars(trainer).update(self.trainer)
        trainer.module, trainer.datamodule = job.module, job.datamodule
        for callback, attributes in zip(trainer.callbacks, self.callbacks, strict=False):
            vars(callback).update(attributes)


class _Portable(pickle.Pickler):
    """Refuses what means nothing outside of its process group."""

    def reducer_override(self, obj: Any) -> Any:
        if hasattr(obj, "full_tensor"):
            raise pickle.PicklingError("a rank's shard")
        return NotImplemented


def picklable_part(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that can travel."""
    kept = {}
    for name, value in attributes.items():
        try:
            _Portable(io.BytesIO()).dump(value)
        except Exception:
            continue  # an open file, a live bar, a rank's shard: it stays in the worker
        kept[name] = value
    return kept
