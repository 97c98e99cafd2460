"""The command `fabricx`. Nothing here imports torch before a run begins."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricx.errors import FabricxError, did_you_mean
from fabricx.redaction import masked_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

STAGES = ("fit", "validate", "test", "predict")
COMMANDS = (*STAGES, "resume", "scale", "report", "status", "checkpoint", "doctor")
HELP = """\
fabricx: training for PyTorch in which the way it is distributed is one word

  fabricx fit          train; with nothing more, handwritten digits on one process
  fabricx validate     validate a checkpoint:  fabricx validate ckpt_path=runs/.../checkpoints/last.ckpt
  fabricx test         test a checkpoint
  fabricx predict      write a checkpoint's predictions to predictions.pt in the run's folder
  fabricx resume       go on with a run that was stopped:  fabricx resume runs/... [trainer.max_epochs=20]
  fabricx scale        more or fewer workers for a run that goes on:  fabricx scale runs/... 3
  fabricx report       what a run did, as tables and as a page; of a sweep's folder, a comparison
  fabricx status       which ranks a run has, how far they are, when they were heard of last
  fabricx checkpoint   ls, verify, or export checkpoints to safetensors
  fabricx doctor       what this machine has; put it into a bug report

Try:
  fabricx fit strategy=ddp trainer.devices=2
  fabricx fit experiment=charlm
  fabricx fit --help                     all groups, all keys
"""


def main() -> None:
    """Run the command that the first argument names."""
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

    if "COMP_LINE" in os.environ:  # completion knows no sub-command
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
    """Go on with a run in its own folder, from its newest checkpoint."""
    from fabricx.config import configuration_of
    from fabricx.launch.run_lock import only_here
    from fabricx.trainer.run_dir import checkpoints_of, newest_whole

    if not arguments or arguments[0].startswith("-"):
        print(
            "fabricx resume RUN_DIR [KEY=VALUE ...]\n\ngo on with a run, from its newest checkpoint, in its own folder"
        )
        return 0 if arguments else 1
    run_dir = Path(arguments[0])
    sys.path.insert(0, os.getcwd())
    try:
        given = configuration_of(run_dir, arguments[1:])
        with only_here(run_dir):  # else what is found may be gone a moment later
            pass
        kept = ((given.get("callbacks") or {}).get("model_checkpoint") or {}).get("dirpath")
        found = checkpoints_of(run_dir, kept)
        if not found:
            raise ValueError(f"{run_dir} has no complete checkpoint to go on from")
        stopped, _ = run("fit", {**given, "ckpt_path": str(newest_whole(found))}, run_dir)
    except (FabricxError, ValueError, LookupError) as error:
        if os.environ.get("FABRICX_TRACEBACK"):
            raise
        print(f"error: {masked_text(str(error))}", file=sys.stderr)
        return 1
    return 130 if stopped else 0


def _scale(arguments: list[str]) -> int:
    """Ask a run that goes on for another number of workers."""
    if (
        len(arguments) != 2
        or arguments[0].startswith("-")
        or not arguments[1].isascii()
        or not arguments[1].isdecimal()
    ):
        print("fabricx scale RUN_DIR WORKERS\n\nlet a run that goes on have so many workers, from its next step on")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 1
    from fabricx.launch.resize import ask

    try:
        ask(Path(arguments[0]), int(arguments[1]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"asked for {arguments[1]}; the run says when they train")
    return 0


def _demonstration(arguments: list[str]) -> list[str]:
    """Choose the digits where nothing is said of what to train."""
    own = ("experiment", "+experiment", "module", "data", "--config-dir", "-cd", "--config-name", "-cn")
    said = any(
        argument.split("=")[0].split(".")[0] in own
        for argument in arguments
        if "._target_" in argument or not argument.startswith(("module.", "data."))
    )
    return [] if said else ["experiment=digits"]


def run(command: str, given: dict[str, Any], run_dir: Path | None = None) -> tuple[bool, float | None]:
    """Run one stage of a configuration, in a run's folder if one is given.

    Returns:
        whether it was interrupted, and the monitored metric, for sweepers.
    """
    from fabricx.config import build

    if given["seed"] is not None:
        from fabricx.core.rng import seed_everything

        seed_everything(given["seed"])
    trainer, module, data = build(given)
    run_dir = trainer.run_dir = run_dir or trainer.run_dir
    assert run_dir is not None
    if command == "fit":
        trainer.fit(module, datamodule=data, ckpt_path=given["ckpt_path"])
        if given["test"] and not trainer.interrupted and not trainer.fast_dev_run:
            trainer.test(datamodule=data)
    elif command == "predict":
        import torch

        torch.save(trainer.predict(module, datamodule=data, ckpt_path=given["ckpt_path"]), run_dir / "predictions.pt")
        print(f"predictions: {run_dir / 'predictions.pt'}")
    else:
        getattr(trainer, command)(module, datamodule=data, ckpt_path=given["ckpt_path"])
    if trainer.is_global_zero and command == "fit":
        _closing_words(trainer, run_dir)
    value = trainer.callback_metrics.get(given["monitor"] or "")
    return trainer.interrupted, None if value is None else float(value)


def _closing_words(trainer: Any, run_dir: Path) -> None:
    shown = "  ".join(f"{name}={float(value):.4g}" for name, value in sorted(trainer.callback_metrics.items()))
    where = os.path.relpath(run_dir)
    print(f"\n{trainer.global_step} steps, {trainer.current_epoch} epochs: {shown}")
    print(f"the run's folder is {where}; look at it with: {_command('tensorboard')} --logdir {Path(where).parent}")
    if trainer.enable_telemetry and trainer.writes:
        print(f"where the time went: {_command('fabricx')} report {where}")


def _command(name: str) -> str:
    """Return how a command of this environment is called from here."""
    file = Path(sys.prefix, "bin", name)
    return name if "VIRTUAL_ENV" in os.environ or not file.exists() else os.path.relpath(file)


if __name__ == "__main__":
    main()
