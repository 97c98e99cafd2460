"""Cells of the matrix: a strategy with options, a number of ranks, and a value of each feature."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from allpairspy import AllPairs

from fabricx import Strategy
from fabricx.strategies import DDP, FSDP, AsyncSGD, ExpertMesh, LocalSGD, Mesh, ParameterServer, Reproducible, Single

WAYS: dict[str, Callable[[], Strategy]] = {
    "single": Single,
    "ddp": DDP,
    "ddp-static": lambda: DDP(static_graph=True),
    "ddp-fp16": lambda: DDP(compression="fp16"),
    "ddp-bf16": lambda: DDP(compression="bf16"),
    "ddp-powersgd": lambda: DDP(compression="powersgd"),
    "ps1-powersgd": lambda: ParameterServer(compression="powersgd", powersgd_rank=1),
    "ps2-topk": lambda: ParameterServer(compression="topk", compression_keep=0.2, servers=2, pull_compression="fp16"),
    "ps1-server-sign": lambda: ParameterServer(optimizer="server", compression="sign"),
    "fsdp": FSDP,
    "fsdp-blocks": lambda: FSDP(wrap=["Linear"], activation_checkpointing=["Linear"], cpu_offload=True),
    "fsdp-kept": lambda: FSDP(wrap=20, reshard_after_forward=False),
    "hsdp": lambda: FSDP(replicas=2),
    "ps0": lambda: ParameterServer(servers=0),
    "ps0-server": lambda: ParameterServer(servers=0, optimizer="server"),
    "ps1": ParameterServer,
    "ps2": lambda: ParameterServer(servers=2),
    "ps2-gloo": lambda: ParameterServer(servers=2, link="gloo"),
    "ps1-server": lambda: ParameterServer(optimizer="server"),
    "ps2-server": lambda: ParameterServer(servers=2, optimizer="server"),
    "ps2-tensor": lambda: ParameterServer(servers=2, optimizer="server", shard_by="tensor"),
    "ps2-overlap": lambda: ParameterServer(servers=2, optimizer="server", overlap="forward"),
    "ps1-bf16": lambda: ParameterServer(compression="bf16"),
    "ps2-server-fp16": lambda: ParameterServer(servers=2, optimizer="server", compression="fp16"),
    "bounded0": lambda: ParameterServer(mode="bounded", max_staleness=0),
    "bounded0-ps2": lambda: ParameterServer(mode="bounded", max_staleness=0, servers=2, shard_by="tensor"),
    "async": lambda: ParameterServer(mode="async"),
    "async_sgd": AsyncSGD,
    "async_sgd-ps2": lambda: AsyncSGD(servers=2, shard_by="tensor", overlap="forward"),
    "async_sgd-dc": lambda: AsyncSGD(compensation="dc"),
    "rounds": lambda: AsyncSGD(every=2, outer="average"),
    "local_sgd": lambda: LocalSGD(every=1),
    "local_sgd-2": lambda: LocalSGD(every=2),
    "reproducible": Reproducible,
}
# In cells of a single feature and in chosen cells, not in lists of pairs and triples.
MESH_WAYS: dict[str, Callable[[], Strategy]] = {
    "tensor": lambda: Mesh(tensor=2),
    "pipeline": lambda: Mesh(pipeline=2, microbatches=3),
    "expert": ExpertMesh,
}
TOGETHER_RANKS = {"tensor": 2, "pipeline": 2}  # ranks that compute a share of each batch together
# Compared with `plain.Joined` only: no feature of a single process is equal to them.
JOINED_WAYS: dict[str, Callable[[], Strategy]] = {
    "ddp-powersgd": WAYS["ddp-powersgd"],
    "ps1-powersgd": WAYS["ps1-powersgd"],
    "ps1-topk": lambda: ParameterServer(compression="topk", compression_keep=0.3),
    "ps1-sign": lambda: ParameterServer(compression="sign"),
    "local_sgd-nesterov": lambda: LocalSGD(every=1, outer="nesterov", outer_lr=0.5, outer_momentum=0.9),
    "rounds-nesterov": lambda: AsyncSGD(every=1, outer="nesterov", outer_lr=0.5, outer_momentum=0.9),
}
ONE_WORKER = {"async", "async_sgd", "async_sgd-ps2", "async_sgd-dc", "rounds", "local_sgd-2"}
COMPRESSED = {"ddp-fp16", "ddp-bf16", "ps1-bf16", "ps2-server-fp16"}
LOSSY = {"ddp-powersgd", "ps1-powersgd", "ps2-topk", "ps1-server-sign"}  # compared with a run without interruption
SERVERS_STEP = {
    "ps1-server-sign",
    "ps0-server",
    "ps1-server",
    "ps2-server",
    "ps2-tensor",
    "ps2-overlap",
    "ps2-server-fp16",
}
BOUNDED = {"bounded0", "bounded0-ps2"}
UNEQUAL_PACE = BOUNDED | (ONE_WORKER - {"local_sgd-2"})
UNFREEZING = ("finetuning", "backbone")  # callbacks that add the first layer to the optimizer later
STREAMS = ("iterable", "ending", "promised")
TOGETHER = ("batchnorm", "sync-batchnorm")
IN_HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip

FEATURES: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 3, 1),
    "optimizer": ("sgd", "momentum", "adam", "groups", "custom", "adagrad", "lbfgs", "own-step", "subset"),
    "update": ("automatic", "dict", "several", "manual", "manual-submodule", "manual-two"),
    "clip": ("none", "norm", "value", "module"),
    "accumulate": (1, 2),
    "schedule": ("none", "step", "epoch", "every-2", "plateau", "two", "own"),
    "model": (
        "plain", "batchnorm", "sync-batchnorm", "dropout", "frozen", "tied", "shared", "sparse", "unused", "buffer",
        "late", "toggled", "scalar", "complex", "dtypes", "recomputed", "compiled",
    ),
    "data": (
        "even", "uneven", "few", "shuffled", "iterable", "ending", "balanced", "weighted", "promised", "combined",
    ),
    "loop": (
        "plain", "limit", "max-steps", "val-interval", "overfit", "reload", "two-val", "skip-rest", "no-loss",
        "lr-callback", "stop-early", "evaluate", "one-val", "nan",
    ),
    "log": ("plain", "objects", "kinds"),
    "save": ("none", *IN_HOOKS, "from-single", "to-single"),
    "callback": ("none", "ema", "averaging", "finetuning", "backbone", "swa", "scheduler"),
    "change": (
        "none", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward",
        "on_before_optimizer_step", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end",
    ),
    "precision": ("64", "32", "bf16-mixed"),
}  # fmt: skip

# A single rank and few digits expose fewer mistakes.
OFTEN: dict[str, tuple[Any, ...]] = {"ranks": (2, 3, 2, 3, 1), "precision": ("64", "64", "64", "32", "bf16-mixed")}


@dataclass(frozen=True)
class Cell:
    """A combination of features; fields default to the first value in `FEATURES`."""

    way: str
    ranks: int = 2
    optimizer: str = "sgd"
    update: str = "automatic"
    clip: str = "none"
    accumulate: int = 1
    schedule: str = "none"
    model: str = "plain"
    data: str = "even"
    loop: str = "plain"
    log: str = "plain"
    save: str = "none"
    callback: str = "none"
    change: str = "none"
    precision: str = "64"
    mixture: bool = False  # the module has experts, for this strategy and for its oracle

    def __post_init__(self) -> None:
        if self.way == "expert":
            object.__setattr__(self, "mixture", True)

    def __str__(self) -> str:
        different = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("way", "mixture")
            and (field.name == "ranks" or getattr(self, field.name) != field.default)
        }
        return " ".join([self.way, *(f"{name}={value}" for name, value in different.items())])

    @staticmethod
    def parse(text: str) -> Cell:
        """Return the cell of a string such as `str(cell)`.

        Raises:
            ValueError: unknown name or value.
        """
        way, *rest = text.split()
        if way not in WAYS | MESH_WAYS:
            raise ValueError(f"no strategy {way!r}; known: {', '.join(WAYS | MESH_WAYS)}")
        values: dict[str, Any] = {}
        for part in rest:
            name, _, value = part.partition("=")
            known = {str(option): option for option in FEATURES[name]}
            if value not in known:
                raise ValueError(f"{name}={value!r}; known: {', '.join(known)}")
            values[name] = known[value]
        return Cell(way, **values)

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that train different shares of the data."""
        return self.ranks // TOGETHER_RANKS.get(self.way, 1)

    @property
    def accumulates(self) -> bool:
        """Return whether some updates have several batches of each rank."""
        return self.accumulate > 1 or self.callback == "scheduler"

    @property
    def manual(self) -> bool:
        """Return whether the module is optimised manually."""
        return self.update.startswith("manual")


