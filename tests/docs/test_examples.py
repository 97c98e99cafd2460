"""Every example runs, is short, and needs nothing but fabricx's public names."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SOURCES = sorted(EXAMPLES.rglob("*.py"))


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, *map(str, command)]
    ended = warm.run(
        whole, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout + ended.stderr


def number(output: str, pattern: str) -> float:
    """Return the last number in an output that follows a text."""
    return float(re.findall(pattern + r"\s*=?\s*([\d.]+)", output)[-1])


def test_the_digits_example_learns(tmp_path):
    output = run(EXAMPLES / "digits.py", "--epochs", "6", cwd=tmp_path)
    assert number(output.partition("test:")[2], "accuracy") > 0.9
    assert list(tmp_path.glob("runs/*/events.out.tfevents.*"))


def test_the_recommender_learns_on_two_ranks(tmp_path):
    output = run(EXAMPLES / "recommender.py", "--epochs", "4", "--devices", "2", cwd=tmp_path)
    assert number(output, "error") < 0.7 < number(output, "error of predicting the mean")


def test_the_gan_alternates_two_optimizers_on_two_ranks(tmp_path):
    output = run(EXAMPLES / "gan.py", "--epochs", "1", "--devices", "2", cwd=tmp_path)
    assert number(output, "critic") < 2


def test_the_language_model_learns(tmp_path):
    output = run(EXAMPLES / "charlm.py", "--epochs", "1", "--part", "0.2", cwd=tmp_path)
    assert number(output, "val_bits") < 6  # a uniform prediction of 103 characters has 6.7 bits


def test_a_gpt_on_a_mesh_is_equal_to_a_single_process(tmp_path):
    program = [EXAMPLES / "gpt_mesh.py", "--part", "0.02"]
    alone, mesh = (
        number(run(*program, *more, cwd=tmp_path), "bits per character:")
        for more in ([], ["--devices", "4", "--tensor", "2", "--pipeline", "2"])
    )
    assert mesh == pytest.approx(alone, rel=1e-4)  # different summation order of float32 values


def test_a_transformers_llama_is_divided_over_two_ranks(tmp_path):
    pytest.importorskip("transformers", reason="the example needs Hugging Face transformers")
    output = run(EXAMPLES / "llama_tensor.py", cwd=tmp_path)
    assert "tensor parallel on 2 ranks" in output
    assert number(output, "loss of the last epoch:") < 1  # guessing has 4.2


def test_a_mixture_of_experts_on_two_ranks_is_equal_to_a_single_process(tmp_path):
    program = [EXAMPLES / "moe.py", "--part", "0.02"]
    alone, divided = (
        number(run(*program, *more, cwd=tmp_path), "bits per character:") for more in ([], ["--devices", "2"])
    )
    assert divided == pytest.approx(alone, rel=1e-2)  # the balance of the experts is a mean over a rank's tokens


def test_a_logger_of_four_methods_sends_runs_to_other_services(tmp_path):
    run(EXAMPLES / "exports" / "wandb_logger.py", cwd=tmp_path)
    [stored] = tmp_path.glob("runs/*/wandb/offline-run-*/*.wandb")
    assert b"loss" in stored.read_bytes()
    run(EXAMPLES / "exports" / "mlflow_logger.py", cwd=tmp_path)
    [loss] = tmp_path.glob("mlruns/*/*/metrics/loss")
    assert [line.split()[2] for line in loss.read_text().splitlines()] == [str(step) for step in range(4, 36, 4)]
    assert [path.read_text() for path in tmp_path.glob("mlruns/*/*/params/lr")] == ["0.1"]


def test_coarse_spans_are_nested(tmp_path):
    run(EXAMPLES / "exports" / "opentelemetry_spans.py", cwd=tmp_path)
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    numbers = {span["context"]["span_id"]: span["name"] for span in spans}
    parents = sorted((span["name"], numbers.get(span["parent_id"])) for span in spans)
    inside = [("epoch 0", "fit"), ("epoch 1", "fit"), ("fit", None)]
    assert [pair for pair in parents if pair[0] != "validation"] == inside
    assert parents.count(("validation", "epoch 0")) == parents.count(("validation", "epoch 1")) == 1


@pytest.fixture
def project(tmp_path) -> Path:
    return Path(shutil.copytree(EXAMPLES / "my_project", tmp_path / "my_project"))


def test_a_project_runs_by_its_own_script(project):
    output = run("train.py", "trainer.max_epochs=2", "trainer.devices=2", "strategy=ddp", cwd=project)
    assert number(output, "error of the forecast:") < 0.6


def test_a_project_runs_by_the_command(project):
    options = ["--config-dir", "conf", "--config-name", "train"]
    output = run("-m", "fabricx", "fit", *options, "module.hidden=16", "trainer.max_epochs=1", cwd=project)
    assert number(output, "val_loss") < 1.5  # the curves' variance
    assert list(project.glob("runs/*/config.yaml"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_is_short_and_has_few_imports(path):
    text = path.read_text()
    assert text.count("\n") < 80
    allowed = {"fabricx", "torch", *sys.stdlib_module_names}
    if path.parent.name == "exports":
        allowed |= {"wandb", "mlflow", "opentelemetry"}
    if path.name == "llama_tensor.py":
        allowed |= {"transformers"}
    if path.parent.name == "clusters":
        allowed |= {"sagemaker"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert str(node.module).partition(".")[0] in allowed
            assert str(node.module) != "fabricx", "import fabricx as fx"


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((EXAMPLES / "clusters").iterdir()) if path.suffix != ".md"],
    ids=lambda path: path.name,
)
def test_cluster_files_are_equal_to_those_of_the_guide(path):
    assert path.read_text() in (ROOT / "docs" / "guides" / "clusters.md").read_text()
