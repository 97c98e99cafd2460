"""Workers have the process settings of the user's process."""

from __future__ import annotations

import os
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch

from fabricx.launch.process_settings import ProcessSettings


def test_settings_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessSettings.of_this_process()
    monkeypatch.setenv("OF_THE_SCRIPT", "1")
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    sys.setrecursionlimit(before.recursion + 1)
    try:
        with warnings.catch_warnings(), np.errstate(divide="raise"):
            warnings.filterwarnings("ignore", "noise")
            settings = pickle.loads(pickle.dumps(ProcessSettings.of_this_process()))
        before.apply()
        assert torch.get_default_dtype() == torch.float32
        assert "OF_THE_SCRIPT" not in os.environ
        with warnings.catch_warnings():
            settings.apply()
            warnings.warn("noise", stacklevel=1)  # is ignored; tests turn other warnings into errors
        assert os.environ["OF_THE_SCRIPT"] == "1"
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.benchmark
        assert sys.getrecursionlimit() == before.recursion + 1
        assert np.geterr()["divide"] == "raise"
    finally:
        with warnings.catch_warnings():
            before.apply()


def test_equal_settings_do_not_import_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *args, **kwargs: pytest.fail("a second is lost"))
    ProcessSettings.of_this_process().apply()


def test_newer_settings_of_precision_and_kernels_are_copied() -> None:
    before = ProcessSettings.of_this_process()
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # excludes torch's older setting, which can't be read
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        settings = pickle.loads(pickle.dumps(ProcessSettings.of_this_process()))
        before.apply()
        assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cuda.flash_sdp_enabled()) == ("none", True)
        settings.apply()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    finally:
        before.apply()
    assert ProcessSettings.of_this_process() == before
