"""States of callbacks, attributes of the module, and requests to stop after the death of a worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fabricx as fx
from fabricx.callbacks import FaultRecovery
from fabricx.strategies import DDP, LocalSGD, ParameterServer
from fabricx.testing import Ledger, SavesAtEnd, fail, kill
from fabricx.testing.faults import Fault
from tests.soak import covering, params

from .kills import STRATEGIES
from .ledgers import BATCH, SAMPLES, exact, train

HOOKS = (
    "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_batch_end",
    "on_validation_end", "on_train_epoch_end",
)  # fmt: skip
KILLS = [
    kill(rank=1).during("backward", step=2),
    kill(rank=0).during("validation", step=4, attempt=1),
    kill(rank=1).during("optimizer", step=6, attempt=2),
    kill(rank=0).during("forward", step=9, attempt=3),
]


class CountsHooks(fx.Callback):
    """Counts the calls of hooks, and saves the counts."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(HOOKS, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = dict(state_dict["counts"])


class CountsWatching(CountsHooks):
    """Counts in hooks that run after those of the module."""

    watches_metrics = True


class DiesWatching(fx.Callback):
    """Kills a rank in a hook of callbacks that watch metrics, in which the other rank waits for it.

    Args:
        hook: name of the hook.
        rank: the rank.
        attempt: number of failures before.
    """

    watches_metrics = True

    def __init__(self, hook: str, rank: int, attempt: int) -> None:
        self.rank, self.attempt = rank, attempt
        setattr(self, hook, self._die)

    def _die(self, trainer: Any, *arguments: Any) -> None:
        if trainer.sanity_checking or len(trainer.failures) != self.attempt:
            return
        if trainer.world.rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.world.barrier()


def _counting(name: str) -> Any:
    def hook(callback: CountsHooks, trainer: Any, *arguments: Any, **options: Any) -> None:
        if not trainer.sanity_checking:
            callback.counts[name] += 1

    return hook


for _name in HOOKS:
    setattr(CountsHooks, _name, _counting(_name))


class CountsBatches(Ledger):
    """Counts batches in attributes, of which some are saved."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.batches, self.losses, self.lost = 0, [], 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.batches += 1
        self.losses.append(float(loss))
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]


def test_states_count_interrupted_work_once(tmp_path: Path) -> None:
    runs = []
    hooks = ("on_train_batch_end", 1), ("on_validation_end", 1), ("on_train_epoch_end", 0)
    watching = [DiesWatching(hook, rank, attempt) for attempt, (hook, rank) in enumerate(hooks, len(KILLS))]
    for name, faults in (("undisturbed", []), ("killed", [*KILLS, *watching])):
        module, counts = CountsBatches(), [CountsHooks(), CountsWatching(), CountsWatching()]
        _, trainer = train(
            STRATEGIES["ddp"](),
            [*counts[:2], *faults, counts[2]],  # type: ignore[list-item]
            tmp_path / name,
            module=module,
            recovery=FaultRecovery(max_restarts=9),
        )
        assert len(trainer.failures) == len(faults)
        runs.append((module, counts))
    (undisturbed, expected), (killed, counted) = runs
    assert exact(killed)
    assert [callback.counts for callback in counted] == [callback.counts for callback in expected]
    assert killed.batches == undisturbed.batches


class CountsEpochs(fx.Callback):
    """Counts the ends of epochs in an attribute."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs += 1


def test_the_end_of_an_epoch_that_a_limit_cuts_counts_once(tmp_path: Path) -> None:
    counts, dies = CountsEpochs(), DiesWatching("on_train_epoch_end", 1, attempt=0)
    _, trainer = train(
        STRATEGIES["ddp"](),
        [counts, dies],  # type: ignore[list-item]
        tmp_path,
        max_steps=2,
    )
    assert len(trainer.failures) == 1
    assert (trainer.global_step, counts.epochs) == (2, 1)


