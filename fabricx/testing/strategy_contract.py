"""The contract suite of synchronous strategies: runs on several ranks are compared with a single process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fabricx import plugins
from fabricx.core.callback import Callback, recovery_policy_of
from fabricx.core.module import Module
from fabricx.core.strategy import Strategy
from fabricx.errors import FabricxError, RanksDisagree, WorkerFailed
from fabricx.testing.broken import BrokenContract
from fabricx.testing.faults import kill
from fabricx.testing.modules import SavesAtStep
from fabricx.trainer.trainer import Trainer

GLOBAL_BATCH: Final = 12
SAMPLES: Final = 43  # 3 whole global batches, and 7 samples
EPOCHS: Final = 3
SAVED_AT: Final = 6  # of 12 steps
KILLED_AT: Final = 6
SNAPSHOT_AT: Final = 4  # steps between two snapshots, from which ranks restart if the strategy is not elastic
STANDSTILL_S: Final = 30.0  # without a batch; these runs recover within a second
ENDED: Final = "was ended"  # in the records of ranks that the supervisor ended because they stood still
COLLECTIVES: Final = "different collectives"  # in the error of ranks that wait for each other
ORDER: Final = 1e-5  # relative differences of sums in another order
RUNS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"samples": 4 * GLOBAL_BATCH},
    "uneven last batch": {},
    "fewer samples than ranks": {"samples": GLOBAL_BATCH + 1},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped by norm": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}


REDUCTION: Final = (
    "Are gradients summed, or averaged with traits.averages? Does backward_without_data take part in each reduction?"
)
WINDOW: Final = "Are gradients reduced at the end of an accumulation window only (self.ends_window)?"
CLIPPED: Final = "Are gradients reduced in backward, before they are clipped, and not in optimizer_step?"
HINTS: Final = {"accumulated": WINDOW, "clipped by norm": CLIPPED, "clipped by value": CLIPPED}  # besides REDUCTION
STOOD_STILL: Final = (
    "In each batch all ranks have to call the same collectives: does backward_without_data, which a rank without a "
    "sample calls in place of backward, call those of backward, also for parameters whose grad is None, and does it "
    "return True?"
)
INITIAL: Final = "Does setup broadcast the weights of rank 0?"
MISSING_KEYS: Final = "Does load_state_dict require an entry that state_dict of another strategy does not have?"
OTHER_NUMBER: Final = (
    "Does load_state_dict divide the state of each rank over any number of ranks? If it cannot, it has to raise a "
    "ValueError that names the strategy."
)
DEATH: Final = (
    "State that differs by rank needs traits.unreplicated, and KeepsLocalState for its copies: without them the "
    "replacement of a dead rank receives the state of another rank by state_dict, which must then not communicate."
)
NO_REASON: Final = (
    "A strategy that cannot continue raises a ValueError that names it and gives the reason; any other "
    "error is a defect."
)
MANUAL: Final = (
    "A step called backward for each layer before the optimizers stepped. Does the second call reduce the gradients of "
    "the first again? Then setup has to raise a ValueError for several_backwards=True."
)


def check_strategy(make: Callable[[], Strategy], *, ranks: int = 2, tolerance: float = ORDER) -> None:
    """Check that a synchronous strategy trains like a single process on the same global batches.

    It runs short trainings of a small network with SGD and momentum, in worker processes on the CPU: whole and uneven
    batches, initial weights that differ by rank, accumulation, clipping, evaluation, and manual optimization, unless
    the strategy refuses it. Then it resumes a run from a checkpoint, which must give the same bits as the run without
    an interruption, loads the checkpoint in a single process and on `ranks + 1` ranks, and resumes a checkpoint of a
    single process. Finally it kills a rank in the middle of a training. The run must end with the weights of the run
    without the death, in place if `traits.elastic`, else from a snapshot; or with an error of fabricx, or a
    `ValueError` that names the strategy and the reason. A run without a batch for 30 s counts as a hang.

    Args:
        make: returns a new strategy; all calls return the same kind.
        ranks: number of ranks, a divisor of 12.
        tolerance: largest difference of weights and metrics to a single process, relative to the largest weight of a
            parameter or, if that is larger, to its largest change in training. 1e-5 is for sums in another order;
            compressed gradients need more. The run with a death is compared with the run of the same strategy without,
            to 1e-5 in any case.

    Raises:
        BrokenContract: the strategy breaks the contract. Errors of a run pass: it compares the ranks' weights, for
            example.
        ValueError: `ranks` does not divide 12, or the strategy is not synchronous.
    """
    if GLOBAL_BATCH % ranks:
        raise ValueError(f"ranks={ranks}: must divide {GLOBAL_BATCH}")
    strategy = make()
    if not strategy.traits.synchronous:
        raise ValueError(f"{type(strategy).__name__} is not synchronous: its weights differ from those of one process")
    runs = {}
    for name, options in RUNS.items():
        with _named(name, STOOD_STILL):
            runs[name] = _train(make(), ranks, **options)
        _compare(
            name, runs[name], _train("single", 1, **options), tolerance, f"{HINTS.get(name, '')} {REDUCTION}".strip()
        )
    _check_initial_weights(make, ranks, runs["plain"])
    _check_manual_optimization(make, ranks, tolerance)
    with tempfile.TemporaryDirectory() as folder:
        _check_resuming(make, ranks, Path(folder), tolerance)
    if ranks > 1:
        _check_death(make, ranks, runs["uneven last batch"])


@contextmanager
def _named(name: str, hint: str) -> Iterator[None]:
    """Raise `BrokenContract` for a run that stood still."""
    try:
        yield
    except WorkerFailed as error:
        if _stood_still(error):
            raise BrokenContract(f"{name}: the run stood still. {hint}\n{error}") from error
        raise


def _stood_still(error: WorkerFailed) -> bool:
    return ENDED in str(error) or COLLECTIVES in str(error)


def _refuses(error: Exception, strategy: Strategy) -> bool:
    """Return whether an error is a message of the strategy or of fabricx, and not a defect."""
    cause = error.__cause__ if isinstance(error, WorkerFailed) else error
    if isinstance(cause, ValueError):
        return type(strategy).__name__ in str(cause)
    return isinstance(cause, FabricxError)


@dataclass(frozen=True)
class _Run:
    """Result of a training.

    Attributes:
        weights: final weights by name.
        step: number of weight updates.
        metrics: metrics of the last epoch.
        failures: failures from which the run has recovered.
    """

    weights: dict[str, Tensor]
    step: int
    metrics: dict[str, float]
    failures: list[str]


def _train(
    strategy: Strategy | str, ranks: int, *, samples: int = SAMPLES, ckpt_path: Path | None = None, began_with: int = 0,
    module: _Network | None = None, **options: Any,
) -> _Run:  # fmt: skip
    module = module or _Network()
    defaults: dict[str, Any] = {
        "max_epochs": EPOCHS, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "accelerator": "cpu", "enable_checkpointing": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    callbacks = [*options.pop("callbacks", ())]
    if ranks > 1 and recovery_policy_of(callbacks) is None:
        callbacks.append(_recovery(max_restarts=0, snapshots=False))
    trainer = Trainer(devices=ranks, strategy=strategy, callbacks=callbacks, **{**defaults, **options})
    batch = GLOBAL_BATCH // (began_with or ranks)
    with _seeded():
        trainer.fit(module, DataLoader(_data(samples), batch), DataLoader(_data(5), 1), ckpt_path=ckpt_path)
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("loss_epoch", "val_loss")}
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return _Run(weights, trainer.global_step, metrics, trainer.failures)


def _recovery(**options: Any) -> Callback:
    """Return a callback that ends ranks that stand still."""
    limits = {"stuck_after": STANDSTILL_S, "patience": STANDSTILL_S}
    recovery: Callback = plugins.build("callbacks", "fault_recovery", **limits, **options)
    return recovery


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _compare(
    name: str, several: _Run, alone: _Run, tolerance: float, hint: str = REDUCTION,
    reference: str = "one process on the same global batches",
) -> None:  # fmt: skip
    if several.step != alone.step:
        raise BrokenContract(f"{name}: {several.step} weight updates, and {alone.step} in the run of {reference}")
    initial = dict(_Network().named_parameters())
    for parameter, wanted in alone.weights.items():
        weights, change = several.weights[parameter], wanted - initial[parameter].detach()
        difference = float((weights - wanted).abs().max())
        scale = float(torch.maximum(wanted.abs().max(), change.abs().max()))  # a trained bias may be close to 0
        if not difference <= tolerance * scale:  # also if it is NaN
            raise BrokenContract(
                f"{name}: {parameter} differs by {difference:.3g} from the run of {reference}, more than "
                f"tolerance={tolerance:g} x {scale:.3g}. {hint}"
            )
    for metric, wanted_value in alone.metrics.items():
        value = several.metrics[metric]
        if not math.isclose(value, wanted_value, rel_tol=max(1e-4, 10 * tolerance)):
            raise BrokenContract(f"{name}: {metric} is {value:.6g}, and {wanted_value:.6g} in the run of {reference}")


def _check_initial_weights(make: Callable[[], Strategy], ranks: int, plain: _Run) -> None:
    """Compare initial weights that differ by rank with equal initial weights: both runs begin with those of rank 0."""
    name = "initial weights that differ by rank"
    try:
        with _named(name, INITIAL):
            run = _train(make(), ranks, module=_OtherWeights(), **RUNS["plain"])
    except WorkerFailed as error:
        if isinstance(error.__cause__, RanksDisagree):
            raise BrokenContract(f"{name}: the ranks differ in training. {INITIAL}\n{error}") from error
        raise
    _compare(name, run, plain, ORDER, INITIAL, "equal initial weights")


def _check_manual_optimization(make: Callable[[], Strategy], ranks: int, tolerance: float) -> None:
    """Compare runs with two calls of `backward` in a step, unless the strategy refuses several calls in `setup`."""
    try:
        with _named("manual optimization", STOOD_STILL):
            several = _train(make(), ranks, module=_ManualNetwork())
    except (ValueError, WorkerFailed) as error:
        if isinstance(error.__cause__ or error, ValueError):
            return
        raise
    _compare("manual optimization", several, _train("single", 1, module=_ManualNetwork()), tolerance, MANUAL)


def _check_resuming(make: Callable[[], Strategy], ranks: int, folder: Path, tolerance: float) -> None:
    """Compare a run with runs that resume in the middle of an epoch: from its checkpoint, and from that of one process.

    The checkpoint of the run is resumed on its ranks, in a single process, and on an additional rank.
    """
    path, of_one = folder / "middle.ckpt", folder / "one.ckpt"
    with _named("saved", "state_dict is collective: all ranks have to call the same collectives in it."):
        whole = _train(make(), ranks, callbacks=[SavesAtStep(path, SAVED_AT)])
    with _named("resumed", "load_state_dict is collective: all ranks have to call the same collectives in it."):
        resumed = _train(make(), ranks, ckpt_path=path)
    for name, wanted in whole.weights.items():
        weights = resumed.weights[name]
        if not torch.equal(weights, wanted):
            raise BrokenContract(
                f"resumed: {name} differs by {float((weights - wanted).abs().max()):.3g} from the run without an "
                "interruption. Does state_dict contain all state that a later step depends on, of each rank?"
            )
    alone = _train("single", 1, ckpt_path=path, began_with=ranks)  # a global batch keeps its size
    _compare("a checkpoint, resumed in one process", whole, alone, tolerance)
    alone = _train("single", 1, callbacks=[SavesAtStep(of_one, SAVED_AT)])
    _check_foreign(make, ranks, of_one, 1, alone, tolerance, MISSING_KEYS)
    most = make().traits.max_ranks
    if ranks > 1 and (most is None or most > ranks):
        _check_foreign(make, ranks + 1, path, ranks, alone, tolerance, OTHER_NUMBER)


def _check_foreign(
    make: Callable[[], Strategy], ranks: int, path: Path, saved_on: int, alone: _Run, tolerance: float, hint: str
) -> None:  # fmt: skip
    """Resume on `ranks` ranks from a checkpoint of `saved_on` ranks, unless the strategy refuses it."""
    name = f"a checkpoint of {saved_on} rank{'s' * (saved_on > 1)}, resumed on {ranks} ranks"
    strategy = make()
    try:
        with _named(name, hint):
            run = _train(strategy, ranks, ckpt_path=path, began_with=saved_on)
    except (ValueError, WorkerFailed) as error:
        if _refuses(error, strategy):
            return
        raise BrokenContract(f"{name}: the run failed. {hint}\n{error}") from error
    _compare(name, run, alone, tolerance, hint)


def _check_death(make: Callable[[], Strategy], ranks: int, whole: _Run) -> None:
    """Compare a run with a run of which a rank is killed, unless the latter ends with a clear error."""
    strategy = make()
    try:
        run = _train_with_death(strategy, ranks)
    except WorkerFailed as error:
        if _stood_still(error):
            raise BrokenContract(f"after the death of a rank: the run stood still. {DEATH}\n{error}") from error
        if _refuses(error, strategy):
            return
        if isinstance(error.__cause__, ValueError) or error.__cause__ is None:
            raise BrokenContract(f"after the death of a rank: the run failed. {NO_REASON}\n{error}") from error
        raise
    if not run.failures:
        raise BrokenContract(f"no rank could be killed in the backward of step {KILLED_AT}: is backward never called?")
    hung = [failure for failure in run.failures if ENDED in failure]
    if hung:
        raise BrokenContract(f"after the death of a rank: the run stood still. {DEATH}\n{hung[0]}")
    _compare("after the death of a rank", run, whole, ORDER, DEATH, "these ranks without a death")


def _train_with_death(strategy: Strategy, ranks: int) -> _Run:
    """Train with the death of a rank in the middle; the run may recover once, and ends at a second failure."""
    fault = kill(ranks - 1).during("backward", step=KILLED_AT)
    with tempfile.TemporaryDirectory() as folder:
        if strategy.traits.elastic:
            recovery = _recovery(max_restarts=1, snapshots=False)
        else:
            recovery = _recovery(max_restarts=1, every_n_train_steps=SNAPSHOT_AT)
        return _train(strategy, ranks, callbacks=[recovery, fault], default_root_dir=Path(folder))


def _data(samples: int) -> TensorDataset:
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


class _Network(Module):
    """A network with a hidden layer and fixed initial weights, trained by SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        with _seeded():
            self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class _OtherWeights(_Network):
    """A network with initial weights that differ by rank; rank 0 has the usual weights."""

    def setup(self, stage: str) -> None:
        for parameter in self.parameters():
            parameter.data += 0.1 * self.global_rank


class _ManualNetwork(_Network):
    """A network with a loss and an optimizer for each layer."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, wanted = batch
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        first = nn.functional.mse_loss(self.net[0](inputs).mean(1, keepdim=True), wanted)
        second = nn.functional.mse_loss(self.net[2](self.net[:2](inputs).detach()), wanted)
        self.log("loss", second, on_step=True, on_epoch=True)
        self.manual_backward(first)
        self.manual_backward(second)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[layer].parameters(), lr=0.05, momentum=0.9) for layer in (0, 2)]
