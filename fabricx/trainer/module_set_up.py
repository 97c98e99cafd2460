"""Set-up of the module on a rank, before the loop: dtype, device, compilation, transfer of batches, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fabricx.checkpoint.storage import as_path
from fabricx.consistency import comparison
from fabricx.core.datamodule import DataModule
from fabricx.core.hook_calls.hooks import fitted, overrides
from fabricx.core.module_hooks import ModuleHooks
from fabricx.core.precision import make_precision
from fabricx.core.tensors.transfer import to_device
from fabricx.distributed.statistics.sync_batchnorm import synchronise
from fabricx.metrics.objects import reduce_along, reduced_metrics
from fabricx.session.status import Overridden

if TYPE_CHECKING:
    import torch

    from fabricx.session.session import Session


def set_up_module(session: Session, ckpt_path: str | Path | None, *, trusted: bool, fits: bool) -> None:
    """Convert and move the module, and load its data.

    Args:
        session: this rank's session, whose module has all layers, after `configure_model`.
        ckpt_path: checkpoint from which the run starts.
        trusted: also read its objects of any class.
        fits: the run trains the module.
    """
    module = session.module
    session.precision = make_precision(session.options.precision, session.world.device)
    session.precision.convert(module)
    if session.options.sync_batchnorm and (session.world.size > 1 or session.world.newcomer):
        synchronise(module, session.world.device)
    _place(module, session.world.device)
    if session.options.compile:
        _compile(module, session.options.compile)
    methods = (
        "backward", "batch_weight", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping",
        "lr_scheduler_step",
    )  # fmt: skip
    overridden: dict[str, Any] = {name: overrides(module, name, ModuleHooks) for name in methods}
    lazy = any(map(nn.parameter.is_lazy, module.parameters()))
    session.overridden = Overridden(**overridden, lazy=lazy)
    session.checkpoints.ckpt_path, session.checkpoints.trusted = as_path(ckpt_path) if ckpt_path else None, trusted
    session.window.by_weight = session.overridden.batch_weight and module.automatic_optimization
    session.transfer = _batch_transfer(session)
    session.data.load(session.world)
    if session.world.size > 1:
        metrics = reduced_metrics(module, session.callbacks, divided=session.divided)
        session.undo.extend(reduce_along(metric, session.world, fits=fits) for metric in metrics)


def check_not_lazy(module: nn.Module) -> None:
    """Refuse parameters without a shape, which ranks cannot share.

    Args:
        module: of the user.

    Raises:
        ValueError: a parameter is created by the first forward.
    """
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"{name} has no shape before the first forward, and several ranks cannot share it: call the lazy layer "
                "with an example in __init__ or setup, under torch.no_grad(), or create a layer that is not lazy"
            )


def set_up_evaluation(session: Session) -> None:
    """Compare the ranks, and prepare the module's steps and metrics for an evaluation.

    Args:
        session: after `set_up_module`.

    Raises:
        RanksDisagree: on all ranks: module or data differ between the ranks.
    """
    comparison.compare(
        session.world, comparison.of_module(session.module) | comparison.of_data(None, session.data.val_feeds)
    )
    session.wrap_steps(fits=False)
    session.metrics.begin(session.weigh)
    session.metrics.collect(None)


def _place(module: nn.Module, device: torch.device) -> None:
    """Move a module to the device of this rank; parameters on the meta device stay there."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        module.to(device)


def _compile(module: nn.Module, choice: bool | Mapping[str, Any]) -> None:
    options = dict(choice) if isinstance(choice, Mapping) else {}
    # In place, so that names in the state dict do not change. Without a forward, training_step calls the children.
    has_forward = type(module).forward is not nn.Module.forward
    for part in [module] if has_forward else list(module.children()):
        part.compile(**options)


def _batch_transfer(session: Session) -> Callable[[Any, int], Any] | None:
    """Return the function that transfers a batch to the device; None where batches need no transfer."""
    owners = [owner for owner in (session.datamodule, session.module) if owner is not None]

    def overridden(name: str) -> Callable[..., Any] | None:
        for owner in owners:
            contract = DataModule if isinstance(owner, DataModule) else ModuleHooks
            if overrides(owner, name, contract):
                return fitted(owner, name, contract)
        return None

    before, move, after = (
        overridden("on_before_batch_transfer"),
        overridden("transfer_batch_to_device"),
        overridden("on_after_batch_transfer"),
    )
    convert, device = session.precision.convert_batch(), session.world.device
    if device.type == "cpu" and not (before or move or after or convert):
        return None  # the batch is on the device already

    def transfer(batch: Any, loader: int) -> Any:
        batch = before(batch, loader) if before else batch
        batch = move(batch, device, loader) if move else to_device(batch, device)
        batch = convert(batch) if convert else batch
        return after(batch, loader) if after else batch

    return transfer