def test_items_of_a_surviving_rank_are_appended_once(tmp_path: Path) -> None:
    fault = kill(rank=1).during("backward", step=2)
    undisturbed, killed = CountsBatches(), CountsBatches()
    for name, module, faults in (("undisturbed", undisturbed, []), ("killed", killed, [fault])):
        train(STRATEGIES["ddp"](), faults, tmp_path / name, module=module)
    assert killed.losses == undisturbed.losses


class Collects(Ledger):
    """Appends to a list that becomes too large for records."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.values: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values += [0.0] * 2000


class WritesMessages(fx.Callback):
    """Writes the messages of the run on each rank to a file.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        def write(text: str) -> None:
            with self.path.open("a") as file:
                file.write(text)

        trainer.print = write


@pytest.mark.parametrize("strategy", params(["ddp"], ["fsdp"]))
def test_attributes_that_have_become_too_large_are_named(strategy: str, tmp_path: Path) -> None:
    for name, module in (("large", Collects()), ("none", Ledger(SAMPLES, BATCH))):
        path = tmp_path / f"{name}.txt"
        callbacks: list[Any] = [WritesMessages(path), kill(rank=1).during("backward", step=3)]
        train(STRATEGIES[strategy](), callbacks, tmp_path, module=module)
        text = path.read_text()
        assert "workers continue from step" in text
        assert ("of types that are not recovered: values. A replacement" in text) is (name == "large")


def killed_and_equal(
    kind: type[Any], strategy: Any, fault: Fault, folder: Path, callbacks: Sequence[fx.Callback] = ()
) -> Any:
    """Return the module of a run with a fault, after a comparison of its weights with a run without the fault."""
    modules = []
    for name, faults in (("undisturbed", []), ("killed", [fault])):
        module = kind()
        _, trainer = train(strategy(), [*faults, *callbacks], folder / name, module=module)
        assert len(trainer.failures) == len(faults)
        modules.append(module)
    undisturbed, killed = modules
    for name, value in undisturbed.state_dict().items():
        if "entries" not in name:
            assert torch.equal(killed.state_dict()[name], value), name
    return killed


class AveragesWeights(fx.Callback):
    """Averages whole weights, by the names of parameters, as callbacks of users do."""

    def __init__(self) -> None:
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        for name, weight in module.state_dict().items():
            average = self.averages.get(name)
            self.averages[name] = weight.clone() if average is None else 0.9 * average + 0.1 * weight

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = state_dict["averages"]


def test_averages_of_a_callback_of_a_user_stay_whole_in_snapshots_and_in_memory_checkpoints(tmp_path: Path) -> None:
    faults = [kill(1).during("backward", step=6), fail(0, error="a hiccup").during("backward", step=9, attempt=1)]
    undisturbed, killed = AveragesWeights(), AveragesWeights()
    train(STRATEGIES["fsdp"](), [undisturbed], tmp_path / "undisturbed")
    _, trainer = train(STRATEGIES["fsdp"](), [killed, *faults], tmp_path / "killed")
    assert len(trainer.failures) == 2
    for name, value in undisturbed.averages.items():
        assert torch.equal(killed.averages[name], value), name


