"""The contract suite of callbacks: a resumed run, and a run in which a worker is killed, equal an undisturbed run."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fabricx import checkpoint
from fabricx.core.callback import Callback
from fabricx.core.hooks import check_hooks
from fabricx.testing.broken import BrokenContract
from fabricx.testing.faults import kill
from fabricx.testing.modules import QUIET, SavesAtStep, TinyModule, assert_same_state, tiny_loader
from fabricx.trainer.trainer import Trainer

EPOCHS: Final = 4
SAVED_AT: Final = 7  # of 16 steps: in the second epoch
KILLED_AT: Final = 5


def check_callback(make: Callable[[], Callback], *, ranks: int = 2, **options: Any) -> None:
    """Check that a callback can be sent, saved and resumed, and that it survives the death of a worker.

    It trains `TinyModule` for 16 steps in 4 epochs with a validation each, in worker processes on the CPU; resumes the
    run from a checkpoint in the middle of the second epoch; and kills a worker in the same epoch. Weights, number of
    steps and state of the callback must be equal at the end of all three runs. A callback whose effect depends on time
    breaks this by design.

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
    """Final weights, number of steps, and state of the callback."""

    def __init__(self, trainer: Trainer, module: TinyModule, callback: Callback) -> None:
        self.step = trainer.global_step
        self.state: dict[str, Any] = callback.state_dict()
        self.weights: Tensor = torch.cat([p.detach().flatten() for p in module.parameters()])


def _train(
    callback: Callback, ranks: int, options: Mapping[str, Any], *others: Callback, ckpt_path: Path | None = None
) -> _End:
    module = TinyModule()
    callbacks = [callback, *options.get("callbacks", ()), *others]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trainer = Trainer(max_epochs=EPOCHS, devices=ranks, **{**QUIET, **options, "callbacks": callbacks})
        loader = tiny_loader(8 * ranks, 2, shuffle=True)
        trainer.fit(module, loader, tiny_loader(), ckpt_path=ckpt_path)
    return _End(trainer, module, callback)


def _compare(name: str, run: _End, whole: _End, hint: str) -> None:
    if run.step != whole.step:
        raise BrokenContract(f"{name}: {run.step} steps, and {whole.step} without an interruption. {hint}")
    if not torch.equal(run.weights, whole.weights):
        difference = float((run.weights - whole.weights).abs().max())
        raise BrokenContract(f"{name}: weights differ by {difference:.3g} from a run without an interruption. {hint}")
    try:
        assert_same_state(run.state, whole.state)
    except AssertionError:
        states = f"the state is {run.state}, and {whole.state} without an interruption"
        raise BrokenContract(f"{name}: {states}. {hint}") from None
