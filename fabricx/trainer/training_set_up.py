"""Set-up of training on a rank: data, options, strategy and optimizers, compared with the other ranks."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from torch import nn

from fabricx.checkpoint import is_foreign, read_manifest
from fabricx.consistency import comparison
from fabricx.core.optimizers import OptimizerHandle, need_metrics_each_step, needs_closure, parse_optimizers
from fabricx.core.strategy_parts import ModelParallel, as_part
from fabricx.core.strategy_support.gradient_checks import SPARSE_CLIPPED, sparse_tables
from fabricx.core.strategy_support.held_gradients import KeptGradients
from fabricx.data.advice import advise_on_length, advise_on_logging
from fabricx.distributed.statistics.sync_batchnorm import synchronised
from fabricx.fault_tolerance import recovery
from fabricx.fault_tolerance.rollback import former_layout
from fabricx.loop import manual_optimization
from fabricx.loop.user_steps import call_method, step_optimizer
from fabricx.metrics.objects import metric_objects
from fabricx.session.accumulation import accumulation_set
from fabricx.session.checkpoint import load_imported_weights
from fabricx.session.unregistered_parameters import check_registered, warn_of_layers
from fabricx.trainer.module_set_up import check_not_lazy
from fabricx.trainer.trial import trial_of

if TYPE_CHECKING:
    from fabricx.session.session import Session


def set_up_training(session: Session) -> None:
    """Set up the parts of a fit, in the order of `core/hooks.md`, with its module on the device and its data loaded.

    Args:
        session: after `set_up_module`.

    Raises:
        RanksDisagree: on all ranks: options, module, data or optimizers differ between the ranks.
        ValueError: an option, the data or an optimizer does not fit the module or the strategy.
    """
    if session.world.main_rank and not session.options.fast_dev_run:
        advise_on_length(session.options.length_given, session.options.max_epochs)
        advise_on_logging(session.data.batches.training, session.options.log_every_n_steps, session.loggers)
    _check_samples_of_all_ranks(session)
    if session.strategy.traits.max_ranks != 1:
        check_not_lazy(session.module)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    session.recorder.update_attributes(
        loader_processes=session.data.train_feed.processes, cores=max(1, cores // max(1, session.world.local_size))
    )
    session.fault_tolerance = recovery.set_up(session)
    _check_options(session)
    comparison.compare_at_set_up(
        session.world,
        "training",
        comparison.of_training(session.options, session.module, session.strategy, session.callbacks)
        | comparison.of_module(session.module)
        | comparison.of_data(session.data.train_feed, session.data.val_feeds),
    )
    _set_up_strategy(session)
    session.wrap_steps(fits=True)
    session.metrics.begin(session.weigh)
    session.metrics.collect(None)
    _set_up_optimizers(session)
    session.share_settings()
    session.metrics.loggers.each(lambda logger: logger.log_graph(session.module))


def _set_up_strategy(session: Session) -> None:
    """Load weights, and distribute the module over the ranks."""
    module, strategy = session.module, session.strategy
    several_backwards = not module.automatic_optimization
    if any(parameter.is_meta for parameter in module.parameters()):  # the strategy creates these when it shards
        strategy.setup(module, several_backwards=several_backwards)
        load_imported_weights(session)
        return
    load_imported_weights(session)
    trial = functools.partial(trial_of, session)
    as_part(strategy, ModelParallel).parallelize(module, trial, _former_layout(session))
    strategy.setup(module, several_backwards=several_backwards)


def _former_layout(session: Session) -> dict[str, Any]:
    """Return how the run that continues divided the module; {} without a checkpoint, also in memory, or a division."""
    path = session.checkpoints.ckpt_path
    if session.world.newcomer:  # the checkpoint may be deleted already
        return {}
    if path is None or is_foreign(path):
        return former_layout(session.world) if session.world.divided else {}
    return dict(read_manifest(path).get("layout") or {})


def _set_up_optimizers(session: Session) -> None:
    """Create the optimizers, compare them with the other ranks, and attach them to the strategy."""
    module = session.module
    optimizers, schedules = parse_optimizers(module.configure_optimizers(), manual=not module.automatic_optimization)
    if not optimizers:
        session.warn_once("no optimizer", "configure_optimizers returned no optimizer, so no weight will change")
    check_registered(session, optimizers)
    warn_of_layers(session, optimizers)
    session.optimizers += optimizers
    session.lr_schedulers += schedules
    comparison.compare_at_set_up(session.world, "optimizers", comparison.of_optimizers(module, optimizers, schedules))
    session.overridden.metrics_each_step = need_metrics_each_step(schedules, session.strategy)
    session.overridden.closures = frozenset(id(optimizer) for optimizer in optimizers if needs_closure(optimizer))
    if session.overridden.closures and (accumulates := accumulation_set(session.options, session.callbacks)):
        raise ValueError(
            f"{accumulates}: an optimizer that computes the loss several times, such as LBFGS, supports only one batch "
            "per update; remove it and set a larger batch_size"
        )
    if not session.strategy.traits.lockstep:
        has_buffers = next(module.buffers(), None) is not None
        session.dealer.keeps_state = has_buffers or bool(metric_objects(module))
    session.strategy.attach_optimizers(session.optimizers)
    session.checks.guard_weights(session.hooks)
    step, called = functools.partial(step_optimizer, session), functools.partial(call_method, session)
    session.optimizer_handles += [
        OptimizerHandle(optimizer, step, module.toggled_optimizer, called) for optimizer in optimizers
    ]
    if not module.automatic_optimization:
        manual_optimization.watch_gradients(session)
    elif session.overridden.optimizer_zero_grad and not session.serving.servers_step:
        session.user_steps.kept = KeptGradients(session.optimizers)
        session.undo.append(session.user_steps.kept.close)


def _check_options(session: Session) -> None:
    """Refuse options that the module or the strategy does not support, before training."""
    options = session.options
    as_part(session.strategy, ModelParallel).check_options(
        precision=options.precision, compiles=bool(options.compile), synchronises_batchnorm=options.sync_batchnorm,
        automatic_optimization=session.module.automatic_optimization,
    )  # fmt: skip
    if not session.module.automatic_optimization:
        manual_optimization.check_options(session)
    if (
        session.options.gradient_clip_val is not None
        and session.options.gradient_clip_algorithm != "value"
        and session.serving.norm_clipping_refused
    ):
        raise ValueError(session.serving.norm_clipping_refused)
    if session.overridden.batch_weight and session.world.size > 1 and session.strategy.batch_weight_refused:
        raise ValueError(session.strategy.batch_weight_refused)
    accumulates = accumulation_set(session.options, session.callbacks)
    if accumulates and session.world.axis("data").size > 1 and session.strategy.accumulation_refused:
        raise ValueError(f"{accumulates}: {session.strategy.accumulation_refused}")
    _check_normalised_rows(session)
    clips = session.options.gradient_clip_val is not None and not session.overridden.configure_gradient_clipping
    if clips and sparse_tables(session.module):
        raise ValueError(SPARSE_CLIPPED)


def _check_normalised_rows(session: Session) -> None:
    """Refuse embeddings with `max_norm` if a forward doesn't look up all rows of the global batch."""
    if session.strategy.step_ranks.size == 1 and not session.serving.servers_step:
        return
    for name, part in session.module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise ValueError(
                f"{name} has max_norm, so its forward changes the rows that a rank looks up, and ranks would hold "
                "different weights: remove max_norm, and scale the vectors after the lookup"
            )


def _check_samples_of_all_ranks(session: Session) -> None:
    """Refuse data with a batch in which a rank has no sample, if the forward is a collective of all ranks."""
    if session.world.size == 1 or session.world.newcomer or not synchronised(session.module):
        return
    if session.data.train_feed.leaves_out(session.options.accumulate_grad_batches):
        remedy = "set drop_last=True on the DataLoader, or another batch_size"
        if not session.data.train_feed.exact_position:
            remedy = "set limit_train_batches to a number of batches that every rank has"
        raise ValueError(
            "SyncBatchNorm needs a sample on each rank in each batch, and at the end of an epoch some of "
            f"{session.world.size} ranks may have none: {remedy}"
        )