def exists(cell: Cell) -> bool:
    """Return whether the cell can exist as an input, and has an oracle."""
    return not any(any(reasons(cell)) for reasons in (_of_strategy, _of_update, _of_batch, _of_save, _of_change))


def _of_strategy(cell: Cell) -> Iterator[bool]:
    """Yield whether a cell is impossible because of the strategy and its ranks."""
    yield cell.way == "single" and cell.ranks != 1
    yield cell.way in ONE_WORKER and cell.ranks != 1  # several workers: no order of updates to compare with
    yield cell.way == "hsdp" and cell.ranks != 2  # the groups must have equal sizes
    yield cell.way in TOGETHER_RANKS and cell.ranks != 2
    # local SGD averages steps: that is the step of the mean gradient only where the step is linear in it.
    linear = cell.optimizer in ("sgd", "groups", "own-step", "momentum", "subset") and cell.clip == "none"
    yield cell.way == "local_sgd" and cell.ranks > 1 and not linear
    # Its second loss is computed with a rank's local weights, between two steps.
    yield cell.way == "local_sgd" and cell.ranks > 1 and cell.update == "manual-two"
    # The newest step of a rank at its own pace differs between ranks.
    yield cell.log == "kinds" and cell.ranks > 1 and cell.way in (*BOUNDED, "local_sgd")
    # Which worker trains which sample is a matter of time.
    yield cell.way in BOUNDED and cell.ranks > 1 and cell.model in ("dropout", "batchnorm")
    # Rounding turns into whole steps where an optimizer divides by the gradient's size.
    yield cell.way in COMPRESSED and cell.optimizer in ("adam", "adagrad", "lbfgs")
    # Gradients are rounded twice; momentum accumulates the rounding until it hides mistakes.
    yield cell.way in COMPRESSED and cell.precision == "bf16-mixed" and cell.optimizer in ("momentum", "custom")
    # It computes several gradients per update, and the error feedback is added to each.
    yield cell.way in LOSSY and cell.optimizer == "lbfgs"
    # Hooks are called for parts of a global batch, so that counts and numbers of calls differ.
    yield cell.way == "reproducible" and cell.loop in ("skip-rest", "no-loss", "limit")
    # A rank without a sample in the part after which the callback changes the rate does so in its next part, too.
    yield cell.way == "reproducible" and cell.loop == "lr-callback" and cell.data in ("few", "uneven")
    # Its gradients increase by more than 2**16 per step, which is an error with integer sums.
    yield cell.way == "reproducible" and (cell.loop, cell.data, cell.model) == ("lr-callback", "combined", "complex")


