"""Arguments of a command line: their conversion for Hydra, and mistakes that are refused first."""

from __future__ import annotations

import re

import pytest

from fabricx.cli.overrides import arranged, parsed
from fabricx.errors import nearest_key

KEYS = [
    "trainer",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.devices",
    "module",
    "module.lr",
    "data.batch_size",
]


def test_flags_precede_overrides_with_their_values() -> None:
    arguments = ["seed=1", "-m", "trainer.max_epochs=1,2", "--cfg", "job", "~data", "--info"]
    ordered = ["-m", "--cfg", "job", "--info", "all", "seed=1", "trainer.max_epochs=1,2", "~data"]
    assert arranged(arguments, list) == ordered


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("runs/a/epoch=0-step=3.ckpt", "runs/a/epoch=0-step=3.ckpt"),
        ("{epoch}-{val_loss:.2f}", "{epoch}-{val_loss:.2f}"),
        ("it's", "it's"),
        ("model (1).ckpt", "model (1).ckpt"),
        ("s3://bucket/run?version=3", "s3://bucket/run?version=3"),
        ("[1,2]", [1, 2]),
        ("{a:1}", {"a": 1}),
        ("'3'", "3"),
        ("null", None),
        ("1e-3", 0.001),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
    ],
)
def test_values_are_parsed_as_written(value: str, read: object) -> None:
    [argument] = arranged([f"module.name={value}"], list)
    [override] = parsed([argument])
    assert override.value() == read


def test_strings_of_a_sweep_are_quoted_separately() -> None:
    [argument] = arranged(["ckpt_path=a=1.ckpt,b=2.ckpt"], list)
    [override] = parsed([argument])
    assert list(override.sweep_string_iterator()) == ["'a=1.ckpt'", "'b=2.ckpt'"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.max_epochs"], "trainer.max_epochs has no value: write trainer.max_epochs=VALUE"),
        (["max_epochs", "3"], "max_epochs 3: write trainer.max_epochs=3"),
        (["trainer.max_epochs", "=", "3"], "without spaces: trainer.max_epochs=3"),
        (["trainer.max_epochs="], "trainer.max_epochs= has no value"),
        (["--max_epochs=3"], "--max_epochs=3: settings are written without dashes: trainer.max_epochs=3"),
        (["--max-epochs", "3"], "settings are written without dashes: trainer.max_epochs=3"),
        (["--lr", "0.1"], "settings are written without dashes: module.lr=0.1"),
        (["--multrun"], "there is no flag '--multrun'. Did you mean '--multirun'?"),
        (["--cfg"], "--cfg needs a value"),
        (["module.sizes=[1,2"], "a bracket or a quote has no partner"),
        (["module.name='a"], "a bracket or a quote has no partner"),
        (["trainer.max_epochs=1,"], "has an empty value between or after commas: write trainer.max_epochs=1;"),
        (["strategy=ddp", "strategy=fsdp"], "strategy is set twice, to ddp and to fsdp"),
        (["runs/a/last.ckpt"], "did you mean ckpt_path=?"),
    ],
)
def test_a_mistake_is_an_error_with_the_correct_setting(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        arranged(arguments, lambda: KEYS)


def test_the_nearest_key_may_be_one_that_the_user_wrote_without_its_group() -> None:
    pairs = {"lr": "module.lr", "batch_size": "data.batch_size", "trainer.max_epoch": "trainer.max_epochs",
             "max_step": "trainer.max_steps", "trainer.trainer.devices": "trainer.devices"}  # fmt: skip
    assert {key: nearest_key(key, KEYS) for key in pairs} == pairs
    assert nearest_key("xyz", KEYS) is None
