"""Options that a divided module does not support are refused with the remedy."""

from __future__ import annotations

import pytest

from fabricx.model_parallel.set_up.option_checks import check_island, check_options, refuse_manual_optimization


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


def test_replicas_and_shards_apply_within_islands() -> None:
    check_island(1, 1, "fsdp")
    check_island(2, 1, "local_sgd")
    check_island(1, 2, "local_sgd")
    for data in ("ddp", "fsdp"):
        with pytest.raises(ValueError, match=f"replicas=2 with data={data}: .*; set data='local_sgd', or replicas=1"):
            check_island(2, 1, data)
        with pytest.raises(ValueError, match=f"shard=2 with data={data}: .*; set data='local_sgd', or data='fsdp' and"):
            check_island(1, 2, data)
    for wrong in (0, True, None, 1.5):
        with pytest.raises(ValueError, match=f"replicas={wrong}: set the number of data ranks of an island"):
            check_island(wrong, 1, "local_sgd")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"shard={wrong}: set the number of data ranks of an island"):
            check_island(1, wrong, "local_sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"replicas=2 with shard=2: .* set replicas=1 or shard=1"):
        check_island(2, 2, "local_sgd")
    with pytest.raises(
        ValueError, match=r"in an island and manual optimization: .* use automatic optimization, or replicas=1 and"
    ):
        refuse_manual_optimization("mesh", pipelined=False, divided=False)
