"""The command `fabricx`. Importing this module does not import torch, which would delay short commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricx.errors import FabricxError, WorkerFailed, did_you_mean
from fabricx.redaction import masked_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fabricx.trainer.trainer import Trainer

STAGES = ("fit", "validate", "test", "predict")
COMMANDS = (*STAGES, "resume", "scale", "report", "status", "checkpoint", "doctor")
HELP = """\
fabricx: training for PyTorch, distributed by a single setting

  fabricx fit          train; without arguments, on handwritten digits in a single process
  fabricx validate     validate a checkpoint:  fabricx validate ckpt_path=runs/.../checkpoints/last.ckpt
  fabricx test         test a checkpoint
  fabricx predict      write a checkpoint's predictions to predictions.pt in the run's folder
  fabricx resume       continue a stopped run:  fabricx resume runs/... [trainer.max_epochs=20]
  fabricx scale        change the number of workers of a run in progress:  fabricx scale runs/... 3
  fabricx report       report a run as tables and as an HTML page; compare the runs of a sweep's folder
  fabricx status       print the ranks of a run, with the newest step and last heartbeat of each
  fabricx checkpoint   list, verify, or export checkpoints to safetensors
  fabricx doctor       print versions, devices and a communication test, for bug reports

Try:
  fabricx fit strategy=ddp trainer.devices=2
  fabricx fit experiment=charlm
  fabricx fit --help                     print all groups and keys
"""


def main() -> None:
    """Run the command in the first argument of the command line."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(HELP)
        return
    command = arguments[0]
    if command == "--version":
        from fabricx import __version__

        print(f"fabricx {__version__}")
        return
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        print(f"error: there is no command {command!r}.{hint}\n  known: {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(1)
    if command == "doctor":
        from fabricx.cli.doctor import examine

        raise SystemExit(examine())
    if command == "checkpoint":
        from fabricx.checkpoint.command import main as checkpoint_command

        raise SystemExit(checkpoint_command(arguments[1:]))
    if command in ("report", "status"):
        from fabricx.telemetry.command import main as telemetry_command

        raise SystemExit(telemetry_command(command, arguments[1:]))
    if command == "scale":
        raise SystemExit(_scale(arguments[1:]))
    if command == "resume":
        raise SystemExit(_resume(arguments[1:]))
    _run(command, arguments[1:])


def _run(command: str, arguments: list[str]) -> None:
    from fabricx.cli.hydra_app import run_app
    from fabricx.config import plain

    if "COMP_LINE" in os.environ:  # Hydra's completion does not support subcommands
        os.environ["COMP_LINE"] = os.environ["COMP_LINE"].replace(f" {command}", "", 1)

    interrupted: list[bool] = []

    def task(cfg: DictConfig) -> Any:
        stopped, value = run(command, plain(cfg))
        if not arguments and command == "fit":
            print(
                "\nNext: fabricx fit strategy=ddp trainer.devices=2    fabricx fit module.lr=0.01    fabricx fit --help"
            )
        if stopped:
            interrupted.append(True)
            raise SystemExit(130)
        return value

    run_app(task, [*_demonstration(arguments), *arguments], None, "config")


def _resume(arguments: list[str]) -> int:
    """Continue a run in its folder from its newest checkpoint; return the exit status."""
    from fabricx.config import configuration_of
    from fabricx.launch.run_lock import exclusive_run
    from fabricx.trainer.run_dir import checkpoints_of, newest_whole

    if not arguments or arguments[0].startswith("-"):
        print(
            "fabricx resume RUN_DIR [KEY=VALUE ...]\n\n"
            "Continue a run from its newest checkpoint, in its folder. Overrides change its configuration."
        )
        return 0 if arguments else 1
    run_dir = Path(arguments[0])
    sys.path.insert(0, os.getcwd())
    try:
        config = configuration_of(run_dir, arguments[1:])
        with exclusive_run(run_dir):  # a run in progress could delete the checkpoints that are listed next
            pass
        dirpath = ((config.get("callbacks") or {}).get("model_checkpoint") or {}).get("dirpath")
        checkpoints = checkpoints_of(run_dir, dirpath)
        if not checkpoints:
            raise ValueError(f"{run_dir} has no complete checkpoint to resume from; start a new run with: fabricx fit")
        stopped, _ = run("fit", {**config, "ckpt_path": str(newest_whole(checkpoints))}, run_dir)
    except (FabricxError, ValueError, LookupError) as error:
        if os.environ.get("FABRICX_TRACEBACK"):
            raise
        print(f"error: {masked_text(str(error))}", file=sys.stderr)
        return 1
    return 130 if stopped else 0


def _scale(arguments: list[str]) -> int:
    """Request a number of workers of a run in progress; return the exit status."""
    if (
        len(arguments) != 2
        or arguments[0].startswith("-")
        or not arguments[1].isascii()
        or not arguments[1].isdecimal()
    ):
        print("fabricx scale RUN_DIR WORKERS\n\nChange the number of workers of a run in progress, at its next step.")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 1
    from fabricx.launch.resize import request_workers

    try:
        request_workers(Path(arguments[0]), int(arguments[1]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"requested {arguments[1]} workers; the run prints a message when they train")
    return 0


def _demonstration(arguments: list[str]) -> list[str]:
    """Return the override for the digits experiment if the arguments choose neither module, data nor experiment."""
    keys = ("experiment", "+experiment", "module", "data", "--config-dir", "-cd", "--config-name", "-cn")
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
    if config["seed"] is not None:
        from fabricx.core.rng import seed_everything

        seed_everything(config["seed"])
    trainer, module, data = build(config)
    run_dir = run_dir or trainer.run_dir
    assert run_dir is not None
    trainer.configure(config, run_dir)
    metrics: dict[str, Any] = {}
    if command == "fit":
        trainer.fit(module, datamodule=data, ckpt_path=config["ckpt_path"])
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
    if trainer.is_global_zero and command == "fit":
        _print_summary(trainer, run_dir, metrics)
    value = metrics.get(config["monitor"] or "")
    return trainer.interrupted, None if value is None else float(value)


def _test(trainer: Trainer, data: Any, run_dir: Path) -> None:
    """Test the trained weights.

    Args:
        trainer: the trainer, after `fit`.
        data: the datamodule.
        run_dir: the run's folder.

    Raises:
        WorkerFailed: a worker failed; the message contains the command that repeats the test.
    """
    try:
        trainer.test(datamodule=data)
    except WorkerFailed as error:
        if trainer.checkpoint_callback is not None:
            error.add_remedy(
                f"the training is complete; to repeat the test: {_command('fabricx')} resume {os.path.relpath(run_dir)}"
            )
        raise


def _print_summary(trainer: Any, run_dir: Path, metrics: Mapping[str, Any]) -> None:
    shown = "  ".join(f"{name}={float(value):.4g}" for name, value in sorted(metrics.items()))
    where = os.path.relpath(run_dir)
    print(f"\n{trainer.global_step} steps, {trainer.current_epoch} epochs: {shown}")
    print(f"run folder: {where}; to show its charts: {_command('tensorboard')} --logdir {Path(where).parent}")
    if trainer.enable_telemetry and trainer.writes:
        print(f"for a report of the time spent: {_command('fabricx')} report {where}")


def _command(name: str) -> str:
    """Return the path of a command of this environment, or its name if the environment is activated."""
    file = Path(sys.prefix, "bin", name)
    return name if "VIRTUAL_ENV" in os.environ or not file.exists() else os.path.relpath(file)


if __name__ == "__main__":
    main()
