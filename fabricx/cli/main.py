"""The command `fabricx`. Importing this module does not import torch, which would delay short commands."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricx.cli import completion
from fabricx.errors import ALL_FRAMES, WorkerFailed, did_you_mean
from fabricx.redaction import masked_command, masked_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fabricx.trainer.trainer import Trainer

_LOG: Final = logging.getLogger(__name__)  # to fabricx.log in the folder of the run
STAGES = ("fit", "validate", "test", "predict")
COMMANDS = (*STAGES, "plan", "simulate", "resume", "scale", "report", "status", "checkpoint", "doctor")
_SETTINGS: Final = "[GROUP=CHOICE ...] [KEY=VALUE ...]"
USAGE: Final = {
    "fit": f"""\
fabricx fit {_SETTINGS}

Train; without settings, on handwritten digits in a single process.
GROUP=CHOICE selects a choice of a group, KEY=VALUE sets a value.

  fabricx fit strategy=ddp trainer.devices=2        the same in two processes
  fabricx fit experiment=charlm trainer.max_epochs=3         other experiment
  fabricx fit --multirun module.lr=0.01,0.001            a run for each value
  fabricx fit module._target_=my_project.Net module.hidden=3  your own module
  fabricx fit ckpt_path=last        a new run that continues a checkpoint
  fabricx fit --cfg job             print the configuration, and exit
  fabricx fit --config-dir conf     your own groups, from a folder
""",
    "plan": f"""\
fabricx plan {_SETTINGS}

Print how a mesh divides the module, without training: the parts of layers
and blocks, each rank's weights, and predicted memory and idle time. The
settings are those of `fabricx fit`; the training step runs on two samples.

  fabricx plan strategy=pipeline trainer.devices=4
  fabricx plan strategy=mesh strategy.tensor=2 strategy.pipeline=2 trainer.devices=4
""",
    "validate": f"""\
fabricx validate ckpt_path=PATH {_SETTINGS}

Run the module's validation loop with the weights of a checkpoint, and print
its metrics. No weights change. Module and data are those of the settings.

  fabricx validate ckpt_path=last                      of the newest run
  fabricx validate ckpt_path=runs/.../checkpoints/last.ckpt
  fabricx validate ckpt_path=last trainer.limit_val_batches=10
  fabricx validate ckpt_path=none       the initial weights of the module
""",
    "test": f"""\
fabricx test ckpt_path=PATH {_SETTINGS}

Run the module's test loop with the weights of a checkpoint, and print its
metrics. No weights change. Module and data are those of the settings.

  fabricx test ckpt_path=last                          of the newest run
  fabricx test ckpt_path=runs/.../checkpoints/last.ckpt trainer.devices=2
  fabricx test ckpt_path=none           the initial weights of the module
""",
    "predict": f"""\
fabricx predict ckpt_path=PATH {_SETTINGS}

Write the predictions of a checkpoint, in the order of the data, to
predictions.pt in the run's folder (read it with torch.load).

  fabricx predict ckpt_path=last                       of the newest run
  fabricx predict ckpt_path=runs/.../checkpoints/last.ckpt trainer.devices=2
""",
}
RESUME_HELP = """\
fabricx resume RUN_DIR [KEY=VALUE ...]

Continue a run in its folder from its newest checkpoint, with its configuration.
KEY=VALUE changes the configuration; the changes are printed, and recorded in
the folder as config-resumed-1.yaml and command-resumed-1.txt.

  fabricx resume runs/2026-01-31_12-00-00-abcdef
  fabricx resume runs/2026-01-31_12-00-00-abcdef trainer.max_epochs=20
  fabricx resume runs/2026-01-31_12-00-00-abcdef trainer.devices=4 strategy=ddp

The number of ranks may change: the global batches stay the same. Optimizers
continue with the learning rates of the checkpoint.
"""
DOCTOR_HELP = """\
fabricx doctor

