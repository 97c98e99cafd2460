"""Strategies of Lightning, by name, by object and by constructor, as strategies of fabricx."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from fabricx import plugins
from fabricx.core.options.former_arguments import former_strategy
from fabricx.core.strategy import Strategy

_DDP: Final = re.compile(r"ddp(_spawn|_fork|_notebook|)(_find_unused_parameters_(true|false))?")
_EITHER: Final = ("find_unused_parameters", "static_graph", "broadcast_buffers")  # arguments of both kinds of DDP
# Arguments without an effect on the result: fabricx selects processes, backend and communication buffers.
_LEFT: Final = (
    "accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "timeout", "start_method",
    "gradient_as_bucket_view", "device_ids", "output_device", "state_dict_type", "use_orig_params",
    "sync_module_states", "limit_all_gathers", "forward_prefetch",
)  # fmt: skip
_HOOKS: Final = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16", "powerSGD_hook": "powersgd"}
_RESHARDS: Final = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


def known_strategy(name: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the strategy that a name of Lightning means; other names as they are.

    Args:
        name: such as "ddp_find_unused_parameters_true".

    Raises:
        ValueError: fabricx has the strategy in another form; the message names it.

    >>> known_strategy("ddp_notebook"), known_strategy("ddp_find_unused_parameters_true")
    (('ddp', {}), ('ddp', {'find_unused_parameters': True}))
    """
    if plugins.path_of("strategies", name):
        return name, {}
    if match := _DDP.fullmatch(name):  # processes start in one way, also in a notebook
        return "ddp", {"find_unused_parameters": True} if match[3] == "true" else {}
    if name == "single_device":
        return "single", {}
    if name == "fsdp_cpu_offload":
        return "fsdp", {"cpu_offload": True}
    if successor := former_strategy(name):
        raise ValueError(f"strategy={name!r} is not a strategy of fabricx: {successor}")
    return name, {}


