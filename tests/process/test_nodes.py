"""Two machines, as far as a network is concerned: each in a namespace of its own, joined by one link."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_recovery import MEMORY, SCRIPT, STEPS

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


def start(node: int, inside: list[str], folder: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Let torchrun start a rank of the script on a node."""
    command = [
        *inside, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29411", "--rdzv-conf", f"is_host={1 - node}",
        "--rdzv-id", "nodes", "--local-addr", ADDRESSES[node], "--max-restarts", "3", "script.py", *arguments,
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
        "GLOO_SOCKET_IFNAME": f"{NAMES[node]}0", "TMPDIR": str(folder),
        **more,
    }  # fmt: skip
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_nodes_go_on_with_their_run_after_kills(nodes: list[list[str]], own_folder: Path) -> None:
    (own_folder / "script.py").write_text(SCRIPT.replace("strategy=sys.argv[1]", "strategy='ddp', num_nodes=2"))
    nodes_running = [start(node, inside, own_folder) for node, inside in enumerate(nodes)]
    try:
        texts = [node.communicate(timeout=100) for node in nodes_running]
    finally:
        for node in nodes_running:
            node.kill()
    said = [line for line in texts[0][0].splitlines() if line.startswith("fit 1")]
    assert said[-1:] == [f"fit 1 {STEPS} True 2"], "".join(texts[0])[-3000:] + "".join(texts[1])[-3000:]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_what_a_lost_node_held_comes_from_its_buddy_or_a_replica(
    strategy: str, nodes: list[list[str]], own_folder: Path
) -> None:
    (own_folder / "script.py").write_text(MEMORY)
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torchrun lets no other node into a later attempt
    running = [start(node, inside, own_folder, strategy, "2", **apart) for node, inside in enumerate(nodes)]
    try:
        assert running[1].wait(60) == -signal.SIGKILL
        running.append(start(1, nodes[1], own_folder, strategy, "2", **apart))
        texts = [node.communicate(timeout=100) for node in running]
    finally:
        for node in running:
            node.kill()
    said = [line for text, _ in texts for line in text.splitlines() if line.startswith(("rank", "fit"))]
    begun = [f"rank {rank} begins at {step} of {step}" for step in (0, 5) for rank in (0, 1)]
    assert sorted(said) == sorted([*begun, f"fit {STEPS} True"]), texts
