"""Log the memory of the device and the load of the machine."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol


@final
class DeviceStatsMonitor(Callback):
    """Log statistics of the main rank's device before and after a batch, every `log_every_n_steps` steps.

    An evaluation at such a step has rows before and after its first batch.

    A GPU has the statistics of `torch.cuda.memory_stats`; a CPU the use of processors, memory and swap in percent. The
    names begin with the hook: "DeviceStatsMonitor.on_train_batch_start/". The records of all ranks' memory and times
    need no callback: see `fabricx report`.

    Args:
        cpu_stats: log the statistics of the CPU. The default is True if the device is a CPU.
        filter_keys: names of the statistics to log, such as {"cpu_percent"}; None for all. A name that the device does
            not have is a warning.

    Raises:
        ValueError: the statistics of the CPU need psutil, or (when training starts) the run has no logger.
    """

    former_methods: ClassVar = renamed(
        "_get_and_log_device_stats", "on_train_batch_end of a Callback, which logs them by trainer.logger.log_metrics"
    )

    def __init__(self, cpu_stats: bool | None = None, filter_keys: Collection[str] | None = None) -> None:
        self.cpu_stats = cpu_stats
        self.filter_keys = None if filter_keys is None else frozenset(filter_keys)
        self._logged: dict[str, int] = {}  # the newest step with a row, by hook

    def setup(self, trainer: TrainerProtocol, pl_module: Module, stage: str) -> None:
        self._logged = {}
        if stage != "fit":
            return
        if not trainer.loggers and not trainer.fast_dev_run:
            raise ValueError(
                "DeviceStatsMonitor: the run has no logger (logger=False); enable a logger or remove the callback"
            )
        if self._of_cpu(trainer.world.device):
            try:
                import psutil  # noqa: F401
            except ImportError:
                raise ValueError(
                    "DeviceStatsMonitor: statistics of the CPU need psutil: pip install psutil, or set cpu_stats=False"
                ) from None

    def on_train_batch_start(self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int) -> None:
        self._log(trainer, "on_train_batch_start", trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._log(trainer, "on_train_batch_end", trainer.global_step)

    def on_validation_batch_start(
        self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, "on_validation_batch_start", trainer.global_step)

    def on_validation_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if not trainer.sanity_checking:
            self._log(trainer, "on_validation_batch_end", trainer.global_step)

    def on_test_batch_start(
        self, trainer: TrainerProtocol, pl_module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log(trainer, "on_test_batch_start", trainer.global_step)

    def on_test_batch_end(
        self, trainer: TrainerProtocol, pl_module: Module, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        self._log(trainer, "on_test_batch_end", trainer.global_step)

    def _log(self, trainer: TrainerProtocol, hook: str, step: int) -> None:
        due = trainer.log_every_n_steps and step % trainer.log_every_n_steps == 0
        if not due or not trainer.is_global_zero or self._logged.get(hook) == step:
            return
        self._logged[hook] = step
        device = trainer.world.device
        stats = device_stats(device)
        if self._of_cpu(device):
            stats |= cpu_stats()
        if self.filter_keys is not None:
            if unknown := sorted(self.filter_keys - stats.keys()):
                trainer.session.warn_once(
                    "DeviceStatsMonitor",
                    f"DeviceStatsMonitor(filter_keys=...): filter_keys contains keys not found: {', '.join(unknown)}. "
                    f"Names of the statistics of this device: {', '.join(sorted(stats)) or 'none'}",
                )
            stats = {name: value for name, value in stats.items() if name in self.filter_keys}
        row = {f"{type(self).__name__}.{hook}/{name}": value for name, value in stats.items()}
        if row:
            trainer.session.metrics.loggers.each(lambda logger: logger.log_metrics(row, step))

    def _of_cpu(self, device: torch.device) -> bool:
        return device.type == "cpu" if self.cpu_stats is None else self.cpu_stats


def device_stats(device: torch.device) -> dict[str, float]:
    """Return the statistics of the memory of a GPU; none of other devices.

    Args:
        device: this rank's device.
    """
    if device.type != "cuda":
        return {}
    return {name: float(value) for name, value in torch.cuda.memory_stats(device).items()}


def cpu_stats() -> dict[str, float]:
    """Return the use of processors, memory and swap, in percent."""
    import psutil

    return {
        "cpu_percent": float(psutil.cpu_percent()),
        "cpu_vm_percent": float(psutil.virtual_memory().percent),
        "cpu_swap_percent": float(psutil.swap_memory().percent),
    }
