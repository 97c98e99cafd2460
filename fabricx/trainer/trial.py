"""Two samples of the training data, and the step on them, for strategies that divide the module by a trial run."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fabricx.core.hook_calls.steps import wrap_steps
from fabricx.core.module_hooks import RUN_ATTRIBUTES
from fabricx.core.module_state.attributes import AttributeMark
from fabricx.core.module_state.buffers import BufferMark
from fabricx.core.module_state.rng import generators_of, random_kept
from fabricx.core.strategy_support.trial import Trial, Validation
from fabricx.data.combined import CombinedLoader
from fabricx.data.loader_classes import fetches_lists
from fabricx.model_parallel.nested import copied

if TYPE_CHECKING:
    from fabricx.session.session import Session

BATCHES: Final = 4  # further batches, at most
CANDIDATES: Final = 32  # samples of which these consist
IGNORED: Final = -100  # label without a loss, in torch and in loaders of transformers


def trial_of(session: Session) -> Trial:
    """Return the training step on two samples.

    Args:
        session: session of a fit, after its data was loaded.

    Raises:
        ValueError: reading samples would change the loader's state.
    """
    with random_kept():
        batch = session.to_device(two_samples(session.data.train_dataloader), 0)
    compute = wrap_steps(session.module, session.precision, several_loaders=False)["training"]
    step = functools.partial(_with_copy, compute)  # which is called several times with the same batch
    samples, rows = _sizes(session.data.train_dataloader)
    undisturbed = functools.partial(_undisturbed, session)
    validation = functools.partial(_validation_of, session)
    others = functools.partial(_others, session)
    half = "16" in session.precision.name
    return Trial(step, batch, undisturbed, samples, rows, session.weigh, validation, others, half)


def _with_copy(step: Callable[..., Any], batch: Any, *args: Any) -> Any:
    """Compute a step, which may change its batch in place."""
    return step(copied(batch), *args)


def _others(session: Session) -> list[Any]:
    with random_kept():
        return [session.to_device(batch, 0) for batch in other_batches(session.data.train_dataloader)]


def _validation_of(session: Session, shared: Iterable[object]) -> Validation | None:
    """Return the validation step on two samples of each loader; None without it, or if the module can't be copied.

    It belongs to a copy of the module, since validation steps add to lists and metrics of the module. It shares
    parameters and buffers with the module, since a divided module finds them by identity.
    """
    if not session.data.val_feeds:
        return None
    several, loaders = session.data.several_loaders, session.data.val_dataloaders
    module = session.module
    try:
        with random_kept():
            kept = (*module.parameters(), *module.buffers(), *shared)  # buffers are restored after a step
            memo: dict[int, Any] = {id(entry): entry for entry in kept}
            for part in module.modules():  # weights that nn.utils.spectral_norm has computed can't be copied
                memo.update({id(v): v.detach() for v in vars(part).values() if isinstance(v, Tensor) and v.grad_fn})
            copied = copy.deepcopy(module, memo).eval()
            batches = [session.to_device(two_samples(part), 0) for part in (loaders if several else [loaders])]
    except Exception:  # such as a handle of a file in the module
        return None
    computes = wrap_steps(copied, session.precision, several_loaders=several)["validation"]

    def attach() -> None:
        vars(copied).update({name: vars(module)[name] for name in RUN_ATTRIBUTES})

    def step(*args: Any) -> Any:
        attach()
        return _with_copy(computes, *args)

    def begin() -> None:
        attach()
        for hook in ("on_validation_start", "on_validation_epoch_start"):
            getattr(copied, hook)()

    args = [(batch, 0, number) if several else (batch, 0) for number, batch in enumerate(batches)]
    return Validation(copied, step, begin, args)


def _sizes(loader: Any) -> tuple[int | None, int]:
    """Return the number of samples of `two_samples`, None if unknown, and of a batch of the loader."""
    known = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    rows = known if isinstance(known, int) else 2
    mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return (2 if mapped and known else None), rows


@contextlib.contextmanager
def _undisturbed(session: Session) -> Iterator[None]:
    """Context of a trial: discards logged values, and restores buffers, attributes and random numbers."""
    buffers, attributes = BufferMark(session.module), AttributeMark(session.module, RUN_ATTRIBUTES)
    restores = [*generators_of(session.module)]
    logbook, before = session.metrics.training, vars(session.module).get("_log_to")
    session.metrics.collect(logbook)
    try:
        with random_kept(), logbook.muted():
            yield
    finally:
        session.metrics.collect(before)
        for restore in restores:
            restore()
        buffers.restore()
        attributes.restore()


def other_batches(loader: Any) -> list[Any]:
    """Return batches for which a loss may have other numbers of terms than for `two_samples`; no state changes.

    They are pairs of samples with few and many elements, such as words without padding. Pairs that the loader can't
    collate are skipped.

    Args:
        loader: loader of the training data, which `two_samples` accepts.
    """
    if not isinstance(loader, DataLoader):
        if isinstance(loader, Sequence):
            return [loader[number] for number in _spread(len(loader), BATCHES)[1:]]
        return list(itertools.islice(iter(_copied(loader)), 1, BATCHES))
    dataset: Any = loader.dataset
    batched = loader.batch_size is not None or loader.batch_sampler is not None
    if fetches_lists(loader):
        return [loader.collate_fn(dataset[_spread(len(dataset), 3)[1:]])]
    count = CANDIDATES if batched else BATCHES
    if isinstance(dataset, IterableDataset):
        items = list(itertools.islice(iter(_copied(dataset)), count))
    elif isinstance(dataset, Mapping) or not hasattr(dataset, "__len__"):
        items = [dataset[key] for key in itertools.islice(iter(_copied(loader.sampler)), count)]
    else:
        items = [dataset[number] for number in _spread(len(dataset), count)]
    if not batched:
        return items[1:]
    batches = []
    for few, many in pairs(items):
        with contextlib.suppress(Exception):  # such as samples of different lengths, of a loader with length groups
            batches.append(loader.collate_fn([items[few], items[many]]))
    return batches


def _spread(length: int, count: int) -> list[int]:
    """Return positions with equal distances, from 0."""
    return [number * length // min(length, count) for number in range(min(length, count))]


def pairs(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the positions of pairs of samples with losses that may be means over different numbers of terms.

    Args:
        items: samples: nested tensors, arrays, numbers and texts.

    >>> pairs([torch.tensor([5, 7, 0]), torch.tensor([5, 0, 0]), torch.tensor([5, 7, 8])])
    [(0, 1), (1, 2)]
    """
    columns = zip(*(_counts(item) for item in items), strict=False)
    extremes = [(column.index(min(column)), column.index(max(column))) for column in columns]
    spread = [(0, len(items) // 2)]  # loaders may draw random masks
    return [*dict.fromkeys(pair for pair in (*spread, *extremes) if pair[0] != pair[1])][:BATCHES]


def _counts(item: Any) -> list[int]:
    """Return counts of a sample; any of them may be the number of terms of the loss."""
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, (list, tuple)) and any(isinstance(entry, (Tensor, list, tuple, Mapping)) for entry in item):
        return [count for entry in item for count in _counts(entry)]
    if isinstance(item, str):
        return [len(item)]
    try:
        flat = torch.as_tensor(item).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        return []
    if not len(flat):
        return [0, 0, 0, 0]
    changes = (flat != flat[-1]).nonzero()
    padding = len(flat) - 1 - int(changes[-1]) if len(changes) else len(flat)
    return [padding, int((flat == IGNORED).sum()), len(flat), int((flat != 0).sum())]


def two_samples(loader: Any) -> Any:
    """Return a batch of two samples, or the first batch of data that are batches already; no state changes.

    Args:
        loader: loader of the training data.

    Raises:
        ValueError: reading would change the loader's state.
    """
    if isinstance(loader, CombinedLoader):
        raise ValueError(
            "model parallelism runs the training step on two samples before training, and can't take these from "
            "several loaders: combine the data sets in one DataLoader"
        )
    if isinstance(loader, DataLoader):
        return _of_dataset(loader)
    if isinstance(loader, Sequence):
        return loader[0]
    return next(iter(_copied(loader)))


def _of_dataset(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        items = list(itertools.islice(iter(_copied(dataset)), 2))
        if not items:
            raise ValueError(
                f"{type(dataset).__name__} yields no sample, but model parallelism runs the training step on two "
                "samples before training: provide at least one sample per rank"
            )
    else:
        if fetches_lists(loader):
            return loader.collate_fn(dataset[_first_keys(loader)])
        items = [dataset[index] for index in _first_keys(loader)]
    return loader.collate_fn(items) if loader.batch_size is not None or loader.batch_sampler else items[0]


def _first_keys(loader: DataLoader[Any]) -> list[Any]:
    """Return the keys of two samples: 0 and 1, or the first keys of the loader's own sampler."""
    dataset: Any = loader.dataset
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__len__"):
        return list(itertools.islice(iter(_copied(loader.sampler)), 2))
    return [0, min(1, len(dataset) - 1)]


def _copied(source: Any) -> Any:
    """Return a copy of a stream; the position of the original does not change."""
    try:
        return copy.deepcopy(source)
    except Exception as error:
        raise ValueError(
            "model parallelism runs the training step on two samples before training, and can't take these from "
            f"{type(source).__name__} without advancing it, because it can't be copied: {error}. Pass a DataLoader of "
            "a map-style data set"
        ) from error
