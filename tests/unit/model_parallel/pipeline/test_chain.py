from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fabricx.model_parallel.context.context_parallel import context_blocks
from fabricx.model_parallel.pipeline.chain import Slot, find_blocks, trace_chain
from fabricx.model_parallel.pipeline.trace import tracing
from fabricx.testing import LayeredModule

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
        )

    def forward(self, x, mask=None):
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    """Variants override `body` and `step`."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 11)
        self.logged: list[str] = []
        self.register_buffer("offset", torch.ones(WIDTH))
        self.register_buffer("unused", torch.ones(1))

    def log(self, name, value):
        self.logged.append(name)

    def body(self, x):
        for block in self.blocks:
            x = block(x, mask=torch.ones(1))
        return x

    def training_step(self, ids):
        x = self.body(self.embed(ids) + self.offset)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        self.log("loss", loss)
        return loss


def observe(model, blocks="auto", *, carries=False):
    ids = torch.arange(10).view(2, 5)
    run = lambda: model.training_step(ids)  # noqa: E731
    return trace_chain(model, find_blocks(model, blocks, run, outside=True, carries=carries), run, carries=carries)


def test_a_chain_records_where_each_parameter_and_buffer_is_used():
    model = Model()
    chain = observe(model)
    assert chain.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert chain.uses["embed.weight"] == chain.uses["offset"] == {-1}
    assert chain.uses["blocks.1.inner.2.weight"] == {1}
    assert chain.uses["head.bias"] == {3}
    assert chain.uses["unused"] == frozenset()
    assert chain.buffers == {"offset", "unused"}
    assert chain.entries == ((((0, 0)),), ((0, 0),), ((0, 0),)), "the mask is no derived argument"
    assert [type(output) for output in chain.outputs] == [Slot] * 3
    assert not chain.joined
    assert not chain.changing
    assert not chain.notes
    assert chain.sizes[0] == 11 * WIDTH * 4
    assert len(chain.costs) == len(chain.sizes) == len(chain.saved) == 5
    assert all(cost > 0 for cost in chain.costs)
    assert chain.saved[1] == chain.saved[2] > 0


def test_a_trace_restores_random_numbers_gradients_and_buffers():
    class Drawing(Model):
        def training_step(self, ids):
            self.offset += 1
            return super().training_step(ids) + F.dropout(torch.ones(3)).sum()

    model = Drawing()
    model.head.bias.grad = torch.ones(11)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    observe(model)
    assert torch.equal(torch.rand(3), expected)
    assert model.offset.tolist() == [1.0] * WIDTH
    assert model.head.bias.grad.tolist() == [1.0] * 11
    assert model.embed.weight.grad is None
    assert "log" not in vars(model)
    assert type(model.blocks[0]) is Block


def test_tied_parameters_are_used_at_several_positions():
    model = Model()
    model.head.weight = model.embed.weight
    chain = observe(model)
    assert chain.uses["embed.weight"] == {-1, 3}
    model.blocks[2].inner[0].weight = model.blocks[0].inner[0].weight
    assert observe(model).uses["blocks.0.inner.0.weight"] == {0, 2}


# -- selection of blocks ----------------------------------------------------------------------------------------------


def test_blocks_that_are_called_several_times_are_an_error_with_the_remedy():
    class Twice(Model):
        def body(self, x):
            return super().body(super().body(x))

    with pytest.raises(ValueError, match=r"blocks\.0 is called 2 times in a step: call the model once"):
        observe(Twice())


def test_auto_selects_the_longest_sequence_of_consecutive_modules():
    module = LayeredModule()
    module.log = lambda *args, **options: None
    run = lambda: module.training_step([torch.ones(2, 6), torch.ones(2, 1)], 0)  # noqa: E731
    assert [name for name, _ in find_blocks(module, "auto", run)] == ["body.0", "body.1", "body.2"]
    # A list inside of each block is not longer than the list of blocks.
    assert observe(Model(2)).blocks == ("blocks.0", "blocks.1")


def test_embeddings_in_the_container_of_the_blocks_are_no_blocks_that_divide_a_sequence():
    class Nano(Model):
        """A container as in nanoGPT."""

        def __init__(self) -> None:
            super().__init__()
            inner = {
                "words": self.embed,
                "places": nn.Embedding(11, WIDTH),
                "h": self.blocks,
                "norm": nn.LayerNorm(WIDTH),
            }
            self.net = nn.ModuleDict(inner)
            del self.embed, self.blocks

        def forward(self, ids):
            x = self.net.words(ids) + self.net.places(input=torch.arange(ids.shape[1]))
            for block in self.net.h.children():
                x = block(x)
            return self.head(self.net.norm(x))

    model = Nano()
    run = lambda: model(torch.arange(6).view(2, 3)).sum()  # noqa: E731
    for streams, skipped in ((False, ["net.words", "net.places"]), (True, [])):
        blocks = find_blocks(model, "auto", run, outside=True, streams=streams)
        assert [name for name, _ in blocks] == [*skipped, *(f"net.h.{n}" for n in range(len(model.net.h))), "net.norm"]
    assert [name for name, _ in context_blocks(model, "auto", run)] == [name for name, _ in blocks]


def test_a_layer_that_shares_its_weights_divides_a_sequence_in_the_module_that_calls_it():
    class Encoder(nn.Module):
        """As in ALBERT."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = Block()

        def forward(self, x):
            for _ in range(3):
                x = self.layer(x, None)
            return x

    class Shared(Model):
        def __init__(self, *, encoder: bool) -> None:
            super().__init__()
            del self.blocks
            self.net = Encoder() if encoder else Block()
            self.encoder = encoder

        def body(self, x):
            return self.net(x) if self.encoder else self.net(self.net(x, None), None)

    model = Shared(encoder=True)
    run = lambda: model.training_step(torch.arange(10).view(2, 5))  # noqa: E731
    assert [name for name, _ in context_blocks(model, "auto", run)] == ["net"]
    assert [name for name, _ in context_blocks(model, ["net"], run)] == ["net"]
    model = Shared(encoder=False)
    with pytest.raises(ValueError, match=r"net has most of the weights.*call it in a submodule, and set blocks="):
        context_blocks(model, "auto", run)


