"""The page `docs/combinations.md`, from the rules: `python -m tests.matrix.table` writes it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.matrix.cells import FEATURES, IN_HOOKS, ONE_WORKER, Cell, exists
from tests.matrix.rules import KNOWN_DEFECTS, refusal

PAGE = Path(__file__).parents[2] / "docs/combinations.md"
COLUMNS = {
    "`single`": "single", "`ddp`": "ddp", "`ddp` static": "ddp-static", "`ddp` bf16": "ddp-bf16",
    "`fsdp`": "fsdp", "PS": "ps1", "PS server": "ps1-server", "PS server 2": "ps2-server",
    "PS server 0": "ps0-server", "PS bounded": "bounded0", "PS bounded 2": "bounded0-ps2",
    "`async_sgd`": "async_sgd", "rounds": "rounds", "`local_sgd`": "local_sgd", "`reproducible`": "reproducible",
    "`tensor`": "tensor", "`pipeline`": "pipeline", "`expert`": "expert",
}  # fmt: skip
HEAD: Final = """# Which features work with which strategies

Each combination of a strategy and a feature either trains the same weights as one process on the global batch ("yes"),
or is refused with an error before the first update (a number, which refers to the reason and the remedy below). "-" is
supported, but not compared: the result differs from that of one process by design (Adam under `local_sgd`) or because
the feature enlarges rounding (Adam after compression). "open" is a known defect.

`tests/matrix` checks each entry on two or three ranks, and combinations of several features pairwise. `async_sgd` is
compared on a single worker, because the order of updates varies with several workers.
`python -m tests.matrix.table` writes this page from the rules of the tests.

Columns:

- `ddp` static: `static_graph=True`. `ddp` bf16: `compression="bf16"`.
- PS: `parameter_server` with `optimizer="worker"`. PS server: `optimizer="server"` with 1 server; PS server 2: with 2
  servers; PS server 0: with `servers=0` (shared memory).
- PS bounded: `mode="bounded"` with `max_staleness=0` and 1 server; PS bounded 2: with 2 servers.
- rounds: `async_sgd` with `every=2` and `outer="average"`.
- `tensor`, `pipeline`: two ranks that compute a share of each batch together. `expert`: data ranks that divide the
  experts of a mixture. `context` and meshes are in [model_parallel.md](model_parallel.md).
