"""The contract suite of callbacks: a resumed run, and a run in which a worker is killed, equal an undisturbed run."""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fabricx import checkpoint
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.hooks import check_hooks
from fabricx.core.module_state.rng import RandomState, random_kept, seed_generators
from fabricx.errors import RanksApart, RanksDisagree, WorkerFailed
from fabricx.testing.broken import BrokenContract
from fabricx.testing.faults import kill
from fabricx.testing.modules import QUIET, SavesAtStep, TinyModule, assert_same_state, tiny_loader
from fabricx.trainer.trainer import Trainer

EPOCHS: Final = 4
SAVED_AT: Final = 7  # of 16 steps: in the second epoch
KILLED_AT: Final = 5
ROUNDING: Final = 1e-4  # of sums in another order
UNEVEN: Final = 13  # samples: 3 whole global batches of 4, and a sample on rank 0
NO_SAMPLE: Final = (
    "A rank without a sample of a batch omits the hooks of that batch: call collectives in on_before_optimizer_step or "
    "on_train_epoch_end, on all ranks."
)
ONE_RANK: Final = (
    "If a single rank requests a stop (trainer.should_stop), all ranks stop at this step or the next: runs then differ "
    "by a step, and this check cannot compare them. Request the stop on all ranks."
)
WEIGHTED: Final = (
    "The last batch has one sample, on rank 0 only: are means over batches or ranks weighted by the number of samples?"
)


def check_callback(make: Callable[[], Callback], *, ranks: int = 2, **options: Any) -> None:
    """Check that a callback can be sent, saved and resumed, and that it survives the death of a worker.

    It trains `TinyModule` for 16 steps in 4 epochs with a validation each, in worker processes on the CPU; resumes the
    run from a checkpoint in the middle of the second epoch; and kills a worker in the same epoch. Weights, number of
    steps and state of the callback must be equal at the end of all three runs. A callback whose effect depends on time
    breaks this by design, and so does a stop that a single rank requests, which may take effect a step later.

    In a last run, on two ranks, one rank has no sample of the last batch of each epoch: it must end, and, if the
    callback draws no random numbers and the strategy is synchronous, equal a run of a single process on the same global
    batches, in which metrics and numbers of the state may differ by rounding.

    Args:
        make: returns a new callback.
        ranks: number of ranks, 2 or more.
        **options: further arguments of the Trainer.

    Raises:
        BrokenContract: the callback breaks the contract. Errors of a run pass: a hook that is misspelt, for example.
    """
    _check_state(make)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "middle.ckpt"
        whole = _train(make(), ranks, options, SavesAtStep(path, SAVED_AT))
        if path.exists():  # the callback has not ended the run before
            hint = "Does state_dict contain all state that later hooks depend on?"
            _compare("resumed from a checkpoint", _train(make(), ranks, options, ckpt_path=path), whole, hint)
    fault = kill(ranks - 1).during("backward", step=KILLED_AT)
    hint = "The interrupted batch is repeated: does a second call of on_train_batch_start change the state?"
    _compare("after the death of a worker", _train(make(), ranks, options, fault), whole, hint)
    _check_uneven(make, options)


def _check_state(make: Callable[[], Callback]) -> None:
    callback = make()
    check_hooks(callback)
    copy = pickle.loads(pickle.dumps(callback))  # it is sent to each worker
    if copy.state_key != callback.state_key:
        raise BrokenContract(
            f"state_key is {callback.state_key!r}, and {copy.state_key!r} in a worker. Does it depend on more than the "
            "arguments of the constructor?"
        )
    state, again = callback.state_dict(), make()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "state", {"callback": state}, {})  # refuses other than plain data
        again.load_state_dict(checkpoint.load(Path(folder) / "state")["callback"])
    if again.state_dict().keys() != state.keys():
        raise BrokenContract(
            f"state_dict has {[*state]}, and {[*again.state_dict()]} after load_state_dict. Does load_state_dict "
            "restore every entry?"
        )


