"""Simulated machines: separate network namespaces that are connected by a bridge."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.soak import params

from .ledgers import STEPS
from .test_security import RUNS, trained
from .test_torchrun_recovery import MEMORY, SCRIPT

NAMES = tuple(f"fx{os.getpid()}{letter}" for letter in "abc")  # the last is a spare node
ADDRESSES = ("10.203.77.1", "10.203.77.2", "10.203.77.3")
BRIDGE = f"fx{os.getpid()}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True)


def make_nodes() -> None:
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("link", "set", BRIDGE, "up")
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        link = f"{name}0"
        ip("netns", "add", name)
        ip("link", "add", f"{name}1", "type", "veth", "peer", "name", link, "netns", name)
        ip("link", "set", f"{name}1", "master", BRIDGE, "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")


def kill_all() -> None:
    """Kill the processes of all nodes: ranks of a killed torchrun may wait for an unreachable node."""
    for name in NAMES:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for process in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[None]:
    """Create the nodes."""
    if shutil.which("ip") is None:
        pytest.skip("two nodes on one machine need network namespaces, which iproute2 makes: install it")
    try:
        make_nodes()
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(
            f"two nodes on one machine need network namespaces, and this user may not make them: {error.stderr}"
        )
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            # The kernel deletes it later.
            subprocess.run(["ip", "link", "del", f"{name}1"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def start(node: int, folder: Path, *arguments: str, **more: str) -> warm.Popen:
    """Start a rank of the script on a node by torchrun."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", more.pop("PER_NODE", "1"),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29411", "--rdzv-conf",
        f"is_host={int(node == 0)},keep_alive_interval=1,keep_alive_max_attempt=6",  # 6 s to detect a lost node
        "--rdzv-id", "nodes", "--local-addr", ADDRESSES[node], "--max-restarts", "3", "script.py", *arguments,
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
        "GLOO_SOCKET_IFNAME": f"{NAMES[node]}0", "TMPDIR": str(folder),
        **more,
    }  # fmt: skip
    return warm.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, network=NAMES[node]
    )


@pytest.mark.usefixtures("nodes")
def test_a_run_on_two_nodes_continues_after_kills(own_folder: Path) -> None:
    (own_folder / "script.py").write_text(SCRIPT.replace("strategy=sys.argv[1]", "strategy='ddp', num_nodes=2"))
    nodes_running = [start(node, own_folder) for node in (0, 1)]
    try:
        texts = [node.communicate(timeout=100) for node in nodes_running]
    finally:
        for node in nodes_running:
            node.kill()
    lines = [line for line in texts[0][0].splitlines() if line.startswith("fit 1")]
    assert lines[-1:] == [f"fit 1 {STEPS} True 2"], "".join(texts[0])[-3000:] + "".join(texts[1])[-3000:]


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("strategy", params(["fsdp"], ["hsdp", "ddp"]))
def test_the_state_of_a_lost_node_is_restored_from_its_buddy_or_a_replica(strategy: str, own_folder: Path) -> None:
    (own_folder / "script.py").write_text(MEMORY)
    # Otherwise torchrun admits no new node to a later attempt; messages between nodes are signed with the key.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "FABRICX_KEY": "0123456789abcdef" * 4}
    running = [start(node, own_folder, strategy, "2", **variables) for node in (0, 1)]
    try:
        assert running[1].wait(100) == -signal.SIGKILL
        running.append(start(1, own_folder, strategy, "2", **variables))
        texts = [node.communicate(timeout=100) for node in running]
    finally:
        for node in running:
            node.kill()
    lines = [line for text, _ in texts for line in text.splitlines() if line.startswith(("rank", "fit"))]
    begun = [f"rank {rank} begins at {step} of {step}" for step in (0, 5) for rank in (0, 1)]
    assert sorted(lines) == sorted([*begun, f"fit {STEPS} True"]), texts


CUT = """
import os, sys, time, torch
from pathlib import Path
import fabricx as fx
from torch.utils.data import DataLoader
from fabricx.callbacks import FaultRecovery
from fabricx.testing import QUIET, Ledger
from tests.process.ledgers import BATCH, EPOCHS, SAMPLES, STEPS, Numbered, exact

class WaitsForCut(fx.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 9 and not trainer.failures:
            Path(f"at-{trainer.global_rank}").touch()
            while not Path("cut").exists():
                time.sleep(0.02)

if __name__ == "__main__":
    torch.manual_seed(3)
    module = Ledger(SAMPLES, BATCH)
    trainer = fx.Trainer(strategy="ddp", max_epochs=EPOCHS, num_nodes=2, **QUIET, callbacks=[
        WaitsForCut(), FaultRecovery(every_n_train_steps=2)])
    trainer.fit(module, DataLoader(Numbered(), BATCH // 2, shuffle=True))
    if trainer.is_global_zero:
        print("fit", trainer.global_step == STEPS, exact(module), len(trainer.failures), flush=True)
"""


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("key", params([], ["0123456789abcdef" * 4, ""]))  # without a key, from snapshots on disk
def test_a_spare_node_replaces_a_node_that_has_lost_its_network(key: str, own_folder: Path) -> None:
    (own_folder / "script.py").write_text(CUT)
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **({"FABRICX_KEY": key} if key else {})}
    running = [start(node, own_folder, **variables) for node in (0, 1)]
    try:
        while len(list(own_folder.glob("at-*"))) < 2:
            assert [node.poll() for node in running] == [None, None]
            time.sleep(0.05)
        running.append(start(2, own_folder, **variables))
        ip("link", "set", f"{NAMES[1]}1", "down")
        (own_folder / "cut").touch()
        texts = [node.communicate(timeout=200) for node in (running[0], running[2])]
    finally:
        kill_all()
        for node in running:
            node.communicate()
    lines = [line for text, _ in texts for line in text.splitlines() if line.startswith("fit")]
    assert lines == ["fit True True 1"], texts
    assert "its machine is unreachable; torchrun starts the ranks again" in texts[0][1]
    assert len(list(own_folder.glob("runs/*"))) == 1


