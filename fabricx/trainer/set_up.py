"""Execution of a job on a rank: set-up, loop, teardown."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from fabricx.checkpoint import is_foreign, read_manifest
from fabricx.checkpoint.hyperparameters import plain
from fabricx.checkpoint.storage import as_path
from fabricx.consistency import comparison
from fabricx.consistency.shared_settings import OwnSettings
from fabricx.core.callback import Callback, attach
from fabricx.core.datamodule import DataModule
from fabricx.core.hook_calls.hooks import check_hooks, fitted
from fabricx.core.logger import Ending
from fabricx.core.module_state.rng import RandomState, seed_generators
from fabricx.core.rank_zero import set_rank
from fabricx.core.state import Phase, TrainerFn, TrainerStatus
from fabricx.core.strategy_parts import ModelParallel, as_part
from fabricx.data.shared_memory import note_on
from fabricx.distributed.sharding.dtensors import is_dtensor
from fabricx.distributed.world import World
from fabricx.lightning import adapt_callback
from fabricx.loop import asynchronous, evaluation, lockstep
from fabricx.loop.fit import fit
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.metrics.objects import has_first_state, held_metrics
from fabricx.redaction import masked
from fabricx.scratch import set_multiprocessing_folder
from fabricx.session.checkpoint import restore_requested
from fabricx.session.error_notes import notes_on
from fabricx.session.session import Session
from fabricx.telemetry.recorder import NoopRecorder
from fabricx.trainer.factory import checkpoints_last, listed
from fabricx.trainer.logging_set_up import open_loggers, open_telemetry
from fabricx.trainer.module_set_up import check_not_lazy, set_up_evaluation, set_up_module
from fabricx.trainer.result import Outcome, added_layers, holders
from fabricx.trainer.training_set_up import set_up_training

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy
    from fabricx.telemetry.logs import LogSettings
    from fabricx.trainer.interface import TrainerInterface
    from fabricx.trainer.run_request import Job


_JOBS = itertools.count()  # all ranks of a world run the same jobs in the same order


def next_job() -> int:
    """Return the number of the next run in this world; all its processes count the same."""
    return next(_JOBS)


def execute(trainer: TrainerInterface, job: Job, world: World, logs: LogSettings | None = None) -> Outcome:
    """Run a job on this rank, from set-up to teardown.

    Args:
        trainer: this rank's trainer, which hooks receive.
        job: validated.
        world: has joined its process group; a newcomer joins later.
        logs: levels of the loggers of the process that started this worker; None in that process.

    Returns:
        the results of the job, on this rank.
    """
    set_multiprocessing_folder()
    allowed = contextlib.ExitStack()
    if job.copied:  # the caller's own process has them
        allowed.enter_context(torch.serialization.safe_globals(job.safe_globals))
    try:
        session = _build(trainer, job, world)
    except BaseException:
        allowed.close()
        _undo_build(trainer.strategy, trainer.state)
        raise
    ending: Ending = "failed"
    try:
        masked([trainer.configuration, plain(job.module.hparams)])  # registers secrets: logs and errors mask them
        open_telemetry(session, job.stage, logs)
        open_loggers(session, job.stage, trainer.arguments)
        outcome = _set_up(session, job)
        outcome.results = _work(session, job)()
        if session.datamodule is not None:
            fitted(session.datamodule, "teardown", DataModule)(TrainerFn(job.stage))
        _call(session.hooks.teardown, TrainerFn(job.stage))
        if job.stage == "fit" and session.divided:
            _restore_whole(session)
        elif job.stage == "fit" and job.copied:
            _gather_kept(session)
        ending = "interrupted" if session.stop.interrupted else "success"
        return outcome
    except BaseException as error:
        if note := note_on(error, session.data.train_dataloader):
            error.add_note(note)
        for note in notes_on(error, session):
            error.add_note(note)
        # For hooks, which read `trainer.interrupted` and `trainer.state.stage`, also of an error in `setup`:
        trainer.state.status, trainer.state.failing = TrainerStatus.INTERRUPTED, True
        _call(session.hooks.on_exception, error)
        if session.datamodule is not None:
            session.datamodule.on_exception(error)
        raise
    finally:
        trainer.state.failing = False
        allowed.close()
        _close(session, ending)


def _restore_whole(session: Session) -> None:
    """Give the module, its optimizers and callbacks whole weights again; all ranks call it."""
    part = as_part(session.strategy, ModelParallel)
    keeping = [callback for callback in session.callbacks if callback.keeps_weights]
    states = part.whole_state({str(number): callback.state_dict() for number, callback in enumerate(keeping)})
    part.restore_whole(session.module)
    for number, callback in enumerate(keeping):
        callback.load_state_dict(states[str(number)])


def _gather_kept(session: Session) -> None:
    """Give callbacks of the main rank whole tensors of weights, as the caller can't use shards; all ranks call it."""
    if not any(is_dtensor(parameter) for parameter in session.module.parameters()):
        return
    for callback in session.callbacks:
        if callback.keeps_weights:
            whole = apply_to_collection(callback.state_dict(), torch.Tensor, _whole_on_cpu)
            if session.world.main_rank:
                callback.load_state_dict(whole)


