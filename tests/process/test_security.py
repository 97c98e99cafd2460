"""Other users of the machine and other machines can neither read nor change a run."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.core.callback import Callback
from fabricx.strategies import DDP, FSDP, AsyncSGD, LocalSGD, ParameterServer
from fabricx.testing import QUIET, LayeredModule, layered_data
from tests import warm
from tests.ports import reserved_port
from tests.soak import SOAK

from .attack import external_addresses

ROOT = Path(__file__).parents[2]
RUNS: dict[str, tuple[Any, int]] = {
    "ddp": (DDP, 2),
    "parameter_server": (lambda: ParameterServer(servers=1), 2),
    "over_gloo": (lambda: ParameterServer(servers=1, link="gloo"), 2),
    "async_sgd": (AsyncSGD, 1),  # a single worker, for a deterministic order of updates
}
if SOAK:  # these runs open the same sockets
    RUNS |= {
        "fsdp": (FSDP, 2),
        "local_sgd": (lambda: LocalSGD(every=2), 2),
        "without_servers": (lambda: ParameterServer(servers=0), 2),
    }


def sockets_below(pid: int, but: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the listening addresses of a process and its descendants: TCP and UDP addresses, and Unix socket paths."""
    parent = psutil.Process(pid)
    internet, unix = set(), set()
    for process in (member for member in (parent, *parent.children(recursive=True)) if member.pid != but):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                    internet.add((connection.laddr.ip, connection.laddr.port))
            paths = {connection.laddr for connection in process.net_connections("unix")}
            unix |= {path for path in paths if os.path.exists(path)}
    return sorted(internet), sorted(unix)


class Attacked(Callback):
    """Send the addresses of a run's sockets to the attacker during training, and wait until the attack is complete.

    Args:
        folder: folder for files of both processes.
        name: name of the run.
        attacker: process id of the attacker.
        run: process id of the parent of all processes of the run.
        others: addresses of processes of concurrent tests.
    """

    def __init__(self, folder: Path, name: str, attacker: int, run: int, others: Any = ()) -> None:
        self.folder, self.name, self.pids, self.others = folder, name, (run, attacker), others

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2 or not trainer.is_global_zero:
            return
        internet, unix = sockets_below(*self.pids)
        internet = [address for address in internet if address not in self.others]
        store = getattr(trainer.world.store, "path", "")  # torchrun's store has no path
        files = [path for path in Path(store).parent.rglob("*") if store and path.is_file() and not path.is_symlink()]
        targets = {
            "internet": internet, "ports": sorted({port for _, port in internet}), "sockets": unix,
            "files": [str(path) for path in files], "addresses": external_addresses(),
            "marker": str(self.folder / "marker"), "launched": "TORCHELASTIC_RUN_ID" in os.environ,
            "modes": [stat.S_IMODE(os.lstat(Path(path).parent).st_mode) for path in unix],
        }  # fmt: skip
        (self.folder / "new").write_text(json.dumps(targets))
        (self.folder / "new").rename(self.folder / f"{self.name}.targets")
        deadline = time.monotonic() + 80
        while not (self.folder / f"{self.name}.result").exists():
            assert time.monotonic() < deadline, "the attacker has ended"
            time.sleep(0.01)


