"""Launchers are detected only by their environment variables."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import psutil
import pytest

import fabricx as fx
from fabricx.distributed.world import World
from fabricx.launch import cluster, launch_store
from fabricx.launch.cluster import address, detect, job, on_one_machine, unused_devices
from fabricx.launch.launch_store import connect
from fabricx.strategies import DDP, ParameterServer
from fabricx.testing import QUIET
from fabricx.trainer import cluster_run
from tests.ports import reserved_port


def test_no_cluster_is_detected_for_a_script_started_by_hand() -> None:
    assert detect({}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}) is None


def test_torchrun_is_detected() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    world = detect({**env, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node_rank) == (5, 8, 1, 4, 1)
    assert address({"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}) == ("node0", 1234)


def test_slurm_is_detected() -> None:
    env = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"}
    world = detect(env)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node_rank) == (3, 4, 1, 2, 1)
    for nodes, first in [("a1,a2", "a1"), ("gpu[07-09,12]", "gpu07"), ("n[3]", "n3"), ("host", "host")]:
        assert address({"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "77"}) == (first, 15077)


# As mpirun of MPICH 5.0 and of Open MPI 5.0 and 4.1 sets them.
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-vm-6078@1"}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8",
             "TRAINING_JOB_NAME": "job17"}  # fmt: skip


@pytest.mark.parametrize("env", [MPICH, OPEN_MPI], ids=["mpich", "openmpi"])
def test_mpi_is_detected(env: dict[str, str]) -> None:
    for environment in (env, {**env, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}):  # mpirun within a job of SLURM
        world = detect(environment)
        assert world is not None
        assert (world.rank, world.size, world.local_rank, world.local_size, world.node_rank) == (3, 4, 1, 2, 1)
    assert not on_one_machine(env)
    assert address({**env, "MASTER_ADDR": "node0"}) == ("node0", 29500)
    with pytest.raises(ValueError, match="set MASTER_ADDR to the machine of rank 0"):
        address(env)


def test_an_mpi_job_on_a_single_machine_has_its_own_port() -> None:
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    host, port = address(alone)
    assert on_one_machine(alone)
    assert (host, port) == ("127.0.0.1", address({**alone, "OMPI_COMM_WORLD_RANK": "0"})[1])
    assert port != address({**alone, "PMIX_NAMESPACE": "prterun-vm-6079@1"})[1]
    assert address({**alone, "MASTER_PORT": "1234"}) == ("127.0.0.1", 1234)
    assert job({**MPICH, "MPI_LOCALNRANKS": "4"}).split()[0] == str(os.getppid())  # MPICH has no number of the job


def test_pmi_variables_alone_are_those_of_srun() -> None:
    world = detect({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
    assert world is not None
    assert (world.rank, world.local_rank) == (1, 1)
    assert detect({"PMI_RANK": "1", "PMI_SIZE": "2"}) is None


def test_sagemaker_starts_a_process_on_each_machine() -> None:
    world = detect(SAGEMAKER)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node_rank) == (1, 2, 0, 1, 1)
    assert not on_one_machine(SAGEMAKER)
    assert address(SAGEMAKER) == ("algo-1", 7777)
    assert job(SAGEMAKER) == "job17"
    assert detect({**SAGEMAKER, "SM_HOSTS": '["algo-2"]'}) is None
    started = detect({**OPEN_MPI, **SAGEMAKER})  # with its launcher for MPI
    assert started is not None
    assert (started.size, address({**OPEN_MPI, **SAGEMAKER})) == (4, ("algo-1", 7777))


def test_a_process_of_sagemaker_does_not_leave_gpus_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unused_devices({**OPEN_MPI, **SAGEMAKER}) == 0
    assert unused_devices({**SAGEMAKER, "SM_NUM_GPUS": "1"}) == 0
    for name, value in SAGEMAKER.items():
        monkeypatch.setenv(name, value)
    options = fx.Trainer(num_nodes=2, **QUIET)
    with pytest.raises(ValueError, match="this machine has 8 GPUs, and SageMaker has started a single process on it"):
        cluster_run.join_launch(options, DDP())


def test_torchrun_may_restart_the_only_rank_of_a_single_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with `--nnodes 1:2` and a rank on each machine, the run ended with an error after a loss."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch_store, "connect", lambda world: world)
    monkeypatch.setattr(cluster_run.process, "enter", lambda options, world: world)
    options = fx.Trainer(num_nodes=2, **QUIET)
    message = "num_nodes=2, but no launcher has started processes on all nodes"
    with pytest.raises(ValueError, match=message):
        cluster_run.join_launch(options, DDP())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    joined = cluster_run.join_launch(options, DDP())
    assert joined is not None
    assert joined.size == 1
    assert not cluster_run.is_launched()
    assert options.world_size == 2
    options._world = replace(joined, store=object())
    assert options.world_size == 1
    with pytest.raises(ValueError, match=message):
        cluster_run.join_launch(options, ParameterServer(servers=1))


def test_the_store_on_a_single_machine_listens_on_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "gpu07"}
    listening: set[tuple[str, int]] = set()

    def meet(store: Any, info: Any) -> tuple[Any, bytes]:
        listening.update(
            tuple(connection.laddr)
            for connection in psutil.Process(os.getpid()).net_connections("inet")
            if connection.status == "LISTEN"
        )
        return store, b"k" * 32

    monkeypatch.setattr(launch_store, "meet", meet)
    with reserved_port() as port:
        world = connect(World(), {**env, "MASTER_PORT": str(port)})
    assert ("127.0.0.1", port) in listening
    assert {address for address, where in listening if where == port} == {"127.0.0.1"}
    assert len(world.secret) == 32
    launch_store._CONNECTED.clear()


def test_other_ranks_on_the_machine_are_assumed_without_a_local_world_size() -> None:
    assert not on_one_machine({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.1.1"})
    assert on_one_machine({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"})
    assert on_one_machine({"SLURM_PROCID": "0", "SLURM_NNODES": "1"})
    assert not on_one_machine({"SLURM_PROCID": "0", "SLURM_NNODES": "2"})


def test_servers_on_several_machines_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_store, "connect", lambda world: world)
    for servers in (1, 0):  # without servers workers exchange packed optimizers
        served = ParameterServer(servers=servers)
        with pytest.raises(ValueError, match="set FABRICX_KEY_FILE"):
            cluster_run.connected(World(size=2), served)
    assert cluster_run.connected(World(size=2, secret=b"k" * 32), served).size == 2
    assert cluster_run.connected(World(size=2), DDP()).size == 2


def test_a_run_shows_the_numbers_of_its_workers_and_the_launch_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun counts servers, and MPI sets no RANK; data sets divide by both variables."""
    launched = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with cluster.shows_rank(World(1, 2, local_rank=1, local_size=2)):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
        detected = cluster.detect()
        assert detected is not None
        assert (detected.rank, detected.size) == (1, 3)
    assert {name: os.environ[name] for name in launched} == launched
    for name in launched:
        monkeypatch.delenv(name)
    with cluster.shows_rank(World(1, 2)):
        assert os.environ["RANK"] == "1"
        assert cluster.detect() is None
    assert not any(name in os.environ for name in launched)
