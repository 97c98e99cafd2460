"""Checks of a pipeline before the module is divided: steps of evaluations, and options that it does not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from fabricx.model_parallel.pipeline.chain import Chain, chunk_of
from fabricx.model_parallel.pipeline.trace import tracing, undisturbed

CLOSURE: Final = (
    "an optimizer that computes the loss again in its step, such as LBFGS, can't be used in a pipeline: use an "
    "optimizer without a closure, or another strategy"
)


def check_evaluation(
    module: nn.Module, chain: Chain, cuts: Sequence[tuple[int, int]], stages: int, step: str, run: Callable[[], Any]
) -> None:  # fmt: skip
    """Check that the last stage can compute a validation, test or predict step from the tensors that stages exchange.

    Args:
        module: the user's module, not divided yet, in evaluation mode.
        chain: chain of the training step.
        cuts: (begin, end) of the blocks of each chunk.
        stages: ranks along the pipeline.
        step: name of the step, for messages.
        run: computes the step on two samples, without gradients.

    Raises:
        ValueError: the step would use tensors that the stages don't have; the message has the remedy.
    """
    remedy = "Change the step, or set other blocks (blocks=...) or fewer stages (pipeline=...)"
    try:
        with undisturbed(module), tracing(module, chain.blocks, calls_blocks=False, outside=chain.outside) as trace:
            run()
    except ValueError as error:
        raise ValueError(
            f"{step} under a pipeline: {error}. In an evaluation within fit, the step has to call the model once, as "
            "training_step does. For results that need more calls, such as generated text, call trainer.validate, test "
            "or predict after fit, where each rank has the whole module"
        ) from error
    for begin, _ in cuts[1:]:
        if begin in trace.joined:
            raise ValueError(f"{step} can't be divided before {chain.blocks[begin]}: {trace.joined[begin]}. {remedy}")
        if not set(trace.entries[begin]) <= set(chain.entries[begin]):
            raise ValueError(
                f"{step} calls {chain.blocks[begin]} with other arguments than training_step: call the model as "
                "training_step does"
            )
    everywhere = {name for name in chain.buffers if not chain.uses[name] or -1 in chain.uses[name]}
    for name, positions in trace.uses.items():
        missing = {chunk_of(position, cuts) % stages for position in positions} - set(
            chain.stages_of(name, cuts, stages)
        )
        if missing and name not in everywhere:
            raise ValueError(
                f"{step} uses {name} at stage {min(missing)} of the pipeline, which doesn't hold it, as training_step "
                f"doesn't use it there. {remedy}"
            )
