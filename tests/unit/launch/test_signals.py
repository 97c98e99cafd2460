"""Signals that end a process, and their handling."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fabricx.launch import signals


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_slurm_signal_before_the_time_limit_requests_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert signals.termination_signals() == (signal.SIGTERM,)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert signals.termination_signals() == (signal.SIGTERM, signal.SIGUSR1)


def test_a_signal_raises_the_exception_that_programs_expect() -> None:
    with pytest.raises(KeyboardInterrupt):
        signals.stop_now(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        signals.stop_now(signal.SIGTERM)
    assert ended.value.code == 143


@pytest.mark.usefixtures("handlers")
def test_signals_are_ignored_until_their_handling_is_restored() -> None:
    signals.ignore()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1)
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_request_is_forwarded_once_and_a_second_request_stops_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    requests = signals.StopRequests(stops_at_step=True)
    with requests.received():
        assert not requests
        assert requests.arrived() is None
        signal.raise_signal(signal.SIGINT)
        assert requests
        assert requests.arrived() == signal.SIGINT
        assert "stopping at the next step" in capsys.readouterr().out
        assert requests.arrived() is None
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            requests.arrived()


def test_a_request_stops_a_run_without_steps_immediately() -> None:
    for stops_at_step, begun in ((True, False), (False, True)):
        requests = signals.StopRequests(stops_at_step=stops_at_step)
        with requests.received():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                requests.arrived(begun=lambda begun=begun: begun)  # type: ignore[misc]
