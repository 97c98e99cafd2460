from __future__ import annotations

import pytest
import torch
from torch import nn

from fabricx.model_parallel.pipeline.chain import find_blocks, trace_chain
from fabricx.model_parallel.pipeline.checks import check_evaluation


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("offset", torch.ones(4))
        self.register_buffer("unused", torch.ones(4))

    def forward(self, ids):
        x = self.embed(ids) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def evaluate(run, trained=None):
    model, ids = Model(), torch.arange(6).view(2, 3)
    train = lambda: (trained or Model.forward)(model, ids).sum()  # noqa: E731
    chain = trace_chain(model, find_blocks(model, "auto", train, outside=True), train)
    with torch.no_grad():
        check_evaluation(model.eval(), chain, [(0, 2), (2, 4)], 2, "validation_step", lambda: run(model, ids))


@pytest.mark.parametrize(
    "run",
    [
        lambda model, ids: model(ids),
        lambda model, ids: None,  # without the model
        lambda model, ids: model(ids) + model.unused.sum() + model.offset.sum(),  # buffers that all stages have
        lambda model, ids: model(ids).argmax(-1).tolist(),
    ],
)
def test_evaluations_that_call_the_model_like_training_are_accepted(run):
    evaluate(run)


def generate(model, ids):
    for _ in range(2):
        ids = model(ids).argmax(-1)


def skip(model, ids):
    return model(ids) + model.embed(ids).sum()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (generate, "validation_step under a pipeline: the step calls blocks.0 where no further block was expected"),
        (skip, "validation_step uses embed.weight at stage 1 of the pipeline, which doesn't hold it"),
        (lambda model, ids: model.head(model.blocks[0](model.embed(ids))), "the step doesn't call blocks.1"),
        (lambda model, ids: model(ids) + model.blocks[0].weight.sum(), "uses blocks.0.weight at stage 1"),
    ],
)
def test_evaluations_that_the_last_stage_cannot_compute_are_refused(run, message):
    with pytest.raises(ValueError, match=message):
        evaluate(run)


def test_a_tensor_that_bypasses_the_cut_is_refused():
    def run(model, ids):
        first = model.blocks[0](model.embed(ids))
        x = first
        for block in list(model.blocks)[1:]:
            x = block(x)
        return model.head(x + first)

    with pytest.raises(ValueError, match=r"can.t be divided before blocks.2: a tensor computed in blocks.0"):
        evaluate(run)


def test_the_code_after_a_block_may_use_the_arguments_of_the_block_if_it_does_so_in_training():
    def residual(model, ids):
        x = model.embed(ids)
        for block in model.blocks:
            x = block(x) + x
        return model.head(x)

    evaluate(residual, trained=residual)
    with pytest.raises(ValueError, match=r"can.t be divided before blocks.2: a tensor computed in blocks.1 is used"):
        evaluate(residual)


class Dropped(nn.Module):
    """As in nanoGPT: a sum of embeddings, and dropout before the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.drop, self.out = (
            nn.Embedding(7, 4), nn.Embedding(7, 4), nn.Dropout(0.2), nn.Linear(4, 7)
        )  # fmt: skip

    def forward(self, ids):
        return self.out(self.drop(self.word(ids) + self.place(ids)))


def test_a_stage_may_begin_with_dropout_which_returns_its_argument_in_an_evaluation():
    model, ids = Dropped(), torch.arange(6).view(2, 3)
    train = lambda: model(ids).sum()  # noqa: E731
    chain = trace_chain(model, find_blocks(model, ["word", "place", "drop", "out"], train), train)
    assert list(chain.joined) == [1]
    with torch.no_grad():
        check_evaluation(model.eval(), chain, [(0, 2), (2, 4)], 2, "validation_step", lambda: model(ids))