def _of_update(cell: Cell) -> Iterator[bool]:
    """Yield whether a cell is impossible because of optimizers, their schedules and the loop of the module."""
    # torch has no such optimizer, or it needs dense gradients.
    yield cell.model == "sparse" and cell.optimizer not in ("sgd", "groups", "adagrad", "own-step", "subset")
    yield cell.model == "sparse" and cell.schedule == "own"  # it sets a weight decay, which dense gradients have only
    yield cell.optimizer == "lbfgs" and (cell.update == "several" or cell.manual or cell.model in ("sparse", "toggled"))
    # Its state has differences of gradients, which are rounding errors in bfloat16.
    yield cell.optimizer == "lbfgs" and cell.precision == "bf16-mixed"
    # Two losses of the same network with a rising rate diverge and amplify rounding.
    yield cell.update == "manual-two" and cell.precision == "bf16-mixed" and cell.loop == "lr-callback"
    # Several optimizers need a model of two parts that are both trained.
    yield cell.update in ("several", "manual-two") and cell.model in ("tied", "shared", "frozen", "late")
    yield cell.update in ("several", "manual-two") and cell.optimizer == "groups"
    # A loop that isn't the module's own.
    yield cell.manual and cell.loop == "no-loss"
    yield cell.manual and cell.accumulates  # the effect of a manual loop over two batches is undefined
    yield cell.manual and cell.optimizer == "own-step"  # optimizer_step is not called
    yield cell.manual and cell.data in ("weighted",)
    yield cell.manual and cell.schedule in ("epoch", "plateau", "two")
    yield cell.manual and cell.update == "manual-submodule" and cell.model != "plain"
    yield cell.save in ("on_before_zero_grad",) and cell.manual
    yield cell.schedule == "plateau" and cell.loop == "limit"
    yield cell.loop in ("two-val",) and cell.schedule == "plateau"  # its metric has a loader suffix
    # Its rates are set in a hook of each optimizer, and its average is of whole epochs.
    yield cell.callback == "swa" and (cell.manual or cell.optimizer == "own-step" or cell.loop == "stop-early")
    # It sets the number of batches of an update. Its refusal with LBFGS is in test_training_set_up.py.
    yield cell.callback == "scheduler" and (cell.accumulate > 1 or cell.optimizer == "lbfgs")
    if cell.callback in UNFREEZING:
        # Its frozen layer would be the only part of an optimizer, or shares weights.
        yield cell.update in ("several", "manual-two") or cell.model in ("tied", "shared", "toggled")
        yield cell.optimizer in ("lbfgs", "custom", "groups", "own-step") or cell.schedule in ("own", "two")
        yield cell.way == "ddp-static"  # it needs gradients of the same parameters