def _whole_on_cpu(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor().cpu() if is_dtensor(tensor) else tensor
    return whole


def _call(hook: tuple[Callable[..., Any], ...], *args: Any) -> None:
    for function in hook:
        function(*args)


def _load_weights(session: Session) -> None:
    """Load the weights to evaluate from the checkpoint; without a checkpoint, copy rank 0's weights to all ranks."""
    restore_requested(session, weights_only=True)
    if session.checkpoints.ckpt_path is None:
        if session.world.size > 1:
            check_not_lazy(session.module)
        comparison.share_weights(session.world, session.module)


def _predict(session: Session, job: Job) -> list[Any]:
    if _has_no_batch(session):
        return []
    _load_weights(session)
    by_loader = [
        session.world.axis("metrics").gather_objects(outputs)
        for outputs in evaluation.predict(session, session.data.val_feeds, keep=job.flag)
    ]
    ordered = [evaluation.in_dataset_order(by_rank) for by_rank in by_loader]
    return ordered if session.data.several_loaders else ordered[0]


def _has_no_batch(session: Session) -> bool:
    """Return whether no rank has a batch to evaluate: a limit is 0, or loaders are empty; then no hook is called."""
    feeds = session.data.val_feeds
    empty = not any(feed.batches() for feed in feeds)
    if all(feed.exact_position for feed in feeds):
        return empty
    return all(session.world.gather_objects(empty))  # ranks whose loaders have lengths of their own


def _evaluate(session: Session, job: Job) -> list[dict[str, float]]:
    if _has_no_batch(session):
        return []
    _load_weights(session)
    results = evaluation.evaluate(
        session, Phase.VALIDATE if job.stage == "validate" else Phase.TEST, session.data.val_feeds
    )
    if job.flag and session.world.main_rank:
        session.print(table(results, job.stage))
    return results


def _work(session: Session, job: Job) -> Callable[[], Any]:
    """Return the function that executes a job; for `fit`, the synchronous or the asynchronous training loop."""
    if job.stage == "fit":
        batches = lockstep if session.strategy.traits.lockstep else asynchronous
        return functools.partial(fit, session, batches.train_batches)
    return functools.partial(_predict if job.stage == "predict" else _evaluate, session, job)


def table(results: list[dict[str, float]], title: str) -> str:
    """Return the results of an evaluation as lines of text.

    Args:
        results: metrics of each loader, by name.
        title: first line, without the colon.
    """
    names = list(dict.fromkeys(name for metrics in results for name in metrics))
    width = max([len(name) for name in names] + [len(title)])
    rows = [f"  {n:<{width}}  " + "  ".join(f"{m[n]:>12.6g}" if n in m else " " * 12 for m in results) for n in names]
    return "\n".join([f"{title}:", *(rows or ["  (nothing was logged)"])])


def _build(trainer: TrainerInterface, job: Job, world: World) -> Session:
    """Build the parts of a run that exist before the first hook, in the order of `core/hooks.md`."""
    module, datamodule, strategy, state = job.module, job.datamodule, trainer.strategy, trainer.state
    world = as_part(strategy, ModelParallel).with_axes(dataclasses.replace(world, job=next_job()))
    strategy.enter(world, module)
    set_rank(world.rank)
    shares = world.axis("data").size
    state.ranks = (ranks_that_began(job) if job.began_with is None else job.began_with) or state.ranks or shares
    state.shared_by = shares
    _seed(state, world, job.random)
    trainer.attach(module, datamodule)
    trainer.callbacks = _with_module_callbacks(trainer.callbacks, module)
    for callback in trainer.callbacks:
        attach(callback, module)
    session = trainer.new_session(
        job.stage, (job.train, job.evaluate), module, datamodule, world, strategy, writes=trainer.writes
    )  # fmt: skip
    trainer.begin_session(session, fits=job.stage == "fit")
    session.undo.append(_set_backend_flags(trainer))
    if trainer.stop.requested and job.stage == "fit":  # by a signal, since the run was started
        session.stop_requests.request(trainer.stop.reason)
    return session


def _set_up(session: Session, job: Job) -> Outcome:
    """Set up a run from its first hook on, in the order of `core/hooks.md`; return the layers that hooks add."""
    known = {name for name, _ in session.module.named_modules(remove_duplicate=False)}
    for owner in (session.datamodule, session.module):
        if owner is not None and not session.world.newcomer and _prepares(owner, session.world):
            owner.prepare_data()
    session.world.barrier()
    if session.datamodule is not None:
        fitted(session.datamodule, "setup", DataModule)(TrainerFn(job.stage))
    _call(session.hooks.setup, TrainerFn(job.stage))
    filled = job.ckpt_path is not None or session.world.newcomer
    with session.sharding.init_context(filled=filled) if job.stage == "fit" else contextlib.nullcontext():
        session.module.configure_model()
    outcome = added_layers(session.module, known) if job.copied and session.world.main_rank else Outcome()
    fits = job.stage == "fit"
    set_up_module(session, job.ckpt_path, trusted=job.trusted, fits=fits)
    _seed_training(session.state, session.world)
    session.checkpoints.key = job.key
    if job.copied and not has_first_state(session.world, fits=fits):  # the ranks' states are summed
        for metric in held_metrics(holders(session.module, session.callbacks)).values():
            metric.reset()
    if fits:
        set_up_training(session)
    else:
        set_up_evaluation(session)
    return outcome


def ranks_that_began(job: Job) -> int:
    """Return the number of ranks with which the run of a checkpoint began; 0 without a checkpoint or without a record.

    It determines the length of an epoch, which the schedules of the optimizers need before the checkpoint is loaded.

    Args:
        job: its path of a checkpoint is resolved.
    """
    if job.stage != "fit" or job.ckpt_path is None or is_foreign(job.ckpt_path):
        return 0
    return int(read_manifest(as_path(job.ckpt_path)).get("ranks", 0))


def _prepares(owner: Module | DataModule, world: World) -> bool:
    """Return whether `prepare_data` runs on this rank: by default on a rank of each machine."""
    return world.local_rank == 0 if getattr(owner, "prepare_data_per_node", True) else world.main_rank


def _seed(state: RunState, world: World, of_caller: Any) -> None:
    """Share the seed of the data order, and random states for the set-up, with all ranks.

    Hooks of the set-up, and methods that create loaders, may draw random numbers (`random_split`): all ranks draw the
    numbers of a single process, so that they have the same data. The training has other numbers: `_seed_training`.

    Args:
        state: position of the run.
        world: the ranks.
        of_caller: packed random states of the calling process; None if this process executes the script.
    """
    state.seed = world.broadcast_object(state.seed)
    if of_caller is not None:
        seed_generators(state.seed % 2**32)  # also on devices
        RandomState.unpacked(of_caller).restore()
    if world.size > 1:
        RandomState.of(world.broadcast_object(RandomState().state_dict())).restore()


def _seed_training(state: RunState, world: World) -> None:
    """Seed random generators by the share of the data: ranks that compute a share together draw the same numbers."""
    data = world.axis("data")
    if data.size > 1:
        seed_generators((state.seed + data.rank) % 2**32)


def _set_backend_flags(options: TrainerOptions) -> Callable[[], None]:
    """Set the global flags of torch that the options of the run require; return a function that restores these."""
    undo = contextlib.ExitStack()
    if options.detect_anomaly:
        undo.callback(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled())
        torch.autograd.set_detect_anomaly(True)
    if options.deterministic:
        before, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        undo.callback(torch.use_deterministic_algorithms, before, warn_only=warns)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=options.deterministic == "warn")
    if options.benchmark is not None:
        undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = options.benchmark
    return undo.close