Print versions, devices, communication backends, and the time of an all-reduce
between two processes. Include its output in a bug report.
"""
SCALE_HELP = """\
fabricx scale RUN_DIR WORKERS

Change the number of workers of a run in progress, at its next step: the
global batches stay the same. Call it on the machine of the run; the run
prints a message when the workers train.

  fabricx scale runs/2026-01-31_12-00-00-abcdef 3
"""
HELP = """\
fabricx: training for PyTorch, distributed by a single setting

  fabricx fit         train; without arguments, on handwritten digits
  fabricx validate    validate a checkpoint
  fabricx test        test a checkpoint
  fabricx predict     write a checkpoint's predictions to predictions.pt
  fabricx plan        print how a mesh divides the module, without training
  fabricx simulate    predict the step of a transformer on many devices
  fabricx resume      continue a stopped run
  fabricx scale       change the number of workers of a run in progress
  fabricx report      report a run as tables and an HTML page; compare a sweep
  fabricx status      print the ranks of a run, with their last heartbeats
  fabricx checkpoint  list, verify, export and import checkpoints
  fabricx doctor      print versions, devices and a communication test

Try:
  fabricx fit strategy=ddp trainer.devices=2
  fabricx test ckpt_path=last
  fabricx resume runs/2026-01-31_12-00-00-abcdef trainer.max_epochs=20
  fabricx report runs/2026-01-31_12-00-00-abcdef
  fabricx fit --help       all groups and keys; COMMAND --help for the others
