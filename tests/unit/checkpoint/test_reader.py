"""An untrusted checkpoint: no file outside of its folder is read, no code in it runs, and all sizes are verified."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import fabricx as fx
from fabricx import checkpoint
from fabricx.checkpoint.command import main
from fabricx.errors import CheckpointError
from fabricx.testing import QUIET, TinyModule, tiny_loader
from tests.unit.checkpoint.hostile import SHARD, is_refused, listed, replace, rewrite, saved

OUTSIDE = (
    "../secret", "a/../../secret", "/etc/passwd", "..", ".", "", ".hidden", "a\\..\\secret", "C:secret", "C:\\secret",
    "sub/secret", "file:///etc/passwd", "s3://a/b", "secret\n", "secret\0", "~/secret", 3, None,
)  # fmt: skip


@pytest.mark.parametrize("unsafe_path", ["manifest", "index"])
def test_no_name_in_a_checkpoint_refers_outside_of_its_folder(tmp_path: Path, unsafe_path: str) -> None:
    secret = b"a secret"
    (tmp_path / "secret").write_bytes(secret)
    for number, name in enumerate(OUTSIDE):
        path = saved(tmp_path / str(number))
        (path.parent / "secret").write_bytes(secret)
        if unsafe_path == "manifest":
            rewrite(path, lambda manifest, name=name: manifest["files"].update({str(name): listed(secret)}))
            if isinstance(name, str):
                assert main(["verify", str(path)]) == 1
                is_refused(path, "refers to the file")
        else:
            index = json.loads((path / "index.json").read_text())
            index["strategy/module/w"]["chunks"][0]["file"] = name
            replace(path, "index.json", json.dumps(index).encode())
            is_refused(path, "doesn't list|isn't text")


@pytest.mark.parametrize("name", ["state.pt", "index.json", SHARD, "manifest.json", "COMMITTED"])
def test_links_are_not_followed_and_pipes_do_not_block(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in is_refused(path)
    (path / name).unlink()
    os.mkfifo(path / name)
    is_refused(path, "damaged|not a complete checkpoint")


def test_all_loaded_data_has_a_checksum(tmp_path: Path) -> None:
    for name in ("state.pt", "index.json", SHARD):
        path = saved(tmp_path / name)
        rewrite(path, lambda manifest, name=name: manifest["files"].pop(name))
        is_refused(path, "does not list|doesn't list")
    for number, wrong in enumerate([{}, None, 3, {"bytes": -1, "crc32": 0}, {"bytes": 1.0, "crc32": 0}, {"bytes": 9}]):
        path = saved(tmp_path / str(number))
        rewrite(path, lambda manifest, wrong=wrong: manifest["files"].update({SHARD: wrong}))
        is_refused(path, "no size and checksum")
    path = saved(tmp_path / "deep")
    replace(path, "index.json", b"[" * 100_000)
    is_refused(path, "index.json is damaged")


def test_a_header_with_offsets_outside_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = (path / SHARD).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for old, new in ((b"[0, 24]", b"[8, 32]"), (b"[0, 24]", b"[0, 16]"), (b"[0, 24]", b"[0,-24]"), (b"[6]", b"[9]")):
        assert old in whole[: 8 + length]
        replace(path, SHARD, whole.replace(old, new))
        is_refused(path, "damaged")
    for lying in (len(whole), 1 << 62):
        replace(path, SHARD, lying.to_bytes(8, "little") + whole[8:])
        is_refused(path, "damaged")


class Runs:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_a_refused_pickle_is_not_run_and_no_advice_to_allow_it_is_shown(own_folder: Path, capfd: Any) -> None:
    path = saved(own_folder)
    whole = (path / "state.pt").read_bytes()
    torch.save(Runs(), own_folder / "evil.pt")
    for data in ((own_folder / "evil.pt").read_bytes(), pickle.dumps(Runs()), b"", b"no archive", whole[:-9]):
        replace(path, "state.pt", data)
        message = is_refused(path, "state.pt was refused, and nothing in it was executed")
        assert main(["export", str(path)]) == 1
        with pytest.raises(CheckpointError, match="was refused"):
            fx.Trainer(max_steps=1, **QUIET).fit(TinyModule(), tiny_loader(), ckpt_path=path)
        shown = message + "".join(capfd.readouterr())
        for advice in ("weights_only", "safe_globals", "trust the source", "file an issue"):
            assert advice not in shown
    assert "it contains" in refusal(path, own_folder / "evil.pt")
    assert not Path("ran").exists()
    with zipfile.ZipFile(own_folder / "bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 24))
    assert "can't be read" in refusal(path, own_folder / "bomb")


def refusal(path: Path, data: Path) -> str:
    replace(path, "state.pt", data.read_bytes())
    return is_refused(path)


def test_an_object_that_could_not_be_loaded_is_saved_without_advice_to_allow_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"can't be pickled: bad .*lambda") as caught:
        checkpoint.save(tmp_path / "one", {"bad": lambda: None}, {})
    assert "safe_globals" not in str(caught.value)


def test_a_target_in_a_checkpoint_is_data(own_folder: Path) -> None:
    target = {"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": ["ran"]}}
    state = {"strategy": {"module": TinyModule().state_dict()}, "hparams": {"lr": target, "_target_": "os.abort"}}
    path = checkpoint.save(own_folder / "one", state, {"configuration": {"module": target}, "hparams": target})
    assert TinyModule.load_from_checkpoint(path).hparams["lr"] == target
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("saved_ones", "hint"),
    [({"lr": 0.1}, "hyperparameters of the checkpoint: it has lr;"), ({}, r"self.save_hyperparameters\(\) in __init_")],
    ids=["others", "none"],
)
def test_a_missing_argument_is_named_with_the_hyperparameters_of_the_checkpoint(
    saved_ones: dict[str, Any], hint: str, own_folder: Path
) -> None:
    class Needs(TinyModule):
        def __init__(self, extra: int, lr: float = 0.1) -> None:
            super().__init__()

    path = checkpoint.save(own_folder / "one", {"strategy": {"module": {}}, "hparams": saved_ones}, {})
    with pytest.raises(CheckpointError, match=rf"Needs needs extra.*extra=\.\.\.\)\n.*{hint}"):
        Needs.load_from_checkpoint(path)


def test_an_argument_that_the_constructor_lacks_is_ignored_unless_it_is_misspelt(own_folder: Path) -> None:
    path = checkpoint.save(own_folder / "one", {"strategy": {"module": TinyModule().state_dict()}, "hparams": {}}, {})
    with pytest.warns(UserWarning, match=r"load_from_checkpoint\(verbosity=...\): TinyModule.__init__ has no such"):
        assert TinyModule.load_from_checkpoint(path, verbosity=1, lr=0.5).hparams.lr == 0.5

    class Wide(TinyModule):
        def __init__(self, hidden_width: int = 2) -> None:
            super().__init__()

    with pytest.raises(TypeError, match=r"hiden_width.*no such argument. Did you mean 'hidden_width'"):
        Wide.load_from_checkpoint(path, hiden_width=3)


class Lenient(TinyModule):
    strict_loading = False


class Strict(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = True


@pytest.mark.parametrize(("cls", "strict"), [(Lenient, True), (Strict, False)])
def test_strict_does_not_override_the_choice_of_the_module(cls: Any, strict: bool, own_folder: Path) -> None:
    path = checkpoint.save(own_folder / "one", {"strategy": {"module": TinyModule().state_dict()}}, {})
    with pytest.raises(ValueError, match=rf"strict={strict}\) contradicts {cls.__name__}.strict_loading"):
        cls.load_from_checkpoint(path, strict=strict)
    for same in (not strict, None):
        cls.load_from_checkpoint(path, strict=same)
    TinyModule.load_from_checkpoint(path, strict=strict)


def test_strict_loading_none_is_the_default(own_folder: Path) -> None:
    class Undecided(TinyModule):
        strict_loading = None

    path = checkpoint.save(own_folder / "one", {"strategy": {"module": {}}}, {})
    with pytest.raises(RuntimeError, match=r"layer\.weight"):
        Undecided.load_from_checkpoint(path)
    with pytest.warns(UserWarning, match="are not all those of the module"):
        Undecided.load_from_checkpoint(path, strict=False)
