from __future__ import annotations

import pytest

from fabricx.callbacks import BatchSizeFinder
from fabricx.callbacks.trials import check_tried


def test_a_callback_that_could_not_try_is_refused() -> None:
    with pytest.raises(ValueError, match="pass it to the Trainer"):
        check_tried(BatchSizeFinder(), "fit", tried=False)
    check_tried(BatchSizeFinder(), "test", tried=False)
    check_tried(BatchSizeFinder(), "fit", tried=True)
