"""Strategies of Lightning by name, object and constructor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx.lightning.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, adapt_strategy, own_class
from fabricx.strategies import DDP, FSDP, Single
from fabricx.testing import QUIET

pl: Any = pytest.importorskip("lightning.pytorch")


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("ddp_find_unused_parameters_true", True), ("ddp_find_unused_parameters_false", False), ("ddp_spawn", False),
        ("ddp_notebook", False), ("ddp_fork_find_unused_parameters_true", True),
    ],
)  # fmt: skip
def test_variants_of_ddp_are_ddp(name: str, unused: bool) -> None:
    strategy: Any = fx.Trainer(strategy=name, devices=2, **QUIET).strategy
    assert type(strategy) is DDP
    assert strategy.find_unused_parameters is unused


def test_every_strategy_that_lightning_registers_runs_or_names_its_successor() -> None:
    for name in pl.strategies.StrategyRegistry.available_strategies():
        try:
            fx.Trainer(strategy=name, devices=2, **QUIET)
        except ValueError as error:
            message = "supports 1 rank" if name == "single_device" else "is not a strategy of fabricx: "
            assert message in str(error), name  # noqa: PT017


@pytest.mark.parametrize("name", ["dp", "ddp2", "ddp_sharded", "horovod", "deepspeed_stage_3", "tpu_spawn", "xla_fsdp"])
def test_a_former_strategy_names_its_successor(name: str) -> None:
    with pytest.raises(ValueError, match=f"strategy='{name}' is not a strategy of fabricx: (set|fabricx runs)"):
        fx.Trainer(strategy=name, devices=2, **QUIET)


def test_objects_of_lightning_become_strategies_with_their_arguments() -> None:
    ddp: Any = fx.Trainer(
        strategy=pl.strategies.DDPStrategy(find_unused_parameters=True, static_graph=False), devices=2, **QUIET
    ).strategy
    assert (type(ddp), ddp.find_unused_parameters) == (DDP, True)
    fsdp: Any = adapt_strategy(pl.strategies.FSDPStrategy(cpu_offload=True, sharding_strategy="SHARD_GRAD_OP"))
    assert (type(fsdp), fsdp.cpu_offload, fsdp.reshard_after_forward) == (FSDP, True, False)
    assert type(adapt_strategy(pl.strategies.SingleDeviceStrategy())) is Single
    with pytest.raises(ValueError, match="ModelParallelStrategy of Lightning is not a strategy of fabricx"):
        adapt_strategy(pl.strategies.ModelParallelStrategy())


def test_arguments_of_lightnings_strategies_are_accepted() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

    kinds: tuple[Any, Any] = DDPStrategy, FSDPStrategy
    ddp_strategy, fsdp_strategy = kinds
    ddp = ddp_strategy(bucket_cap_mb=10, gradient_as_bucket_view=True, ddp_comm_hook=fp16_compress_hook, timeout=None)
    assert (ddp.bucket_mib, ddp.compression) == (10.0, "fp16")
    fsdp = fsdp_strategy(auto_wrap_policy={torch.nn.Linear, torch.nn.LayerNorm}, state_dict_type="full")
    assert fsdp.wrap == ["LayerNorm", "Linear"]
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (ddp_strategy, {"ddp_comm_hook": allreduce_hook}, "a codec of your own"),
        (ddp_strategy, {"model_averaging_period": 4}, 'strategy="local_sgd" averages models'),
        (ddp_strategy, {"colour": 1}, "has no such argument"),
        (fsdp_strategy, {"sharding_strategy": "NO_SHARD"}, 'strategy="ddp" does not shard'),
        (fsdp_strategy, {"mixed_precision": 1}, r"FSDP\(param_dtype=\.\.\., reduce_dtype=\.\.\.\)"),
        (fsdp_strategy, {"auto_wrap_policy": print}, "names of classes"),
    ]
    for make, arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            make(**arguments)


def test_isinstance_finds_strategies_and_accelerators_by_lightnings_names() -> None:
    from fabricx.pytorch import accelerators, strategies

    single = fx.Trainer(**QUIET)
    kinds: Any = (strategies.DDPStrategy, strategies.FSDPStrategy, strategies.ParallelStrategy)
    assert isinstance(single.strategy, strategies.SingleDeviceStrategy)
    assert not isinstance(single.strategy, kinds)
    ddp = fx.Trainer(strategy=strategies.DDPStrategy(find_unused_parameters=True), devices=2, **QUIET)
    assert [isinstance(ddp.strategy, kind) for kind in kinds] == [True, False, True]
    assert isinstance(single.accelerator, accelerators.CPUAccelerator)
    assert isinstance(single.accelerator, accelerators.Accelerator)
    assert isinstance(accelerators.CPUAccelerator(), accelerators.Accelerator)
    assert not isinstance(accelerators.CPUAccelerator(), accelerators.MPSAccelerator)
    assert not isinstance("auto", accelerators.Accelerator)
    assert not isinstance(single.accelerator, accelerators.CUDAAccelerator)
    for kind in kinds:
        subclass: Any = type("Mine", (kind,), {})  # a package with strategies for other devices can be imported
        assert not isinstance(single.strategy, subclass)
        with pytest.raises(TypeError, match=r"class Mine\(.*derive from fabricx\.Strategy"):
            subclass("device")


def test_a_lightning_class_in_a_file_is_a_fabricx_class_with_its_arguments() -> None:
    path = "lightning.pytorch.strategies.ddp.DDPStrategy"
    options = {"find_unused_parameters": True, "bucket_cap_mb": 5, "accelerator": None, "ddp_comm_hook": None}
    expected = "fabricx.strategies.ddp.DDP", {"find_unused_parameters": True, "bucket_mib": 5.0}
    assert own_class(path, options) == expected
    assert own_class("pytorch_lightning.strategies.SingleDeviceStrategy", {"device": "cpu"}) == (
        "fabricx.strategies.single.Single", {},
    )  # fmt: skip
    assert own_class("my_project.strategies.DDPStrategy", {}) is None
    assert own_class("DDPStrategy", {}) is None
    kind: Any = ParallelStrategy
    with pytest.raises(TypeError, match="names of those of fabricx"):
        kind()