class CountsAfterUpdates(Ledger):
    """Counts batches, and collects values of the batches of each rank, in a hook after the update."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.count, self.sums = {"batches": 0}, list[float]()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count["batches"] += 1
        self.sums.append(float(batch[0].sum()))


@pytest.mark.parametrize("step", [4, 5])
def test_a_rank_that_dies_in_a_hook_after_the_update_keeps_its_own_values(step: int, tmp_path: Path) -> None:
    """At step 4, the other rank has run the hook and waits in that of a snapshot."""
    messages = WritesMessages(tmp_path / "messages.txt")
    fault = kill(0).during("batch end", step=step)  # before the hook of the module
    undisturbed, killed = CountsAfterUpdates(), CountsAfterUpdates()
    for name, module, callbacks in (("undisturbed", undisturbed, []), ("killed", killed, [fault, messages])):
        train(STRATEGIES["ddp"](), callbacks, tmp_path / name, module=module)  # type: ignore[arg-type]
    assert killed.count == undisturbed.count == {"batches": 12}
    assert killed.sums == [value for number, value in enumerate(undisturbed.sums, 1) if number != step]
    assert "attributes that differ between the ranks: sums. Those of the rank that failed" in messages.path.read_text()


class ChangesOptions(Ledger):
    """Changes options of its optimizer in hooks of epochs and batches, and adds a group at the start of an epoch."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.added = torch.nn.Parameter(torch.ones(1))

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        if self.current_epoch == 1:
            optimizer.add_param_group({"params": [self.added], "lr": 0.01})

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["momentum"] *= 0.9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.added.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p is not self.added], lr=0.1, momentum=0.5)


@pytest.mark.parametrize(("rank", "step"), covering(product([0, 1], [4, 5])))
def test_options_that_hooks_of_interrupted_work_change_change_once(rank: int, step: int, tmp_path: Path) -> None:
    """Steps of each epoch: 4, so that the death is in the first or the second batch of an epoch."""
    killed_and_equal(ChangesOptions, STRATEGIES["ddp"], kill(rank).during("backward", step=step), tmp_path)


class ChangesAtEnd(fx.Callback):
    """Scales weights and counts in the last hook of the training, and kills rank 0 when the other rank has run it.

    Args:
        once: file that is created before the kill.
        weights: scale the weights, too.
    """

    def __init__(self, once: Path, *, weights: bool) -> None:
        self.once, self.weights = once, weights

    @torch.no_grad()
    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.history.append("end")
        module.layer.bias.mul_(1.5 if self.weights else 1.0)
        trainer.world.barrier()
        if trainer.world.rank == 0 and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class KeepsHistory(Ledger):
    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.history: list[str] = []

    def on_train_epoch_end(self) -> None:
        self.history.append("epoch")


@pytest.mark.parametrize("weights", [False, True])
def test_the_last_hooks_of_a_training_change_attributes_and_weights_once(tmp_path: Path, *, weights: bool) -> None:
    modules = []
    for name in ("undisturbed", "killed"):
        once = tmp_path / f"{name}.once"
        if name == "undisturbed":
            once.touch()
        module = KeepsHistory()
        _, trainer = train(STRATEGIES["ddp"](), [ChangesAtEnd(once, weights=weights)], tmp_path / name, module=module)
        # Changed weights would change again: then all workers restart from a snapshot.
        assert len(trainer.failures) == (name == "killed")
        modules.append(module)
    assert modules[0].history == modules[1].history == ["epoch"] * 3 + ["end"]
    assert torch.equal(modules[0].layer.bias, modules[1].layer.bias)