def adapt_strategy(strategy: Any) -> Any:
    """Return the strategy of fabricx for an object of Lightning; other objects as they are.

    Args:
        strategy: strategy of Lightning.

    Raises:
        ValueError: fabricx has no such strategy, or not with these arguments.
    """
    if type(strategy).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning"):
        return strategy
    kind, state = type(strategy).__name__, vars(strategy)
    if kind == "DDPStrategy":
        options = {
            name: state.get(f"_{name}") for name in ("ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
        }
        return DDPStrategy(**options, **state.get("_ddp_kwargs", {}))
    if kind == "FSDPStrategy":
        offload = getattr(state.get("cpu_offload"), "offload_params", state.get("cpu_offload"))
        return _built(
            kind, cpu_offload=bool(offload), sharding_strategy=state.get("sharding_strategy", "FULL_SHARD"),
            mixed_precision=state.get("mixed_precision"), **state.get("kwargs", {}),
        )  # fmt: skip
    if kind == "SingleDeviceStrategy":
        return _built(kind)
    remedy = former_strategy(kind.removesuffix("Strategy").lower()) or "pass a strategy of fabricx.strategies"
    raise ValueError(f"{kind} of Lightning is not a strategy of fabricx: {remedy}")


def ddp_options(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of `fabricx.strategies.DDP` for those of Lightning's `DDPStrategy`.

    Args:
        arguments: arguments of `DDPStrategy`.

    Raises:
        ValueError: an argument has no equivalent; the message names it.
    """
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None:
            continue
        if name in _EITHER:
            options[name] = value
        elif name == "bucket_cap_mb":
            options["bucket_mib"] = float(value)
        elif name in ("ddp_comm_hook", "ddp_comm_wrapper"):
            options["compression"] = _compression(name, value)
        elif name not in _LEFT:
            raise ValueError(
                f"DDPStrategy({name}=...): fabricx.strategies.DDP has no such argument; remove it"
                + ('; strategy="local_sgd" averages models' if name == "model_averaging_period" else "")
            )
    return options


def _compression(name: str, hook: Any) -> str:
    known = _HOOKS.get(getattr(hook, "__name__", ""))
    if known is None:
        raise ValueError(
            f"DDPStrategy({name}=...): fabricx.strategies.DDP(compression=...) has the hooks {', '.join(_HOOKS)} as "
            f"{', '.join(_HOOKS.values())}; others are a codec of your own (docs/extending.md)"
        )
    return known


def fsdp_options(**arguments: Any) -> dict[str, Any]:
    """Return the arguments of `fabricx.strategies.FSDP` for those of Lightning's `FSDPStrategy`.

    Args:
        arguments: arguments of `FSDPStrategy`.

    Raises:
        ValueError: an argument has no equivalent; the message names it.
    """
    options: dict[str, Any] = {}
    policies = {"auto_wrap_policy": "wrap", "activation_checkpointing_policy": "activation_checkpointing"}
    for name, value in arguments.items():
        if value is None or name in _LEFT:
            continue
        if name == "cpu_offload":
            options[name] = bool(getattr(value, "offload_params", value))
        elif name in policies and isinstance(value, (set, list, tuple)) and all(isinstance(c, type) for c in value):
            options[policies[name]] = sorted(cls.__name__ for cls in value)
        elif name == "sharding_strategy" and str(getattr(value, "name", value)).upper() in _RESHARDS:
            options["reshard_after_forward"] = _RESHARDS[str(getattr(value, "name", value)).upper()]
        else:
            successors = {
                "sharding_strategy": 'strategy="ddp" does not shard; FSDP(replicas=...) shards within groups',
                "mixed_precision": "set FSDP(param_dtype=..., reduce_dtype=...), or Trainer(precision=...)",
                "auto_wrap_policy": "set FSDP(wrap=...) to names of classes, or to a number of parameters",
                "activation_checkpointing_policy": "set FSDP(activation_checkpointing=...) to names of classes",
            }
            raise ValueError(f"FSDPStrategy({name}={value!r}): {successors.get(name, 'FSDP has no such argument')}")
    return options


def own_class(path: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the path of a strategy's class and its arguments for a class of Lightning; None for other classes.

    Args:
        path: path of the class, such as "lightning.pytorch.strategies.DDPStrategy".
        arguments: arguments of the class.

    Raises:
        ValueError: an argument has no equivalent; the message names it.
    """
    package, _, name = path.rpartition(".")
    if name not in _OPTIONS or not re.match(
        r"(lightning\.pytorch|pytorch_lightning|fabricx\.pytorch)\.strategies\b", package
    ):
        return None
    strategy, options = _OPTIONS[name]
    cls = plugins.find("strategies", strategy)
    return f"{cls.__module__}.{cls.__qualname__}", options(**arguments)


_OPTIONS: Final[Mapping[str, tuple[str, Callable[..., dict[str, Any]]]]] = {
    "DDPStrategy": ("ddp", ddp_options),
    "FSDPStrategy": ("fsdp", fsdp_options),
    "SingleDeviceStrategy": ("single", lambda **arguments: {}),  # the Trainer selects the device
}


def _built(kind: str, *positional: Any, **arguments: Any) -> Any:
    strategy, options = _OPTIONS[kind]
    return plugins.build("strategies", strategy, **options(*positional, **arguments))


class _OfLightning(type):
    """Class of Lightning's names of strategies: a call returns a strategy of fabricx, and `isinstance` finds it.

    A class may derive from such a name, so that a package with strategies for other devices can be imported; fabricx
    would not call its methods, and a call of it is an error.
    """

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if cls.__bases__ != (object,) or cls.__name__ not in _OPTIONS:
            raise TypeError(
                f"class {cls.__name__}({cls.__bases__[0].__name__}): strategies of Lightning are names of those of "
                "fabricx; pass the arguments to the strategy, or derive from fabricx.Strategy (docs/extending.md)"
            )
        return _built(cls.__name__, *arguments, **options)

    def __instancecheck__(cls, strategy: Any) -> bool:
        kind = _OPTIONS[cls.__name__][0] if cls.__bases__ == (object,) else ""
        return kind != "" and isinstance(strategy, plugins.find("strategies", kind))


class _Parallel(_OfLightning):
    def __instancecheck__(cls, strategy: Any) -> bool:
        return isinstance(strategy, Strategy) and not isinstance(strategy, SingleDeviceStrategy)


class ParallelStrategy(metaclass=_Parallel):
    """Any strategy but `single`, for `isinstance`."""


class DDPStrategy(metaclass=_OfLightning):
    """`fabricx.strategies.DDP` with the arguments of Lightning's `DDPStrategy`."""


class FSDPStrategy(metaclass=_OfLightning):
    """`fabricx.strategies.FSDP` with the arguments of Lightning's `FSDPStrategy`."""


class SingleDeviceStrategy(metaclass=_OfLightning):
    """`fabricx.strategies.Single`; the Trainer selects the device."""
