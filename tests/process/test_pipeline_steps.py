"""Single steps of a pipeline: random numbers, batches without a loss, evaluations, errors, and waits."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from fabricx.distributed import world as worlds
from fabricx.distributed.activity import collective_trace, heartbeat
from fabricx.distributed.point_to_point import Transfers
from fabricx.distributed.world import World
from fabricx.errors import PeerLost
from fabricx.model_parallel.microbatches import split
from fabricx.model_parallel.pipeline.seeds import seeded
from fabricx.strategies import Mesh
from fabricx.testing import run_ranks
from tests.process import meshes
from tests.process.stages import LENGTH, WIDTH, WORDS, Language, batches, compute, divided, make, staged, whole

pytestmark = pytest.mark.usefixtures("warm_ranks")

ROWS = 8
UNEVEN = (8, 7, 5, 7, 8, 2, 1, 8)  # rows of batches, whose microbatches have known and new shapes


def world() -> World:
    current = worlds.current()
    assert current is not None
    torch.set_num_threads(1)
    return current


def gradients(module: Any, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of one batch, of all stages."""
    pipeline = divided(module, batches(ROWS)[0], **options)
    compute(pipeline, batches(ROWS)[1], 1)
    pipeline.reduce_shared()
    of_stage = {n: p.grad for n, p in module.named_parameters() if n in pipeline.own_names}
    return {name: value for part in pipeline.world.gather_objects(of_stage) for name, value in part.items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- random numbers ---------------------------------------------------------------------------------------------------


class WithDropout(Language):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        x = F.dropout(x, 0.1, self.training)
        for block in self.blocks:
            run = lambda *args, block=block: F.dropout(block(*args), 0.2, self.training)  # noqa: E731
            x = checkpoint(run, x, mask, use_reentrant=False) if self.checkpointed else run(x, mask)
        return x


class Masking(Language):
    """Masks random words before the blocks: all stages must draw the same mask."""

    def training_step(self, batch: Tensor, index: int) -> Any:
        return super().training_step(torch.where(torch.rand(batch.shape) < 0.3, 0, batch), index)


class NoiseBetweenBlocks(Language):
    """Draws noise on the first stage, between two blocks, and also uses it in the loss."""

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, mask)
            if number == 0:
                self.noise = torch.randn(x.shape, dtype=torch.float64)
                x = x + self.noise
        return x

    def training_step(self, batch: Tensor, index: int) -> Any:
        outputs = super().training_step(batch, index)
        return {"loss": outputs["loss"] + F.mse_loss(outputs["logits"][..., :WIDTH], self.noise)}


def draw() -> dict[str, Any]:
    world()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = gradients(make(WithDropout))
    # (model creation seeds the generator) the batch doesn't change the generator
    after = torch.rand(1)
    again = gradients(make(WithDropout))
    return {
        "again": equal(first, again),
        "checkpointed": equal(first, gradients(make(WithDropout, checkpointed=True))),
        "gpipe": equal(first, gradients(make(WithDropout), schedule="gpipe")),
        "after": after, "expected": expected, "masking": gradients(make(Masking)),
        "between": gradients(make(NoiseBetweenBlocks)),
    }  # fmt: skip


def test_random_numbers_are_reproducible_and_equal_on_all_stages_before_the_blocks() -> None:
    first, second = run_ranks(draw, 2)
    assert first["again"]
    assert first["checkpointed"], "checkpointed blocks draw the same masks again"
    assert first["gpipe"], "whatever the order of the microbatches"
    assert torch.equal(first["after"], second["after"]), "the stages have the same generator after a batch"
    module = make(Masking)
    for number, part in enumerate(split(batches(ROWS)[1], 4)):
        torch.manual_seed(1000 + number)
        (module.training_step(part, 1)["loss"] / 4).backward()
    for name, parameter in module.named_parameters():
        assert torch.allclose(first["masking"][name], parameter.grad, rtol=0, atol=1e-12), name
    module = make(NoiseBetweenBlocks)
    for number, part in enumerate(split(batches(ROWS)[1], 4)):
        seed = lambda block, number=number: torch.manual_seed(1000 + 4 * block + number)  # noqa: E731
        with seeded(module, [f"blocks.{block}" for block in range(4)], seed):
            (module.training_step(part, 1)["loss"] / 4).backward()
    for name, parameter in module.named_parameters():
        assert torch.allclose(first["between"][name], parameter.grad, rtol=0, atol=1e-12), name


