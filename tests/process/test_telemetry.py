"""Records, traces and reports of runs with several processes that are slowed, killed and hung."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, Dataset

import fabricx as fx
from fabricx.callbacks import FaultRecovery, Profiler, Tracing
from fabricx.distributed.world import WAITED_S
from fabricx.fault_tolerance.hang_report import explain
from fabricx.loggers import TensorBoardLogger
from fabricx.strategies import DDP, AsyncSGD, ParameterServer
from fabricx.telemetry import recorder
from fabricx.telemetry.diagnosis import diagnose
from fabricx.telemetry.report import load_run, rank_lines, recovery, warnings_of
from fabricx.testing import QUIET, TinyModule, kill, tiny_data, tiny_loader
from tests import warm
from tests.soak import params
from tests.unit.telemetry.test_trace import check_trace

pytestmark = pytest.mark.usefixtures("warm_ranks")

LOGGING: dict[str, Any] = {**QUIET, "logger": TensorBoardLogger(), "log_every_n_steps": 5}


class Clock:
    """A simulated clock for the recorder of a rank; advances with every call, and counts waiting time."""

    def __init__(self, strategy: Any) -> None:
        self.asked, self.strategy = 0.0, strategy

    def __call__(self) -> float:
        self.asked += 1e-6
        return float(self.asked + self.strategy.waited_s + WAITED_S[0])


class Slow(Dataset[Any]):
    """Samples that advance the rank's simulated clock, if any, by an hour each."""

    def __init__(self) -> None:
        self.data = tiny_data(48)
        self.clock: Clock | None = None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if self.clock is not None:
            self.clock.asked += 3600.0
        return self.data[index]


class Counting(TinyModule):
    """Replaces the clock of each rank's recorder, and slows down the data of rank 1."""

    def on_train_start(self) -> None:
        clock = recorder._clock = Clock(self.trainer.strategy)
        if self.global_rank == 1:
            self.trainer.train_dataloader.dataset.clock = clock

    def on_fit_end(self) -> None:
        recorder._clock = time.monotonic


class LogsAndWarns(TinyModule):
    """Logs and warns on the ranks."""

    def on_train_start(self) -> None:
        logging.getLogger("own").warning("of all ranks")
        if self.global_rank:
            warnings.warn("of one rank only", stacklevel=1)


def folder_of(trainer: fx.Trainer) -> Path:
    assert trainer.run_dir is not None
    return trainer.run_dir


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> fx.Trainer:
    """Train with tracing."""
    root = tmp_path_factory.mktemp("traced")
    trainer = fx.Trainer(
        devices=2, strategy=DDP(), max_epochs=1, default_root_dir=root,
        callbacks=[Tracing(operators=[5, 6]), Profiler()],
        **LOGGING,
    )  # fmt: skip
    trainer.fit(LogsAndWarns(), tiny_loader(160, 4, shuffle=True), tiny_loader(8, 4))
    return trainer


def test_a_rank_with_slow_data_is_named(tmp_path: Path) -> None:
    trainer = fx.Trainer(devices=2, strategy=DDP(), max_epochs=1, default_root_dir=tmp_path, **LOGGING)
    trainer.fit(Counting(), DataLoader(Slow(), batch_size=4))
    seen = load_run(folder_of(trainer))
    first, second = rank_lines(seen.run)
    assert diagnose(seen.run).startswith("rank 1 is slow in data wait: ")
    assert second.straggler > first.straggler == 0.0
    assert second.spans["data"] == pytest.approx(4 * 3600e3, abs=1.0)  # ms of each step
    assert first.spans["data"] < 1.0


def test_the_records_of_a_run_contain_its_steps_spans_and_arguments(traced: fx.Trainer) -> None:
    seen = load_run(folder_of(traced))
    first, second = rank_lines(seen.run)
    assert {"data", "forward", "backward", "optimizer", "other"} <= first.spans.keys()
    assert (first.steps, second.steps) == (20, 20)
    assert (seen.state, seen.complaints) == ("done", [])
    made = yaml.safe_load((seen.run_dir / "arguments.yaml").read_text())
    assert made["trainer"]["strategy"]["class"] == "DDP"
    assert made["trainer"]["callbacks"][0] == {"class": "Tracing", "steps": None, "operators": [5, 6]}
    assert made["module"] == {"class": "LogsAndWarns", "lr": 0.1}
    assert set(seen.run.metrics) == {"loss", "val_loss", "epoch"}
    assert seen.run.gauges.keys() == {"gradient_norm", "learning_rate"}
    assert {step: float(f"{lr:.6f}") for step, lr in seen.run.gauges["learning_rate"].items()} == dict.fromkeys(
        (5, 10, 15, 20), 0.1
    )