def _of_batch(cell: Cell) -> Iterator[bool]:
    """Yield whether a cell is impossible because of the model, its data and the loop over them."""
    yield cell.model == "complex" and cell.clip == "value"  # torch has no order of complex numbers
    yield cell.model == "dtypes" and cell.precision != "64"
    # Rounding of a few numbers turns into whole steps.
    yield cell.model == "dtypes" and cell.optimizer in ("adam", "adagrad", "lbfgs")
    yield cell.model in ("scalar", "complex", "dtypes", "recomputed") and cell.update == "manual-submodule"
    # torchmetrics omits NaN: the mean of a rank's part differs from the mean of the global batch.
    yield cell.loop == "nan" and cell.log == "objects" and cell.ranks > 1
    # A single sample has no statistics, also on a single process.
    yield cell.data == "few" and (cell.model == "batchnorm" or (cell.model == "sync-batchnorm" and cell.ranks == 1))
    # A microbatch of each rank is a different part of the global batch than a microbatch of a single process.
    yield cell.accumulates and cell.ranks > 1 and (cell.loop == "no-loss" or cell.model in TOGETHER)
    # A step without a loss must be collective, and these cannot detect that: it is an error.
    yield cell.loop == "no-loss" and (cell.model == "sync-batchnorm" or cell.optimizer == "lbfgs")
    # A step without a loss on a single rank is counted, or an update is the mean of the remaining batches.
    yield cell.loop == "no-loss" and cell.way in {*BOUNDED, "local_sgd"} and cell.ranks > 1
    # A stream has no length, so that a fraction of it is undefined.
    yield cell.data in STREAMS and cell.loop == "overfit"
    yield cell.data in ("balanced", *STREAMS) and cell.ranks == 1
    # Each batch of a stream has equal weight, so that a window of unequal batches has a different mean.
    yield cell.data in ("ending", "promised") and cell.accumulates


def _of_save(cell: Cell) -> Iterator[bool]:
    """Yield whether a cell is impossible because of a checkpoint, also for a different number of ranks."""
    # On fewer ranks an update has several microbatches, which LBFGS refuses then (tests/process/test_resume.py).
    yield cell.save == "to-single" and cell.optimizer == "lbfgs" and cell.ranks > 1
    # A different number of ranks loses different parts.
    yield cell.way in LOSSY and cell.save in ("from-single", "to-single")
    # Random numbers and batches of a rank differ with the number of ranks.
    elsewhere = cell.save in ("from-single", "to-single")
    yield elsewhere and cell.model in ("dropout", "batchnorm", "sync-batchnorm", "buffer")
    # A single process calls hooks once for all ranks' batches, so that a different batch has no loss.
    yield cell.save == "to-single" and cell.loop == "no-loss" and cell.ranks > 1
    yield elsewhere and cell.manual and cell.ranks > 1  # a manual loop steps with each rank's batch
    yield cell.data in STREAMS and elsewhere  # each rank reads its own stream
    # An epoch of two loaders has four batches: three steps of a batch end before the first validation.
    validates = cell.save in ("on_validation_epoch_end", "on_validation_end")
    yield validates and cell.data == "combined" and cell.loop == "max-steps" and not cell.accumulates
    # A run with early stopping continues when resumed.
    yield cell.loop == "stop-early" and cell.save == "on_train_end"
    yield cell.loop == "skip-rest" and cell.save in ("on_train_batch_end",)


