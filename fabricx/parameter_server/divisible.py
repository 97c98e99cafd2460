"""Whether optimizers can step on parts of parameters: a table for torch's optimizers, a trial for others."""

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

# Each element is stepped by itself: a part of a parameter is stepped like the whole.
_ELEMENTWISE: Final = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.ASGD, optim.Rprop, optim.SparseAdam,
}  # fmt: skip
# Each parameter is stepped by itself; older versions of torch lack some.
_BY_TENSOR: Final = {kind for name in ("Adafactor", "Muon") if (kind := getattr(optim, name, None)) is not None}
_TRIED_STEPS: Final = (1.0, 100.0, 0.01)  # scales of the gradients with which a division is tried
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def needs_whole_tensors(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], servers: int,
    shard_by: Literal["auto", "element", "tensor"] = "auto", tables: frozenset[int] = frozenset(),
) -> bool:  # fmt: skip
    """Return whether a server has to keep whole parameters for these optimizers to step.

    What is said of an optimizer that isn't torch's own is tried: three steps of the whole and of the parts have to be
    the same. With one server nothing is divided, and any optimizer is right.

    Args:
        optimizers: the user's own; they stay as they are.
        parameters: all of theirs, by number.
        servers: among how many the parameters are divided.
        shard_by: what the user says; "auto" is right for torch's optimizers.
        tables: numbers of the parameters of which servers have rows in turn.

    Raises:
        ValueError: an optimizer can't be stepped by servers, or not by so many.
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
                f"{names} steps whole parameters: shard_by='element' would change its results; leave it out"
            )
        return True
    if shard_by == "auto":
        raise ValueError(
            f"whether {names} steps each element by itself isn't known, so its parameters can't be divided among "
            f"{servers} servers (or workers, with servers=0): say servers=1, which divides nothing; shard_by='tensor' "
            "if it steps one parameter at a time; or shard_by='element' if each element goes by itself"
        )
    if tables:
        raise ValueError(f"{names} with sparse embeddings, whose rows are divided among servers: say servers=1")
    whole = shard_by == "tensor"
    if not steps_alike(optimizers, parameters, divide([p.shape for p in parameters], servers, whole=whole)):
        raise ValueError(
            f"{names} steps parts otherwise than the whole, so shard_by={shard_by!r} would change its results: say "
            "servers=1" + ("" if whole else ", or shard_by='tensor'") + "; or optimizer='worker', or strategy=ddp"
        )
    return whole


def _check_can_step(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{name} computes the loss several times a step, and a server can't: take strategy=ddp")
    own = vars(optimizer).get("step")
    hooks = any(getattr(optimizer, kind, None) for kind in _HOOKS)
    module = importlib.import_module("torch.optim.optimizer")
    hooks = hooks or any(getattr(module, f"_global{kind}".replace("_step", ""), None) for kind in _HOOKS)
    if hooks or (own is not None and not hasattr(own, "_wrapped_by_lr_sched")):
        raise ValueError(
            f"{name} has hooks of its step, or a step that was replaced, which run in no server: use the "
            "module's hooks (on_before_optimizer_step), take optimizer='worker', or strategy=ddp"
        )


def steps_alike(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], shards: Sequence[Shard]) -> bool:
    """Return whether optimizers step parts as they step the whole, with random gradients of several sizes."""
    generator = torch.Generator().manual_seed(0)
    gradients = [
        [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype).mul_(scale) for p in parameters]
        for scale in _TRIED_STEPS
    ]
    wanted = _tried(optimizers, parameters, divide([p.shape for p in parameters], 1, whole=True), gradients)
    try:
        found = _tried(optimizers, parameters, shards, gradients)
    except Exception:  # of whatever kind: it can't be divided like this
        return False
    # Sums over a vector may be rounded otherwise where it is cut; a step that sees other elements differs by far more.
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(wanted, found, strict=True))


@torch.no_grad()
def _tried(
    optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], shards: Sequence[Shard],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:  # fmt: skip
    found = [parameter.detach().cpu().reshape(-1).clone() for parameter in parameters]
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
                found[piece.parameter][piece.start : piece.stop] = part.detach().reshape(-1)
    return found