def test_messages_of_all_ranks_are_in_one_file_and_repeated_messages_are_merged(traced: fx.Trainer) -> None:
    seen = load_run(folder_of(traced))
    warned = {text.partition(" (")[0]: (ranks, times) for ranks, text, times in warnings_of(seen.run)}
    assert warned["WARNING own: of all ranks"] == ("0, 1", 2)
    assert warned["WARNING UserWarning: of one rank only"] == ("1", 1)
    assert len((folder_of(traced) / "logs" / "all.log").read_text().splitlines()) == len(seen.run.logs)
    assert "of one rank only" in (folder_of(traced) / "logs" / "rank-1.log").read_text()


def test_the_trace_of_a_run_contains_the_operators_within_the_spans_of_both_ranks(traced: fx.Trainer) -> None:
    events = check_trace(folder_of(traced) / "trace.json")
    for rank in (0, 1):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        names = [e["name"] for e in spans]
        assert names.count("forward") == names.count("data wait") == 20
        forwards = [e["ts"] for e in spans if e["name"] == "forward"]
        losses = [e["ts"] for e in spans if e["name"] == "aten::mse_loss"]
        assert len(losses) >= 2  # of the two profiled steps
        minute = 60e6  # confused clocks would differ by years, clocks of a busy machine by moments
        assert all(min(forwards) - minute <= at <= max(forwards) + minute for at in losses)


def test_tensorboard_shows_all_ranks_and_the_users_metrics(traced: fx.Trainer) -> None:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder_of(traced).parent), "--port", "0"]
    with warm.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = next(match.group() for line in process.stderr or () if (match := re.search(r"http://\S+", line)))
            look_at_board(address, folder_of(traced).name)
        finally:
            process.kill()


def look_at_board(address: str, name: str) -> None:
    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"{address}data/plugin/{path}", timeout=60) as answer:
            return json.load(answer)

    deadline = time.monotonic() + 60
    ranks = [f"{name}/telemetry/rank_{rank}" for rank in (0, 1)]
    while not {name, f"{name}/telemetry", *ranks} <= (tags := ask("scalars/tags")).keys():
        assert time.monotonic() < deadline, tags.keys()
        time.sleep(0.2)
    assert {"loss", "val_loss"} <= tags[name].keys()
    by_rank = {f"~ranks/{tag}" for tag in ("busy_ms", "wait_ms", "data_ms", "straggler", "share")}
    assert all(by_rank <= tags[rank].keys() for rank in ranks)
    whole = {f"~training/{tag}" for tag in ("step_ms", "samples_per_s", "gradient_norm", "learning_rate")}
    assert whole <= tags[f"{name}/telemetry"].keys()
    shown = ask(f"scalars/scalars?run={ranks[1]}&tag=~ranks/straggler")
    assert 0.0 <= shown[-1][2] <= 1.0
    assert "arguments/text_summary" in ask("text/tags")[name]
    charts = {c["title"]: [chart["title"] for chart in c["chart"]] for c in ask("custom_scalars/layout")["category"]}
    assert "loss" in charts["metrics"]
    assert "busy time, ms" in charts["ranks"]


def test_the_death_of_a_rank_is_in_all_records_of_a_run(tmp_path: Path) -> None:
    trainer = fx.Trainer(
        devices=2, strategy=DDP(), max_epochs=1, default_root_dir=tmp_path,
        callbacks=[kill(rank=1).during("backward", step=4), FaultRecovery(patience=30.0)], **LOGGING,
    )  # fmt: skip
    trainer.fit(TinyModule(), tiny_loader(80, 4))
    run = load_run(folder_of(trainer)).run
    assert recovery(run).startswith("recovered 1 time, ")
    names = [event["name"] for event in run.events]
    assert names.count("death") == 1
    assert "killed by SIGKILL" in next(event["text"] for event in run.events if event["name"] == "death")
    assert run.ranks[1].processes == 2
    assert run.size == 2
    assert [line.steps for line in rank_lines(run)] == [10, 10]


