"""Sharded training equals training in a single process, in combination with hooks, freezing and optimizers."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA, ModelCheckpoint
from fabricx.distributed.sharding.fsdp_internals import units_of
from fabricx.errors import WorkerFailed
from fabricx.strategies import DDP, FSDP, Single, fsdp
from fabricx.testing import QUIET, LayeredModule, SavesAtEnd, assert_same_state, layered_data, run_ranks
from fabricx.testing.modules import Layer

pytestmark = pytest.mark.usefixtures("warm_ranks")


class Layers(LayeredModule):
    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)


def loader(batch: int) -> DataLoader[Any]:
    return DataLoader(layered_data(21), batch, shuffle=True)


def train(strategy: Any, devices: int = 2, *, ckpt: Path | None = None, **options: Any) -> tuple[Layers, fx.Trainer]:
    torch.manual_seed(2)
    module = Layers()
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 2, **QUIET, **options})
    trainer.fit(module, loader(6 // devices), loader(5), ckpt_path=ckpt)
    return module, trainer


class RecordsHeldBytes(fx.Callback):
    """Records the bytes of weights, gradients and moments of this rank."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        held = [tensor for p in module.parameters() for tensor in (p, p.grad, *optimizer.state.get(p, {}).values())]
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in held if tensor is not None]
        module.held_bytes = sum(tensor.nbytes for tensor in local)


def test_a_rank_holds_half_of_the_weights_gradients_and_moments() -> None:
    sharded, _ = train(FSDP(), callbacks=[RecordsHeldBytes()])
    whole, _ = train(DDP(), callbacks=[RecordsHeldBytes()])
    assert int(sharded.held_bytes) < 0.6 * int(whole.held_bytes)  # 9 rows on 2 ranks are 5 and 4


@pytest.mark.timeout(240)
def test_single_ddp_and_fsdp_load_checkpoints_of_each_other_bit_for_bit(tmp_path: Path) -> None:
    strategies: list[tuple[Any, int]] = [(Single(), 1), (DDP(), 2), (FSDP(), 2), (DDP(), 2), (FSDP(wrap=["Linear"]), 2)]
    before: dict[str, Any] | None = None
    path: Path | None = None
    for number, (strategy, devices) in enumerate(itertools.chain(strategies, strategies[:1])):
        # max_steps is reached: the run loads the checkpoint, and immediately writes a checkpoint.
        saver = SavesAtEnd(tmp_path / f"{number}.ckpt")
        train(strategy, devices, ckpt=path, callbacks=[saver], max_steps=3)
        path = tmp_path / f"{number}.ckpt"
        state = checkpoint.load(path)["strategy"]
        if before is not None:
            assert_same_state(state, before)
        before = state


class Deep(fx.Module):
    """24 blocks of equal size; records each release of freed memory, with the gathered bytes at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)) for _ in range(24)])
        self.moment = "forward"
        self.returns: list[tuple[str, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body(batch).square().mean()

    def on_before_backward(self, loss: Any) -> None:
        self.moment = "backward"

    def on_after_backward(self) -> None:
        self.moment = "update"

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.moment = "forward"

    def note_return(self) -> bool:
        outputs = [tensor for unit in units_of(self) for p in unit.fsdp_params for tensor in p.all_gather_outputs]
        self.returns.append((self.moment, sum(tensor.untyped_storage().nbytes() for tensor in outputs)))
        return True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def returns_of_freed_memory(accumulate: int) -> tuple[int, list[tuple[str, int]]]:
    """Return the bytes of a block, and the releases of freed memory in two batches; 8 blocks trigger a release."""
    module = Deep()
    block = sum(parameter.nbytes for parameter in module.body[0].parameters())
    trainer = fx.Trainer(
        devices=2, strategy="fsdp", max_epochs=1, accumulate_grad_batches=accumulate, num_sanity_val_steps=0, **QUIET
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "LARGE", 8 * block)
        patch.setattr(fsdp, "release_freed_memory", module.note_return)
        trainer.fit(module, DataLoader(torch.randn(8, 8), 2))
    return block, module.returns


def test_memory_of_freed_weights_and_gradients_is_returned_to_the_system_within_a_step() -> None:
    # A forward frees 24 blocks; a backward frees also gradients and inputs of reductions: a release per 3 blocks.
    step = {"forward": 3, "backward": 8, "update": 1}
    window = {"forward": 6, "backward": 3 + 8, "update": 1}  # the first backward of a window keeps its gradients
    for accumulate, expected in ((1, {name: 2 * count for name, count in step.items()}), (2, window)):
        for block, returns in run_ranks(returns_of_freed_memory, 2, accumulate):
            assert Counter(moment for moment, _ in returns) == expected
            assert max(gathered for _, gathered in returns) <= 2 * block  # the next block is gathered in advance


class BuildsOnMeta(Layers):
    """Creates its layers on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.body: Any = None
        self.was: list[str] = []

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(*[Layer() for _ in range(3)])
            self.was = [str(parameter.device) for parameter in self.body.parameters()]


