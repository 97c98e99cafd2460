"""Options of fsdp; the process tests train with it."""

from __future__ import annotations

import pytest

from fabricx.strategies import FSDP


@pytest.mark.parametrize(
    ("options", "message"), [({"param_dtype": "float16"}, "known: bf16"), ({"replicas": 0}, "replicas=0")]
)
def test_wrong_options_are_errors_with_an_explanation(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP(**options)  # type: ignore[arg-type]


def test_torchs_errors_about_shards_in_a_validation_step_name_the_remedy() -> None:
    def step(message: str) -> None:
        raise RuntimeError(message)

    evaluated = FSDP().wrap_evaluation(step)
    for text in ("aten.cat got mixed torch.Tensor and DTensor", "Sharding propagation failed for aten.view"):
        with pytest.raises(ValueError, match=r"validation_step computes with weights .* Call the submodule instead"):
            evaluated(text)
    with pytest.raises(RuntimeError, match="another"):
        evaluated("another error")