def test_auto_selects_attributes_of_the_same_class():
    class Stages(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.layer2, self.layer3, self.layer4 = Block(), Block(), Block(), Block()
            del self.blocks

        def body(self, x):
            return self.layer4(self.layer3(self.layer2(self.layer1(x))))

    assert observe(Stages()).blocks == ("layer1", "layer2", "layer3", "layer4")


def test_auto_skips_branches_that_all_take_the_same_input():
    class Branches(Model):
        def __init__(self) -> None:
            super().__init__(2)
            self.branches = nn.ModuleList(Block() for _ in range(4))

        def body(self, x):
            return super().body(sum(branch(x) for branch in self.branches))

    assert observe(Branches()).blocks == ("blocks.0", "blocks.1")


def test_blocks_are_selected_by_class_or_names():
    model = Model()
    assert observe(model, "Block").blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert observe(model, ["blocks.0", "blocks.1"]).blocks == ("blocks.0", "blocks.1")
    assert observe(model, ["blocks.0", "blocks.1"]).uses["blocks.2.norm.bias"] == {2}, "after the blocks"


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("Blok", "no such class. Did you mean 'Block'"),
        (["blocks.0", "block.1"], "no part 'block.1'. Did you mean 'blocks.1'"),
        (["blocks.0"], "needs two or more different blocks"),
        (["blocks.0", "blocks.0"], "needs two or more different blocks"),
        (["blocks.1", "blocks.0"], "calls blocks.0 where blocks.1 was expected"),
        (["blocks.0", "blocks.0.inner"], "blocks.0 calls blocks.0.inner: blocks can't be nested"),
    ],
)
def test_blocks_that_form_no_chain_are_refused(blocks, message):
    with pytest.raises((ValueError, LookupError), match=message):
        observe(Model(), blocks)


def test_auto_names_the_obstacle_if_there_is_no_chain():
    class Skips(Model):
        def body(self, x):
            return super().body(x) + x

    with pytest.raises(ValueError, match=r"finds no chain.*before the blocks is used after the blocks \(add\)"):
        observe(Skips())


class Checkpointed(Model):
    def body(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def test_blocks_that_compute_again_in_the_backward_have_times():
    assert all(cost > 0 for cost in observe(Checkpointed()).costs)


# -- modules that cannot be cut ---------------------------------------------------------------------------------------


class Twice(Model):
    def body(self, x):
        return super().body(super().body(x))


class Omits(Model):
    def body(self, x):
        return self.blocks[0](x) + sum(parameter.sum() for parameter in self.blocks[1].parameters())


class Reentrant(Model):
    def body(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return x


def sync_batch_norm():
    model = Model()
    model.blocks[0].norm = nn.SyncBatchNorm(WIDTH)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Twice, "calls blocks.0 where no further block was expected"),
        (Omits, r"doesn't call blocks.1: .*by block\(...\), not by block.forward"),
        (Reentrant, "pass use_reentrant=False"),
        (sync_batch_norm, "use GroupNorm or LayerNorm"),
    ],
    ids=["twice", "omits", "reentrant", "sync batch norm"],
)
def test_modules_that_cannot_be_trained_in_a_pipeline_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        observe(make(), ["blocks.0", "blocks.1", "blocks.2"])


