from __future__ import annotations

from dataclasses import asdict

import pytest

from fabricx.cli.simulate import KEYS, UNITS, main, simulated
from fabricx.model_parallel.scaling.dimensions import Cluster, Transformer

SMALL = ["layers=4", "hidden=64", "heads=4", "kv_heads=2", "ffn=128", "vocabulary=100", "sequence=64", "batch=16"]


def test_it_prints_a_table_a_chart_and_traffic(capsys):
    assert main([*SMALL, "devices=2,4", "mesh.data=fsdp"]) == 0
    output = capsys.readouterr().out
    assert "a step of 16 x 64 tokens" in output
    assert output.count("data 2 (fsdp)") == 1
    assert "GB that a rank sends in a step" in output


def test_settings_change_the_cluster_the_mesh_and_the_units():
    lines = simulated(
        [*SMALL, "devices=4", "tflops=100", "between_gb_s=12.5", "node=4", "mesh.pipeline=2", "mesh.tensor=2"]
    )
    assert "a device: 100 TFLOP/s" in lines[1]
    assert "within a node of 4, 12.5 GB/s to other nodes" in lines[2]
    assert any("data 1 x pipeline 2 x tensor 2" in line for line in lines)


def test_activations_of_32_bits_send_twice_as_much_along_the_tensor_axis():
    fixed = ["layers=4", "vocabulary=64", "devices=2", "mesh.tensor=2", "mesh.recompute=true"]
    sent = [float(simulated([*fixed, f"precision={name}"])[-1].split()[1]) for name in ("bf16-mixed", "32-true")]
    assert sent[1] == pytest.approx(2 * sent[0], abs=0.2)
    assert sent[0] > 100


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("laers=3", "there is no setting 'laers'. Did you mean 'layers'?"),
        ("layers", "layers has no value: write layers=VALUE"),
        ("layers=0", "layers=0: must be a whole number, 1 or more"),
        ("devices=8,x", "devices=x: must be a whole number"),
        ("tflops=fast", "tflops=fast: must be a positive number"),
        ("mesh.data=all", "mesh.data=all: must be ddp or fsdp"),
        ("precision=64", "precision=64: must be bf16-mixed or 16-mixed or 32-true"),
        ("heads=5", "heads have to divide hidden"),
        ("batch=16", "batch is set twice"),
    ],
)
def test_wrong_settings_are_errors_that_name_the_remedy(argument, message, capsys):
    arguments = [a for a in SMALL if a == argument or not a.startswith(argument.partition("=")[0] + "=")]
    assert main([*arguments, argument]) == 1
    assert message in capsys.readouterr().err


def test_the_help_names_the_keys(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(key in output for key in KEYS)
    model = asdict(Transformer())
    cluster = {key: getattr(Cluster(), field) / unit for key, (field, unit) in UNITS.items()}
    assert [
        text for name, value in {**model, **cluster}.items() if (text := f"{name}={value:.10g}") not in output
    ] == []