def _with_module_callbacks(callbacks: list[Callback], module: Module) -> list[Callback]:
    """Return the callbacks, with those of the module in place of callbacks of the same class or a base class of it."""
    added = listed(module.configure_callbacks())
    for callback in added:
        adapt_callback(callback)
        check_hooks(callback)
    replaced = tuple({type(other) for other in callbacks} - {Callback})
    replaced = tuple(cls for cls in replaced if any(isinstance(callback, cls) for callback in added))
    return checkpoints_last([*(other for other in callbacks if type(other) not in replaced), *added])


def _undo_build(strategy: Strategy, state: RunState) -> None:
    """Release what an unfinished `_build` has set up."""
    strategy.teardown()
    state.phase = Phase.IDLE


def _close(session: Session, ending: Ending) -> None:
    """Release all resources of the run, also after an error."""
    try:
        with _attempt_all() as attempt:
            attempt(session.stop_requests.close)
            attempt(session.checkpoints.close)
            for undo in session.undo:
                attempt(undo)
            attempt(functools.partial(session.metrics.loggers.close, ending))
            attempt(functools.partial(session.recorder.close, ending))
            attempt(session.strategy.teardown)
    finally:
        session.metrics.loggers, session.recorder = LoggerDispatcher(), NoopRecorder()
        session.settings_check = OwnSettings()
        session.running = False
        session.state.phase = Phase.IDLE
        session.metrics.collect(None)


@contextlib.contextmanager
def _attempt_all() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Yield a function that runs an action and keeps its error; at the end, raise the first error."""
    errors: list[BaseException] = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            errors.append(error)

    yield attempt
    if errors:
        raise errors[0]
