"""Options that a divided module does not support are refused with the remedy."""

from __future__ import annotations

import pytest

from fabricx.model_parallel.option_checks import check_options, check_replicas, refuse_manual_optimization


@pytest.mark.parametrize(
    ("precision", "compiles", "synchronises_batchnorm", "remedy"),
    [
        ("32", True, False, "remove compile"),
        ("32", False, True, "remove sync_batchnorm, or use another normalisation"),
        ("16-mixed", False, False, "set precision=bf16-mixed"),
    ],
)
def test_an_unsupported_option_names_the_remedy(
    precision: str, compiles: bool, synchronises_batchnorm: bool, remedy: str
) -> None:
    with pytest.raises(ValueError, match=rf"with strategy=tensor: .*{remedy}$"):
        check_options("tensor", precision, compiles=compiles, synchronises_batchnorm=synchronises_batchnorm)


def test_other_options_are_accepted() -> None:
    check_options("mesh", "bf16-mixed", compiles=False, synchronises_batchnorm=False)


@pytest.mark.parametrize(("pipelined", "reason"), [(True, "has no loss"), (False, "before there are optimizers")])
def test_manual_optimization_is_refused_with_its_reason(pipelined: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{reason}; use automatic optimization, or strategy=ddp"):
        refuse_manual_optimization("mesh", pipelined=pipelined)


def test_replicas_are_those_of_islands() -> None:
    check_replicas(1, "fsdp")
    check_replicas(2, "local_sgd")
    for data in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match=f"replicas=2 with data={data}: .*; set data='local_sgd', or replicas=1"):
            check_replicas(2, data)
    for wrong in (0, True, None, 1.5):
        with pytest.raises(ValueError, match=f"replicas={wrong}: set the number of data ranks of an island"):
            check_replicas(wrong, "local_sgd")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"replicas and manual optimization: .* use automatic optimization, or replicas=1"
    ):
        refuse_manual_optimization("mesh", pipelined=False, divided=False)