class Failing(TinyModule):
    """Raises an error in the fourth batch of rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 3:
            raise ArithmeticError("no more")
        return super().training_step(batch, batch_idx)


def test_a_failed_run_has_the_first_traceback_and_its_records(tmp_path: Path) -> None:
    trainer = fx.Trainer(devices=2, strategy=DDP(), max_epochs=1, default_root_dir=tmp_path, **LOGGING)
    with pytest.raises(fx.errors.WorkerFailed) as caught:
        trainer.fit(Failing(), tiny_loader(80, 4))
    assert str(caught.value).startswith("rank 1 failed:")
    assert "raise ArithmeticError" in str(caught.value)
    assert "dispatch.py" not in str(caught.value)
    [run_dir] = (tmp_path / "runs").iterdir()
    assert load_run(run_dir).state == "failed"


class Hung(TinyModule):
    """Hangs in the fourth step of rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and self.global_step == 3 and self.trainer.world.generation == 0:
            while True:
                time.sleep(0.01)
        return super().training_step(batch, batch_idx)


SHARED = "exchange in shared memory with rank 1"


@pytest.mark.parametrize(
    ("event", "strategy"),
    params([(SHARED, DDP())], [("all_reduce #", DDP(shared_memory=False)), (SHARED, ParameterServer(servers=0))]),
)
def test_the_report_of_a_hang_names_the_line_of_the_hanging_rank_and_the_waits_of_the_others(
    tmp_path: Path, event: str, strategy: Any
) -> None:
    trainer = fx.Trainer(
        devices=2, strategy=strategy, max_epochs=1, default_root_dir=tmp_path,
        callbacks=[FaultRecovery(stuck_after=5, patience=60.0)], **LOGGING,
    )  # fmt: skip
    trainer.fit(Hung(), tiny_loader(80, 4))
    run = load_run(folder_of(trainer)).run
    [hang] = [event for event in run.events if event["name"] == "hang"]
    assert hang["silent_s"] > 5.0  # stuck_after
    sentence, _, stacks = hang["text"].partition("\n")
    assert "rank 1 is at " in sentence
    assert "in training_step: time.sleep(0.01), after " in sentence
    assert f"rank 0 waits in {event}" in sentence
    assert "rank 0:" in stacks
    assert "thread MainThread" in stacks
    assert trainer.global_step == 10
    assert explain({}) == "no rank could be asked"


@pytest.mark.parametrize("strategy", params([AsyncSGD()], [ParameterServer()]))
def test_the_trace_contains_the_queues_of_servers_and_an_arrow_per_gradient(tmp_path: Path, strategy: Any) -> None:
    trainer = fx.Trainer(
        devices=2, strategy=strategy, max_epochs=1, default_root_dir=tmp_path, callbacks=[Tracing()], **LOGGING
    )
    trainer.fit(TinyModule(), tiny_loader(160, 4))
    run = load_run(folder_of(trainer)).run
    assert {"push", "pull"} <= {span for line in rank_lines(run) for span in line.spans}
    arrows = {"s": set(), "f": set()}
    for event in check_trace(folder_of(trainer) / "trace.json"):
        if event["ph"] in arrows:
            arrows[event["ph"]].add(event["id"])
    assert arrows["f"]
    assert arrows["f"] <= arrows["s"]  # all applied gradients were sent
    assert {name for name in run.gauges if name.startswith("server_queue_")}


def test_records_of_a_running_run_are_readable(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, fabricx as fx\n"
        "from fabricx.testing import TinyModule, tiny_loader\n"
        "class Long(TinyModule):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        time.sleep(0.05)\n"
        "        return super().training_step(batch, batch_idx)\n"
        "if __name__ == '__main__':\n"
        "    trainer = fx.Trainer(max_epochs=1000, accelerator='cpu', enable_progress_bar=False)\n"
        "    trainer.fit(Long(), tiny_loader(80, 4))\n"
    )
    with warm.Popen([sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                runs = [path for path in tmp_path.glob("runs/*") if any(path.glob("telemetry/worker*.jsonl"))]
                if runs and load_run(runs[0]).run.steps > 3:
                    break
                time.sleep(0.2)
            assert load_run(runs[0]).state == "running"
            assert load_run(runs[0]).run.ranks[0].ending is None
        finally:
            process.kill()
    seen = load_run(runs[0])
    seen.run.ended -= 60
    assert seen.state.startswith("no records for")
