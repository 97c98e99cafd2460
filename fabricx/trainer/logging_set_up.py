"""Records of a run on a rank: telemetry, loggers, the arguments of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fabricx.checkpoint.hyperparameters import plain, without_origin
from fabricx.core.options.arguments import described
from fabricx.core.strategy_parts import MeasuresWaiting, as_part
from fabricx.errors import DifferentValues, full_disk_costs
from fabricx.metrics.logger_dispatcher import LoggerDispatcher
from fabricx.redaction import masked
from fabricx.telemetry import events as telemetry
from fabricx.telemetry.recorder import Results, open_recorder
from fabricx.trainer import provenance

if TYPE_CHECKING:
    from pathlib import Path

    from fabricx.core.datamodule import DataModule
    from fabricx.core.module import Module
    from fabricx.session.session import Session
    from fabricx.telemetry.logs import LogSettings


def open_telemetry(session: Session, stage: str, logs: LogSettings | None) -> None:
    """Open the telemetry of this rank, if the run writes files; an evaluation records only its results.

    Args:
        session: without a recorder.
        stage: "fit", "validate", "test" or "predict".
        logs: levels of the loggers of the process that started this worker, if any.
    """
    if not session.writes or not session.options.enable_telemetry or session.run_dir is None:
        return
    if stage != "fit":
        if stage != "predict" and session.world.main_rank and (session.run_dir / telemetry.FOLDER).is_dir():
            with full_disk_costs("the records of the results"):
                session.recorder = Results(session.run_dir)
    else:
        attributes = {
            "strategy": type(session.strategy).__name__, "servers": session.serving.servers,
            "synchronous": session.strategy.traits.synchronous,
            "device": str(session.world.device), "precision": session.options.precision,
            "attempt": session.state.attempt,
        }  # fmt: skip
        waiting = as_part(session.strategy, MeasuresWaiting)
        with full_disk_costs("the records of this rank"):
            session.recorder = open_recorder(session.run_dir, session.world, waiting, logs, **attributes)


def open_loggers(session: Session, stage: str, arguments: Mapping[str, Any]) -> None:
    """Open the loggers on the main rank, and record command, arguments and hyperparameters of a training run.

    Args:
        session: session, which has its recorder.
        stage: "fit", "validate", "test" or "predict"; predictions are not logged.
        arguments: arguments of the Trainer, as far as they differ from the defaults.
    """
    if stage == "predict" or not session.world.main_rank or session.options.fast_dev_run:
        return
    assert session.run_dir is not None
    records = stage == "fit" and session.writes
    if session.loggers or records:
        session.run_dir.mkdir(parents=True, exist_ok=True)
    session.metrics.loggers = LoggerDispatcher(
        session.loggers, session.run_dir, session.recorder, recovers=stage == "fit"
    )
    params = _hparams_to_log(session.module, session.datamodule) if stage == "fit" else {}
    if records:
        _record_arguments(session, session.run_dir, arguments)
    if params and session.options.enable_autolog_hparams:
        session.metrics.loggers.each(lambda logger: logger.log_hyperparams(masked(params)))


def _record_arguments(session: Session, run_dir: Path, arguments: Mapping[str, Any]) -> None:
    """Write command, versions and arguments to the run's folder, and log them."""
    provenance.write(run_dir, None)
    recorded: dict[str, Any] = {"trainer": arguments}
    for name, owner in (("module", session.module), ("datamodule", session.datamodule)):
        if owner is not None:
            recorded[name] = {"class": type(owner).__name__, **described(owner.hparams)}
    provenance.write_arguments(run_dir, recorded)
    for name in ("config.yaml", "arguments.yaml", "command.txt"):
        if (file := run_dir / name).is_file():
            text = (file.stem, file.read_text())
            session.metrics.loggers.each(lambda logger, text=text: logger.log_text(*text))  # type: ignore[misc]


def _hparams_to_log(module: Module, data: DataModule | None) -> dict[str, Any]:
    """Return the hyperparameters of the module and the data module as plain data.

    Raises:
        ValueError: they have different values of one name.
    """
    owners = [owner for owner in (module, data) if owner is not None]
    logged = [without_origin(plain(owner.hparams)) for owner in owners if owner.__dict__.get("_log_hyperparams")]
    for name in sorted(set.intersection(*map(set, logged))) if len(logged) > 1 else ():
        if logged[0][name] != logged[1][name]:
            raise DifferentValues(
                f"the module and the data module have different hyperparameters {name!r}: {logged[0][name]!r} and "
                f"{logged[1][name]!r}. Rename one of them, or call save_hyperparameters(logger=False) in one of them"
            )
    return {name: value for hparams in logged for name, value in hparams.items()}
