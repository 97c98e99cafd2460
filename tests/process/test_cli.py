"""The command line as seen by users: runs, output, and messages about mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fabricx.checkpoint import read_manifest
from fabricx.demo.digits import DigitsClassifier
from tests import warm
from tests.soak import params

SHORT = ("trainer.max_epochs=2", "trainer.limit_train_batches=5", "trainer.enable_progress_bar=false")


def fabricx(*arguments: str, fails: bool = False, warnings: str = "ignore") -> str:
    done = warm.run(
        [sys.executable, "-m", "fabricx", *arguments], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONWARNINGS": warnings},
    )  # fmt: skip
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_prints_its_results_and_its_folder(own_folder: Path) -> None:
    output = fabricx("fit", *SHORT, warnings="default")
    assert "test_accuracy" in output
    assert "without a model" not in output  # a warning of `Trainer.test`
    assert "tensorboard --logdir runs" in output
    [run] = (own_folder / "runs").iterdir()
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    assert "torch" in json.loads((run / "versions.json").read_text())
    command = (run / "command.txt").read_text()
    assert command.strip().endswith(f"fabricx fit {' '.join(SHORT)}")
    texts = EventAccumulator(str(run)).Reload()
    assert command.encode() in texts.Tensors("command/text_summary")[0].tensor_proto.string_val[0]
    assert b"max_epochs: 2" in texts.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    last = next((run / "checkpoints").glob("last.ckpt"))
    assert "fit ended" in (run / "fabricx.log").read_text()
    output = fabricx("test", f"ckpt_path={last}", "module.lr=0.1")
    assert "test_accuracy" in output
    assert "note: module.lr=0.1 differs from 0.005 in the run of the checkpoint" in output
    assert "(step 10, epoch 1; its run is complete)" in output
    output = fabricx("validate", "ckpt_path=last")
    assert "val_accuracy" in output
    assert f"validates runs/{run.name}/checkpoints/" in output
    assert f"the newest is ckpt_path=runs/{run.name}/checkpoints/" in fabricx("test", fails=True)
    assert "initial weights" in fabricx("test", "ckpt_path=none", "trainer.limit_test_batches=1")
    output = fabricx("test", "ckpt_path=last", "experiment=charlm", fails=True)
    assert "module._target_=fabricx.demo.digits.DigitsClassifier module.hidden=128" in output
    assert "predictions.pt" in fabricx("predict", f"ckpt_path={last}", "trainer.devices=2")


def test_plan_prints_the_division_of_a_module_without_training_or_writing_files(own_folder: Path) -> None:
    output = fabricx("plan", "strategy=pipeline", "trainer.devices=2", "strategy.microbatches=3")
    assert "mesh: data 1 x pipeline 2; data ranks: ddp" in output
    assert "pipeline: 2 stages, 1f1b, 3 microbatches" in output
    assert "; the whole module 0.3 MiB" in output
    output = fabricx("plan", "strategy=mesh", "strategy.data=local_sgd", "strategy.replicas=2", "trainer.devices=2")
    assert "mesh: islands 1 x replicas 2; data ranks: local_sgd between islands" in output
    assert "each rank computes all of it" in fabricx("plan", "strategy=single")
    assert not list(own_folder.glob("runs/*"))


def test_a_run_is_resumed_in_its_folder_and_its_checkpoints_are_listed_verified_and_exported(own_folder: Path) -> None:
    fabricx("fit", "trainer.devices=2", *SHORT)
    [run] = (own_folder / "runs").iterdir()
    output = fabricx("resume", str(run), "trainer.max_epochs=3", "strategy=ddp", "module.lr=0.5", "data.batch_size=16")
    assert "15 steps, 3 epochs" in output
    assert "trainer.max_epochs: 2 -> 3" in output
    assert "the optimizer continues with the checkpoint's lr=0.005 (configured: 0.5)" in output
    assert "each update now has 32 samples, and had 64" in output
    assert "to keep 64, set batch_size=32" in output
    assert yaml.safe_load((run / "config.yaml").read_text())["module"]["lr"] == 0.005
    assert yaml.safe_load((run / "config-resumed-1.yaml").read_text())["module"]["lr"] == 0.5
    assert "module.lr=0.5" in (run / "command-resumed-1.txt").read_text()
    assert (run / "fabricx.log").read_text().count("fit ended") == 2
    output = fabricx("resume", str(run), "module.hidden=7", "trainer.max_epochs=4", fails=True)
    assert "are not those of the module" in output
    assert not (run / "config-resumed-2.yaml").exists()
    assert "the training was already complete; to continue it:" in fabricx(
        "resume", str(run)
    )  # with 3 epochs, as resumed
    listed = fabricx("checkpoint", "ls", "runs").splitlines()
    assert [line.split()[:4] for line in listed] == [["step", "epoch", "ranks", "strategy"], ["15", "2", "2", "DDP"]]
    assert fabricx("checkpoint", "verify", str(run)).startswith("whole")
    output = fabricx("checkpoint", "export", str(run), "weights.safetensors")
    weights = load_file(own_folder / "weights.safetensors")
    assert f"{len(weights)} tensors" in output
    assert set(weights) == set(DigitsClassifier().state_dict())
    assert read_manifest(run / "checkpoints" / "last.ckpt")["configuration"]["trainer"]["max_epochs"] == 3
    part = next(run.rglob("rank-00001.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert "DAMAGED" in fabricx("checkpoint", "verify", str(run), fails=True)
    assert "all checkpoints" in fabricx("resume", str(run), fails=True)
    output = fabricx("resume", str(run), "trainer.max_epoch=4", fails=True)
    assert "Did you mean 'trainer.max_epochs'?" in output
    assert "there is no such folder" in fabricx("resume", "nowhere", fails=True)


def test_a_sweep_has_a_folder_per_job_with_several_ranks(own_folder: Path) -> None:
    fabricx("fit", "--multirun", "module.lr=0.1,0.01", "trainer.devices=2", *SHORT)
    [sweep] = (own_folder / "multirun").iterdir()
    jobs = sorted(folder.name for folder in sweep.iterdir() if folder.is_dir())
    assert jobs == ["0", "1"]
    rates = [yaml.safe_load((sweep / job / "config.yaml").read_text())["module"]["lr"] for job in jobs]
    assert rates == [0.1, 0.01]


@pytest.mark.parametrize(
    ("arguments", "message"),
    params(
        [  # from each source of mistakes; tests/unit/cli/test_mistakes.py has more
            (["fit", "trainer.max_epoch=3"], "Did you mean 'trainer.max_epochs'?"),
            (["fit", "module.lr=fast"], "module.lr='fast' is of type str"),
            (["fit", "strategy=dpd"], "Did you mean 'ddp'?"),
            (["fit", "trainer.devices=0"], "devices=0"),
            (["fit", "module._target_=nowhere.Net"], "nowhere.Net can't be imported"),
            (["test", "ckpt_path=nowhere"], "there is no complete checkpoint"),
            (["fti"], "Did you mean 'fit'?"),
            (["fit", "--config-dir", "nowhere"], "the folder does not exist"),
        ],
        [
            (["fit", "module.hiden=3"], "Did you mean 'module.hidden'?"),
            (["fit", "strategy=async_sgd", "strategy.max_stalenes=3"], "Did you mean 'strategy.max_staleness'?"),
            (["fit", "stratgy=ddp"], "Did you mean 'strategy'?"),
            (["fit", "logger.text._target_=mine.Text"], "to add it, write +logger.text._target_=..."),
            (["fit", "+callbacks.early_stoping.monitor=val_loss"], "Did you mean 'early_stopping'?"),
            (["fit", "experiment=nope"], "experiment=nope: there is no such experiment"),
            (["fit", "module._target_=nowhere"], "write the module and the class"),
            (["fit", "trainer.default_root_dir=s3://a/b"], "callbacks.model_checkpoint.dirpath="),
            (["fit", "callbacks.model_checkpoint.dirpath=s3://a/b"], "Install s3fs"),
        ],
    ),
)
def test_a_mistake_is_explained_without_a_traceback(arguments: list[str], message: str) -> None:
    output = fabricx(*arguments, fails=True)
    assert message in output
    assert "Traceback" not in output
    assert "Error executing job" not in output
    assert not list(Path("runs").glob("*"))


def test_an_error_in_the_users_code_is_printed_with_its_traceback(own_folder: Path) -> None:
    (own_folder / "mine.py").write_text(
        "from fabricx.demo.digits import DigitsClassifier\n"
        "class Net(DigitsClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        raise ValueError('mine alone')\n"
    )
    output = fabricx("fit", "module._target_=mine.Net", fails=True)
    assert "mine.py" in output
    assert "ValueError: mine alone" in output


def test_help_and_configuration_are_shown_without_running(own_folder: Path) -> None:
    output = fabricx("fit", "--help")
    assert "strategy: async_sgd, auto, context, custom, ddp, expert, fsdp" in output
    assert "trainer.log_every_n_steps=10\n      weight updates between two rows in the loggers." in output
    assert "hydra" not in output
    assert "fabricx fit" in fabricx("--help")
    assert yaml.safe_load(fabricx("fit", "--cfg", "job"))["module"]["hidden"] == 128
    assert not (own_folder / "runs").exists()


def test_composing_a_configuration_does_not_import_torch() -> None:
    code = "import sys, fabricx.cli.main, fabricx.cli.hydra_app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_project_may_have_its_own_configuration_groups_and_modules(own_folder: Path) -> None:
    (own_folder / "my_project").mkdir()
    (own_folder / "my_project/__init__.py").touch()
    (own_folder / "my_project/models.py").write_text(
        "from fabricx.demo.digits import DigitsClassifier\nclass Net(DigitsClassifier):\n    pass\n"
    )
    (own_folder / "conf/module").mkdir(parents=True)
    # fabricx has the same name: the project's file takes precedence
    (own_folder / "conf/module/digits.yaml").write_text("_target_: my_project.models.Net\nhidden: 9\n")
    (own_folder / "conf/train.yaml").write_text(
        "defaults:\n  - fabricx\n  - _self_\ntrainer:\n  max_steps: 3\nmy_own: 7\n"
    )
    (own_folder / "train.py").write_text(
        "import fabricx as fx\n"
        "from fabricx.config import build\n"
        "@fx.main(config_path='conf', config_name='train')\n"
        "def train(cfg):\n"
        "    trainer, module, data = build(cfg)\n"
        "    trainer.fit(module, datamodule=data)\n"
        "    print('trained', type(module).__module__, trainer.global_step, cfg.my_own)\n"
        "if __name__ == '__main__':\n"
        "    train()\n"
    )
    assert "my_project.models.Net" in fabricx("fit", "--config-dir", "conf", "--cfg", "job")
    assert "steps" in fabricx("fit", "--config-dir", "conf", "trainer.devices=2", *SHORT)
    output = warm.run(
        [sys.executable, "train.py", "trainer.devices=2"], capture_output=True, text=True, timeout=100, check=False
    )
    assert "trained my_project.models 3 7" in output.stdout, output.stderr


def test_doctor_runs_a_collective_on_two_ranks() -> None:
    assert "all-reduce works" in fabricx("doctor")


DIES_IN_TEST = """
import os, pathlib, signal
from fabricx.demo.digits import DigitsClassifier