def test_layers_of_configure_model_are_allocated_as_shards_only() -> None:
    module = BuildsOnMeta()
    trainer = fx.Trainer(devices=2, strategy="fsdp", max_epochs=8, **QUIET)
    trainer.fit(module, loader(3), loader(5))
    assert set(module.was) == {"meta"}
    assert all(str(parameter.device) == "cpu" for parameter in module.parameters())
    deviations = [layer.up.weight.std().item() for layer in module.body]
    assert min(deviations) > 0.1  # initial values of Linear: uniform within 1 / sqrt(6), on every shard
    assert float(trainer.callback_metrics["val"]) < 3.0  # 6 is the variance of the targets


class InitializesOnMeta(BuildsOnMeta):
    """Initializes a layer in `configure_model` with other values than the layer's own."""

    def configure_model(self) -> None:
        super().configure_model()
        nn.init.zeros_(self.body[1].up.weight)


def test_initial_values_that_meta_layers_would_lose_are_refused() -> None:
    trainer = fx.Trainer(devices=2, strategy="fsdp", max_epochs=1, **QUIET)
    with pytest.raises(Exception, match=r"body\.1\.up\.weight is given values in configure_model"):
        trainer.fit(InitializesOnMeta(), loader(3))


class TwoDtypes(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.head.double()


def test_parameters_of_two_dtypes_are_refused_by_name() -> None:
    trainer = fx.Trainer(devices=2, strategy="fsdp", max_epochs=1, **QUIET)
    with pytest.raises(Exception, match=r"head\.weight is torch\.float64"):
        trainer.fit(TwoDtypes(), loader(3))


def test_the_checkpoint_callback_stores_sharded_weights(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val", save_last=True)
    module, trainer = train("fsdp", callbacks=[saver], enable_checkpointing=True)
    assert Path(trainer.checkpoint_callback.best_model_path).is_dir()
    assert checkpoint.read_manifest(tmp_path / "last.ckpt")["module"].endswith(".Layers")
    weights = checkpoint.load(tmp_path / "last.ckpt")["strategy"]["module"]
    for name, tensor in module.state_dict().items():
        assert torch.equal(weights[name], tensor)


class Freezes(LayeredModule):
    """Freezes the head at update 1, and unfreezes it at update 3.

    Args:
        where: name of the hook.
        begins: call the hook "training_step" before the forward instead of after it.
        clamps: change the weights each time instead.
        of_optimizer: freeze the optimizer's parameters instead of the module's.
        releases: whether the head is unfrozen.
    """

    def __init__(
        self, where: str, *, begins: bool = False, clamps: bool = False, of_optimizer: bool = False,
        releases: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.releases = releases
        self.where, self.begins, self.clamps, self.of_optimizer = where, begins, clamps, of_optimizer

    def at(self, hook: str) -> None:
        if hook == self.where and self.clamps:
            self.head.weight.data.clamp_(-0.1, 0.1)
        elif hook == self.where and self.of_optimizer:
            for parameter in self.trainer.optimizers[0].param_groups[1]["params"]:
                parameter.requires_grad_(self.global_step < 1 or (self.releases and self.global_step > 2))
        elif hook == self.where:
            self.head.requires_grad_(self.global_step not in (1, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.begins:
            self.at("training_step")
        loss = super().training_step(batch, batch_idx)
        if not self.begins:
            self.at("training_step")
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.at("on_before_zero_grad")

    def on_before_backward(self, loss: Any) -> None:
        self.at("on_before_backward")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.at("validation_step")


def trained(strategy: Any, cases: list[dict[str, Any]], devices: int) -> list[Any]:
    """Return the weights of each case."""
    weights = []
    for case in cases:
        torch.manual_seed(2)
        module = Freezes(**case)
        trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 3, **QUIET})
        trainer.fit(module, DataLoader(layered_data(12), 6 // devices), DataLoader(layered_data(6), 3))
        weights.append({name: getattr(p, "full_tensor", p.clone)().tolist() for name, p in module.named_parameters()})
    return weights


GATHERED = ["training_step", "on_before_zero_grad", "on_before_backward", "validation_step"]


def test_parameters_that_are_frozen_while_gathered_stay_frozen() -> None:
    cases: list[Any] = [{"where": where} for where in GATHERED] + [{"where": "training_step", "begins": True}]
    cases += [{"where": where, "of_optimizer": True} for where in GATHERED[1:]]
    cases += [
        {"where": "training_step", "of_optimizer": True, "begins": begins, "releases": False}
        for begins in (False, True)
    ]
    alone = trained(Single(), cases, 1)
    for sharded in run_ranks(trained, 2, FSDP(), cases, 2):
        for case, actual, expected in zip(cases, sharded, alone, strict=True):
            for name, values in expected.items():
                # Weights of about 0.1.
                torch.testing.assert_close(actual[name], values, rtol=0, atol=1e-6, msg=f"{case}: {name}")


def test_unfreezing_an_optimizers_parameters_while_they_are_gathered_is_an_error() -> None:
    with pytest.raises(WorkerFailed, match=r"training_step has set requires_grad=True on the optimizer's head\.weight"):
        trained(FSDP(), [{"where": "training_step", "begins": True, "of_optimizer": True}], devices=2)


class FreezesDuringForward(LayeredModule):
    """Freezes the head during its forward.

    Args:
        of_optimizer: freeze the optimizer's parameters (shards), not the module's (gathered).
    """

    def __init__(self, of_optimizer: bool) -> None:
        super().__init__()
        self.of_optimizer = of_optimizer

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        parameters = self.trainer.optimizers[0].param_groups[1]["params"] if self.of_optimizer else None
        for parameter in parameters or self.head.parameters():
            parameter.requires_grad = False
        outputs: torch.Tensor = self.head(hidden)
        for parameter in parameters or self.head.parameters():
            parameter.requires_grad = True
        return outputs


def frozen_during_forward(strategy: Any, of_optimizer: bool, devices: int) -> dict[str, Any]:
    torch.manual_seed(2)
    module = FreezesDuringForward(of_optimizer)
    trainer = fx.Trainer(devices=devices, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(layered_data(12), 6 // devices))
    return module.state_dict()


def test_parameters_that_are_frozen_during_a_forward_are_not_trained_by_it() -> None:
    sharded, alone = frozen_during_forward(FSDP(), False, 2), frozen_during_forward(Single(), False, 1)
    for name, weights in alone.items():
        torch.testing.assert_close(sharded[name], weights, rtol=0, atol=1e-6, msg=name)  # weights of about 0.1
    torch.manual_seed(2)
    assert torch.equal(sharded["head.weight"], FreezesDuringForward(False).head.weight)
    with pytest.raises(WorkerFailed, match=r"training_step has set requires_grad=True on the optimizer's head\.weight"):
        frozen_during_forward(FSDP(), True, 2)


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_changing_weights_while_they_are_gathered_is_an_error(where: str) -> None:
    with pytest.raises(WorkerFailed, match=r"head\.weight was changed or replaced while strategy=fsdp had gathered it"):
        trained(FSDP(), [{"where": where, "clamps": True}], devices=2)


class PredictsBeforeStep(fx.Module):
    """Computes predictions without gradients before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.head(batch[0]), batch[1]))
        with torch.no_grad():
            self.head(batch[0])
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_forward_without_a_backward_does_not_keep_outdated_weights() -> None:
    heads = []
    for strategy, devices in ((Single(), 1), (FSDP(reshard_after_forward=False), 2)):
        torch.manual_seed(2)
        module = PredictsBeforeStep()
        trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 1, **QUIET})
        trainer.fit(module, DataLoader(layered_data(12), 6 // devices))
        heads.append(module.head.weight.detach())
    torch.testing.assert_close(*heads, rtol=0, atol=1e-6)  # the difference was 0.1


def changes_in_hooks() -> list[Callable[[nn.Linear], Any]]:
    """Return changes of weights in hooks, one change per batch."""
    return [
        lambda head: setattr(head.weight, "data", head.weight.data * 0.9),
        lambda head: nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(head.parameters()) * 0.5, head.parameters()
        ),
        lambda head: head.weight.copy_(torch.linspace(0, 1, head.weight.numel()).view(head.weight.shape)),
        lambda head: head.weight[1].mul_(2),
        lambda head: (torch.manual_seed(3), nn.init.normal_(head.weight)),
        lambda head: nn.init.normal_(head.weight),  # with the random numbers of the first rank
        lambda head: head.weight.div_(head.weight.norm()).clamp_(-0.3, 0.3),
        lambda head: head.weight.sub_(head.weight.grad, alpha=0.1),
        lambda head: setattr(head.bias, "grad", torch.ones(3)),
    ]


class ChangesWeights(fx.Module):
    """Changes weights in several ways, and keeps an average of its head.

    Args:
        mistake: the mistake of a hook; "assigns" happens between forward and backward.
    """

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3)  # row counts that are odd for two ranks
        self.average = torch.optim.swa_utils.AveragedModel(self.head)
        self.mistake = mistake
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.body(batch[0]).tanh()).square().mean()

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        changes = changes_in_hooks()
        changes[batch_idx % len(changes)](self.head)
        self.average.update_parameters(self.head)
        self.norms += [float(self.head.weight.norm()), float(self.average.module.weight.norm())]
        if self.mistake == "copies":
            copy.deepcopy(self.head)
        if self.mistake == "sets":
            self.head.weight.set_(torch.zeros(3, 5))
        if self.mistake == "replaces":
            self.head.weight = nn.Parameter(self.head.weight.detach() * 2)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.mistake == "assigns":
            self.head.weight.data = self.head.weight.data * 0.5

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.body.bias.data = self.body.bias.data * 0.9

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), "interval": "step"}]


def changed_in_hooks(strategy: Any, devices: int) -> list[Any]:
    torch.manual_seed(2)
    module = ChangesWeights()
    trainer = fx.Trainer(devices=devices, strategy=strategy, **{"max_epochs": 1, **QUIET})
    trainer.fit(module, DataLoader(layered_data(18), 2 // devices))
    return [module.norms, {name: whole(p) for name, p in module.named_parameters()}]


def whole(parameter: Any) -> Any:
    return getattr(parameter, "full_tensor", parameter.clone)().detach()


def test_hooks_see_and_change_whole_weights() -> None:
    [alone] = run_ranks(changed_in_hooks, 1, Single(), 1)
    for sharded in run_ranks(changed_in_hooks, 2, FSDP(), 2):
        torch.testing.assert_close(sharded, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("replaces", r"head\.weight was replaced by another parameter"),
        ("copies", "call AveragedModel in __init__"),
        ("sets", r"by set_: use weight\.copy_\(values\)"),
        ("assigns", r"on_before_zero_grad assigns to parameter\.data"),
    ],
)
def test_mistakes_of_hooks_are_errors(mistake: str, message: str) -> None:
    trainer = fx.Trainer(devices=2, strategy=FSDP(), **{"max_epochs": 1, **QUIET})
    with pytest.raises(WorkerFailed, match=message):
        trainer.fit(ChangesWeights(mistake), DataLoader(layered_data(16), 1))


class Penalised(Layers):
    """Adds a term to the loss, selected by `term`."""

    term = "weights"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.term == "weights":
            return loss + sum(weight.pow(2).sum() for weight in self.parameters())
        inputs = batch[0].clone().requires_grad_()
        [slope] = torch.autograd.grad(self(inputs).sum(), inputs, create_graph=True)
        return loss + slope.pow(2).mean()


@pytest.mark.parametrize(
    ("term", "message"), [("weights", "Call the submodule instead of reading"), ("slope", "no second derivative")]
)
def test_loss_terms_without_support_for_shards_are_errors_with_the_remedy(term: str, message: str) -> None:
    module = Penalised()
    module.term = term
    with pytest.raises(WorkerFailed, match=rf"training_step (?s:.*){message}(?s:.*)strategy=ddp"):
        fx.Trainer(devices=2, strategy=FSDP(wrap=["Linear"]), max_epochs=1, **QUIET).fit(module, loader(3))
    fx.Trainer(devices=2, strategy=DDP(), max_epochs=1, **QUIET).fit(module, loader(3))


class NormalizesByNumber(torch.optim.SGD):
    """Divides the gradients by their norm, computed as a Python number."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.pow(2).sum()) for p in parameters) ** 0.5
        for parameter in parameters:
            parameter.grad.div_(norm or 1.0)
        return super().step(closure)


def test_an_optimizer_that_converts_sharded_values_to_python_numbers_is_refused() -> None:
    module = Layers()
    module.configure_optimizers = lambda: NormalizesByNumber(module.parameters(), 0.1)  # type: ignore[method-assign]
    with pytest.raises(
        WorkerFailed, match=r"NormalizesByNumber makes another update with the sharded parameters of fsdp"
    ):
        fx.Trainer(devices=2, strategy=FSDP(wrap=["Linear"]), max_epochs=1, **QUIET).fit(module, loader(3))


def test_averages_after_a_fit_on_shards_are_whole_in_the_calling_process() -> None:
    averages = {}
    for strategy, devices in ((Single(), 1), (FSDP(), 2)):
        torch.manual_seed(0)
        average = EMA(0.5, apply_at_end=False)
        trainer = fx.Trainer(strategy=strategy, devices=devices, max_epochs=1, callbacks=[average], **QUIET)
        trainer.fit(LayeredModule(), DataLoader(layered_data(8), 4 // devices))
        averages[devices] = average.averages
    torch.testing.assert_close(averages[2], averages[1])
