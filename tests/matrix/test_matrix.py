"""Every combination of strategy, feature and ranks is equal to a single process, or is refused at set-up."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from fabricx.distributed.world import World
from fabricx.trainer import process
from tests.matrix import fits
from tests.matrix.cells import MESH_WAYS, WAYS, Cell, exists, pairwise, single_features, triples
from tests.matrix.rules import KNOWN_DEFECTS, REFUSALS, known_defect, refusal
from tests.matrix.running import judge, report
from tests.matrix.table import PAGE, table
from tests.soak import SEED, SOAK, rounds, seeds, some

SHORT = 6  # cells in `make test`: the first cells of a pairwise list have most of its pairs
TRIPLES = 2

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(3600 if SOAK else 600)]


def check(cells: Sequence[Cell], folder: Path) -> None:
    """Fail with a description of each cell that is neither right nor refused."""
    wrong = {cell: lines for cell, lines in judge(cells, folder).items() if lines}
    if wrong:
        pytest.fail("\n".join(report(cell, lines) for cell, lines in wrong.items()), pytrace=False)


@functools.cache
def trained(seed: int) -> list[Cell]:
    """Return a pairwise list without refused cells."""
    return pairwise(seed, lambda cell: refusal(cell) or known_defect(cell))


def all_triples() -> Iterator[Cell]:
    """Yield cells with each triple of values, without refused cells."""
    return triples(SEED, lambda cell: refusal(cell) or known_defect(cell))


def refused() -> list[Cell]:
    """Return the simplest cell of each refusal, for each refused strategy.

    The short form has a single strategy of each class and traits, a single strategy for refusals during training,
    after which ranks must be restarted, and a single mesh, whose trial run is slow.
    """
    cells: dict[tuple[int, Any], Cell] = {}
    made = {name: make() for name, make in (WAYS | MESH_WAYS).items()}
    kinds = {name: name if SOAK else (type(strategy), strategy.traits) for name, strategy in made.items()}
    alone = single_features(2)
    others: list[dict[str, Any]] = [
        {"clip": "norm"}, {"clip": "value"}, {"accumulate": 2}, {"update": "manual"}, {"data": "few"},
        {"data": "balanced"},
        {"model": "sync-batchnorm", "data": "few"}, {"model": "sync-batchnorm", "data": "iterable"},
    ]  # fmt: skip
    pairs = [dataclasses.replace(cell, **more) for cell in alone for more in others]
    for cell in (*alone, *(pair for pair in pairs if exists(pair))):
        for number, rule in enumerate(REFUSALS):
            if rule.matches(cell):
                each_cell = SOAK or not (rule.steps or cell.way in MESH_WAYS)
                cells.setdefault((number, kinds[cell.way] if each_cell else ""), cell)
    return list(dict.fromkeys(cells.values()))  # a cell may show several refusals


@pytest.mark.soak
@pytest.mark.parametrize("seed", seeds(1, 5))
def test_pairs_of_features_train_the_weights_of_a_single_process(seed: int, tmp_path: Path) -> None:
    cells = trained(seed)
    check([*some(cells, SHORT, len(cells)), *(() if SOAK else islice(all_triples(), TRIPLES))], tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="the test of pairs has some: starting ranks costs as much as several cells")
def test_triples_of_features_train_the_weights_of_a_single_process(tmp_path: Path) -> None:
    check(list(islice(all_triples(), rounds(TRIPLES, 400))), tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(not SOAK, reason="nearly all of these cells show little: TELLING has those that do")
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_feature_alone_trains_the_weights_of_a_single_process(ranks: int, tmp_path: Path) -> None:
    cells = [cell for cell in single_features(ranks) if not known_defect(cell)]
    count = min(len(cells), rounds(0, len(cells)))
    check(random.Random(ranks + SEED - 1).sample(cells, count), tmp_path)


TELLING = (  # short cells that expose a common mistake, with optimizers whose steps are as large as their gradients
    "hsdp ranks=2 clip=norm",  # the norm of a shard
    "fsdp ranks=3 clip=norm data=uneven",
    "bounded0 ranks=2 clip=norm",  # clipped before the sum
    "ps2-server ranks=3 clip=norm accumulate=2",  # the norm of a server's part
    "ddp ranks=2 clip=value data=uneven",
    "ps0-server ranks=3 clip=value schedule=plateau",
    "ddp ranks=2 optimizer=momentum model=frozen",  # weight decay of frozen parameters
    "fsdp ranks=2 optimizer=momentum model=frozen",
    "ps2-server ranks=2 optimizer=momentum model=frozen save=to-single",
    "local_sgd ranks=3 optimizer=momentum model=frozen data=uneven",
    "fsdp ranks=3 optimizer=momentum save=from-single",  # momentum that is lost
    "fsdp-kept ranks=2 model=tied data=uneven",  # gradients that count twice
    "ps2-server ranks=2 model=tied data=uneven",
    "ps1 ranks=3 model=sparse data=uneven",  # rows that are lost
    "ddp ranks=3 model=sync-batchnorm data=uneven",  # statistics of unequal shares
    "ps2-overlap ranks=3 schedule=two callback=ema data=uneven",  # updates that are counted otherwise
    "fsdp ranks=3 optimizer=momentum callback=averaging data=uneven save=on_train_epoch_end",  # averages of shards
    "hsdp ranks=2 optimizer=momentum callback=backbone save=on_train_epoch_end",  # groups that are added to shards
    "ps2-server ranks=3 callback=scheduler data=uneven",  # a different number of batches per update
    "ddp-static ranks=2 model=complex",  # buckets of two dtypes, of which DDP numbers none as last
    "ddp-static ranks=2 model=complex data=ending loop=no-loss",  # a second broadcast of buffers
    "ddp-static ranks=2 callback=scheduler",  # refused at set-up, not at the first update of several batches
    "bounded0 ranks=2 callback=scheduler save=on_train_epoch_end",
    "ddp-bf16 ranks=2 data=uneven",  # factors that rounding could hide
    "ps1-bf16 ranks=3 data=few",
    "ddp ranks=2 data=uneven precision=bf16-mixed",
    "fsdp-blocks ranks=3 data=uneven precision=bf16-mixed",
)


def test_unsupported_combinations_are_refused_before_the_first_step(tmp_path: Path) -> None:
    check([cell for cell in refused() if not known_defect(cell)], tmp_path)


AGAIN = (  # that were wrong once
    "local_sgd ranks=2 optimizer=momentum model=scalar",
    "fsdp ranks=2 update=manual loop=evaluate",
    "ps2-tensor ranks=2 callback=ema save=on_train_epoch_end",
    "fsdp ranks=2 callback=ema save=on_train_epoch_end",
    "ps0-server ranks=2 callback=ema save=to-single",
    "ps2-server ranks=2 model=sparse",
    "bounded0 ranks=2 model=sparse",
    "async_sgd ranks=1 loop=no-loss",
    "rounds ranks=1 loop=no-loss",
    "ddp ranks=2 loop=overfit save=to-single",
    "ps2-server ranks=2 optimizer=own-step clip=norm",
    "bounded0 ranks=3 accumulate=2 loop=limit",
    "async ranks=1 callback=ema loop=max-steps",
    "rounds ranks=1 callback=ema",
    "ddp ranks=2 data=uneven loop=max-steps save=on_validation_end",
    "fsdp ranks=2 model=sync-batchnorm loop=evaluate",
    "bounded0 ranks=3 callback=ema save=on_train_epoch_end",
    "ps1-server ranks=2 model=sparse callback=ema",
    "bounded0-ps2 ranks=2 optimizer=own-step",
    "fsdp ranks=3 update=manual-two precision=bf16-mixed",
    "ddp ranks=3 model=dropout save=on_train_epoch_end",
    "ddp ranks=3 data=ending loop=lr-callback",
    "ddp ranks=3 data=few change=on_train_batch_end",
    "ddp-powersgd ranks=2 save=on_train_epoch_end",
    "fsdp ranks=2 accumulate=2 loop=skip-rest log=kinds",  # a window of which a part is discarded
    "fsdp-kept ranks=2 data=few",
    "ddp ranks=3 data=ending callback=ema",
    "fsdp ranks=3 data=ending save=on_train_batch_end",
    "fsdp ranks=2 update=manual data=ending save=on_train_batch_end",
    "async ranks=1 accumulate=2 data=weighted loop=no-loss",
    "ddp ranks=2 update=manual data=promised",
    "local_sgd-2 ranks=1 data=few change=on_validation_epoch_end",
    "ddp ranks=3 log=objects loop=one-val",
    "ddp ranks=2 update=manual data=few log=kinds",
    "ddp ranks=2 update=manual data=few log=objects",
    "fsdp ranks=2 data=ending log=objects",
    "ddp ranks=2 log=kinds loop=limit save=to-single",
    "ps0-server ranks=2 model=dtypes",
    "async_sgd ranks=1 loop=no-loss log=kinds",
    "ps0 ranks=3 data=weighted log=kinds",
    "ddp ranks=3 data=shuffled log=objects",
    "ddp-fp16 ranks=2 model=scalar",
    "reproducible ranks=2 model=complex",  # imaginary parts, which a conversion to a real dtype drops
    "bounded0-ps2 ranks=2 optimizer=subset update=several clip=value",
    "ddp ranks=3 data=few loop=no-loss log=kinds",
    "fsdp ranks=2 data=ending loop=no-loss",
    "ps2-overlap ranks=2 data=few callback=ema",
    "local_sgd ranks=2 optimizer=momentum data=ending save=on_train_batch_end",  # a rank has no sample next
    "ddp ranks=3 accumulate=2 schedule=plateau data=iterable loop=skip-rest save=on_train_epoch_end",
)


def test_earlier_defects_and_cells_that_expose_common_mistakes_are_right(tmp_path: Path) -> None:
    check([Cell.parse(text) for text in (*TELLING, *some(AGAIN, len(AGAIN) // 2, len(AGAIN)))], tmp_path)


MESHES = (
    "tensor ranks=2 clip=norm data=uneven callback=ema",
    "tensor ranks=2 optimizer=momentum callback=averaging save=on_train_epoch_end",
    "pipeline ranks=2 optimizer=momentum callback=backbone data=uneven",
    "tensor ranks=2 callback=swa",
    "tensor ranks=2 model=dropout accumulate=2 save=on_train_epoch_end",
    "tensor ranks=2 optimizer=momentum model=toggled save=to-single",
    "pipeline ranks=2 optimizer=momentum clip=norm model=buffer save=from-single",
    "pipeline ranks=2 update=several clip=value data=uneven log=objects loop=evaluate",
    "pipeline ranks=2 data=weighted",  # by samples in training only
    "tensor ranks=2 model=sparse change=on_train_batch_end",  # the norm of a gradient, and weights in a hook
    "pipeline ranks=2 change=on_train_batch_end",
    "expert ranks=3 clip=norm accumulate=2 data=uneven callback=ema log=objects save=on_train_epoch_end",
    "expert ranks=3 optimizer=momentum model=shared data=few callback=averaging save=to-single",
    "expert ranks=3 update=several model=dropout data=weighted change=on_train_epoch_end loop=evaluate",
    "expert ranks=2 optimizer=adam model=toggled data=ending loop=no-loss callback=scheduler",
    "expert ranks=2 clip=value model=frozen data=few save=from-single",
)


def test_divided_modules_train_the_weights_of_a_single_process(tmp_path: Path) -> None:
    check([Cell.parse(text) for text in MESHES], tmp_path)


def test_an_error_in_a_server_job_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(world: World, number: int, *, network: bool) -> None:
        raise ValueError(f"server {number} of job {world.job}")

    monkeypatch.setattr(process, "serve", serve)
    store = HashStore()
    store.set("matrix/serve/0", "5 2 0")
    try:
        with pytest.raises(ValueError, match="server 1 of job 5"):
            fits._serve(World(store=store), 1)
    finally:
        store.set("matrix/serve/1", "-1 0 0")  # its thread ends


def test_a_cell_is_parsed_from_its_name() -> None:
    assert all(Cell.parse(str(cell)) == cell for cell in trained(0))


def test_strategies_with_each_feature_are_in_the_list() -> None:
    cells = trained(0)
    assert {cell.way for cell in cells} == set(WAYS)
    assert all(exists(cell) for cell in cells)


def test_each_refusal_is_tested() -> None:
    cells = refused()
    assert [rule.says for rule in REFUSALS if not any(rule.matches(cell) for cell in cells)] == []


def test_known_defects_refer_to_existing_cells() -> None:
    cells = [*single_features(2), *single_features(3), *pairwise(0, lambda cell: None)]
    cells += [dataclasses.replace(cell, callback="ema") for cell in single_features(2)]  # defects of three features
    assert [rule.what for rule in KNOWN_DEFECTS if not any(rule.matches(cell) for cell in cells)] == []


def test_the_table_of_the_docs_matches_the_rules() -> None:
    assert PAGE.read_text() == table(), "write it with: python -m tests.matrix.table"
