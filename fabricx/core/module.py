"""The contract of a module: a `torch.nn.Module` with its training and evaluation steps."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.hparams import HyperParameters, of_class
from fabricx.core.module_hooks import RUN_ATTRIBUTES, ModuleHooks
from fabricx.core.rank_zero import set_launched_rank
from fabricx.core.tensors.reductions import Reduction
from fabricx.errors import WrongArgument

if TYPE_CHECKING:
    from os import PathLike

    from fabricx.core.trainer import TrainerProtocol

set_launched_rank()  # before the first use of `rank_zero_only` in a user's module


class Module(ModuleHooks, HyperParameters, nn.Module):
    """Base class of users' modules: implement `training_step` and `configure_optimizers`, and call `Trainer.fit`.

    Attributes:
        automatic_optimization: set it to False in `__init__` if `training_step` calls `manual_backward` and steps the
            optimizers.
        example_input_array: an input of `forward`, for the summary, the graph and exports.
        strict_loading: False ignores weights that a checkpoint lacks, or has in addition; None is True.
        prepare_data_per_node: False runs `prepare_data` on the main rank only, instead of on a rank of each machine.
        single_file_checkpoints: True writes each checkpoint as a file that `torch.load` and Lightning read, instead of
            a folder that all ranks write in parallel.
    """

    automatic_optimization: bool = True
    example_input_array: Any = None
    strict_loading: bool | None = True
    prepare_data_per_node: bool = True
    single_file_checkpoints: bool = False
    __jit_unused_properties__: ClassVar[list[str]] = [  # a script module has neither a trainer nor hyperparameters
        "current_epoch", "device", "dtype", "global_rank", "global_step", "hparams", "hparams_initial", "local_rank",
        "logger", "loggers", "on_gpu", "trainer",
    ]  # fmt: skip
    __jit_ignored_attributes__: ClassVar[list[str]] = [
        "automatic_optimization", "example_input_array", "strict_loading", "prepare_data_per_node",
        "single_file_checkpoints", *RUN_ATTRIBUTES,
    ]  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(dict.fromkeys(RUN_ATTRIBUTES))

    # -- what users call ----------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = True,
        sync_dist_group: None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number under a name, reduced over all ranks.

        Means are weighted by batch size. The default is `on_step` in training steps, and `on_epoch` elsewhere; with
        both, loggers receive `name_step` and `name_epoch`.

        Args:
            name: key in the loggers and in `trainer.callback_metrics`.
            value: a number, a tensor with a single element, or a `torchmetrics.Metric`.
            prog_bar: show it in the progress bar.
            logger: pass it to the loggers.
            on_step: log the value of the latest step, reduced over ranks.
            on_epoch: log the value over the whole epoch and all ranks.
            reduce_fx: "mean" (or "avg"), "sum", "max" or "min"; or a function of such a name, such as `torch.mean`.
            enable_graph: without an effect: values are logged without their graph.
            sync_dist: False logs the main rank's value instead of the reduction over ranks.
            sync_dist_group: None: values are reduced over the ranks that train.
            add_dataloader_idx: with several loaders, append `/dataloader_idx_0` to the name.
            batch_size: number of samples of the value; by default that of the batch.
            metric_attribute: without an effect: a metric object is found by its identity.
            rank_zero_only: only the main rank logs the value; implies `sync_dist=False`.

        Raises:
            ValueError: the value isn't a single number, the reduction is unknown, there is a group, or this is a hook
                that can't log.
        """
        log_to = self.__dict__.get("_log_to")
        if log_to is None:
            log_to = self._log_of_run(name)
            if log_to is None:
                return
        if sync_dist_group is not None:
            raise ValueError(
                f"self.log({name!r}, ..., sync_dist_group=...): values are always reduced over all ranks that train; "
                "remove sync_dist_group"
            )
        if type(value) is Tensor and value.dim() == 0:
            value = value.detach()
        log_to.log(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx,
            sync_dist and not rank_zero_only,
        )  # fmt: skip

    def _log_of_run(self, name: str) -> Any:
        """Return the log of the run's module, of which this module is a part.

        Without a trainer, as in a test of a step, nothing is logged.
        """
        trainer: Any = self.__dict__.get("_trainer")
        if trainer is None:
            warnings.warn(f"self.log({name!r}, ...) was called outside of a trainer, and logs nothing", stacklevel=3)
            return None
        log_to = trainer.module.__dict__.get("_log_to")
        if log_to is None:
            raise ValueError(
                f"self.log({name!r}, ...) was called where metrics can't be logged, such as in predict_step, "
                "on_fit_start, on_validation_end, on_save_checkpoint or on_train_end; call it in a training or "
                "evaluation step, or in a hook between on_train_start and on_train_epoch_end, or on_validation_start "
                "and on_validation_epoch_end"
            )
        return log_to

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log each entry of a dict, also of a `torchmetrics.MetricCollection`.

        Args:
            dictionary: values by name.
            args: of `log`, after the value.
            options: of `log`.

        Raises:
            WrongArgument: the values are not those of a dict.
        """
        if not hasattr(dictionary, "items"):
            raise WrongArgument(f"self.log_dict got {type(dictionary).__name__}: pass a dict of values by name")
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main rank only, above the progress bar.

        Args:
            args: as in `print`.
            kwargs: as in `print`.
        """
        self.trainer.print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors of all ranks that train different shares of the data; collective.

        Args:
            data: a tensor of shape [...], or a collection of tensors; the same shapes on every rank. For other shapes
                and objects: `self.trainer.world.gather_objects`.
            group: None; Lightning's argument for a part of the ranks.
            sync_grads: propagate gradients to the rank of each part.

        Returns:
            The same structure with tensors of shape [data ranks, ...], where a mesh has as many data ranks as its data
            axis is long, and other strategies have `world_size`; as it is, under a strategy for a single rank.

        Raises:
            ValueError: a group is passed.
        """
        if group is not None:
            raise ValueError("all_gather(group=...): for a part of the ranks, call torch.distributed.all_gather")
        return self.trainer.all_gather(data, sync_grads)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of several optimizers, for manual optimization.

        Args:
            use_pl_optimizer: return an `OptimizerHandle`, whose `step` runs through the trainer; False returns torch's
                optimizer.
        """
        # After a fit in workers there are no handles, but torch's optimizers.
        handles = (use_pl_optimizer and self.trainer.optimizer_handles) or self.trainer.optimizers
        return handles[0] if len(handles) == 1 else handles

    def lr_schedulers(self) -> Any:
        """Return the learning rate scheduler, the list of several schedulers, or None."""
        schedulers = [schedule.scheduler for schedule in self.trainer.lr_schedulers]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss in manual optimization, instead of `loss.backward()`.

        With several ranks the loss is the mean over this rank's samples, and the gradient becomes the mean over the
        samples of all ranks.

        Args:
            loss: shape [].
            args: passed to `Tensor.backward`.
            kwargs: passed to `Tensor.backward`, such as `retain_graph=True`.

        Raises:
            ValueError: the module is optimised automatically.
        """
        if self.automatic_optimization:
            raise ValueError(
                "manual_backward needs self.automatic_optimization = False in __init__; with automatic optimization, "
                "return the loss from training_step"
            )
        self.trainer.manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters, in `configure_gradient_clipping` or a manual loop.

        Args:
            optimizer: of the parameters.
            gradient_clip_val: limit of the norm or of each element; None for that of the Trainer; 0 clips nothing.
            gradient_clip_algorithm: "norm" or "value"; None for that of the Trainer.

        Raises:
            ValueError: the Trainer has another limit, or the algorithm is unknown.
        """
        own = self.trainer.gradient_clip_val
        limit = own if gradient_clip_val is None else gradient_clip_val
        if own not in (None, limit):
            raise ValueError(
                f"You have set Trainer(gradient_clip_val={own}) and have passed clip_gradients(gradient_clip_val="
                f"{limit}). Use one of them: remove the argument of the Trainer, or pass None here"
            )
        algorithm = (gradient_clip_algorithm or self.trainer.gradient_clip_algorithm or "norm").lower()
        if algorithm not in ("norm", "value"):
            raise ValueError(
                f"clip_gradients(gradient_clip_algorithm={gradient_clip_algorithm!r}): pass 'norm' or 'value'"
            )
        self.trainer.clip_gradients(optimizer, limit, algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Disable gradients of the parameters of all other optimizers, until `untoggle_optimizer`.

        Args:
            optimizer: to train.
        """
        toggled = {id(p) for group in optimizer.param_groups for p in group["params"]}
        before = self.__dict__.setdefault("_requires_grad", {})
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    before.setdefault(parameter, parameter.requires_grad)
                    parameter.requires_grad_(before[parameter] and id(parameter) in toggled)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`, of all optimizers.

        Args:
            optimizer: not used; for the signature of Lightning.
        """
        for parameter, required in self.__dict__.pop("_requires_grad", {}).items():
            parameter.requires_grad_(required)

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Context between `toggle_optimizer` and `untoggle_optimizer`.

        Args:
            optimizer: to train.
        """
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self) -> Self:
        """Disable all gradients, and switch to evaluation mode; returns the module."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Enable all gradients, and switch to training mode; returns the module."""
        self.requires_grad_(True)
        return self.train()

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **options: Any) -> Any:
        """Export the module to ONNX by `torch.onnx.export`.

        Args:
            file_path: file to write; None writes nothing.
            input_sample: input of `forward`; a tuple or a dict for several. By default `example_input_array`.
            options: of `torch.onnx.export`.

        Returns:
            the result of `torch.onnx.export`.

        Raises:
            ModuleNotFoundError: onnx is not installed; the message has the command.
            ValueError: there is no input.
        """
        from fabricx.core.export import to_onnx

        return to_onnx(self, file_path, input_sample, **options)

    def to_torchscript(
        self, file_path: Any = None, method: str = "script", example_inputs: Any = None, **options: Any
    ) -> Any:
        """Export the module in evaluation mode to TorchScript; torch recommends `torch.export.export` instead.

        Args:
            file_path: file to write; None writes nothing.
            method: "script" compiles the source of `forward`, "trace" records its operations.
            example_inputs: input of `forward` to trace; by default `example_input_array`.
            options: of `torch.jit.script` or `torch.jit.trace`.

        Returns:
            the script module.

        Raises:
            ValueError: the method is unknown, or there is no input to trace.
        """
        from fabricx.core.export import to_torchscript

        return to_torchscript(self, file_path, method, example_inputs, **options)

    @of_class
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PathLike[str] | IO[bytes],
        map_location: Any = None,
        hparams_file: str | PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **override: Any,
    ) -> Self:
        """Create a module from a checkpoint, with its hyperparameters as arguments, and load its weights.

        Args:
            checkpoint_path: folder of the checkpoint; or a file of Lightning, torch or safetensors, also an open file.
            map_location: device of the weights; the CPU by default.
            hparams_file: YAML file with arguments, in the place of the saved hyperparameters.
            strict: require that the names of all weights match; by default as `strict_loading` of the module.
            weights_only: False also reads objects of any class, which runs code that the file names; pass it for a file
                that you trust. Otherwise, objects are read only if their classes are allowed by
                `torch.serialization.add_safe_globals`.
            override: arguments that replace or complete the saved hyperparameters.

        Returns:
            the module, outside of a trainer.

        Raises:
            CheckpointError: the checkpoint does not exist, is incomplete, or lacks arguments of the constructor.
        """
        from fabricx.checkpoint import as_file, load_module

        with as_file(checkpoint_path) as path:
            trusted = weights_only is False
            return load_module(cls, path, map_location, strict, override, hparams_file, trusted=trusted)

    # -- what users read ----------------------------------------------------------------------------------------

    @property
    def trainer(self) -> TrainerProtocol:
        """Return the trainer that runs this module.

        Raises:
            RuntimeError: no trainer has run it.
        """
        trainer: TrainerProtocol | None = self.__dict__.get("_trainer")
        if trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a trainer; read `trainer` only in steps and hooks of a run"
            )
        return trainer

    @trainer.setter
    def trainer(self, trainer: TrainerProtocol | None) -> None:
        for module in self.modules():
            if isinstance(module, Module):  # also modules within this module
                module.__dict__["_trainer"] = trainer

    @property
    def logger(self) -> Any:
        """Return the first logger; None without a logger or a trainer."""
        trainer: TrainerProtocol | None = self.__dict__.get("_trainer")
        return trainer.logger if trainer else None

    @property
    def loggers(self) -> list[Any]:
        """Return all loggers; none without a trainer."""
        trainer: TrainerProtocol | None = self.__dict__.get("_trainer")
        return trainer.loggers if trainer else []

    @property
    def current_epoch(self) -> int:
        """Return the number of completed epochs."""
        trainer: TrainerProtocol | None = self.__dict__.get("_trainer")
        return trainer.current_epoch if trainer else 0

    @property
    def global_step(self) -> int:
        """Return the number of weight updates."""
        trainer: TrainerProtocol | None = self.__dict__.get("_trainer")
        return trainer.global_step if trainer else 0

    @property
    def global_rank(self) -> int:
        """Return the rank of this process among all processes."""
        trainer: TrainerProtocol | None = self.__dict__.get("_trainer")
        return trainer.global_rank if trainer else 0

    @property
    def local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        trainer: TrainerProtocol | None = self.__dict__.get("_trainer")
        return trainer.local_rank if trainer else 0

    @property
    def on_gpu(self) -> bool:
        """Return whether the weights are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next((tensor.device for tensor in _tensors(self)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the floating-point weights."""
        kinds = (tensor.dtype for tensor in _tensors(self) if tensor.is_floating_point())
        return next(kinds, torch.get_default_dtype())

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in RUN_ATTRIBUTES}
        return {**state, **dict.fromkeys(RUN_ATTRIBUTES)}


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def batch_weight(module: Module, batch: Any) -> float:
    """Return the weight of a batch, from `Module.batch_weight`.

    Args:
        module: overrides `batch_weight`.
        batch: of this rank.

    Raises:
        ValueError: the weight is negative or not finite.
    """
    weight = float(module.batch_weight(batch))
    if not 0.0 <= weight < math.inf:
        raise ValueError(
            f"{type(module).__name__}.batch_weight returned {weight:g}; return a finite number of terms, 0 or more"
        )
    return weight


class _Alias:
    """Another name of an attribute, which projects read in Lightning's class; a value of the object has precedence."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else getattr(module, self._name)


class LightningModule(Module):
    """A module with the defaults of Lightning's class of this name: checkpoints are single files, and `predict_step`
    calls the module with the whole batch.

    Attributes:
        CHECKPOINT_HYPER_PARAMS_KEY: key of the hyperparameters in `on_save_checkpoint` and `torch.load`.
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    single_file_checkpoints = True
    _device, _dtype = _Alias("device"), _Alias("dtype")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Return the result of the module for a whole batch, also for a list or tuple.

        Args:
            batch: batch on the device.
            batch_idx: index of the batch.
            dataloader_idx: number of the data loader.
        """
        return self(batch)