def joined(model) -> dict[int, str]:
    return dict(observe(model, ["blocks.0", "blocks.1", "blocks.2"]).joined)


def test_no_cut_is_made_where_a_tensor_skips_the_blocks():
    class Skips(Model):
        def body(self, x):
            first = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](first)) + first

    assert list(joined(Skips())) == [2], "blocks.1 takes it, blocks.2 does not"
    assert "computed in blocks.0 is used after the blocks (add)" in joined(Skips())[2]

    class Auxiliary(Model):
        def body(self, x):
            x = super().body(x)
            return x + self.blocks[1].auxiliary

    class Router(Block):
        def forward(self, x, mask=None):
            self.auxiliary = self.norm.weight.sum()
            return super().forward(x)

    model = Auxiliary()
    model.blocks[1] = Router()
    assert list(joined(model)) == [2]


class Outside(Model):
    """Residual connections are outside of the blocks, which are in lists in a list."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(0)
        self.layers: Any = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(layers)
        )

    def body(self, x):
        for attention, inner in self.layers:
            x = attention(x) + x
            x = inner(x).transpose(0, 1) + x.transpose(0, 1)
            x = x.transpose(0, 1)
        return x


def test_code_after_a_block_may_use_the_arguments_of_the_block():
    chain = observe(Outside())
    assert chain.blocks == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")
    assert chain.entries[1:] == (((0, 0),),) * 3
    assert (chain.joined, chain.outside) == ({}, {1, 2, 3})
    assert not observe(Model()).outside
    names = list(chain.blocks)
    with tracing(model := Outside(), names) as trace:
        model.training_step(torch.arange(10).view(2, 5))
    assert list(trace.joined) == [1, 2, 3], "without a stage that receives the arguments"

    class View(Outside):
        def body(self, x):
            for attention, inner in self.layers:
                x = attention(x) + x
                before = x.transpose(0, 1)  # not the tensor that the next stage receives
                x = (inner(x).transpose(0, 1) + before).transpose(0, 1)
            return x

    assert list(observe(View(), names).joined) == [1, 3]

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return x + self.shift

    class InPlace(Outside):
        def __init__(self) -> None:
            super().__init__()
            for pair in self.layers:
                pair[1] = Shift()

        def body(self, x):
            for attention, inner in self.layers:
                x = attention(x) + x
                x += inner(x)
            return x

    assert list(observe(InPlace(), names).joined) == [1, 3], "a received tensor is a leaf of the graph"

    class Branches(Outside):
        def body(self, x):
            for number, (attention, inner) in enumerate(self.layers):
                x = attention(x) + x
                x = inner(x) + (x if number or x.sum().item() > 0 else 2 * x)
            return x

    assert list(observe(Branches(), names).joined) == [2, 3], "later stages don't know the condition"
    assert "in a condition or by item()" in observe(Branches(), names).joined[2]

    class Normalised(Outside):
        def body(self, x):
            for attention, inner in self.layers:
                x = x + inner(attention(x))
            return x

    assert list(observe(Normalised(), names).joined) == [1, 3]


class Passing(Model):
    """Tensors of several origins are used after the blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.condition = kind, nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        condition = self.condition(x)
        condition = {"view": condition[:], "computed": 2 * condition}.get(self.kind, condition)
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        if self.kind == "changed":
            condition.mul_(2.0)
        if self.kind in ("argument", "output"):
            return outputs[-1] + outputs[self.kind != "argument"]
        return outputs[-1] * condition


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("argument", [("argument", 0, 0, 0)] * 2),
        ("output", [None, ("output", 0)]),
        ("module", [("module", "condition", 1)] * 2),
    ],
)
def test_tensors_that_all_stages_can_find_pass_blocks_by(kind, paths):
    chain = observe(Passing(kind), carries=True)
    assert not chain.joined
    assert chain.entries == (((0, 0),), *(((0, 0), path) if path else ((0, 0),) for path in paths))
    assert chain.carried == {path for path in paths if path}
    assert "the stages between receive and send them" in chain.notes[0]


@pytest.mark.parametrize("kind", ["view", "computed", "changed"])
def test_views_computed_and_changed_tensors_dont_pass_blocks_by(kind):
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert list(observe(Passing(kind), blocks, carries=True).joined) == [1, 2]


