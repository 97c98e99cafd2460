"""Names of Lightning's strategies that users' hooks read from `trainer.strategy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from fabricx.core.tensors.transfer import to_device
from fabricx.distributed.world import World
from fabricx.errors import did_you_mean

_CHECKPOINTS: Final = "trainer.save_checkpoint(path) and fit(ckpt_path=...) write and read checkpoints"
_DEVICES: Final = "trainer.device_ids, trainer.num_devices and trainer.num_nodes describe the devices"
_STEPS: Final = "the loop calls the steps of the module"

# Attributes of Lightning's strategies that fabricx doesn't have, with their successors.
_SUCCESSORS: Final[Mapping[str, str]] = {
    "setup_optimizers": "a hook trains new parameters by trainer.optimizers[0].add_param_group({'params': [...]}), and "
    "changes rates in param_groups; for other optimizers, train in two fits",
    "accelerator": "trainer.accelerator is its name", "precision_plugin": "trainer.precision is its name",
    "load_checkpoint": f"{_CHECKPOINTS}; torch.load(path, weights_only=True) reads a file",
    "checkpoint_io": _CHECKPOINTS, "save_checkpoint": _CHECKPOINTS,
    "remove_checkpoint": "ModelCheckpoint(save_top_k=...) removes checkpoints, and shutil or os a single one",
    "load_model_state_dict": "trainer.lightning_module.load_state_dict(checkpoint['state_dict'])",
    "lightning_module_state_dict": "trainer.lightning_module.state_dict()",
    "optimizer_state": "optimizer.state_dict()", "load_optimizer_state_dict": "optimizer.load_state_dict(state)",
    "distributed_sampler_kwargs": "trainer.distributed_sampler_kwargs",
    "node_rank": "trainer.node_rank", "num_nodes": "trainer.num_nodes", "num_processes": "trainer.num_devices",
    "is_distributed": "trainer.world_size > 1", "parallel_devices": _DEVICES, "cluster_environment": _DEVICES,
    "process_dataloader": "train_dataloader and val_dataloader return the loaders",
    "training_step": _STEPS, "validation_step": _STEPS, "test_step": _STEPS, "predict_step": _STEPS,
}  # fmt: skip


class StrategyNames:
    """Ranks and collectives of a strategy under Lightning's names; `World` has the same operations."""

    traits: Any
    world: World
    module: nn.Module | None

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank."""
        return self.world.device

    @property
    def model(self) -> nn.Module | None:
        """Return the module; None outside of a run."""
        return self.module

    @property
    def optimizers(self) -> list[Any]:
        """Return the optimizers of the run; none outside of a run."""
        module: Any = self.module
        return [] if module is None else list(module.trainer.optimizers)

    @property
    def lightning_module(self) -> nn.Module | None:
        """Return the module; None outside of a run."""
        return self.module

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is the main rank, or a replacement that takes its place."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Return the number of this rank among all ranks."""
        return self.world.planned.rank

    @property
    def local_rank(self) -> int:
        """Return the number of this rank on this machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.world.size

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks.

        Args:
            name: without an effect.
        """
        self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return an object of a rank on all ranks.

        Args:
            obj: any picklable object.
            src: its rank.
        """
        return self.world.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: None = None, reduce_op: str | None = "mean") -> Any:
        """Return a tensor, reduced over all data ranks.

        Args:
            tensor: tensor of the same shape on each rank; other objects are returned as they are.
            group: None for all ranks.
            reduce_op: "mean" (or "avg"), "sum", "max" or "min".

        Raises:
            ValueError: there is a group, or the operation is unknown.
        """
        if group is not None:
            raise ValueError(
                "strategy.reduce(group=...): pass None for all ranks, or call torch.distributed.all_reduce"
            )
        if not isinstance(tensor, Tensor):
            return tensor
        word, world = (reduce_op or "mean").lower(), self.world.axis("data")
        if word in ("mean", "avg"):
            return world.all_reduce(tensor.clone().to(torch.promote_types(tensor.dtype, torch.float32))) / world.size
        if word not in ("sum", "max", "min"):
            raise ValueError(f"strategy.reduce(reduce_op={reduce_op!r}): set 'mean', 'sum', 'max' or 'min'")
        return world.all_reduce(tensor.clone(), word)  # type: ignore[arg-type]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all data ranks decide True, or at least one of them; every rank calls it.

        Args:
            decision: of this rank.
            all: whether all ranks have to decide True.
        """
        world = self.world.axis("data")
        agreed = int(world.all_reduce(torch.tensor(int(bool(decision)), device=world.device)))
        return agreed == world.size if all else agreed > 0

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return a batch on the device, by the transfer methods of the module.

        Args:
            batch: of a loader.
            device: that of this rank by default.
            dataloader_idx: index of the loader.
        """
        device, module = device or self.root_device, self.module
        if module is None:
            return to_device(batch, device)
        hooks: Any = module
        batch = hooks.on_before_batch_transfer(batch, dataloader_idx)
        batch = hooks.transfer_batch_to_device(batch, device, dataloader_idx)
        return hooks.on_after_batch_transfer(batch, dataloader_idx)

    def all_gather(self, tensor: Tensor, group: None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all data ranks, shape [ranks, ...]; as it is, under a strategy for a single rank.

        Args:
            tensor: shape [...], the same on each rank.
            group: None for all ranks.
            sync_grads: propagate gradients to the rank of each part.
        """
        return tensor if self.traits.max_ranks == 1 else self.world.axis("data").all_gather(tensor, sync_grads)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Raise an error with the successor of an attribute; Python calls this for missing attributes only."""
            owner = type(self)
            if hasattr(owner, name):
                return object.__getattribute__(self, name)  # the error within a property
            if name in _SUCCESSORS:
                hint = f": {_SUCCESSORS[name]}"
            else:
                hint = "" if name[0] == "_" else f".{did_you_mean(name, [n for n in dir(owner) if n[0] != '_'])}"
            raise AttributeError(f"{owner.__name__} has no attribute {name!r}{hint}")