"""
_MEANINGS: Final[dict[str, dict[Any, str]]] = {
    "optimizer": {
        "sgd": "SGD", "momentum": "SGD with Nesterov momentum and weight decay", "adam": "Adam",
        "groups": "parameter groups with different learning rates",
        "custom": "an optimizer class of the user, with its own state and attributes", "adagrad": "Adagrad",
        "lbfgs": "LBFGS", "own-step": "the module overrides `optimizer_step`",
        "subset": "the optimizer has some of the trainable parameters only",
    },
    "update": {
        "automatic": "automatic optimization", "dict": "`training_step` returns a dict",
        "several": "several optimizers for the same loss", "manual": "manual optimization",
        "manual-submodule": "manual optimization that calls submodules directly",
        "manual-two": "manual optimization with two optimizers",
    },
    "clip": {
        "norm": "clipping by norm", "value": "clipping by value",
        "module": "the module overrides `configure_gradient_clipping`",
    },
    "accumulate": {1: "an update for each batch", 2: "`accumulate_grad_batches=2`"},
    "schedule": {
        "step": 'interval "step"', "epoch": 'interval "epoch"', "every-2": "every second step",
        "plateau": "ReduceLROnPlateau", "two": "two schedulers of an optimizer",
        "own": "a scheduler class of the user, for learning rate and weight decay",
    },
    "model": {
        "plain": "linear layers", "batchnorm": "BatchNorm", "sync-batchnorm": "`sync_batchnorm=True`",
        "dropout": "dropout", "frozen": "frozen parameters", "tied": "layers with tied weights",
        "shared": "a layer under two names that is called twice", "sparse": "sparse gradients of an embedding",
        "unused": "parameters without a gradient", "buffer": "buffers that the forward changes",
        "late": "layers that `configure_model` creates", "toggled": "parameters that are frozen in some epochs",
        "scalar": "a parameter without dimensions", "complex": "complex parameters",
        "dtypes": "parameters of two dtypes", "recomputed": "activation checkpointing", "compiled": "`compile`",
    },
    "data": {
        "even": "complete global batches", "uneven": "an incomplete last batch",
        "few": "a last batch with fewer samples than ranks", "shuffled": "`shuffle=True`",
        "iterable": "a stream for each rank, without a length", "ending": "streams that end earlier on some ranks",
        "balanced": "`LoadBalancer` with unequal shares", "weighted": "`Module.batch_weight`",
        "promised": "streams with a `__len__` that is too large on some ranks", "combined": "several loaders",
    },
    "loop": {
        "plain": "whole epochs", "limit": "`limit_train_batches`", "max-steps": "`max_steps`",
        "val-interval": "`val_check_interval`", "overfit": "`overfit_batches`",
        "reload": "`reload_dataloaders_every_n_epochs`", "two-val": "two validation loaders",
        "skip-rest": "`on_train_batch_start` returns -1", "no-loss": "`training_step` returns None for some batches",
        "lr-callback": "a callback changes the learning rate", "stop-early": "`EarlyStopping`",
        "evaluate": "`validate`, `test` and `predict` after `fit`", "one-val": "a single validation sample",
        "nan": "a monitored metric that becomes NaN",
    },
    "log": {
        "plain": "means, sums and maxima of an epoch", "objects": "torchmetrics objects",
        "kinds": "values of steps and epochs, numbers, minima",
    },
    "save": {
        **{hook: f"`save_checkpoint` in `{hook}`, and resuming from it" for hook in IN_HOOKS},
        "from-single": "resuming a run of one process", "to-single": "resuming on one process",
    },
    "callback": {
        "ema": "`EMA`", "averaging": "`WeightAveraging`, `EMAWeightAveraging`", "finetuning": "`BaseFinetuning`",
        "backbone": "`BackboneFinetuning`", "swa": "`StochasticWeightAveraging`",
        "scheduler": "`GradientAccumulationScheduler`",
    },
    "change": {hook: f"weights that `{hook}` changes" for hook in FEATURES["change"] if hook != "none"},
    "precision": {"64": "float64", "32": "float32", "bf16-mixed": "`precision='bf16-mixed'`"},
}  # fmt: skip


LIMITS: Final = """
## Limits: what is not detected

- **Your own collectives** (`self.all_gather`, functions of `torch.distributed`, functional collectives, methods of a
  group such as `group.allreduce`, operators of `torch.ops`) are an error where a rank would not join: at a batch of
  which some rank has no sample, in training and evaluation, and between two meetings of asynchronous ranks. Not
  detected are collectives that a program calls otherwise: by an operator that it looked up before (`f =
  torch.ops._c10d_functional.all_reduce`), in compiled code, by the backend of a group, or in C++; and collectives in
  the evaluation of streams without a length that end earlier on some ranks. The ranks then wait until the run's hang
  report names the lines of all ranks.
- **Under `fsdp` and manual optimization**, a rank without a sample of a batch calls `training_step` (under `fsdp`
  also the steps of evaluations) with another sample, with weight zero. The gradients and `self.log` do not count it.
  Your own collective in the step would: it is an error at such a batch. Not detected is a collective that other
  libraries call within fabricx or torch (`trainer.world`, `torch.distributed.optim`).
- **`fsdp`: parameters that are frozen and released within a step** through the optimizer (`optimizer.param_groups`)
  have an effect if the forward of their submodule is between the two. A step that reads such a parameter without this
  forward (a penalty on `self.layer.weight`) trains it. Freeze the module's own parameters
  (`self.layer.requires_grad_(False)`), or use `ddp`.
- **Losses that are no mean over samples**: each data rank computes the loss of its share, and the shares are weighted
  by their samples. A sum, a mean over tokens, class weights, `ignore_index`, a comparison of samples with each other,
  and code that depends on the contents of a whole batch therefore depend on the number of data ranks, as in other
  frameworks. Define `Module.batch_weight` (the number of terms, or the sum of the class weights): then the result is
  that of one process. A pipeline refuses such losses before training.