# -- steps ------------------------------------------------------------------------------------------------------------


class SkipsSomeBatches(Language):
    """Returns no loss for batches that begin with an even word; returns a tensor; calls are counted."""

    def training_step(self, batch: Tensor, index: int) -> Any:
        if batch[0, 0] % 2 == 0:
            return None
        return super().training_step(batch, index)["loss"]


def skip_batches() -> Any:
    world()
    data, calls, results = batches(ROWS), [], []
    pipeline = divided(make(SkipsSomeBatches), torch.ones_like(data[0]), microbatches=2)
    for batch in (data[0].clone(), data[1].clone(), data[2].clone()):
        batch[0, 0], batch[4, 0] = {0: (1, 1), 1: (2, 1), 2: (2, 2)}[len(results)]
        calls.clear()

        def backward(output: Any) -> None:
            calls.append(output is None)
            if output is not None:
                pipeline.backward(output)

        for parameter in pipeline.module.parameters():
            parameter.grad = None
        arguments = (pipeline.module.training_step, backward, batch, 0)
        if len(results) == 1:
            refused = message(pipeline.forward_backward, *arguments, seed=torch.manual_seed)
            results.append((list(calls), refused))
            continue
        result = pipeline.forward_backward(*arguments, seed=torch.manual_seed)
        results.append((list(calls), None if result is None else result.item()))
    return results, [p.grad is None for n, p in pipeline.module.named_parameters() if n in pipeline.own_names]


def test_batches_without_a_loss_are_skipped_and_parts_without_a_loss_refused_on_all_stages() -> None:
    for results, without in run_ranks(skip_batches, 2):
        assert [calls for calls, _ in results] == [[False, False], [False], [True]]
        assert all(without)
        assert "training_step returned None for microbatch 1 of 2" in results[1][1]
    losses = [loss for _, loss in results]
    assert losses[0] is not None
    assert losses[2] is None


class Frozen(Language):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)
        self.positions.requires_grad_(False)


class ExcludesPadding(Language):
    """Excludes rows with padding only, so that shapes depend on values."""

    reduction = "sum"

    def training_step(self, batch: Tensor, index: int) -> Any:
        kept = batch[:, 0] % 3 > 0
        kept[0] = True
        return super().training_step(batch[kept], index)


