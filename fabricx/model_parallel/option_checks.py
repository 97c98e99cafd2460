"""Options of a run that a divided module does not support."""

from __future__ import annotations

from typing import NoReturn


def check_options(name: str, precision: str, *, compiles: bool, synchronises_batchnorm: bool) -> None:
    """Refuse options of a run that a divided module does not support.

    Args:
        name: the strategy's name.
        precision, compiles, synchronises_batchnorm: options of the run.

    Raises:
        ValueError: names the option and the remedy.
    """
    if compiles:
        raise ValueError(f"compile with strategy={name}: a compiled module can't be divided over ranks; remove compile")
    if synchronises_batchnorm:
        raise ValueError(
            f"sync_batchnorm with strategy={name}: the ranks of a divided module may compute the same samples, which "
            "would be counted several times; remove sync_batchnorm, or use another normalisation"
        )
    if precision == "16-mixed":
        raise ValueError(
            f"precision=16-mixed with strategy={name}: an overflow would be noticed by some of the ranks only; set "
            "precision=bf16-mixed"
        )


def refuse_manual_optimization(name: str, *, pipelined: bool) -> NoReturn:
    """Refuse manual optimization of a divided module.

    Args:
        name: the strategy's name.
        pipelined: the module is divided into stages of a pipeline.

    Raises:
        ValueError: always; names the reason and the remedy.
    """
    if pipelined:
        raise ValueError(
            f"strategy={name} with manual optimization: a stage of a pipeline computes a part of the step, and has no "
            "loss; use automatic optimization, or strategy=ddp"
        )
    raise ValueError(
        f"strategy={name} with manual optimization: the step of the trial run has no optimizers; use automatic "
        "optimization, or strategy=ddp or fsdp"
    )
