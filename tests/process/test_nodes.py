"""Two machines, as far as a network is concerned: each in a namespace of its own, joined by one link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_recovery import SCRIPT, STEPS

NAMES = (f"fx{os.getpid()}a", f"fx{os.getpid()}b")
ADDRESSES = ("10.203.77.1", "10.203.77.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, text=True)


def make_nodes() -> None:
    links = [f"{name}0" for name in NAMES]
    for name in NAMES:
        ip("netns", "add", name)
    ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
    for name, link, address in zip(NAMES, links, ADDRESSES, strict=True):
        ip("link", "set", link, "netns", name)
        ip("-n", name, "address", "add", f"{address}/24", "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    """Make two nodes; yields for each the beginning of a command that is run there."""
    if shutil.which("ip") is None:
        pytest.skip("two nodes on one machine need network namespaces, which iproute2 makes: install it")
    try:
        make_nodes()
        yield [["ip", "netns", "exec", name] for name in NAMES]
    except subprocess.CalledProcessError as error:
        pytest.skip(
            f"two nodes on one machine need network namespaces, and this user may not make them: {error.stderr}"
        )
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_two_nodes_go_on_with_their_run_after_kills(nodes: list[list[str]], own_folder: Path) -> None:
    (own_folder / "script.py").write_text(SCRIPT.replace("strategy=sys.argv[1]", "strategy='ddp', num_nodes=2"))
    nodes_running = []
    for rank, (inside, address, name) in enumerate(zip(nodes, ADDRESSES, NAMES, strict=True)):
        command = [
            *inside, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29411",
            "--rdzv-conf", f"is_host={1 - rank}",
            "--rdzv-id", "nodes", "--local-addr", address, "--max-restarts", "3", "script.py",
        ]  # fmt: skip
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
            "GLOO_SOCKET_IFNAME": f"{name}0",
        }  # fmt: skip
        nodes_running.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        texts = [node.communicate(timeout=100) for node in nodes_running]
    finally:
        for node in nodes_running:
            node.kill()
    said = [line for line in texts[0][0].splitlines() if line.startswith("fit 1")]
    assert said[-1:] == [f"fit 1 {STEPS} True 2"], "".join(texts[0])[-3000:] + "".join(texts[1])[-3000:]
