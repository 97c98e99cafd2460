"""Checks of a pipeline before the module is divided: steps of evaluations, and options that it does not support."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from fabricx.core.module_state.attributes import extrapolate, lists_of, numbers_of
from fabricx.core.module_state.rng import seed_generators
from fabricx.core.strategy_support.trial import Trial
from fabricx.model_parallel.pipeline.chain import Chain, chunk_of
from fabricx.model_parallel.pipeline.trace import tracing, undisturbed

CLOSURE: Final = (
    "an optimizer that computes the loss again in its step, such as LBFGS, can't be used in a pipeline: use an "
    "optimizer without a closure, or another strategy"
)

FURTHER: Final = 1000  # steps after which the loss is compared


def check_counters(module: nn.Module, blocks: Sequence[str], trial: Trial, microbatches: int) -> list[str]:
    """Refuse a step whose loss depends on numbers that it changes, in attributes or buffers of the module.

    Stages would have other numbers: the step runs for each microbatch, and on most stages it ends before the code after
    the blocks. Attributes that a second step on the same samples leaves as they are, such as the size of a table, pass.

    Args:
        module: the user's module, not divided yet.
        blocks: names of the blocks.
        trial: the training step.
        microbatches: runs of the step for a batch; with one, code before the blocks and within them may count.

    Returns:
        names of other numbers that the step changes, and of lists that it extends.

    Raises:
        ValueError: names the attributes.
    """
    entry: dict[str, Any] = {}  # numbers at the call of the first block
    first = module.get_submodule(blocks[0])
    hook = first.register_forward_pre_hook(lambda *_: entry.update(_counts(module, blocks)))
    try:
        with trial.undisturbed():
            states, numbers, lengths = [_counts(module, blocks)], numbers_of(module), lists_of(module)
            losses = []
            for _ in range(2):
                losses.append(_loss(trial))
                states.append(_counts(module, blocks))
                if states[-1] == states[-2]:
                    break
            lists = [name for name, length in lists_of(module).items() if length > lengths.get(name, length)]
    finally:
        hook.remove()
    if len(losses) < 2:  # flags that the step sets and resets
        return lists
    alone = microbatches == 1
    before, after = entry if alone else states[1], states[-1]
    changed = [name for name in after if before.get(name) != after[name] and not (alone and _inside(name, blocks))]
    if not changed:
        return lists
    if not _differ(*losses):
        with trial.undisturbed():
            _loss(trial)
            extrapolate(module, numbers, FURTHER)
            losses[1] = _loss(trial)
        if not _differ(*losses):
            return [*changed, *lists]
    raise ValueError(
        f"the loss of training_step depends on {', '.join(changed[:3])}{', ...' * (len(changed) > 3)} of the module, "
        "which the step changes. Under a pipeline it runs for each microbatch, and on most stages it ends before the "
        "code after the blocks, so that stages would have different values: use self.trainer.global_step, or change it "
        "in on_train_batch_start or on_train_batch_end, which run once for a batch on all stages"
    )


def _loss(trial: Trial) -> float | None:
    """Return the loss of the step with the same random numbers at each call; None without, or after an error."""
    seed_generators(0)
    try:
        outputs = trial.step(trial.batch, 0)
    except Exception:  # of numbers that no step has reached
        return None
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return float(loss.detach()) if isinstance(loss, Tensor) else None


def _differ(first: float | None, *others: float | None) -> bool:
    return any(
        other != first if first is None or other is None else not math.isclose(first, other, rel_tol=1e-6)
        for other in others
    )


def _counts(module: nn.Module, blocks: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of a module by name: of attributes, of single elements in buffers, and of replaced buffers."""
    numbers = {name: None if value != value else value for name, value in numbers_of(module).items()}
    for name, buffer in module.named_buffers():
        if not name.endswith("num_batches_tracked") and not _inside(name, blocks):
            numbers[name] = id(buffer), buffer.item() if buffer.numel() == 1 else None
    return numbers


def _inside(name: str, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


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
        received, carries = chain.outside, bool(chain.carried)
        with (
            undisturbed(module),
            tracing(module, chain.blocks, calls_blocks=False, outside=received, carries=carries) as trace,
        ):
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
        same_calls = all(trace.calls[begin].get(name) == count for name, count in chain.calls.get(begin, {}).items())
        if not set(trace.entries[begin]) <= set(chain.entries[begin]) or not same_calls:
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
