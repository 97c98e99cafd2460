"""Refusals, tolerances and known defects of cells. No other problem is excused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.matrix.cells import (
    BOUNDED,
    COMPRESSED,
    SERVERS_STEP,
    STREAMS,
    TOGETHER_RANKS,
    UNEQUAL_PACE,
    UNFREEZING,
    Cell,
)


@dataclass(frozen=True)
class Refusal:
    """An unsupported combination.

    Attributes:
        matches: returns whether a cell is such a combination.
        says: regular expression of the error message.
        why: for the table in the docs: the reason and the remedy.
        steps: training steps that may have started, without an update; 1 where only a hook of the first step reveals
            the combination.
    """

    matches: Callable[[Cell], bool]
    says: str
    why: str
    steps: int = 0


FSDP = {"fsdp", "fsdp-blocks", "fsdp-kept", "hsdp"}
CHANGING = {
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end",
}  # fmt: skip
WITHIN_STEP = {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}
DIVIDED = {"ps2-server", "ps2-overlap", "ps2-server-fp16"}
ELSEWHERE = ("ps", "bounded", "async", "rounds", "local_sgd")  # no rank has the weights of each update
APART = UNEQUAL_PACE  # ranks go at their own pace
DIVIDES = {*TOGETHER_RANKS, "expert"}  # a rank has a part of some weights
TRIAL_STEPS = 6  # calls of the training step before a mesh divides a module, at most
_MICROBATCHES = 29  # calls of a pipeline until the first update: 14 are of the trial, for four other pairs of samples
REFUSALS = (
    Refusal(
        lambda c: c.manual and c.way == "ddp-static" and c.ranks > 1,
        "static_graph=True needs one backward per step",
        "`static_graph=True` needs a single backward per step, and a manual loop may call several. Remove the option.",
    ),
    Refusal(
        lambda c: c.manual and (c.way in APART or c.way in SERVERS_STEP),
        "a manually optimised module steps by itself",
        "Servers step once per batch, and a manual loop decides itself when to step. Use `optimizer=worker` or `ddp`.",
    ),
    Refusal(
        lambda c: c.manual and c.way == "reproducible",
        "needs automatic optimization",
        "`reproducible` divides each step into parts, which needs automatic optimization. Otherwise use `ddp`.",
    ),
    Refusal(
        lambda c: c.model in ("batchnorm", "sync-batchnorm") and c.way == "reproducible",
        "keeps statistics of this rank|SyncBatchNorm",
        "Batch statistics depend on the number of ranks. Use GroupNorm or LayerNorm.",
    ),
    Refusal(
        lambda c: c.way == "reproducible" and (
            c.model == "buffer" or c.change in ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
        ),
        "was changed between the parts of a global batch",
        "A rank computes several parts of each batch, depending on the number of ranks. Change values in "
        "`on_before_optimizer_step`.",
        steps=_MICROBATCHES,
    ),
    Refusal(
        lambda c: c.model == "sync-batchnorm" and c.way in APART and c.ranks > 1,
        "SyncBatchNorm needs all ranks",
        "Synchronised statistics need all ranks at the same batch. Use BatchNorm or `ddp`.",
    ),
    Refusal(
        lambda c: c.model == "sync-batchnorm" and c.ranks > 1 and c.data == "few",
        "SyncBatchNorm needs a sample on each rank",
        "A rank without samples has no statistics. Set `drop_last=True` or another batch size.",
    ),
    Refusal(
        lambda c: c.model == "sync-batchnorm" and c.ranks > 1 and c.data in STREAMS,
        "some of . ranks may have none: set limit_train_batches",
        "A stream may end earlier on some ranks. Set `limit_train_batches`.",
    ),
    Refusal(
        lambda c: c.optimizer == "lbfgs" and (c.way in APART - {"rounds"} or c.way in SERVERS_STEP),
        "LBFGS computes the loss several times",
        "LBFGS computes the loss several times per step, which a server cannot. Use `optimizer=worker` or `ddp`.",
    ),
    Refusal(
        lambda c: c.clip == "module" and c.ranks > 1 and c.way in SERVERS_STEP | BOUNDED,
        "this gradient is only this worker's part",
        "Only the servers have the global gradient. Call `self.clip_gradients`, or use `optimizer=worker` or `ddp`.",
        steps=1,
    ),
    Refusal(
        lambda c: c.clip == "norm" and c.ranks > 1 and c.way == "bounded0-ps2",
        "the norm of a gradient can't be limited",
        "Each server has a part of the gradient, so none knows its norm. "
        "Use `servers=1`, clipping by value, or `mode=sync`.",
    ),
    Refusal(
        lambda c: c.optimizer == "lbfgs" and c.accumulates,
        "supports only one batch per update",
        "LBFGS computes the loss of a single batch repeatedly. Use a larger batch instead of accumulation.",
    ),
    Refusal(
        lambda c: c.optimizer == "lbfgs" and c.way in FSDP and c.ranks > 1,
        "LBFGS needs the whole gradient",
        "LBFGS needs the whole gradient on a rank. Use `ddp`.",
    ),
    Refusal(
        lambda c: c.manual and c.way == "ddp-powersgd" and c.ranks > 1,
        "a manually optimised module may call backward several times",
        "Compression errors are added to the gradient of the next update. "
        "Use automatic optimization or `compression='bf16'`.",
    ),
    Refusal(
        lambda c: c.model == "tied" and c.manual and c.way in FSDP and c.ranks > 1,
        "belongs to several submodules",
        "Weights are gathered for each submodule that a manual step calls. "
        "Put tied weights into one submodule, or use `ddp`.",
    ),
    Refusal(
        lambda c: c.way == "ddp-static" and c.model == "toggled" and c.ranks > 1,
        "static_graph=True needs gradients of the same parameters",
        "`static_graph=True` needs gradients of the same parameters in each step. Remove the option.",
        steps=9,
    ),
    Refusal(
        lambda c: c.way == "ddp-static" and c.accumulates and c.ranks > 1,
        "static_graph=True needs one backward per update",
        "`static_graph=True` needs a single backward per update. Remove the option.",
    ),
    Refusal(
        lambda c: c.model == "sparse" and c.ranks > 1 and c.way in FSDP | {"ddp-fp16", "ddp-bf16", "ddp-powersgd"},
        "does not support sparse gradients, which",
        "Sparse gradients cannot be compressed or sharded. Use `sparse=False`, or `ddp` without compression.",
    ),
    Refusal(
        lambda c: c.model == "sparse" and c.way == "reproducible",
        "does not support sparse gradients, which",
        "Gradients are summed as integers, which excludes sparse gradients. Use `sparse=False` or `ddp`.",
    ),
    Refusal(
        lambda c: c.optimizer == "lbfgs" and c.way == "reproducible",
        "LBFGS needs them several times",
        "Gradients are summed once per update, and LBFGS needs several. Use `ddp`.",
    ),
    Refusal(
        lambda c: c.optimizer == "custom" and (c.way in DIVIDED or (c.way == "ps0-server" and c.ranks > 1)),
        "steps each element independently is unknown",
        "An unknown optimizer may combine the elements of a parameter, so servers cannot divide it. "
        "Use `servers=1` or `shard_by='tensor'`.",
    ),
    Refusal(
        lambda c: c.model == "sparse" and c.way == "ps0-server",
        "does not support sparse gradients",
        "Weights in shared memory do not support sparse gradients. Use `servers=1`.",
    ),
    Refusal(
        lambda c: c.model == "sparse" and c.clip in ("norm", "value"),
        "can.t clip sparse gradients",
        "torch cannot clip sparse gradients. Use `sparse=False`, or override `configure_gradient_clipping`.",
    ),
    Refusal(
        lambda c: c.model == "sparse" and c.way in ("async_sgd-dc", "ps1-powersgd"),
        "does not support sparse gradients",
        "`compensation` and `powersgd` need dense gradients. Use `sparse=False`, or neither option.",
    ),
    Refusal(
        lambda c: c.data in STREAMS and c.way == "reproducible",
        "needs a map-style DataLoader",
        "A stream cannot be divided into equal parts. Use a DataLoader over a map-style dataset.",
    ),
    Refusal(
        lambda c: c.data in STREAMS and c.way in BOUNDED,
        "use a DataLoader over a map-style dataset",
        "A stream cannot be distributed to workers on request. Use a DataLoader over a map-style dataset.",
    ),
    Refusal(
        lambda c: c.model == "scalar" and c.way in FSDP and c.ranks > 1,
        "has no dimensions; give it the shape",
        "A parameter without dimensions cannot be sharded. Use a parameter of shape [1], or `ddp`.",
    ),
    Refusal(
        lambda c: c.model in ("dtypes", "complex") and c.way in FSDP and c.ranks > 1,
        "needs parameters of the same dtype",
        "Parameters are sharded in a single buffer. Use a single dtype, or `ddp`.",
    ),
    Refusal(
        lambda c: c.model in ("dtypes", "complex") and c.way == "ps0-server",
        "all of one dtype|is complex",
        "Weights are in a single shared buffer. Use a single real dtype, or `servers=1`.",
    ),
    Refusal(
        lambda c: c.model == "complex" and c.way.startswith(("ps", "bounded", "async", "rounds", "local_sgd")),
        "is complex",
        "Servers and averaging support real numbers only. Train `torch.view_as_real` of the parameter.",
    ),
    Refusal(
        lambda c: c.data == "promised" and c.data_ranks > 1 and c.loop != "limit",
        "ended after 1 batches of this epoch, fewer than its length or limit_train_batches announced",
        "The lengths of the loaders determine the weight of each batch. "
        "Remove a wrong `__len__`, or set `limit_train_batches` to an existing number.",
        steps=3,
    ),
    Refusal(
        lambda c: c.data == "balanced" and c.way in ("local_sgd", "reproducible") and c.ranks > 1,
        "needs equal shares",
        "The strategy needs equal shares of all ranks. Use `ddp`, `fsdp` or `parameter_server`.",
    ),
    Refusal(
        lambda c: c.data == "weighted" and c.way in BOUNDED | {"rounds", "local_sgd", "local_sgd-2"} and c.ranks > 1,
        "batch_weight needs the weight of the global batch",
        "The weight of the global batch is unknown at a step. Use `ddp`, `fsdp` or `mode=sync`.",
    ),
    Refusal(
        lambda c: c.data == "balanced" and c.manual and c.ranks > 1,
        "manual optimization doesn't weight losses by the samples of a rank",
        "A manual loop does not weight its losses by samples. Use automatic optimization.",
    ),
    Refusal(
        lambda c: c.data == "balanced" and c.way == "expert" and c.ranks > 1,
        "LoadBalancer: ExpertMesh computes the samples of a data rank on several ranks",
        "Ranks compute the experts of each other's samples. Remove the callback.",
    ),
    Refusal(
        lambda c: c.way in UNEQUAL_PACE and c.save in {*WITHIN_STEP, "on_train_batch_start", "on_train_batch_end"},
        "each rank works at its own pace",
        "Ranks are at different batches, and a checkpoint needs all. "
        "Save in `on_train_epoch_end`, or by `ModelCheckpoint(every_n_train_steps=...)`.",
        steps=9,
    ),
    Refusal(
        lambda c: c.way in UNEQUAL_PACE and c.loop == "skip-rest",
        "on_train_batch_start returned -1",
        "Ranks are at different batches of the epoch. Set `trainer.should_stop` or `limit_train_batches`.",
        steps=9,
    ),
    Refusal(
        lambda c: c.way in BOUNDED and c.ranks > 1 and c.accumulates and c.loop == "val-interval",
        "in the middle of an update",
        "Ranks synchronise between updates only. Set `val_check_interval` to a multiple of `accumulate_grad_batches`.",
    ),
    Refusal(
        lambda c: c.change in CHANGING and c.way in SERVERS_STEP | APART,
        "changes weights",
        "Servers own the weights, so changes by a worker would be lost. "
        "Change them in `on_fit_start`, or use `optimizer=worker` or `ddp`.",
        steps=9,
    ),
    Refusal(
        lambda c: c.change in ("on_train_batch_start", "on_train_batch_end") and c.data in ("few", "ending", "promised")
        and c.ranks > 1 and c.way in FSDP | {"local_sgd", "expert"},
        "changed weights at a batch of which",
        "Ranks without a sample do not call this hook. Use `on_before_optimizer_step`, `drop_last=True` or `ddp`.",
        steps=9,
    ),
    Refusal(
        lambda c: (c.callback in ("swa", "averaging") and c.way.startswith(ELSEWHERE))
        or (c.callback == "swa" and c.way in DIVIDES),
        "(StochasticWeightAveraging|EMAWeightAveraging) needs the weights|averages of weights that are divided",
        "Ranks do not have the weights or the rate of each update. Use `ddp` or `fsdp`, or `EMA`.",
    ),
    Refusal(
        lambda c: c.callback == "swa" and c.model in ("batchnorm", "sync-batchnorm"),
        "the statistics of batch normalisation belong to",
        "Batch statistics belong to the weights of the last step. Use `EMA(use_buffers=True)` or GroupNorm.",
    ),
    Refusal(
        lambda c: c.callback in UNFREEZING and c.way.startswith((*ELSEWHERE, "reproducible")),
        "adds parameters to the optimizers during training",
        "The parameters of the optimizers are fixed before training. "
        "Use `ddp` or `fsdp`, or change `requires_grad` only.",
    ),
    Refusal(
        lambda c: c.manual and c.way in DIVIDES,
        "with manual optimization",
        "Layers or blocks are divided after a trial of the step, which has no optimizers; a stage has no loss. "
        "Use automatic optimization, `ddp` or `fsdp`.",
    ),
    Refusal(
        lambda c: c.optimizer == "lbfgs" and c.way in DIVIDES,
        "LBFGS needs all gradients as a single vector|computes the loss again in its step, such as LBFGS",
        "LBFGS needs all gradients on a rank, and the loss several times. Use AdamW or SGD.",
        steps=_MICROBATCHES,
    ),
    Refusal(
        lambda c: c.clip == "module" and c.way in DIVIDES,
        "this gradient is divided over ranks",
        "No rank has the whole gradient. Call `self.clip_gradients`, or set `gradient_clip_val`.",
        steps=_MICROBATCHES,
    ),
    Refusal(
        lambda c: c.model == "sync-batchnorm" and c.way in DIVIDES,
        "sync_batchnorm with strategy=",
        "Ranks that compute the same samples would count them several times. Use GroupNorm or LayerNorm.",
    ),
    Refusal(
        lambda c: c.model == "compiled" and c.way in DIVIDES,
        "a compiled module can.t be divided",
        "A compiled module cannot be divided. Remove `compile`.",
    ),
    Refusal(
        lambda c: c.data == "combined" and c.way in DIVIDES,
        "model parallelism runs the training step",
        "The trial of the step reads two samples of a single loader. Combine the data sets, or use `ddp`.",
    ),
    Refusal(
        lambda c: c.model == "shared" and c.way == "pipeline",
        "finds no chain of blocks",
        "A stage of a pipeline computes each of its blocks once. Name other blocks by `blocks`.",
        steps=_MICROBATCHES,
    ),
    Refusal(
        lambda c: c.model == "sparse" and c.way in ("pipeline", "expert"),
        "does not support sparse gradients, which",
        "Gradients are summed after backward, dense ones only. Use `sparse=False`, or `ddp`.",
    ),
    Refusal(
        lambda c: c.change == "on_after_backward" and c.way == "pipeline",
        "call this hook at different moments",
        "Stages call this hook for each microbatch, while others are being computed. "
        "Change weights in `on_before_optimizer_step`.",
        steps=_MICROBATCHES,
    ),
    Refusal(
        lambda c: c.loop == "no-loss" and c.way == "pipeline",
        "returned None after it has called the model",
        "Other stages have computed the batch already. Return None before the model is called, or a loss of zero.",
        steps=_MICROBATCHES + 9,  # a batch without a loss follows later
    ),
    Refusal(
        lambda c: c.save in WITHIN_STEP,
        "a training step is running",
        "Weights, random states and data position are inconsistent within a step. Save in `on_train_batch_end`.",
        steps=_MICROBATCHES,  # reproducible computes a global batch in 12 parts
    ),
)  # fmt: skip


def refusals(cell: Cell) -> list[Refusal]:
    """Return all reasons why a cell is refused."""
    return [rule for rule in REFUSALS if rule.matches(cell)]


def refusal(cell: Cell) -> Refusal | None:
    """Return why a cell is refused; None if it has to be right."""
    return next(iter(refusals(cell)), None)


def tolerance(cell: Cell) -> float:
    """Return the largest difference of a number from the oracle's, relative to the largest number of its tensor.

    0 (bitwise equal) where a single rank computes like the oracle in the same order. Servers keep the widest dtype.
    """
    # A gradient has 8 or 11 bits of mantissa; with autocast, gradients of parts are rounded differently than
    # the gradient of the whole. Weights and gradients of nearly all of 250 such cells differed by less than 0.006
    # (bf16) and 0.002 (fp16); where several steps per batch, or momentum, accumulate the rounding, by 0.06.
    if cell.precision == "bf16-mixed" or (cell.way in COMPRESSED and "bf16" in cell.way):
        carried = cell.optimizer in ("momentum", "custom") or cell.update == "manual-two" or cell.model == "complex"
        return 0.1 if carried else 0.05
    if cell.way in COMPRESSED:
        return 0.02 if cell.model == "complex" else 0.005
    if cell.clip == "norm" and cell.way in UNEQUAL_PACE and cell.precision == "64":
        return 1e-6  # the server's norm is in float32
    other_order = {"reproducible", "rounds", "local_sgd", "local_sgd-2"}
    if cell.clip != "none":  # a server's norm
        other_order |= SERVERS_STEP | UNEQUAL_PACE
    if cell.ranks == 1 and cell.model not in ("sparse", "dtypes") and cell.way not in other_order:
        return 0.0
    if cell.precision == "32" or cell.model in ("dtypes", "complex") or cell.way == "reproducible":
        # Different summation order, after steps that amplify differences; Adam and LBFGS divide by small numbers: LBFGS
        # keeps differences of gradients of a batch, which have lost a digit.
        return 1e-3 if cell.optimizer in ("adam", "lbfgs") else 1e-4
    return 1e-8


@dataclass(frozen=True)
class Defect:
    """A known defect that will be fixed.

    Attributes:
        what: description of the defect.
        matches: returns whether a cell is affected.
        says: regular expression of the problems that it causes; "" for all, and the cell isn't run.
    """

    what: str
    matches: Callable[[Cell], bool]
    says: str = ""


KNOWN_DEFECTS: tuple[Defect, ...] = ()


def known_defect(cell: Cell) -> str | None:
    """Return the known defect that excludes a cell, if any."""
    return next((rule.what for rule in KNOWN_DEFECTS if not rule.says and rule.matches(cell)), None)


def excused(cell: Cell, problem: str) -> bool:
    """Return whether a known defect causes a problem."""
    return any(rule.says and rule.matches(cell) and re.search(rule.says, problem) for rule in KNOWN_DEFECTS)