class _End:
    """Final weights, number of steps, metrics, random state, and state of the callback."""

    def __init__(self, trainer: Trainer, module: TinyModule, callback: Callback) -> None:
        self.synchronous = trainer.strategy.traits.synchronous
        self.random = RandomState()
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.step = trainer.global_step
        self.state: dict[str, Any] = callback.state_dict()
        self.weights: Tensor = torch.cat([p.detach().flatten() for p in module.parameters()])


def _train(
    callback: Callback, ranks: int, options: Mapping[str, Any], *others: Callback, ckpt_path: Path | None = None,
    data: DataLoader[Any] | None = None,
) -> _End:  # fmt: skip
    module = TinyModule()
    callbacks = [callback, *options.get("callbacks", ()), *others]
    with random_kept():
        seed_generators(0)
        trainer = Trainer(max_epochs=EPOCHS, devices=ranks, **{**QUIET, **options, "callbacks": callbacks})
        loader = data or tiny_loader(8 * ranks, 2, shuffle=True)
        trainer.fit(module, loader, tiny_loader(), ckpt_path=ckpt_path)
        return _End(trainer, module, callback)


def _check_uneven(make: Callable[[], Callback], options: Mapping[str, Any]) -> None:
    """Compare a run whose last batches have a sample on rank 0 only with a run of a single process."""
    name = "a rank without a sample"
    try:
        run = _train(make(), 2, options, data=tiny_loader(UNEVEN, 2))
    except WorkerFailed as error:
        if isinstance(error.__cause__, (RanksApart, RanksDisagree)) or "different collectives" in str(error):
            raise BrokenContract(f"{name}: the ranks are in different collectives. {NO_SAMPLE}\n{error}") from error
        raise
    if not run.synchronous:
        return
    one_process = {**options, "strategy": "single"}
    alone, bare = (_train(c, 1, one_process, data=tiny_loader(UNEVEN, 4)) for c in (make(), Callback()))
    if alone.random.differs(bare.random):  # numbers that differ by rank
        return
    if run.step != alone.step:
        raise BrokenContract(f"{name}: steps on several ranks: {run.step}; in one process: {alone.step}. {WEIGHTED}")
    for what in ("weights", "metrics", "state"):
        ours, wanted = getattr(run, what), getattr(alone, what)
        if not _close(ours, wanted):
            raise BrokenContract(f"{name}: {what} on several ranks: {ours}; in one process: {wanted}. {WEIGHTED}")


def _close(actual: Any, expected: Any) -> bool:
    """Return whether two states of tensors and plain data differ by rounding at most."""
    if isinstance(actual, Tensor):
        return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=ROUNDING, atol=ROUNDING)
    if isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(_close(actual[key], expected[key]) for key in actual)
    if isinstance(actual, (list, tuple)):
        return len(actual) == len(expected) and all(map(_close, actual, expected))
    if isinstance(actual, float):
        both_nan = math.isnan(actual) and math.isnan(expected)
        return both_nan or math.isclose(actual, expected, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(actual == expected)


def _compare(name: str, run: _End, whole: _End, hint: str) -> None:
    if run.step != whole.step:
        by_one = f" {ONE_RANK}" if abs(run.step - whole.step) == 1 else ""
        raise BrokenContract(
            f"{name}: steps of the resumed run: {run.step}; without an interruption: {whole.step}. {hint}{by_one}"
        )
    if not torch.equal(run.weights, whole.weights):
        difference = float((run.weights - whole.weights).abs().max())
        raise BrokenContract(f"{name}: weights differ by {difference:.3g} from a run without an interruption. {hint}")
    try:
        assert_same_state(run.state, whole.state)
    except AssertionError:
        states = f"the state is {run.state}, and {whole.state} without an interruption"
        raise BrokenContract(f"{name}: {states}. {hint}") from None
