"""The figure of the first page: a run in which a worker is killed, beside an undisturbed run.

`python docs/figures/kill_a_worker.py` trains both, compares their losses and weights bit by bit, and writes
`docs/figures/kill_a_worker.svg` for the README, and `kill_a_worker_narrow.svg` for the site. It needs matplotlib
(`pip install fabricx[docs]`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import fabricx as fx
from fabricx.demo.digits import DigitsClassifier, DigitsData
from fabricx.loggers import JSONLogger
from fabricx.testing import kill

PALE, BRIGHT, TEXT = "#7986cb", "#ff7043", "#808a96"  # readable on white and on black


def train(folder: Path, steps: int, callbacks: list[fx.Callback]) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Return a row for each step, with its loss and time in seconds, and the trained weights."""
    fx.seed_everything(0)
    net = DigitsClassifier(lr=1e-3)
    trainer = fx.Trainer(
        max_steps=steps, devices=2, accelerator="cpu", callbacks=callbacks, log_every_n_steps=1,
        logger=JSONLogger(folder), default_root_dir=folder, limit_val_batches=0, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, datamodule=DigitsData(batch_size=64))
    [file] = folder.rglob("metrics.jsonl")
    rows = [row for line in file.read_text().splitlines() if "loss" in (row := json.loads(line))]
    return rows, [weight.detach().clone() for weight in net.parameters()]


def draw(
    undisturbed: list[dict[str, Any]], killed: list[dict[str, Any]], step: int, file: Path, narrow: bool = False
) -> None:
    """Draw the losses by time and by step, beside each other or, if narrow, below each other."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: Any = {
        "font.family": "sans-serif", "font.size": 9.5, "svg.fonttype": "none", "svg.hashsalt": "0",
        "text.color": TEXT, "axes.labelcolor": TEXT, "axes.edgecolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        shape, size = ((2, 1), (5.4, 4.4)) if narrow else ((1, 2), (9, 2.9))
        figure, (first, second) = pyplot.subplots(*shape, figsize=size, layout="constrained")
        for rows, color, width, label, gap in (
            (undisturbed, PALE, 4.5, "undisturbed", len(undisturbed)),
            (killed, BRIGHT, 1.4, "a worker is killed", step),
        ):
            seconds = [row["time"] - rows[0]["time"] for row in rows]
            losses = [row["loss"] for row in rows]
            first.plot(seconds[:gap], losses[:gap], color=color, lw=width, label=label)
            first.plot(seconds[gap:], losses[gap:], color=color, lw=width)
            second.plot([row["step"] for row in rows], losses, color=color, lw=width, label=label)
        before, after = (row["time"] - killed[0]["time"] for row in killed[step - 1 : step + 1])
        first.axvspan(before, after, color=BRIGHT, alpha=0.18, lw=0)
        beside: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
        first.annotate(f"SIGKILL of rank 1:\na replacement joins\nin {after - before:.1f} s", (after, 1.4), **beside)
        second.axvline(step + 1, color=BRIGHT, lw=1, ls=":")
        second.annotate(
            f"killed in step {step + 1}:\nlosses and weights\nare equal to the bit", (step + 1, 1.4), **beside
        )
        first.set(xlabel="seconds", ylabel="loss", ylim=(0, None))
        second.set(xlabel="step", ylabel="loss", ylim=(0, None))
        second.legend(frameon=False, loc="upper right")
        figure.savefig(file, transparent=True, metadata={"Date": None})


def main() -> None:
    """Train, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--file", type=Path, default=Path(__file__).with_suffix(".svg"))
    args = parser.parse_args()
    step = args.steps // 3
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, weights = train(Path(folder) / "undisturbed", args.steps, [])
        killed, repeated = train(Path(folder) / "killed", args.steps, [kill(rank=1).during("backward", step=step)])
    assert [row["loss"] for row in undisturbed] == [row["loss"] for row in killed]
    assert all(map(torch.equal, weights, repeated))
    print(f"{len(killed)} losses and all weights are equal to the bit")
    draw(undisturbed, killed, step, args.file)
    draw(undisturbed, killed, step, args.file.with_stem(f"{args.file.stem}_narrow"), narrow=True)


if __name__ == "__main__":
    main()
