"""Errors of torch about shards name the remedy."""

from __future__ import annotations

import pytest

from fabricx.distributed.sharding.fsdp_errors import explained


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("got mixed torch.Tensor and DTensor", "Call the submodule instead of reading its parameters"),
        ("setStorage: sizes [2] are out of bounds for storage of size 0", "use strategy=ddp"),
    ],
)
def test_an_error_of_shards_names_the_step_and_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"^validation_step .*{remedy}"), explained("validation_step"):
        raise RuntimeError(text)


def test_other_errors_are_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="the user's"), explained("training_step"):
        raise RuntimeError("the user's")