class ChangesBuffers(Language):
    """Normalises before the blocks and between two of them, and changes its batch in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)])

    def body(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norms[0](x.flatten(0, 1)).view_as(x)
        for number, block in enumerate(self.blocks):
            x = block(x, mask)
            if number == 0:
                x = self.norms[1](x.flatten(0, 1)).view_as(x)
        return x

    def training_step(self, batch: Tensor, index: int) -> Any:
        return super().training_step(batch.add_(1).remainder_(WORDS), index)


def traffic() -> dict[str, Any]:
    world()
    frozen = staged(make(Frozen), batches(ROWS)[:3])
    pipeline = divided(make(Language), batches(ROWS)[0])
    sizes = []
    for length in (8, 6, 8, 6):
        before = pipeline.transfers.sent_bytes
        compute(pipeline, batches(ROWS)[0][:, : length + 1], 0)
        sizes.append(pipeline.transfers.sent_bytes - before)
    pipeline.module.head.requires_grad_(False)
    compute(pipeline, batches(ROWS)[0], 0)
    uneven = divided(make(Language), batches(ROWS)[0], microbatches=3)
    rows = [compute(uneven, batches(ROWS)[0][:count], 0) for count in UNEVEN]
    ragged = divided(make(ExcludesPadding), batches(ROWS)[0])
    changed = [compute(ragged, batch, 0) for batch in batches(ROWS)[:4]]
    ragged.module.reduction = "mean"
    refused = ""
    batch = torch.ones_like(batches(ROWS)[0])
    batch[1, 0] = 0  # excluded
    try:  # only the last stage computes a loss
        compute(ragged, batch, 0)
    except ValueError as error:
        refused = str(error)
    interleaved = divided(make(ChangesBuffers), batches(ROWS)[0], virtual=2)
    compute(interleaved, batches(ROWS)[0], 0)
    buffers = {name: value for name, value in whole(interleaved).items() if name in interleaved.chain.buffers}
    losses = [output and output["loss"].item() for output in changed]
    uneven_losses = [output and output["loss"].item() for output in rows]
    return {
        "uneven": uneven_losses,
        "frozen": frozen["sent"],
        "sizes": sizes,
        "ragged": losses,
        "changing": ragged.chain.changing,
        "refused": refused,
        "buffers": buffers,
    }


def test_gradients_of_frozen_stages_are_not_sent_shapes_are_announced_once_and_buffers_change_once() -> None:
    first, last = run_ranks(traffic, 2)
    elements = ROWS * LENGTH * WIDTH * 8
    assert first["frozen"] < 3 * elements + 1500, "activations only"
    [whole_header, short_header, whole_batch, short_batch] = first["sizes"]
    assert whole_batch == elements
    assert short_batch == elements * 6 // 8
    assert whole_header > whole_batch
    assert short_header > short_batch
    expected = [make(Language).training_step(batches(ROWS)[0][:count], 0)["loss"].item() for count in UNEVEN]
    assert last["uneven"] == pytest.approx(expected, abs=1e-12)
    module = make(ChangesBuffers)
    for part in split(batches(ROWS)[0], 4):
        module.training_step(part, 0)
    for name, value in module.named_buffers():
        assert torch.allclose(first["buffers"][name], value, rtol=0, atol=1e-12), name
    module = make(ExcludesPadding)
    expected = []
    for batch in batches(ROWS)[:4]:
        expected.append(sum(module.training_step(part, 0)["loss"].item() for part in split(batch, 4)) / 4)
    assert first["changing"]
    assert last["ragged"] == pytest.approx(expected, abs=1e-12)
    assert not first["refused"]
    assert "cross_entropy is a mean over 8, 16, 16, 16 in the microbatches" in last["refused"]


def evaluate() -> Any:
    this_world = world()
    data = batches(ROWS)
    module = make(Language)
    pipeline = divided(module, data[0], virtual=2)
    with torch.inference_mode():
        outputs = [pipeline.evaluate(pipeline.module.training_step, batch, 0, seed=torch.manual_seed) for batch in data]
    under_way = pipeline.transfers.under_way
    pipeline.transfers.finish()
    placeholders = sum(p.isnan().all().item() for p in pipeline.module.parameters())
    values = whole(pipeline)
    pipeline.undo(values)
    classes = [type(block).__name__ for block in module.blocks]
    expected = [pipeline.module.training_step(batch, 0)["loss"].item() for batch in data]
    this_world.barrier()
    return [output and output["loss"].item() for output in outputs], expected, under_way, placeholders, classes


def test_evaluations_equal_those_of_a_single_process_and_restore_the_whole_module() -> None:
    for rank, (losses, expected, under_way, placeholders, classes) in enumerate(run_ranks(evaluate, 2)):
        assert losses == (pytest.approx(expected, abs=1e-12) if rank else [None] * len(expected))
        assert under_way < 10, "sends of earlier batches have ended"
        assert placeholders > 20
        assert classes == ["Block"] * 4


# -- errors -----------------------------------------------------------------------------------------------------------


class CatchesBaseException(Language):
    def training_step(self, batch: Tensor, index: int) -> Any:
        try:
            return super().training_step(batch, index)
        except BaseException:
            return None


class CatchesException(Language):
    """Catches exceptions, as users do."""

    def training_step(self, batch: Tensor, index: int) -> Any:
        try:
            return super().training_step(batch, index)
        except Exception:
            return None


def message(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        function(*args, **options)
    return str(error.value)


def fail() -> dict[str, str]:
    """Return errors of the first stage, which doesn't wait for the other stage; the other receives transfers."""
    this_world, data = world(), batches(ROWS)
    errors = {}
    for name, cls in (("swallows", CatchesBaseException), ("catches", CatchesException)):
        pipeline = divided(make(cls), data[0])
        step = pipeline.module.training_step
        if name == "swallows" and this_world.rank == 0:
            errors[name] = message(pipeline.evaluate, step, data[0], 0, seed=torch.manual_seed)
        else:
            with torch.no_grad():
                pipeline.evaluate(step, data[0], 0, seed=torch.manual_seed)
        pipeline.transfers.finish()
    if this_world.rank == 0:
        errors["outside"] = message(pipeline.module.blocks[0], torch.ones(1, 2, WIDTH), None)
        errors["early"] = message(
            pipeline.evaluate, lambda batch: pipeline.module.blocks[0](torch.ones(1, 2, WIDTH).double(), None), data[0],
            seed=torch.manual_seed,
        )  # fmt: skip
        errors["loss"] = message(
            pipeline.forward_backward, lambda *_: torch.ones(1), print, data[0], 0, seed=torch.manual_seed
        )  # fmt: skip
    this_world.barrier()
    return errors


