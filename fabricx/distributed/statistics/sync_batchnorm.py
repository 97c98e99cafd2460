"""Synchronised batch normalisation on CPUs, where torch does not provide it."""

from __future__ import annotations

from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabricx.distributed.autograd_collectives import sum_of_all


@final
class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Computes on CPUs what `torch.nn.SyncBatchNorm` computes on GPUs, with two all-reduces forward and two backward.

    Ranks may have different numbers of samples: mean and variance are those of all samples together. The class does not
    derive from `torch.nn.SyncBatchNorm`, which DistributedDataParallel refuses on CPUs.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015, algorithm 1, with the sums taken over ranks.
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        several = dist.is_initialized() and dist.get_world_size() > 1
        if not several or not self.training:  # as torch's: in an evaluation, ranks may have other numbers of batches
            alone: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
            return alone
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        axes = [0, *range(2, values.dim())]
        shape = [1, -1] + [1] * (values.dim() - 2)
        count = values.new_tensor([values.numel() / values.shape[1]])
        *sums, count = sum_of_all(torch.cat([values.sum(axes), count])).split([values.shape[1], 1])
        if count <= 1:
            raise ValueError(
                f"batch normalisation needs more than one value per channel over all ranks, got {int(count)}: increase "
                "the batch size"
            )
        mean = sums[0] / count
        centred = values - mean.view(shape)
        variance = sum_of_all(centred.square().sum(axes)) / count
        self._update_running(mean.detach(), variance.detach() * count / (count - 1))
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        normalised: Tensor = output.to(input.dtype)
        return normalised

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"batch normalisation needs an input of shape [samples, channels, ...], got {tuple(input.shape)}"
            )

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        if not self.track_running_stats:  # frozen, as by BaseFinetuning.freeze
            return
        self.num_batches_tracked.add_(1)
        part = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), part)
        self.running_var.lerp_(variance.to(self.running_var), part)


_SYNCHRONISED: Final = (SyncBatchNorm, nn.SyncBatchNorm)


def synchronise(module: nn.Module, device: torch.device) -> None:
    """Convert all batch normalisation layers of a module to layers that use the samples of all ranks.

    Synchronised layers stay unchanged: a module may be trained or evaluated again, when a strategy owns the parameters
    and hooks of these layers.

    Args:
        module: changed in place, at any depth.
        device: device of the module; on "cpu" the layers become `SyncBatchNorm` of this module, else torch's.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> synchronise(model, torch.device("cpu"))
    >>> type(model[1]).__name__, sorted(model.state_dict())[:2]
    ('SyncBatchNorm', ['0.bias', '0.weight'])
    """
    for parent in list(module.modules()):
        for name, part in parent.named_children():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and not isinstance(part, _SYNCHRONISED):
                setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(part))
    on_cpu: Any = SyncBatchNorm
    for part in module.modules() if device.type == "cpu" else ():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = on_cpu


def synchronised(module: nn.Module) -> bool:
    """Return whether a module has synchronised batch normalisation, so that its forward is a collective.

    Args:
        module: root module.
    """
    return any(isinstance(part, _SYNCHRONISED) for part in module.modules())


def has_own_statistics(module: nn.Module) -> bool:
    """Return whether a module has batch normalisation that uses only this rank's samples.

    Args:
        module: root module.
    """
    layers = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return any(not isinstance(layer, _SYNCHRONISED) for layer in layers)
