"""Mistakes in a configuration are explained: key, value, choices, the nearest name, the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fabricx.cli.mistakes import unread_keys


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=digit"], "there is no such experiment. Did you mean 'digits'?\n  known: charlm, digits"),
        (["debug=nope"], "debug=nope: there is no such debug.\n  known: fdr, limit, overfit"),
        (["strategy=dpp"], "there is no such strategy. Did you mean 'ddp'?"),
        (["strategy=my.Mine"], "your own class: strategy._target_=my.Mine"),
        (["strategy=fsdp", "strategy.bucket_mib=3"], "with strategy=fsdp\n  it belongs to strategy=ddp"),
        (["callbacks.early_stopping.patience=3"], "it belongs to callbacks=early_stopping"),
        (["trainer.max_epoch=3"], "Did you mean 'trainer.max_epochs'?"),
        (["lr=1"], "Did you mean 'module.lr'?"),
        (["+trainer.devices=3"], "the key exists already; set it without '+': trainer.devices=..."),
        (["+trainer.foo=3"], "trainer.foo: there is no such key"),
        (["~nothing"], "~nothing: there is no such key to remove"),
        (["~trainer.devices"], "this key can't be removed"),
        (["trainer.log_every_n_steps=often"], "trainer.log_every_n_steps=often: Value 'often' of type 'str'"),
        (["trainer=big"], "trainer='big': trainer is a group of keys"),
        (["seed=abc"], "seed='abc': set a whole number"),
        (["test=maybe"], "test='maybe': set true or false"),
        (["data=null"], "data=null: a group needs a choice: charlm, custom, digits; to leave it out, write ~data"),
        (["callbacks=nan"], "callbacks=nan is read as a float: write callbacks='\"nan\"', or rename the file"),
        (["module.lr=1,2"], "several values need --multirun, which starts a run for each"),
        (["module.lr=${oc.env:NO_SUCH}"], "module.lr: the environment variable NO_SUCH is not set"),
        (["module.lr=${nothing}"], "module.lr=${nothing}: there is no key 'nothing'"),
        (["--config-name", "confg"], "--config-name confg: there is no such file. Did you mean 'config'?"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: the folder does not exist"),
        (["--config-dir"], "--config-dir needs a folder"),
        (["hydra.run.dir=/proc/nowhere"], "error: /proc/nowhere: No such file or directory; start in another folder"),
    ],
)  # fmt: skip
def test_a_mistake_is_explained_and_leaves_no_folder(
    arguments: list[str], message: str, own_folder: Path, explained: Callable[..., str]
) -> None:
    output = explained(arguments)
    assert message in output
    assert "Traceback" not in output
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# @package _global_\ntrainer: {max_epoch: 1}", "experiment/a.yaml: there is no key 'trainer.max_ep"),
        ("# @package _global_\ndefaults: [override /modul: digits]", "no group 'modul' to override. Did you"),
        ("# @package _global_\ndefaults: [override /module: digits, override /module: charlm]",
         "experiment/a.yaml overrides module twice, with digits and with charlm"),
        ("trainer: {max_epochs: 1}", "write `# @package _global_` as its first line"),
        ("trainer: [", "experiment/a.yaml"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_experiment_is_explained(
    text: str, message: str, own_folder: Path, explained: Callable[..., str]
) -> None:
    (own_folder / "conf/experiment").mkdir(parents=True)
    (own_folder / "conf/experiment/a.yaml").write_text(text)
    output = explained(["--config-dir", "conf", "experiment=a"])
    assert message in output
    assert "Traceback" not in output


def test_unused_keys_are_detected() -> None:
    cfg = OmegaConf.create(
        {"foo": 1, "width": 3, "module": {"width": "${width}", "depth": "${sizes.depth}"}, "sizes": {}}
    )
    arguments = ["+foo=1", "+width=3", "+sizes={}", "+module.x=2", "seed=1", "+experiment=mine"]
    assert unread_keys(cfg, arguments) == ["foo"]
