"""A single process on the global batch, and the differences of a cell from it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fabricx import checkpoint
from fabricx.distributed.world import World
from tests.matrix.cells import BOUNDED, SERVERS_STEP, UNEQUAL_PACE, Cell
from tests.matrix.fits import Found, fit, needs_own_oracle, reference_of
from tests.matrix.module import make_module
from tests.matrix.rules import DIVIDES, TRIAL_STEPS, refusal, refusals, tolerance

# Errors of gloo, and of a client of servers, after an error on another rank.
_PEER_GONE = (
    r"Connection (closed|reset) by peer|connection to another rank was lost|"
    r"ServerLost: (server \d+ has ended|another worker has died)"
)
ROUNDED_GRADIENTS = 0.005  # larger tolerances are those of 16-bit gradients
MOST_ASTRAY = 0.07  # of the movement of weights: gradients that are 1.1 times too large change it by about 0.1
DIVERGED = 1e3  # growth of weights from which 16 bits are too few to determine the training
JOINING = {"local_sgd", "local_sgd-2"}  # a checkpoint joins the moments of the ranks, which rounds them


def oracle_of(cell: Cell) -> Cell:
    """Return the cell that a single process trains."""
    shared = "from-single" if cell.save == "from-single" else "none"
    return dataclasses.replace(cell, way="single", ranks=1, save=shared)


def run_oracle(cell: Cell, folder: Path) -> Found:
    """Train on a single process; with "from-single", a checkpoint is written during training."""
    middle = folder / "mid.ckpt" if cell.save == "from-single" else None
    oracle = fit(cell, World(), folder, save=middle)
    if (folder / "end.ckpt").exists():
        oracle.state = checkpoint.load(folder / "end.ckpt")
    return oracle


def problems(cell: Cell, results: Sequence[Found], oracle: Found) -> list[str]:
    """Return the problems of a cell; none if it is right, or refused as expected."""
    expected = refusal(cell)
    if expected is not None:
        pattern = "|".join(rule.says for rule in refusals(cell))  # any of them may be seen first
        trial = TRIAL_STEPS if cell.way in DIVIDES else 0
        return list(_refused_wrongly(results, pattern, max(expected.steps, trial)))
    if oracle.error:
        return [f"the oracle failed: {oracle.error}"]
    failed = [f"rank {rank}: {result.error}" for rank, result in enumerate(results) if result.error]
    if failed:
        kind = "failed in training" if any(result.trained for result in results) else "was refused without a rule"
        return [f"{kind}: {failed[0]}"]
    return list(_wrong(cell, results, oracle))


def _refused_wrongly(results: Sequence[Found], pattern: str, steps: int) -> Iterator[str]:
    refused = any(re.search(pattern, result.error) for result in results)
    for rank, result in enumerate(results):
        if refused and re.search(_PEER_GONE, result.error):
            continue
        if not result.error:
            yield f"rank {rank} trains what is to be refused ({pattern})"
        elif result.trained > steps:
            yield f"rank {rank} refused after {result.trained} training steps: {result.error}"
        elif not re.search(pattern, result.error):
            yield f"rank {rank}: the error doesn't say {pattern!r}: {result.error}"


def _wrong(cell: Cell, results: Sequence[Found], oracle: Found) -> Iterator[str]:
    first, close = results[0], tolerance(cell)
    wanted = oracle
    if needs_own_oracle(cell):
        assert first.reference is not None
        wanted, close = first.reference, 1e-6 if cell.way in JOINING else 0.0
        # The first step of static_graph sums in a different order. Servers step in the widest dtype of the
        # parameters, and a checkpoint has each parameter's dtype.
        narrower = cell.model == "dtypes" and cell.way in SERVERS_STEP
        if reference_of(cell) != cell or (cell.way == "ddp-static" and cell.ranks > 2) or narrower:
            close = tolerance(cell)
    yield from _against(cell, first, wanted, close, whole=cell.save != "from-single")
    if first.resumed is not None:
        if first.resumed.error:
            yield f"the run from the checkpoint failed: {first.resumed.error}"
        else:
            for problem in _against(cell, first.resumed, wanted, close, whole=False):
                yield f"after going on from the checkpoint: {problem}"
    elif cell.save.startswith("on_") and not first.error:
        yield f"nothing was saved in {cell.save}"
    for rank, result in enumerate(results[1:], 1):
        if (
            result.random
            and result.random == first.random
            and cell.way not in ("reproducible", *DIVIDES)  # the first step is that of the trial
            and cell.save != "from-single"
        ):
            yield f"rank {rank} draws the random numbers of rank 0"
        if result.position != first.position:
            yield f"rank {rank} is at {result.position}, rank 0 at {first.position}"
        if not same(result.metrics, first.metrics, 1e-12):
            yield f"rank {rank} has other metrics than rank 0: {result.metrics} {first.metrics}"


def _against(cell: Cell, result: Found, oracle: Found, close: float, *, whole: bool) -> Iterator[str]:
    if result.position != oracle.position:
        yield f"(updates, epochs) are {result.position}, and have to be {oracle.position}"
    if result.state is None or oracle.state is None:
        yield "no state was saved at the end"
        return
    for part in ("strategy", "callbacks"):
        for path, a, b in differences(result.state.get(part), oracle.state.get(part), close):
            if not _compared(path) or (cell.ranks > 1 and path.endswith(".calls")):  # a rank counts its own calls
                continue
            if not _keeps_more(cell, path) or not same(a.to(b.dtype), b, close):
                yield f"{part}{path}: {_short(a)}, and has to be {_short(b)}"
    far = astray(cell, result.state["strategy"]["module"], oracle.state["strategy"]["module"])
    if far > (most := min(max(close, 1e-9), MOST_ASTRAY)):
        yield f"the weights are beside their way by {far:.3g} of its length, and may be by {most:.3g}"
    seen = oracle.seen if whole else oracle.seen[len(oracle.seen) - len(result.seen) :]
    if cell.way not in (*BOUNDED, "local_sgd") or cell.ranks == 1:  # otherwise hooks read a worker's gradient
        yield from _against_seen(result.seen, seen, close)
    for path, a, b in differences(result.metrics, oracle.metrics, max(close, 1e-6)):  # sums in float32
        yield f"metric {path}: {a}, and has to be {b}"
    for path, a, b in differences(result.results, oracle.results, max(close, 1e-6)):
        yield f"results {path}: {_short(a)}, and have to be {_short(b)}"


def _compared(path: str) -> bool:
    """Return whether a part of a checkpoint means the same under each strategy."""
    own_keys = (".kept", ".thin", ".exponents", ".outer", ".used", ".LoadBalancer", ".Watches", ".SavesIn")
    scratch = ".al[" in path  # of LBFGS, which writes it before it reads it
    return not path.startswith(own_keys) and not path.endswith(".reason") and not scratch


def _keeps_more(cell: Cell, path: str) -> bool:
    """Return whether a state is on servers, which keep the widest dtype of all parameters."""
    return cell.model == "dtypes" and path.startswith(".optimizers") and cell.way in SERVERS_STEP | UNEQUAL_PACE


@torch.no_grad()
def astray(cell: Cell, actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the distance between weights after training, relative to their distance from the initial weights.

    It detects steps that are wrong by a factor, for weights of any size.
    """
    begun = make_module(cell)
    begun.configure_model()
    distance = way = 0.0
    for name, first in begun.named_parameters():
        distance += float((actual[name] - wanted[name]).abs().double().square().sum())
        way += float((wanted[name] - first.to(wanted[name].dtype)).abs().double().square().sum())
    if not way or not way < DIVERGED**2:  # nothing was trained, or training diverges in this cell
        return 0.0
    return math.sqrt(distance / way)