"""


def main() -> None:
    """Run the command in the first argument of the command line.

    Raises:
        SystemExit: the command is unknown, or has failed; with its exit code.
    """
    try:
        _main(sys.argv[1:])
    except KeyboardInterrupt:  # before a run handles Ctrl-C: most of a second, while libraries are imported
        if os.environ.get(ALL_FRAMES):
            raise
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except PermissionError as error:
        if os.environ.get(ALL_FRAMES):
            raise
        text = f"{error.filename}: {error.strerror}" if error.filename else error
        print(f"error: {text}", file=sys.stderr)
        raise SystemExit(1) from None


def _main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(HELP)
        return
    command = arguments[0]
    if any(flag in arguments for flag in completion.FLAGS):
        completion.main(arguments, COMMANDS, (*STAGES, "plan"))
        return
    if command == "--version":
        from fabricx import __version__

        print(f"fabricx {__version__}")
        return
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        print(f"error: there is no command {command!r}.{hint}\n  known: {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(1)
    if command == "doctor":
        if arguments[1:] and arguments[1] not in ("-h", "--help"):
            print(f"error: fabricx doctor takes no arguments, but got: {shlex.join(arguments[1:])}", file=sys.stderr)
            raise SystemExit(1)
        if arguments[1:]:
            print(DOCTOR_HELP)
            raise SystemExit(0)
        from fabricx.cli.doctor import examine

        raise SystemExit(examine())
    if command == "checkpoint":
        from fabricx.checkpoint.command import main as checkpoint_command

        raise SystemExit(checkpoint_command(arguments[1:]))
    if command in ("report", "status"):
        from fabricx.telemetry.command import main as telemetry_command

        raise SystemExit(telemetry_command(command, arguments[1:]))
    if command == "simulate":
        from fabricx.cli.simulate import main as simulate_command

        raise SystemExit(simulate_command(arguments[1:]))
    if command == "scale":
        raise SystemExit(_scale(arguments[1:]))
    if command == "resume":
        raise SystemExit(_resume(arguments[1:]))
    _run(command, arguments[1:])


def _run(command: str, arguments: list[str]) -> None:
    from fabricx.cli.hydra_app import run_app
    from fabricx.cli.mistakes import unread_keys
    from fabricx.config import plain
    from fabricx.scratch import private_folder

    interrupted: list[bool] = []

    def task(cfg: DictConfig) -> Any:
        for key in unread_keys(cfg, arguments):
            print(f"note: nothing reads the key {key}, which the command line adds", file=sys.stderr)
        if command == "plan":
            return _plan(plain(cfg))
        stopped, value = run(command, plain(cfg))
        if not arguments and command == "fit":
            print(
                "\nNext: fabricx fit strategy=ddp trainer.devices=2    fabricx fit module.lr=0.01    fabricx fit --help"
            )
        if stopped:
            interrupted.append(True)
            raise SystemExit(130)
        return value

    with private_folder() if command == "plan" else contextlib.nullcontext("") as folder:
        hidden = [f"hydra.run.dir={folder}"] if folder else []
        run_app(task, [*_demonstration(arguments), *arguments, *hidden], None, "config", USAGE[command])


def _plan(config: dict[str, Any]) -> None:
    """Set up a fit that makes no step, and leaves no files: a mesh prints how it divides the module."""
    from fabricx.config import build, check_settings

    off = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "enable_telemetry"), False
    )
    config = {**config, "logger": {}, "callbacks": {}, "trainer": {**config["trainer"], **off, "max_steps": 0}}
    check_settings(config)
    trainer, module, data = build(config)
    trainer.fit(module, datamodule=data, ckpt_path=config["ckpt_path"])
    if not getattr(trainer.strategy, "divides", False):
        name = type(trainer.strategy).__name__.lower()
        print(f"strategy={name} doesn't divide the module: each rank computes all of it, on its own samples")


def _resume(arguments: list[str]) -> int:
    """Continue a run in its folder from its newest checkpoint; return the exit status."""
    from fabricx.cli.hydra_app import error_message
    from fabricx.config import changed_settings, configuration_of, plain, recorded_configuration
    from fabricx.redaction import masked

    if not arguments or arguments[0].startswith("-"):
        print(RESUME_HELP)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 1
    run_dir = Path(arguments[0])
    sys.path.insert(0, os.getcwd())
    try:
        config = configuration_of(run_dir, arguments[1:])
        newest = _newest_of(run_dir, config)
        changed = changed_settings(masked(plain(recorded_configuration(run_dir))), masked(config))
        for key, (old, new) in changed.items():
            print(f"{key}: {old} -> {new}")
        if "seed" in changed:
            print(
                "seed has no effect on a resumed run: the order of the data and random numbers continue from the "
                "checkpoint"
            )
        stopped = _run_resumed({**config, "ckpt_path": str(newest)}, run_dir, newest)
    except Exception as error:
        if os.environ.get(ALL_FRAMES):
            raise
        print(masked_text(error_message(error)), file=sys.stderr)
        return 1
    return 130 if stopped else 0


def _newest_of(run_dir: Path, config: dict[str, Any]) -> Path:
    """Return the newest whole checkpoint of a run that is not in progress."""
    from fabricx.launch.run_lock import lock_owner, occupied
    from fabricx.trainer.run_dir import checkpoints_of, newest_whole

    if (owner := lock_owner(run_dir)) is not None:  # it could delete the checkpoints that are listed next
        raise occupied(run_dir, owner)
    dirpath = ((config.get("callbacks") or {}).get("model_checkpoint") or {}).get("dirpath")
    checkpoints = checkpoints_of(run_dir, dirpath)
    if not checkpoints:
        raise ValueError(f"{run_dir} has no complete checkpoint to resume from; start a new run with: fabricx fit")
    return newest_whole(checkpoints)


def _run_resumed(config: dict[str, Any], run_dir: Path, newest: Path) -> bool:
    """Resume a run, and record its new configuration and command, unless it fails before it saves anything."""
    from fabricx.cli.run_log import logging_of_run
    from fabricx.launch.run_lock import lock_owner
    from fabricx.redaction import records_masked
    from fabricx.trainer import provenance

    recorded = provenance.write_resumed(run_dir, {**config, "ckpt_path": None})
    try:
        with records_masked(), logging_of_run(run_dir):
            return run("fit", config, run_dir)[0]
    except BaseException:
        saved = True
        with contextlib.suppress(ValueError):
            saved = lock_owner(run_dir) is None and _newest_of(run_dir, config) != newest
        if not saved:
            for file in recorded:
                file.unlink(missing_ok=True)
        raise


def _scale(arguments: list[str]) -> int:
    """Request a number of workers of a run in progress; return the exit status."""
    if len(arguments) != 2 or arguments[0].startswith("-"):
        print(SCALE_HELP)
        return 0 if arguments and arguments[0] in ("-h", "--help") else 1
    from fabricx.launch.resize import request_workers

    try:
        if not arguments[1].isascii() or not arguments[1].isdecimal():
            raise ValueError(f"{arguments[1]!r} is not a number of workers: write, say, fabricx scale {arguments[0]} 3")
        request_workers(Path(arguments[0]), int(arguments[1]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"requested {arguments[1]} workers; the run prints a message when they train")
    return 0


def _demonstration(arguments: list[str]) -> list[str]:
    """Return the override for the digits experiment if the arguments choose neither module, data nor experiment."""
    flags = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
    keys = ("experiment", "+experiment", "module", "data", *flags)
    chosen = any(
        argument.split("=")[0].split(".")[0] in keys
        for argument in arguments
        if "._target_" in argument or not argument.startswith(("module.", "data."))
    )
    return [] if chosen else ["experiment=digits"]


def run(command: str, config: dict[str, Any], run_dir: Path | None = None) -> tuple[bool, float | None]:
    """Run a stage of a configuration.

    Args:
        command: "fit", "validate", "test" or "predict".
        config: the configuration, as plain data.
        run_dir: the run's folder; None for a new folder.

    Returns:
        whether the run was interrupted, and the last value of the monitored metric, for sweepers.
    """
    from fabricx.config import build, check_settings

    check_settings(config)
    _check_checkpoint(command, config, resumes=run_dir is not None)
    if config["seed"] is not None:
        from fabricx.core.module_state.rng import seed_everything

        seed_everything(config["seed"])
    trainer, module, data = build(config)
    run_dir = run_dir or trainer.run_dir
    assert run_dir is not None
    trainer.configure(config, run_dir)
    metrics: dict[str, Any] = {}
    _LOG.info("%s: %s", command, masked_command(sys.orig_argv))
    _LOG.info("run folder: %s; checkpoint: %s", run_dir, config["ckpt_path"])
    if command == "fit":
        trainer.fit(module, datamodule=data, ckpt_path=config["ckpt_path"])
        _say_if_nothing_was_left(trainer, run_dir)
        metrics.update(trainer.callback_metrics)  # the test replaces them
        if config["test"] and not trainer.interrupted and not trainer.fast_dev_run:
            _test(trainer, data, run_dir)
    elif command == "predict":
        import torch

        torch.save(trainer.predict(module, datamodule=data, ckpt_path=config["ckpt_path"]), run_dir / "predictions.pt")
        print(f"predictions: {run_dir / 'predictions.pt'}")
    else:
        getattr(trainer, command)(module, datamodule=data, ckpt_path=config["ckpt_path"])
    metrics.update(trainer.callback_metrics)
    _LOG.info("%s ended: %s", command, {name: float(value) for name, value in metrics.items()})
    if trainer.is_global_zero and command == "fit":
        _print_summary(trainer, run_dir, metrics)
    value = metrics.get(config["monitor"] or "")
    return trainer.interrupted, None if value is None else float(value)


def _check_checkpoint(command: str, config: dict[str, Any], *, resumes: bool) -> None:
    """Refuse an evaluation without a checkpoint, and a checkpoint of another model."""
    from fabricx.checkpoint import is_committed, read_manifest
    from fabricx.checkpoint.storage import as_path
    from fabricx.config import check_same_model
    from fabricx.trainer.run_dir import resolve_checkpoint

    path = config["ckpt_path"]
    newest = None
    root = Path(config["trainer"].get("default_root_dir") or ".")
    with contextlib.suppress(ValueError):  # there is none
        looks = path == "last" or (path is None and command != "fit")
        newest = resolve_checkpoint("last", None, None, root, trains=command == "fit") if looks else None
    if command != "fit" and (path is None or (path == "last" and newest is None)):
        hint = "there is none in runs" if newest is None else f"the newest is ckpt_path={os.path.relpath(newest)}"
        raise ValueError(
            f"fabricx {command} needs a checkpoint: set ckpt_path to its path, or to last; {hint}\n  to use the "
            "initial weights of the module: ckpt_path=none"
        )
    if path == "none":
        config["ckpt_path"] = None
        print(f"{command}: with the initial weights of the module, without a checkpoint", file=sys.stderr)
        return
    checkpoint = newest if path == "last" else as_path(path) if path not in (None, "best") else None
    if checkpoint is not None and is_committed(checkpoint):
        differing = check_same_model(config, read_manifest(checkpoint).get("configuration"), str(path))
        for key, (old, new) in differing.items() if not resumes else ():
            print(f"note: {key}={new} differs from {old} in the run of the checkpoint", file=sys.stderr)


def _say_if_nothing_was_left(trainer: Trainer, run_dir: Path) -> None:
    """Say that a run was resumed after its end, so that nothing was trained."""
    from fabricx.checkpoint import is_committed, read_manifest
    from fabricx.checkpoint.storage import as_path

    begun = None if trainer.ckpt_path is None else as_path(trainer.ckpt_path)
    if begun is None or trainer.interrupted or not is_committed(begun) or not trainer.is_global_zero:
        return
    if trainer.global_step == read_manifest(begun).get("step"):
        command = _command("fabricx", "resume", os.path.relpath(run_dir))
        print(
            f"the training was already complete; to continue it:\n  {command} "
            f"trainer.max_epochs={2 * max(1, trainer.current_epoch)}"
        )


def _test(trainer: Trainer, data: Any, run_dir: Path) -> None:
    """Test the best checkpoint of the run, or the trained weights if it has none.

    Args:
        trainer: the trainer, after `fit`.
        data: the datamodule.
        run_dir: the run's folder.

    Raises:
        WorkerFailed: a worker failed; the message contains the command that repeats the test.
    """
    saved = trainer.checkpoint_callback
    try:
        trainer.test(datamodule=data, ckpt_path="best" if saved is not None and saved.best_model_path else None)
    except WorkerFailed as error:
        if saved is not None:
            command = _command("fabricx", "resume", os.path.relpath(run_dir))
            error.add_remedy(f"the training is complete; to repeat the test: {command}")
        raise


def _print_summary(trainer: Trainer, run_dir: Path, metrics: Mapping[str, Any]) -> None:
    shown = "  ".join(f"{name}={float(value):.4g}" for name, value in sorted(metrics.items()))
    epochs = f"{trainer.state.epoch} epoch{'' if trainer.state.epoch == 1 else 's'}"
    print(f"\n{trainer.global_step} step{'' if trainer.global_step == 1 else 's'}, {epochs}")
    width = shutil.get_terminal_size((80, 24)).columns
    for line in textwrap.wrap(shown, width - 2, break_long_words=False):
        print(f"  {line}")
    where = os.path.relpath(run_dir)
    if trainer.fast_dev_run:
        return
    print(f"run folder: {where}")
    if trainer.loggers:
        print(f"charts: {_command('tensorboard', '--logdir', str(Path(where).parent))}")
    if trainer.enable_telemetry and trainer.writes:
        print(f"report: {_command('fabricx', 'report', where)}")


def _command(name: str, *arguments: str) -> str:
    """Return a command line for a shell: the command has a path, unless its environment is activated."""
    file = Path(sys.prefix, "bin", name)
    named = "VIRTUAL_ENV" in os.environ or not file.exists()
    return shlex.join([name if named else os.path.relpath(file), *arguments])


if __name__ == "__main__":
    main()