- **Hooks of gradients** (`register_hook` of a weight or an activation, backward hooks of a module) see the gradient of
  a rank's share of the batch: that of the share's mean where gradients are averaged (`ddp`, `fsdp`, `local_sgd`), and
  a part of the mean over the global batch where they are summed (strategies with servers). A hook that is not linear,
  such as a clamp or noise of a fixed size, therefore depends on ranks and strategy; change gradients in
  `on_before_optimizer_step`. Hooks of `register_post_accumulate_grad_hook` see the sum of a rank's microbatches so
  far, after each microbatch of an accumulation or a pipeline (under `fsdp` once, the gradient of the window): a hook
  that scales gradients depends on the division into microbatches. Random numbers that forwards and hooks draw are the
  same under each of these strategies.
- **Buffers that a forward computes from the batch** (statistics of BatchNorm and InstanceNorm, codebooks with moving
  averages) have the share of a rank; ranks that train together use those of rank 0, as torch's DDP does. Sum over
  ranks in the forward (`self.all_gather`), or use `sync_batchnorm=True`. `local_sgd` joins the statistics of
  BatchNorm and InstanceNorm, and ranks at their own pace pool them. A counter or scale that a forward updates in each
  batch counts the batches of its rank at their own pace.
- **`local_sgd`: parameters that a rank's batch doesn't use** (`if mask.any(): ...`) get no momentum and no weight decay
  in that rank's step, since each rank makes a step of its own. Let the step use each parameter, with a weight of zero
  where it has no effect, or use `ddp`.
- **LBFGS enlarges rounding**: it divides by products of differences of gradients, which lose digits as training
  converges. Several ranks add up the loss of the global batch in another order: in float64 the weights of a small model
  differ from those of one process by 2e-15 after 4 steps of 5 iterations, by 3e-8 after 4 steps with
  `line_search_fn="strong_wolfe"` and 20 iterations, and by 0.1 after 8. A single process that adds up the two halves of
  each batch differs by the same numbers. Each evaluation of the loss is that of the global batch."""


def table() -> str:
    """Return the page."""
    notes: dict[str, int] = {}
    rows, supported = [], []
    for name, meanings in _MEANINGS.items():
        assert meanings.keys() == {*FEATURES[name]} - {"none"}, f"describe each value of {name} once"
        everywhere = []
        for value, meaning in meanings.items():
            entries = [_entry(way, name, value, notes) for way in COLUMNS.values()]
            if set(entries) == {"yes"}:
                everywhere.append(meaning)
            else:
                rows.append(f"| {name}: {meaning} | {' | '.join(entries)} |")
        supported += [f"- {name}: {'; '.join(everywhere)}"] if everywhere else []
    refused = [f"{number}. {why}" for why, number in notes.items()]
    defects = [f"- {re.sub(r'^[0-9]+: ', '', defect.what)}" for defect in KNOWN_DEFECTS]
    parts = [HEAD, f"| feature | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}", *rows]
    parts += ["", "## Refused: reasons and remedies", "", *refused]
    parts += ["", "## Features that work with all strategies", "", *supported]
    if defects:
        parts += ["", "## Known defects, also of several features together", "", *defects]
    return "\n".join([*parts, LIMITS]) + "\n"


def _entry(way: str, name: str, value: object, notes: dict[str, int]) -> str:
    cell = Cell(way, **{"ranks": 1 if way == "single" else 2, name: value})  # type: ignore[arg-type]
    if (rule := refusal(cell)) is not None:
        return str(notes.setdefault(rule.why, len(notes) + 1))
    if any(defect.matches(cell) for defect in KNOWN_DEFECTS):
        return "open"
    ranks = (1,) if way in ONE_WORKER else (2, 3)
    return "yes" if way == "single" or any(exists(replace(cell, ranks=number)) for number in ranks) else "-"


if __name__ == "__main__":
    PAGE.write_text(table())