def trained(strategy: Any, devices: int, callbacks: list[Callback]) -> list[Tensor]:
    torch.manual_seed(1)
    module = LayeredModule()
    loader = DataLoader(layered_data(24), 4 // devices)
    fx.Trainer(strategy=strategy, devices=devices, max_epochs=1, callbacks=callbacks, **QUIET).fit(module, loader)
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.soak
def test_another_user_can_not_connect_to_a_run_and_does_not_change_its_weights(own_folder: Path) -> None:
    attacker = warm.Popen([sys.executable, "-m", "tests.process.attack", str(own_folder), *RUNS], cwd=ROOT)
    try:
        for name, (strategy, devices) in RUNS.items():
            undisturbed = trained(strategy(), devices, [])
            others, _ = sockets_below(os.getpid(), attacker.pid)
            attacks = Attacked(own_folder, name, attacker.pid, os.getpid(), others)
            attacked = trained(strategy(), devices, [attacks])
            targets = json.loads((own_folder / f"{name}.targets").read_text())
            assert {address for address, _ in targets["internet"]} <= {"127.0.0.1"}, (name, targets["internet"])
            assert targets["sockets"], name  # at least the socket of the store
            assert set(targets["modes"]) == {0o700}, (name, targets["sockets"])
            assert targets["files"], name
            successes = json.loads((own_folder / f"{name}.result").read_text())
            if os.geteuid() == 0:
                assert successes == [], name
            assert all(torch.equal(a, b) for a, b in zip(attacked, undisturbed, strict=True)), name
    finally:
        attacker.kill()
        attacker.wait()
    assert not (own_folder / "marker").exists()


UNDER_TORCHRUN = """
import os, sys
from pathlib import Path
from tests.process.test_security import RUNS, Attacked, trained

if __name__ == "__main__":
    attacked = Attacked(Path.cwd(), "torchrun", int(sys.argv[1]), os.getppid())
    weights = trained(RUNS["over_gloo"][0](), 2, [attacked])
    if os.environ["RANK"] == "0":  # lines of more than 4 KiB of several processes would mix in one pipe
        print(0, [weight.tolist() for weight in weights], flush=True)
"""


def test_attacks_on_torchruns_store_have_no_effect(own_folder: Path) -> None:
    (own_folder / "script.py").write_text(UNDER_TORCHRUN)
    key = own_folder / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    attacker = warm.Popen([sys.executable, "-m", "tests.process.attack", str(own_folder), "torchrun"], cwd=ROOT)
    try:
        done = warm.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "script.py",
             str(attacker.pid)],
            capture_output=True, text=True, timeout=100, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FABRICX_KEY_FILE": str(key), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    finally:
        attacker.kill()
        attacker.wait()
    successes = json.loads((own_folder / "torchrun.result").read_text())
    assert any("a store at port" in success for success in successes)  # torchrun's store, which admits any process
    expected = [weight.tolist() for weight in trained(RUNS["over_gloo"][0](), 2, [])]
    lines = [line for line in done.stdout.splitlines() if line.startswith("0 ")]
    assert lines == [f"0 {expected}"], done.stdout + done.stderr[-3000:]
    assert not (own_folder / "marker").exists()


def test_runs_without_a_key_train_and_never_execute_received_code(own_folder: Path) -> None:
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.1.1"}
    with reserved_port() as port:
        ranks = [
            warm.Popen(
                [sys.executable, "-m", "tests.process.keyless", str(own_folder)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, **environ, "RANK": str(rank), "GROUP_RANK": str(rank), "MASTER_PORT": str(port),
                     "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            texts = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    for number, (out, error) in enumerate(texts):
        lines = [line for line in out.splitlines() if line.startswith(f"{number} ")]
        unsent = ["TypeError True"] * 2  # for an object that is not plain data, on both ranks
        # Rank 1 has sent the last object.
        forged = ["ValueError False", "ValueError False" if number == 0 else "no error"]
        assert lines[:1] == [f"{number} {unsent + forged}"], out + error[-3000:]
        assert lines[-1] == f"{number} True", out + error[-3000:]
    assert "no FABRICX_KEY_FILE is set" in texts[0][1]
    assert not (own_folder / "marker").exists()


@pytest.mark.parametrize(("users_key", "kind"), [(True, "delete"), (False, "overwrite")], ids=["users_key", "own_key"])
def test_a_program_that_overwrites_or_deletes_addresses_during_the_start_executes_no_code(
    users_key: bool, kind: str, own_folder: Path
) -> None:
    (own_folder / "script.py").write_text(UNDER_TORCHRUN)
    (own_folder / "torchrun.result").touch()  # training doesn't wait for another attack
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with reserved_port() as port:
        attacker = warm.Popen(
            [sys.executable, "-m", "tests.process.attack", str(own_folder), kind, str(port)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            done = warm.run(
                [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--master-addr", "127.0.0.1",
                 "--master-port", str(port), "--nproc-per-node", "3", "script.py", str(attacker.pid)],
                capture_output=True, text=True, timeout=180, check=False,
                env={**environment, "FABRICX_KEY": secrets.token_hex(32)} if users_key else environment,
            )  # fmt: skip
            written = json.loads(attacker.communicate(timeout=180)[0])
        finally:
            attacker.kill()
            attacker.wait()
    assert any("fabricx" in key for key in written), written
    if done.returncode == 0:
        expected = [weight.tolist() for weight in trained(RUNS["over_gloo"][0](), 2, [])]
        assert f"0 {expected}" in done.stdout.splitlines()
    else:
        assert "AuthenticationError" in done.stderr, done.stderr[-6000:]
    assert not (own_folder / "marker").exists()