def test_auto_selects_the_blocks_that_can_be_divided_best():
    class Stem(Outside):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])

        def body(self, x):
            return super().body(self.stem(x))

    assert observe(Stem()).blocks[0] == "stem.0"

    class Small(Outside):
        def __init__(self) -> None:
            super().__init__(layers=4)
            self.stem = nn.Sequential(*[nn.LayerNorm(WIDTH) for _ in range(9)])

        def body(self, x):
            x = self.stem(x)
            for attention, inner in self.layers:
                x = x + inner(attention(x))
            return x

    assert observe(Small()).blocks[0] == "layers.0.0", "three boundaries, but between equal parts"


def test_arguments_that_all_blocks_take_are_sent_with_the_stream():
    class Memory(Model):
        def body(self, x):
            memory = self.head.weight.mean() * x
            for block in self.blocks:
                x = block(x, mask=memory)
            return x

    chain = observe(Memory())
    assert chain.entries[1:] == (((0, 0), (1, "mask")),) * 2
    assert not chain.joined

    class Late(Model):
        def body(self, x):
            memory = 2 * x
            return self.blocks[2](self.blocks[1](self.blocks[0](x)), mask=memory)

    chain = observe(Late(), ["blocks.0", "blocks.1", "blocks.2"])
    assert list(chain.joined) == [1], "the stage of blocks.1 would not have it"
    assert "blocks.2 takes argument 'mask'" in chain.joined[1]
    assert chain.entries[2] == ((0, 0), (1, "mask"))


def test_code_between_blocks_belongs_to_the_block_before():
    class Between(Model):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.Parameter(torch.ones(3))

        def body(self, x):
            for number, block in enumerate(self.blocks):
                x = block(x) * self.scales[number]
            return x

    chain = observe(Between())
    assert not chain.joined
    assert chain.uses["scales"] == {0, 1, 3}


def test_values_logged_in_an_early_block_merge_the_stages():
    class Logs(Model):
        def body(self, x):
            self.log("rows", torch.tensor(2.0))
            self.log("norm", x.norm())
            return super().body(x)

    assert list(joined(Logs())) == [1, 2]
    assert "self.log('norm')" in joined(Logs())[1]


def test_a_buffer_that_is_written_in_one_stage_and_read_in_another_joins_them():
    class Codes(Model):
        def body(self, x):
            x = super().body(x + self.unused)
            with torch.no_grad():
                self.unused.mul_(0.9).add_(x.mean())
            return x

    assert list(joined(Codes())) == [1, 2]
    assert "the buffer unused is written after the blocks and also used before the blocks" in joined(Codes())[1]

    class Counts(Model):
        def body(self, x):
            self.unused.add_(1)  # the same on all stages
            return super().body(x) * self.unused

    assert not joined(Counts())

    class Assigns(Model):
        def body(self, x):
            x = super().body(x)
            self.unused = x.detach().mean(0)
            return x

    chain = observe(Assigns())
    assert chain.uses["unused"] == {3}, "the last stage has the value to save"
    assert not chain.joined

    class Replaces(Assigns):
        def body(self, x):
            return super().body(x + self.unused.mean())

    assert list(joined(Replaces())) == [1, 2]


def test_data_dependent_shapes_are_found():
    class Packs(Model):
        def training_step(self, ids):
            return super().training_step(ids[ids.sum(1) > 0])

    assert observe(Packs()).changing


def test_outputs_with_several_values_have_their_structure():
    class Tuples(Model):
        def body(self, x):
            for block in self.blocks:
                x, size, _ = block(x)
            return x * size

    class Several(Block):
        def forward(self, x, mask=None):
            return super().forward(x), x.shape[1], None

    model = Tuples()
    model.blocks = nn.ModuleList(Several() for _ in range(3))
    chain = observe(model)
    assert isinstance(chain.outputs[0][0], Slot)
    assert chain.outputs[0][1:] == (5, None)
    assert not chain.joined

    class Opaque(Block):
        def forward(self, x, mask=None):
            return super().forward(x), x.shape[1], object()

    model.blocks[0] = Opaque()
    assert "an object of class object" in observe(model).joined[1]


def test_batch_normalisation_has_a_note():
    model = Model()
    model.blocks[0].norm = nn.BatchNorm1d(5)
    assert "blocks.0.norm normalises each microbatch by its own statistics" in observe(model).notes[0]


def test_effects_that_depend_on_the_microbatch_have_a_note():
    model = Model()
    hooked, normalised = next(model.blocks[1].named_parameters())[0], next(model.blocks[2].named_children())[0]
    model.blocks[1].get_parameter(hooked).register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    nn.utils.parametrizations.spectral_norm(model.blocks[2].get_submodule(normalised))
    first, second = observe(model).notes
    assert f"gradient hooks of blocks.1.{hooked} receive the gradient of a microbatch" in first
    assert f"blocks.2.{normalised}.parametrizations.weight.0 runs a power iteration per microbatch" in second
