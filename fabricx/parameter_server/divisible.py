"""Whether optimizers can step parts of parameters: a table for torch's optimizers, a trial for all others."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from fabricx.parameter_server.optimizer_parts import nested, part_of, sliced
from fabricx.parameter_server.wire.partition import Shard, divide

# These optimizers step each element independently: a part of a parameter is stepped like the whole.
_ELEMENTWISE: Final = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop, optim.SparseAdam,
}  # fmt: skip
# These optimizers step each parameter independently; older versions of torch lack some of them.
_BY_TENSOR: Final = {kind for name in ("Adafactor", "Muon") if (kind := getattr(optim, name, None)) is not None}
_TRIED_STEPS: Final = (1.0, 100.0, 0.01)  # scales of the gradients of a trial
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def needs_whole_tensors(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], servers: int,
    shard_by: Literal["auto", "element", "tensor"] = "auto", tables: frozenset[int] = frozenset(),
) -> bool:  # fmt: skip
    """Return whether servers have to keep whole parameters for these optimizers.

    The user's statement on an optimizer outside of torch is tested: three steps of the whole and of the parts must have
    the same result. With a single server nothing is divided, and any optimizer can be used.

    Args:
        optimizers: the user's optimizers; they are not changed.
        parameters: all parameters of the optimizers, by number.
        servers: number of servers.
        shard_by: the user's statement; "auto" is sufficient for torch's optimizers.
        tables: numbers of the parameters whose rows are distributed over servers.

    Raises:
        ValueError: servers can't step an optimizer, or only fewer servers can.
    """
    every = nested(optimizers)
    for optimizer in every:
        _check_can_step(optimizer)
    kinds = {type(optimizer) for optimizer in every}
    names = ", ".join(sorted(kind.__name__ for kind in kinds - _ELEMENTWISE))
    if kinds <= _ELEMENTWISE or servers == 1:
        return shard_by == "tensor"
    if kinds <= _ELEMENTWISE | _BY_TENSOR:
        if shard_by == "element":
            raise ValueError(
                f"{names} steps whole parameters, so shard_by='element' would change its results: remove shard_by"
            )
        return True
    if shard_by == "auto":
        raise ValueError(
            f"whether {names} steps each element independently is unknown, so its parameters can't be divided over "
            f"{servers} servers (or workers, with servers=0): set servers=1, which divides nothing; shard_by='tensor' "
            "if it steps each parameter independently; or shard_by='element' if it steps each element independently"
        )
    if tables:
        raise ValueError(
            f"{names} can't step sparse embeddings in parts, but their rows are divided over servers: set servers=1"
        )
    whole = shard_by == "tensor"
    if not steps_alike(optimizers, parameters, divide([p.shape for p in parameters], servers, whole=whole)):
        raise ValueError(
            f"{names} steps parts differently from the whole, so shard_by={shard_by!r} would change its results: set "
            "servers=1" + ("" if whole else ", or shard_by='tensor'") + "; or optimizer='worker', or strategy=ddp"
        )
    return whole


def _check_can_step(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{name} computes the loss several times per step, which a server can't: use strategy=ddp")
    step = vars(optimizer).get("step")
    hooks = any(getattr(optimizer, kind, None) for kind in _HOOKS)
    module = importlib.import_module("torch.optim.optimizer")
    hooks = hooks or any(getattr(module, f"_global{kind}".replace("_step", ""), None) for kind in _HOOKS)
    wrapped = getattr(step, "__wrapped__", None) is type(optimizer).step  # by a scheduler
    if hooks or (step is not None and not wrapped):
        raise ValueError(
            f"{name} has step hooks, or a replaced step, which do not run on servers: use the "
            "module's hooks (on_before_optimizer_step), optimizer='worker', or strategy=ddp"
        )


def steps_alike(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], shards: Sequence[Shard]) -> bool:
    """Return whether optimizers step parts as they step the whole, in a trial with random gradients of several scales.

    Args:
        optimizers: not changed.
        parameters: parameters by number.
        shards: the parts.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = [
        [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype).mul_(scale) for p in parameters]
        for scale in _TRIED_STEPS
    ]
    wanted = _tried(optimizers, parameters, divide([p.shape for p in parameters], 1, whole=True), gradients)
    try:
        divided = _tried(optimizers, parameters, shards, gradients)
    except Exception:  # any error means that the division does not work
        return False
    # Sums over a divided vector may be rounded differently; a step that depends on other elements differs by far more.
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(wanted, divided, strict=True))


@torch.no_grad()
def _tried(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], shards: Sequence[Shard],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:  # fmt: skip
    results = [parameter.detach().cpu().reshape(-1).clone() for parameter in parameters]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for shard in shards:
            packed, parts = sliced(optimizers, parameters, shard)
            copies = packed.unpack(parts)
            for by_parameter in gradients:
                for part, piece in zip(parts, shard.pieces, strict=True):
                    part.grad = part_of(by_parameter[piece.parameter], piece).clone()
                for optimizer in copies:
                    optimizer.step()
            for part, piece in zip(parts, shard.pieces, strict=True):
                results[piece.parameter][piece.start : piece.stop] = part.detach().reshape(-1)
    return results