class Net(DigitsClassifier):
    def test_step(self, batch, batch_idx):
        mark = pathlib.Path("died")
        if self.global_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().test_step(batch, batch_idx)
"""


def test_the_death_of_a_worker_in_the_test_after_a_fit_is_an_error_with_the_command_to_repeat_the_test(
    own_folder: Path,
) -> None:
    (own_folder / "mine.py").write_text(DIES_IN_TEST)
    options = ("strategy=fsdp", "trainer.devices=2", "module._target_=mine.Net", "experiment=digits")
    output = fabricx("fit", *SHORT, *options, fails=True)
    assert "rank 1 failed" in output
    assert "test does not recover from the failure of a worker: call it again" in output
    [line] = [line for line in output.splitlines() if line.startswith("the training is complete; to repeat the test")]
    command, run_dir = line.split()[-2:]
    assert command == "resume"
    assert "test_accuracy" in fabricx(command, run_dir)


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_ends_cleanly_with_a_checkpoint(own_folder: Path, devices: int) -> None:
    process = warm.Popen(
        [sys.executable, "-m", "fabricx", "fit", "trainer.max_epochs=100000", f"trainer.devices={devices}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(own_folder.glob("runs/*/checkpoints/*/COMMITTED")):  # training has started
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole process group
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    deadline = time.monotonic() + 60  # the fork server ends after its last client
    while subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < deadline, "processes remain"
        time.sleep(0.1)


def test_secrets_are_masked_in_all_output_and_files_of_a_run(own_folder: Path) -> None:
    (own_folder / "mine.py").write_text(
        "import logging\n"
        "from fabricx.demo.digits import DigitsClassifier\n"
        "class Net(DigitsClassifier):\n"
        "    def __init__(self, api_key, url, tokenizer='bert', fails=False):\n"
        "        super().__init__()\n"
        "        self.save_hyperparameters()\n"
        "    def on_train_start(self):\n"
        "        assert (self.hparams.api_key, self.hparams.url) == ('s3cret-value', 'pg://me:s3cret-too@host')\n"
        "        logging.warning('the key is %s', self.hparams.api_key)\n"
        "        if self.hparams.fails:\n"
        "            raise ValueError(f'refused by {self.hparams.url}')\n"
    )
    secrets = ("s3cret-value", "s3cret-too")
    overrides: tuple[str, ...] = ("module.api_key=s3cret-value", "module.url=pg://me:s3cret-too@host")
    small = ("module._target_=mine.Net", "data=digits", "logger=all", "trainer.devices=2", *SHORT)
    output = fabricx("fit", "--multirun", "module.tokenizer=gpt", "module.fails=false", *overrides, *small)
    output += fabricx("fit", "--cfg", "job", *overrides, *small)
    [sweep] = (own_folder / "multirun").iterdir()
    run = sweep / "0"
    config = yaml.safe_load((run / "config.yaml").read_text())["module"]
    assert (config["api_key"], config["url"], config["tokenizer"]) == ("<masked>", "pg://me:<masked>@host", "gpt")
    output += fabricx("resume", str(run), fails=True)
    assert "pass them again" in output
    assert "module.api_key=..." in output
    assert "module.url=..." in output
    assert "15 steps" in fabricx("resume", str(run), *overrides, "trainer.max_epochs=3")
    output += fabricx("resume", str(run), *overrides, "trainer.max_epochs=4", "module.fails=true", fails=True)
    assert "refused by pg://me:<masked>@host" in output
    output += fabricx("report", str(run)) + fabricx("report", str(sweep))
    assert [secret for secret in secrets if secret in output] == []
    files = [file for file in own_folder.rglob("*") if file.is_file() and not file.stem.startswith("mine")]
    assert {"report.html", "manifest.json", "hparams.yaml", "state.pt", "multirun.yaml"} <= {
        file.name for file in files
    }
    assert [file for file in files if any(secret.encode() in file.read_bytes() for secret in secrets)] == []