SERVED = """
import os, sys
import torch
from torch.utils.data import DataLoader
import fabricx as fx
from fabricx.strategies import AsyncSGD, ParameterServer
from fabricx.testing import QUIET, LayeredModule, layered_data

MADE = {
    "sync": lambda servers: ParameterServer(servers=servers),
    "bounded": lambda servers: ParameterServer(servers=servers, mode="bounded", max_staleness=0),
    "async": lambda servers: AsyncSGD(servers=servers),
}


def trained(name, servers, workers):
    torch.manual_seed(1)
    module = LayeredModule()
    loader = DataLoader(layered_data(24), 4 // workers)
    trainer = fx.Trainer(strategy=MADE[name](servers), max_epochs=1, num_nodes=2, **QUIET)
    trainer.validate(module, loader)  # servers do not take part in it
    for _ in range(2):  # the second trainer joins the same launch
        trainer = fx.Trainer(strategy=MADE[name](servers), max_epochs=1, num_nodes=2, **QUIET)
        trainer.fit(module, loader)
    return [weight.tolist() for weight in module.parameters()]


if __name__ == "__main__":
    servers = int(sys.argv[1])
    workers = int(os.environ["WORLD_SIZE"]) - servers
    for name in sys.argv[2:]:
        weights = trained(name, servers, workers)
        if os.environ["RANK"] == "0":
            print(name, weights, flush=True)
"""


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(("per_node", "servers"), params([(2, 3)], [(1, 1), (2, 1)]))
def test_workers_and_servers_may_be_divided_over_nodes_in_any_way(
    per_node: int, servers: int, own_folder: Path
) -> None:
    (own_folder / "script.py").write_text(SERVED)
    key = {"FABRICX_KEY": secrets.token_hex(32), "PER_NODE": str(per_node)}
    names = ["sync", "bounded", "async"] if per_node * 2 - servers == 1 else ["sync", "bounded"]
    running = [start(node, own_folder, str(servers), *names, **key) for node in (0, 1)]
    try:
        texts = [node.communicate(timeout=100) for node in running]
    finally:
        for node in running:
            node.kill()
            node.wait()
    assert [node.returncode for node in running] == [0, 0], texts
    lines = dict(line.split(" ", 1) for line in texts[0][0].splitlines() if line.startswith(tuple(names)))
    assert sorted(lines) == sorted(names), texts
    assert len(set(lines.values())) == 1  # staleness 0 and a single worker are equivalent to "sync"


ATTACKED = """
import os, sys
from pathlib import Path
from tests.process.test_security import RUNS, Attacked, trained

if __name__ == "__main__":
    name, strategy, attacker = sys.argv[1:]
    make, devices = RUNS[strategy]
    devices = 1 if "RANK" in os.environ else devices  # of each node
    run = os.getppid() if "RANK" in os.environ else os.getpid()
    weights = trained(make(), devices, [Attacked(Path.cwd(), name, int(attacker), run)])
    print("weights", [weight.tolist() for weight in weights], flush=True)
"""


@pytest.mark.usefixtures("nodes")
def test_a_run_on_one_node_is_unreachable_from_another_and_a_run_on_both_refuses_attacks(own_folder: Path) -> None:
    (own_folder / "script.py").write_text(ATTACKED)
    root = Path(__file__).parents[2]
    attacker = warm.Popen(
        [sys.executable, "-m", "tests.process.attack", str(own_folder), "single", "both"], cwd=root, network=NAMES[1]
    )
    running: list[warm.Popen] = []
    try:
        running = [
            warm.Popen(
                [sys.executable, "script.py", "single", "over_gloo", str(attacker.pid)], network=NAMES[0],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
            )
        ]  # fmt: skip
        single = running[0].communicate(timeout=100)
        key = secrets.token_hex(32)
        running += [start(node, own_folder, "both", "ddp", str(attacker.pid), FABRICX_KEY=key) for node in (0, 1)]
        both = [node.communicate(timeout=100) for node in running[1:]]
    finally:
        for process in (attacker, *running):
            process.kill()
            process.wait()
    reports = [
        json.loads((own_folder / f"{name}.{kind}").read_text())
        for name in ("single", "both")
        for kind in ("targets", "result")
    ]
    assert reports[0]["ports"], "gloo's are open"
    assert [reports[0]["addresses"], reports[2]["addresses"]] == [[ADDRESSES[0]]] * 2
    assert reports[1] == [], "no port, file or socket of a run on one machine is in reach"
    assert "a store at port 29411" in reports[3]  # torchrun's store, which admits any process
    expected = [weight.tolist() for weight in trained(RUNS["over_gloo"][0](), 2, [])]
    assert f"weights {expected}" in single[0].splitlines(), single[0] + single[1][-3000:]
    weights = [[line for line in out.splitlines() if line.startswith("weights")] for out, _ in both]
    assert weights[0] == weights[1], both
    assert len(weights[0]) == 1, both
    assert [node.returncode for node in running] == [0, 0, 0]
    assert not (own_folder / "marker").exists()
