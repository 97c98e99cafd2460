"""torchrun and SLURM are recognised by their variables, and nothing else is."""

from __future__ import annotations

from fabricx.launch.environment import address, detect


def test_nothing_is_detected_where_a_person_has_started_the_script() -> None:
    assert detect({}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}) is None


def test_torchrun() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    found = detect({**env, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node_rank) == (5, 8, 1, 4, 1)
    assert address({"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}) == ("node0", 1234)


def test_slurm() -> None:
    env = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2"}
    found = detect(env)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size, found.node_rank) == (3, 4, 1, 2, 1)
    for nodes, first in [("a1,a2", "a1"), ("gpu[07-09,12]", "gpu07"), ("n[3]", "n3"), ("host", "host")]:
        assert address({"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "77"}) == (first, 15077)
