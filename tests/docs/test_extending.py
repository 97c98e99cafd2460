"""The programs and commands of docs/extending.md run, in a project that is made of the files on the page."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml|toml)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SHORT = (
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture
def project(own_folder: Path) -> Path:
    for name, text in FILES.items():
        (own_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (own_folder / name).write_text(text)
    (own_folder / "my_project" / "__init__.py").touch()
    return own_folder


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONUNBUFFERED", None)  # it mixes the lines of ranks, as `print` then writes each argument alone
    ended = warm.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    return ended.stdout


def test_the_page_has_the_files_that_it_lists() -> None:
    assert list(FILES) == [
        "my_project/text_logger.py", "tests/test_text_logger.py", "my_project/stop_at.py", "tests/test_stop_at.py",
        "train.py", "conf/logger/text.yaml", "pyproject.toml", "my_project/int8.py", "tests/test_int8.py", "launch.py",
        "tests/test_launch.py",
    ]  # fmt: skip
    assert len(COMMANDS) == 6
    assert all(text.count("\n") < 60 for text in FILES.values())


def test_the_tests_on_the_page_pass(project: Path) -> None:
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={project}/own", "tests")
    assert "5 passed" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_the_page_use_the_selected_plugin(project: Path, command: str) -> None:
    name, *arguments = shlex.split(command)
    if name == "python":
        output = run(*arguments).splitlines()
        assert [line for line in output if line.endswith("True")] == ["2 True"] * 2  # of each rank
        assert sum("training stops" in line for line in output) == 1
        return
    output = run("-m", "fabricx", *arguments, *SHORT)
    assert "3 steps, 1 epoch" in output
    if "compression" in command:
        [config] = (project / "runs").glob("*/config.yaml")
        assert "compression: my_project.int8.Int8" in config.read_text()
    if "logger.text" in command or "logger=text" in command:
        [values] = (project / "runs").glob("*/other.txt" if "other.txt" in command else "*/values.txt")
        assert {line.split("\t")[0] for line in values.read_text().splitlines()} == {"1", "2", "3"}
    assert bool(list((project / "runs").glob("*/events.out.*"))) is ("logger=text" not in command)


def test_a_registered_name_selects_the_plugin(project: Path) -> None:
    about = tomllib.loads(FILES["pyproject.toml"])["project"]
    installed = project / "my_project-0.1.dist-info"  # as pip install makes it
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    [(group, names)] = about["entry-points"].items()
    lines = "".join(f"{name} = {path}\n" for name, path in names.items())
    strategy = "[fabricx.strategies]\nquantized_ddp = my_project.quantized_ddp:QuantizedDDP\n"
    (installed / "entry_points.txt").write_text(f"[{group}]\n{lines}\n{strategy}")
    shutil.copy(ROOT / "examples" / "quantized_ddp.py", project / "my_project")
    [command] = re.findall(r"the name is enough: `fabricx (.*?)`", PAGE)
    run("-m", "fabricx", *shlex.split(command), *SHORT)
    assert list((project / "runs").glob("*/values.txt"))
    assert "3 steps" in run("-m", "fabricx", "fit", "strategy=quantized_ddp", "trainer.devices=2", *SHORT)
