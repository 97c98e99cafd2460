"""Cost of the exchange with servers since the previous row of the loggers."""

from __future__ import annotations

from collections import Counter

from fabricx.parameter_server.totals import Totals
from fabricx.parameter_server.wire.messages import Counts

MIB = 2**20


def test_rows_have_the_increments_since_the_previous_row() -> None:
    first = Totals([(MIB, 0, 0.5), (MIB, MIB, 0.5)], [Counts(messages=4, queued=2, staleness={0: 3, 1: 1})])
    later = Totals([(3 * MIB, 0, 1.0), (MIB, MIB, 2.0)], [Counts(messages=6, queued=8, staleness={0: 3, 1: 1, 4: 2})])
    assert first.since(None) == {
        "exchange/sent_mib": 2.0, "exchange/received_mib": 1.0, "exchange/waited_s": 1.0, "exchange/dropped": 0.0,
        "exchange/staleness_mean": 0.25, "exchange/staleness_max": 1.0, "exchange/queue_mean": 0.5,
        "exchange/clock_lead": 0.0,
    }  # fmt: skip
    assert later.since(first) == {
        "exchange/sent_mib": 2.0, "exchange/received_mib": 0.0, "exchange/waited_s": 2.0, "exchange/dropped": 0.0,
        "exchange/staleness_mean": 4.0, "exchange/staleness_max": 4.0, "exchange/queue_mean": 3.0,
        "exchange/clock_lead": 0.0,
    }  # fmt: skip
    assert later.staleness == Counter({0: 3, 4: 2, 1: 1})


def test_counts_are_not_negative_after_the_death_of_a_worker_or_server() -> None:
    before = Totals([(4 * MIB, MIB, 9.0), (MIB, MIB, 1.0)], [Counts(messages=9, queued=9, staleness={2: 5}, dropped=3)])
    after = Totals([(MIB, MIB, 1.0)], [Counts(messages=1)])
    assert set(after.since(before).values()) == {0.0}