def test_errors_name_the_remedy() -> None:
    errors, _ = run_ranks(fail, 2)
    assert "use `except Exception` in place of `except:`" in errors["swallows"]
    assert "blocks.0 was called outside of a step" in errors["outside"]
    assert "call the model in training_step, validation_step" in errors["outside"]
    assert "in a pipeline a step has to call all blocks, or none" in errors["early"]
    assert "Return None to skip a batch" in errors["loss"]


# -- waits ------------------------------------------------------------------------------------------------------------


def wait() -> Any:
    """Rank 1 sends nothing; rank 0 reports its pending transfer, fails at the time limit, and disconnects."""
    this_world = world()
    if this_world.rank:
        transfers = Transfers(this_world)
        with pytest.raises(PeerLost, match="rank 1 of 2, receive of microbatch 4: the connection"):
            transfers.complete(transfers.expect(torch.zeros(2), 0, "forward", 1, "receive of microbatch 4"))
        return None
    transfers, reports = Transfers(this_world, timeout=timedelta(seconds=3)), []

    def report() -> None:
        deadline = time.monotonic() + 60
        while not reports and time.monotonic() < deadline:
            pending = heartbeat.diagnosis().pending
            reports.extend([pending] if "microbatch" in pending else [])

    thread = threading.Thread(target=report)
    thread.start()
    expected = transfers.expect(torch.zeros(2), 1, "forward", 1, "receive of microbatch 3")
    with pytest.raises(RuntimeError) as error:
        transfers.complete(expected)
    thread.join()
    return reports, error.value.__notes__, heartbeat.diagnosis().pending


def test_a_wait_has_a_limit_and_a_hang_report_names_the_microbatch() -> None:
    reports, notes, after = run_ranks(wait, 2)[0]
    assert reports == ["receive of microbatch 3"]
    assert notes == ["rank 0 of 2, receive of microbatch 3"]
    assert "microbatch" not in after


class Deep(meshes.GPT):
    """A model that two ranks divide into four chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(meshes.Block(0.0))


def routes(virtual: int) -> Any:
    """Train on a pipeline; return the transfers of each rank as counted for reports of a hang."""
    collective_trace.forget_transfers()
    meshes.train(Mesh(pipeline=2, virtual=virtual, microbatches=2), 4, {"max_epochs": 1}, {}, kind=Deep)
    return world().gather_objects(collective_trace.transfers())


@pytest.mark.parametrize("virtual", [1, 2])
def test_both_ranks_of_a_transfer_count_it_by_the_same_route(virtual: int) -> None:
    first, second = run_ranks(routes, 2, virtual)[0]
    assert (first.awaited, second.awaited) == (None, None)
    opposite = {"send": "receive", "receive": "send"}
    assert first.begun == {(opposite[kind], route): number for (kind, route), number in second.begun.items()}
    assert sum(first.begun.values()) > 20