def _of_change(cell: Cell) -> Iterator[bool]:
    """Yield whether a cell is impossible because of weights that a hook changes."""
    each_batch = cell.change in ("on_train_batch_start", "on_train_batch_end", "on_after_backward")
    elsewhere = cell.save in ("from-single", "to-single")
    # A batch of the hooks is a different part of the global batch, or a rank's only part, which may change weights.
    yield each_batch and (
        (cell.way == "reproducible" and cell.data in ("few", "uneven")) or (elsewhere and cell.ranks > 1)
    )
    # A resumed run calls its start hooks again, and the last window may have fewer batches for hooks.
    yield cell.change != "none" and (cell.save != "none" or cell.accumulates)
    # An error on the ranks that call it (tests/unit/consistency/test_hook_effects.py).
    yield cell.change == "on_after_backward" and cell.data in ("few", "ending", "promised") and cell.ranks > 1
    # Each optimizer calls the hook separately.
    yield cell.change == "on_before_optimizer_step" and cell.update in ("several", "manual-two")
    yield cell.change == "on_after_backward" and (cell.update == "manual-two" or cell.optimizer == "lbfgs")


def pairwise(seed: int, excluded: Callable[[Cell], object], n: int = 2) -> list[Cell]:
    """Return cells that contain each possible pair of values at least once (`n`: each n-tuple).

    Args:
        seed: selects one of many such lists.
        excluded: returns whether a cell is excluded, for example because it is refused, which hides other features.
        n: size of the tuples.
    """
    names = ["way", *FEATURES]
    values: list[list[Any]] = [list(WAYS), *(list(known) for known in FEATURES.values())]
    chance = random.Random(seed)
    for known in values:
        chance.shuffle(known)

    def possible(row: list[Any]) -> bool:
        cell = _completed(dict(zip(names, row, strict=False)))
        return exists(cell) and not excluded(cell)

    cells = [Cell(*row) for row in AllPairs(values, filter_func=possible, n=n)]
    return [_on_more_ranks(cell, chance, excluded) for cell in cells]


def triples(seed: int, excluded: Callable[[Cell], object]) -> Iterator[Cell]:
    """Yield cells until each possible triple of values has occurred; deterministic for a seed.

    Each cell begins with a triple that has not occurred yet; a random value is added for each further feature,
    unless the combination becomes impossible or excluded. The complete list has tens of thousands of cells.

    Args:
        seed: of the order of the triples, and of the added values.
        excluded: returns whether a cell is excluded.
    """
    known = {"way": tuple(WAYS), **FEATURES}
    chance = random.Random(seed)
    wanted = [
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(known, 3)
        for values in itertools.product(*(known[name] for name in names))
    ]
    chance.shuffle(wanted)
    seen: set[tuple[tuple[str, Any], ...]] = set()
    for triple in wanted:
        if triple in seen or (cell := _cell_with(dict(triple), known, chance, excluded)) is None:
            continue
        seen.update(itertools.combinations(((name, getattr(cell, name)) for name in known), 3))
        yield cell


def _cell_with(
    values: dict[str, Any], known: dict[str, tuple[Any, ...]], chance: random.Random, excluded: Callable[[Cell], object]
) -> Cell | None:  # fmt: skip
    """Return a cell with these values and many other values at random; None if it is impossible with the defaults."""
    for way in [values["way"]] if "way" in values else chance.sample(known["way"], len(known["way"])):
        cell = _completed({**values, "way": way})
        if not exists(cell) or excluded(cell):
            continue
        others = [name for name in FEATURES if name not in values]
        for name in chance.sample(others, len(others)):
            more = dataclasses.replace(cell, **{name: chance.choice(OFTEN.get(name, known[name]))})
            if exists(more) and not excluded(more):
                cell = more
        return cell
    return None


def _completed(values: dict[str, Any]) -> Cell:
    """Return a cell of the first values of a row, with a number of ranks that the strategy supports."""
    way = values["way"]
    return Cell(**{"ranks": 1 if way == "single" or way in ONE_WORKER else 2, **values})


def _on_more_ranks(cell: Cell, chance: random.Random, excluded: Callable[[Cell], object]) -> Cell:
    """Return the cell on 2 or 3 ranks if possible: a single rank exposes fewer mistakes."""
    if cell.ranks == 1 and chance.random() < 0.9:
        for ranks in chance.sample((2, 3), 2):
            more = dataclasses.replace(cell, ranks=ranks)
            if exists(more) and not excluded(more):
                return more
    return cell


def single_features(ranks: int) -> list[Cell]:
    """Return each strategy with each value of each feature alone: the table of the docs."""
    cells = []
    for way in WAYS | MESH_WAYS:
        world_size = _completed({"way": way}).ranks
        plain = Cell(way, ranks=world_size if world_size == 1 or way == "hsdp" else ranks)
        values = [(name, value) for name, known in FEATURES.items() if name != "ranks" for value in known]
        cells += [dataclasses.replace(plain, **{name: value}) for name, value in values]
    return [cell for cell in dict.fromkeys(cells) if exists(cell)]
