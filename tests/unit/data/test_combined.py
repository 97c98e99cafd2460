"""A combination of several loaders."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fabricx as fx
from fabricx.data import CombinedLoader
from fabricx.data.combined import MODES
from fabricx.data.iterable import ListFeed
from fabricx.data.joined_loaders import joined
from fabricx.distributed.world import World
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.unit.data.number_loaders import Stream, loader, plain
from tests.unit.data.positioned import Positioned, Sized


def test_modes_and_loaders_that_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Unsupported mode 'maxsize', please select one of: \['min_size', .*'max_size'"
    ):
        CombinedLoader([tiny_loader()], "maxsize")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Unsupported mode None"):
        CombinedLoader([tiny_loader()], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass its loaders in the dict or list"):
        CombinedLoader([CombinedLoader([tiny_loader()])])
    with pytest.raises(ValueError, match="yields no batch when it begins again"):
        list(CombinedLoader([range(2), iter([3])], "max_size_cycle"))
    with pytest.raises(TypeError, match="'NoneType' object is not iterable"):
        iter(CombinedLoader([None, range(2)]))


def test_an_empty_list_is_a_loader_without_batches() -> None:
    def items(mode: Any, loaders: Any) -> list[Any]:
        return list(CombinedLoader(loaders, mode))

    assert [items(mode, []) for mode in MODES] == [[]] * 4
    assert items("min_size", [[], range(2)]) == []
    assert items("max_size", {"a": [], "b": range(1)}) == [({"a": None, "b": 0}, 0, 0)]
    assert items("sequential", [[], range(2)]) == [(0, 0, 1), (1, 1, 1)]  # the index of the second loader is 1


def test_loaders_are_replaced_separately_or_together() -> None:
    loader = CombinedLoader({"a": range(2), "b": [range(3)]})
    loader.flattened[0] = "xyz"
    assert [batch for batch, _, _ in loader] == [{"a": "x", "b": [0]}, {"a": "y", "b": [1]}, {"a": "z", "b": [2]}]
    loader.flattened = (loaders := [[range(1)], [range(2)]])
    assert loader.flattened is loaders
    assert list(loader) == [({"a": range(1), "b": [range(2)]}, 0, 0)]
    with pytest.raises(AttributeError):
        loader.iterables = [range(2)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mode", "limits", "expected"),
    [
        ("min_size", 1, [([0, 0], 0, 0)]), ("min_size", [9, 2], [([0, 0], 0, 0), ([1, 1], 1, 0)]),
        ("max_size", [9, 1], [([0, 0], 0, 0), ([1, 1], 1, 0)]), ("max_size", 0, []),
        ("max_size_cycle", 3, [([0, 0], 0, 0), ([1, 1], 1, 0), ([0, 2], 2, 0)]),
        ("sequential", [1, 2], [(0, 0, 0), (0, 0, 1), (1, 1, 1)]), ("sequential", [0, 1], [(0, 0, 1)]),
        ("sequential", [2, float("inf")], [(0, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1)]),
    ],
)  # fmt: skip
def test_limits_end_an_iteration_and_are_counted(mode: Any, limits: Any, expected: list[Any]) -> None:
    loader = CombinedLoader([range(2), range(4)], mode)
    loader.limits = limits
    assert list(loader) == expected
    assert len(loader) == len(expected)
    loader.limits = None
    assert len(loader) == len(list(loader)) == {"min_size": 2, "sequential": 6}.get(mode, 4)


def test_limits_bound_streams_and_have_a_value_for_each_loader() -> None:
    loader = CombinedLoader([Stream(), Stream()], "max_size")
    loader.limits = 2
    assert loader.limits == [2, 2]
    assert len(loader) == len(list(loader)) == 2
    with pytest.raises(ValueError, match=r"Mismatch in number of limits \(1\) and number of iterables \(2\)"):
        loader.limits = [1]


def test_a_reset_ends_the_processes_of_loaders() -> None:
    part = loader(0, 4, num_workers=1, persistent_workers=True)
    both, others = CombinedLoader([part, range(2)]), set(multiprocessing.active_children())
    assert [plain(batch) for batch, _, _ in both] == [[[0, 1], 0], [[2, 3], 1]]
    children = set(multiprocessing.active_children()) - others
    assert children
    both.reset()
    for child in children:
        child.join(120)  # torch waits 5 s before it terminates the process
    assert not any(child.is_alive() for child in children)


def test_a_list_of_numbers_is_one_loader_and_its_items_the_batches() -> None:
    loader = CombinedLoader([[1, 2], {"a": [[3.0], ["b"]]}], "max_size_cycle")
    assert loader.flattened == [[1, 2], [3.0], ["b"]]
    assert [batch for batch, _, _ in loader] == [[1, {"a": [3.0, "b"]}], [2, {"a": [3.0, "b"]}]]
    loader.flattened = [[3], [2], [1]]
    assert loader.iterables == [[3], {"a": [[2], [1]]}]
    with pytest.raises(ValueError, match=r"Mismatch in flattened length \(1\) and existing length \(3\)"):
        loader.flattened = [[3]]
    trained = fx.Trainer(max_epochs=1, **QUIET)
    module = OnNumbers()
    trained.fit(module, CombinedLoader({"a": [1, 2], "b": [3]}, "max_size_cycle"))
    assert module.seen == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]


class OnNumbers(TinyModule):
    """Trains on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return self.layer.weight.sum() * batch["a"]


