"""Processes of a launch join their store even if a foreign program writes to the launcher's store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fabricx.distributed.messages.authentication import AuthenticationError, new_key
from fabricx.distributed.world import World
from fabricx.launch import launch_store, store_host
from fabricx.launch.launch_store import PLACE, Launch, meet, user_key

KEY = b"k" * 32
NAMES = ("node0", "29500", "2", "run")


def launch(rank: int, size: int = 2, user_key: bytes = KEY, *, alone: bool = False, **more: Any) -> Launch:
    return Launch(rank, size, alone, user_key, more.pop("names", NAMES), "localhost", **more)


def begin(store: dist.Store, launches: list[Launch]) -> tuple[dict[int, Any], list[threading.Thread]]:
    """Join the launch with each rank in a thread; return their results or errors."""
    results: dict[int, Any] = {}

    def rank(info: Launch) -> None:
        try:
            results[info.rank] = meet(store, info)
        except Exception as error:
            results[info.rank] = error

    threads = [threading.Thread(target=rank, args=(info,), daemon=True) for info in launches]
    for thread in threads:
        thread.start()
    return results, threads


def together(store: dist.Store, launches: list[Launch]) -> dict[int, Any]:
    results, threads = begin(store, launches)
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture(autouse=True)
def _hosts_end(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(store_host, "_STARTED", [])
    yield
    for process in store_host._STARTED:
        process.kill()  # in place of the end of the first rank
        process.wait()


def test_an_attempt_of_fewer_ranks_has_the_names_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the address written by ranks of the earlier attempt for that of another program."""
    launches: list[Launch] = []
    monkeypatch.setattr(launch_store, "_open_launcher_store", lambda *_, **__: None)
    monkeypatch.setattr(launch_store, "_CONNECTED", {})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # set for a launch on a single machine
    monkeypatch.setattr(launch_store, "meet", lambda store, info: (launches.append(info), (None, b""))[1])
    for size in ("4", "2"):
        environment = {
            "RANK": "1", "WORLD_SIZE": size, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "run", "FABRICX_KEY": "k" * 40,
        }  # fmt: skip
        launch_store.connect(World(), environment)
    assert [info.size for info in launches] == [4, 2]
    assert launches[0].names == launches[1].names


def test_ranks_on_the_same_machine_read_the_key_from_a_file_that_is_then_deleted() -> None:
    results = together(dist.HashStore(), [launch(rank, 3, b"", alone=True) for rank in range(3)])
    stores, keys = zip(*results.values(), strict=True)
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    assert stores[0].path
    assert not Path(stores[0].path).with_name(store_host.KEY).exists()
    stores[1].set("address", "here")
    assert stores[2].get("address") == b"here"


def test_two_launches_with_one_key_of_the_user_have_different_keys() -> None:
    first, second = (together(dist.HashStore(), [launch(0), launch(1)]) for _ in range(2))
    assert first[0][1] == first[1][1]
    assert second[0][1] == second[1][1]
    assert first[0][1] != second[0][1]
    assert first[0][0].port


def test_several_machines_without_a_key_have_none() -> None:
    results = together(dist.HashStore(), [launch(0, user_key=b""), launch(1, user_key=b"")])
    assert [results[rank][1] for rank in (0, 1)] == [b"", b""]


def test_ranks_with_different_keys_are_an_error() -> None:
    results, _ = begin(dist.HashStore(), [launch(0), launch(1, user_key=new_key())])
    deadline = time.monotonic() + 30
    while 1 not in results and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(results[1], AuthenticationError)
    assert "have different keys" in str(results[1])


def test_a_rank_ignores_the_address_of_an_earlier_attempt() -> None:
    store = dist.HashStore()
    first = together(store, [launch(0), launch(1)])
    results, threads = begin(store, [launch(1)])  # the rank of the earlier attempt exists already
    threads[0].join(0.5)
    assert not results
    store_host._STARTED[0].kill()
    second, more = begin(store, [launch(0)])
    for thread in [*threads, *more]:
        thread.join(60)
    assert results[1][1] == second[0][1] != first[1][1]


@pytest.mark.parametrize("kind", ["foreign", "replayed", "garbage", "large"])
@pytest.mark.parametrize("alone", [True, False], ids=["one machine", "several"])
def test_writes_of_another_program_during_the_rendezvous_are_an_error(kind: str, alone: bool) -> None:
    store = dist.HashStore()
    key = b"" if alone else KEY
    other = dist.HashStore()
    together(other, [launch(rank, user_key=key, alone=alone, names=("other",)) for rank in (0, 1)])
    forged = {"foreign": bytes(64).hex().encode(), "garbage": b"\x80\x04\xff", "large": b"0" * (1 << 24)}
    value = other.get(PLACE) if kind == "replayed" else forged[kind]
    results, _ = begin(store, [launch(0, user_key=key, alone=alone)])
    store.wait([PLACE], timedelta(seconds=30))
    store.set(PLACE, value)  # type: ignore[arg-type]
    later, _ = begin(store, [launch(1, user_key=key, alone=alone)])
    deadline = time.monotonic() + 30
    while not (results and later) and time.monotonic() < deadline:
        time.sleep(0.01)
    for error in (results[0], later[1]):
        assert isinstance(error, AuthenticationError), error
        assert "another program has written" in str(error)


def test_a_deleted_address_is_written_again() -> None:
    store = dist.HashStore()
    results, threads = begin(store, [launch(0)])
    store.wait([PLACE], timedelta(seconds=30))
    store.delete_key(PLACE)
    threads += begin(store, [launch(1)])[1]
    for thread in threads:
        thread.join(60)
    assert not isinstance(results[0], Exception)


def test_later_changes_in_the_launchers_store_have_no_effect() -> None:
    theirs = dist.HashStore()
    results = together(theirs, [launch(0), launch(1)])
    store = results[1][0]
    store.set("stop", "no")
    for key in (PLACE, "stop", "complete", "here/1"):
        theirs.set(key, "anything")
    assert store.get("stop") == b"no"
    assert results[0][0].add("count", 1) == 1


def test_an_attempt_has_all_agents_and_their_highest_restart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_store, "agent", lambda: "a")
    results = together(dist.HashStore(), [launch(rank, restarts=times) for rank, times in enumerate((0, 3))])
    assert launch_store.attempt(World(store=results[1][0])) == launch_store.Attempt(3, ["a", "a"])


def test_the_users_key_is_long_and_closed_to_others(tmp_path: Path) -> None:
    text = "0123456789abcdef" * 4
    path = tmp_path / "key"
    path.write_text(text + "\n")
    path.chmod(0o600)
    assert user_key({}) is None
    assert (
        user_key({"FABRICX_KEY": text})
        == user_key({"FABRICX_KEY_FILE": str(path)})
        != user_key({"FABRICX_KEY": text * 2})
    )
    for variables, message in (
        ({"FABRICX_KEY": "short"}, "32 characters"),
        ({"FABRICX_KEY_FILE": "none"}, "can't be read"),
    ):
        with pytest.raises(ValueError, match=message):
            user_key(variables)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        user_key({"FABRICX_KEY_FILE": str(path)})
