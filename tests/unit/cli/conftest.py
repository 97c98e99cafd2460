"""Fixtures of the tests of the command line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fabricx.cli.hydra_app import run_app
from fabricx.config import check_settings, plain


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command with a mistake, and returns the message."""

    def explained(arguments: list[str], function: Any = None) -> str:
        with pytest.raises(SystemExit) as ended:
            run_app(function or (lambda cfg: check_settings(plain(cfg))), arguments, None, "config")
        assert ended.value.code == 1
        logger = logging.getLogger("fabricx")  # as the caller had it, without the log of the run
        assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)
        output = capsys.readouterr().err
        assert "Error executing job" not in output
        assert "hydra.cc" not in output
        return output

    return explained