def test_it_is_an_iterator_that_starts_parallel_loaders_at_once() -> None:
    begun: list[str] = []

    class Begins:
        def __init__(self, name: str) -> None:
            self.name = name

        def __iter__(self) -> Any:
            begun.append(self.name)
            return iter([self.name])

    for mode, expected in (("min_size", ["a", "b"]), ("sequential", ["a"])):
        begun.clear()
        loader = CombinedLoader([Begins("a"), Begins("b")], mode)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="call iter"):
            next(loader)
        assert iter(loader) is loader
        assert begun == expected
        assert next(loader) == (("a", 0, 0) if mode == "sequential" else (["a", "b"], 0, 0))
        assert next(loader.read()) == (("a", 0, 0) if mode == "sequential" else (["a", "b"], 0, 0))
        loader.reset()
        with pytest.raises(TypeError, match="call iter"):
            next(loader)


def test_samplers_have_the_nesting_of_loaders_and_a_stream_has_no_length() -> None:
    first = tiny_loader()
    loader = CombinedLoader({"a": first, "b": [Stream()]}, "min_size")
    assert loader.sampler == {"a": first.sampler, "b": [None]}
    assert loader.batch_sampler == {"a": first.batch_sampler, "b": [None]}
    assert len(loader) == len(first)
    with pytest.raises(TypeError, match="has no length, because 'Stream' has none"):
        len(CombinedLoader([first, Stream()], "max_size"))
    iter(loader)
    copy = pickle.loads(pickle.dumps(CombinedLoader([[1], [2]])))
    assert next(iter(copy)) == ([1, 2], 0, 0)
    loader.limits = None
    assert loader.limits is None


class TwoLoaders(TinyModule):
    """Trains on two loaders, and records their batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(sorted((name, tuple(part[1].flatten().tolist())) for name, part in batch.items()))
        return sum(super(TwoLoaders, self).training_step(part, batch_idx) for part in batch.values())  # type: ignore[return-value]

    def train_dataloader(self) -> Any:
        return {"a": tiny_loader(12, 2, shuffle=True), "b": tiny_loader(6, 2, shuffle=True)}


def test_a_run_resumes_at_its_next_combined_batch(tmp_path: Path) -> None:
    def run(ckpt: Path | None = None, **options: Any) -> tuple[TwoLoaders, fx.Trainer]:
        torch.manual_seed(0)
        module, trainer = TwoLoaders(), fx.Trainer(**QUIET | {"default_root_dir": tmp_path} | options)
        trainer.fit(module, ckpt_path=ckpt)
        return module, trainer

    whole, _ = run(max_epochs=2)
    first, trainer = run(max_steps=4)
    rest, _ = run(trainer.save_checkpoint(tmp_path / "middle.ckpt"), max_epochs=2)
    assert first.seen + rest.seen == whole.seen
    assert len(whole.seen) == 12
    assert torch.equal(rest.layer.weight, whole.layer.weight)


def test_evaluations_read_loaders_sequentially_or_in_parallel(quiet: dict[str, Any]) -> None:
    class Counts(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.calls.append((type(batch).__name__, batch_idx, dataloader_idx))

    module, trainer = Counts(), fx.Trainer(**quiet)
    trainer.validate(module, CombinedLoader([tiny_loader(4, 2), tiny_loader(2, 2)], "sequential"), verbose=False)
    trainer.validate(module, CombinedLoader({"a": tiny_loader(4, 2), "b": tiny_loader(2, 2)}), verbose=False)
    assert module.calls == [("list", 0, 0), ("list", 1, 0), ("list", 0, 1), ("dict", 0, 0)]


@pytest.mark.parametrize(("kind", "limit"), [(Positioned, float("inf")), (Sized, float("inf")), (Sized, 2)])
@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_loaders_with_a_state_continue_at_their_positions(mode: Any, restarts: bool, kind: Any, limit: float) -> None:
    def made() -> ListFeed:
        loaders = {"a": kind(0, 2, restarts=restarts), "b": kind(10, 5, restarts=restarts)}
        return ListFeed(joined(CombinedLoader(loaders, mode), ranks=1), World(), limit)

    def read(feed: ListFeed, epoch: int, first: int = 0) -> Iterator[Any]:
        return (micro.data for micro in feed.epoch(epoch, first=first))

    for position in range(8):
        feed = made()
        batches = read(feed, 0)
        begun = list(itertools.islice(batches, position))
        state = pickle.loads(pickle.dumps(feed.state_dict()))
        rest = list(batches)
        ended = pickle.loads(pickle.dumps(feed.state_dict()))
        following = list(read(feed, 1)) + list(read(feed, 2))
        resumed = made()
        resumed.load_state_dict(state)
        assert [*read(resumed, 0, len(begun)), *read(resumed, 1), *read(resumed, 2)] == rest + following
        resumed = made()
        resumed.load_state_dict(ended)
        assert [*read(resumed, 1), *read(resumed, 2)] == following
        if not rest:
            break
    assert not rest
    for position in (1, 2) if restarts else ():  # of the second epoch, before which loaders have older states
        feed, resumed = made(), made()
        batches = itertools.chain(read(feed, 0), read(feed, 1))
        begun = len(list(read(made(), 0))) + position
        consumed = list(itertools.islice(batches, begun))
        resumed.load_state_dict(pickle.loads(pickle.dumps(feed.state_dict())))
        assert len(consumed) == begun
        assert list(read(resumed, 1, position)) == list(batches)
