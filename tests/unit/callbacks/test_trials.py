from __future__ import annotations

from typing import Any

import pytest

from fabricx.callbacks import BatchSizeFinder, LearningRateFinder
from fabricx.callbacks.trials import check_tried


def test_a_callback_that_cannot_run_a_trial_is_refused() -> None:
    with pytest.raises(ValueError, match="pass it to the Trainer"):
        check_tried(BatchSizeFinder(), "fit", tried=False)
    check_tried(BatchSizeFinder(), "test", tried=False)
    check_tried(BatchSizeFinder(), "fit", tried=True)


@pytest.mark.parametrize("finder", [BatchSizeFinder, LearningRateFinder])
def test_an_unknown_search_mode_is_refused_by_the_constructor(finder: Any) -> None:
    with pytest.raises(ValueError, match="mode='other'"):
        finder(mode="other")