class CountsValidations(Ledger):
    """Counts batches of validations in a buffer, with which it scales the loss."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.register_buffer("validated", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (1 + 0.1 * self.validated) * super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        super().validation_step(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.validated *= 1.5


@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_that_a_validation_changes_count_once(rank: int, tmp_path: Path) -> None:
    killed_and_equal(CountsValidations, STRATEGIES["ddp"], kill(rank).during("validation", step=4), tmp_path)


class Running:
    def __init__(self) -> None:
        self.total = 1.0


class KeepsState(Ledger):
    """Scales the loss by a nested collection, an object in a list, and buffers that are not persistent."""

    noise: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)
        self.history: dict[str, list[float]] = {"scale": [1.0]}
        self.means = [Running()]
        self.register_buffer("noise", torch.ones(2), persistent=False)
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def on_train_epoch_start(self) -> None:
        self.noise *= 0.7

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.history["scale"].append(self.history["scale"][-1] * 0.95)
        self.means[0].total *= 1.05
        self.seen += self.noise
        factor = self.history["scale"][-1] + self.means[0].total + self.noise.sum() + self.seen.sum()
        return super().training_step(batch, batch_idx) * factor


@pytest.mark.parametrize(("strategy", "step"), covering(product(["ddp", "fsdp", "local_sgd"], [2, 4, 6])))
def test_nested_collections_and_buffers_that_are_not_persistent(strategy: str, step: int, tmp_path: Path) -> None:
    killed = killed_and_equal(KeepsState, STRATEGIES[strategy], kill(1).during("backward", step=step), tmp_path)
    assert len(killed.history["scale"]) == 13


def fixed() -> DDP:
    """A strategy that cannot continue with other ranks, as strategies of users without `Elastic`."""
    strategy = DDP()
    strategy.traits = replace(strategy.traits, elastic=False)
    return strategy


def test_attributes_after_a_restart_from_a_snapshot(tmp_path: Path) -> None:
    messages = WritesMessages(tmp_path / "messages.txt")
    killed = killed_and_equal(KeepsState, fixed, kill(1).during("optimizer", step=6), tmp_path, [messages])
    assert len(killed.history["scale"]) == 13
    assert "not recovered" not in messages.path.read_text()


class ScalesWeights(Ledger):
    """Scales its weights at the start of each epoch, after the validation of the previous epoch."""

    def __init__(self) -> None:
        super().__init__(SAMPLES, BATCH)

    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        for parameter in self.parameters():
            parameter.mul_(0.9)


def test_hooks_see_the_same_weights_with_and_without_in_memory_checkpoints(tmp_path: Path) -> None:
    weights = []
    for every, faults in ((100, []), (1, []), (1, [kill(rank=0).during("forward", step=5)])):
        module, recovery = ScalesWeights(), FaultRecovery(snapshots=False, copy_every_n_steps=every)
        folder = tmp_path / str(len(weights))
        _, trainer = train(LocalSGD(every=3), faults, folder, module=module, recovery=recovery)
        assert len(trainer.failures) == len(faults)
        weights.append({name: value for name, value in module.state_dict().items() if "entries" not in name})
    for name, value in weights[0].items():
        for other in weights[1:]:
            assert torch.equal(other[name], value), name


class StopsAtStep(fx.Callback):
    """Requests a stop after a step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        if trainer.global_step == 7:
            trainer.should_stop = True


@pytest.mark.parametrize(("strategy", "rank"), params([("ddp", 0), ("fsdp", 1)], [("ddp", 1), ("fsdp", 0)]))
def test_a_death_after_a_requested_stop_stops_at_the_same_step(strategy: str, rank: int, tmp_path: Path) -> None:
    weights = []
    for name, faults in (("undisturbed", []), ("killed", [kill(rank).during("checkpoint", step=7)])):
        callbacks = [StopsAtStep(), *faults, SavesAtEnd(tmp_path / name / "end.ckpt")]
        recovery = FaultRecovery(snapshots=False, copy_every_n_steps=4)
        module, trainer = train(STRATEGIES[strategy](), callbacks, tmp_path / name, recovery=recovery)
        assert trainer.global_step == 7
        assert len(trainer.failures) == len(faults)
        weights.append(module.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


class StopsAndDies(fx.Callback):
    """Requests a stop before the first batch of rank 1 in the second epoch, and kills this rank."""

    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        if trainer.current_epoch == 1 and trainer.world.rank == 1 and not trainer.failures:
            trainer.should_stop = True
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_position_of_a_run_that_stops_after_a_death_has_all_samples_of_the_weights(tmp_path: Path) -> None:
    """Regression: the stop preceded the meeting at which asynchronous ranks set their position."""
    strategy = ParameterServer(mode="bounded")
    module, trainer = train(strategy, [StopsAndDies()], tmp_path)  # type: ignore[list-item]
    assert len(trainer.failures) == 1
    trained = SAMPLES * trainer.state.epoch + trainer.state.samples
    assert float(-module.entries.detach().sum()) == pytest.approx(trained)