def _against_seen(actual: list[Any], wanted: list[Any], close: float) -> Iterator[str]:
    if len(actual) != len(wanted):
        yield f"{len(actual)} updates were seen by hooks, and have to be {len(wanted)}"
        return
    for number, ((rates, norm), (right, right_norm)) in enumerate(zip(actual, wanted, strict=True)):
        if rates != right:
            yield f"update {number}: its rates are {rates}, and have to be {right}"
        if norm is not None and not _close(norm, right_norm, max(close, 1e-9)):
            yield f"update {number}: a hook sees a gradient of norm {norm:.6g}, and it is {right_norm:.6g}"


def same(first: Any, other: Any, close: float) -> bool:
    """Return whether two nested states are equal within a tolerance."""
    return next(differences(first, other, close), None) is None


def differences(first: Any, other: Any, close: float, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the paths at which two nested states differ, with both values."""
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        if first.shape != other.shape or first.dtype != other.dtype or not _near(first, other, close):
            yield path, first, other
    elif isinstance(first, dict) and isinstance(other, dict):
        for key in sorted(first.keys() | other.keys(), key=str):
            if key not in first or key not in other:
                yield f"{path}.{key}", first.get(key, "(missing)"), other.get(key, "(missing)")
            else:
                yield from differences(first[key], other[key], close, f"{path}.{key}")
    elif isinstance(first, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(first) != len(other):
            yield path, first, other
        else:
            for number, (a, b) in enumerate(zip(first, other, strict=True)):
                yield from differences(a, b, close, f"{path}[{number}]")
    elif isinstance(first, float) and isinstance(other, float):
        if not _close(first, other, max(close, 1e-12)):
            yield path, first, other
    elif first != other:
        yield path, first, other


def _close(first: float, other: float, relative: float) -> bool:
    if not math.isfinite(other):  # training diverges in this cell
        return not math.isfinite(first)
    return math.isclose(first, other, rel_tol=relative, abs_tol=1e-12)


def _near(first: Tensor, other: Tensor, close: float) -> bool:
    if first.is_complex():
        first, other = torch.view_as_real(first), torch.view_as_real(other)
    if torch.equal(first, other):
        return True
    if not other.isfinite().all():  # training diverges in this cell
        return torch.equal(first.isfinite(), other.isfinite())
    if close >= ROUNDED_GRADIENTS and other.numel() and float(other.abs().max()) > DIVERGED:
        return True
    if not close or not first.is_floating_point():
        return False
    least = 0.5 if close >= ROUNDED_GRADIENTS else 1e-3  # steps of rounded gradients may have made a weight small
    scale = max(least, float(other.abs().max())) if other.numel() else 1.0
    return bool(((first - other).abs().max() <= close * scale).item())


def _short(value: Any) -> str:
    return str(value.flatten()[:6].tolist()) if isinstance(value, Tensor) else str(value)[:200]
