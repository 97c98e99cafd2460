"""Leases of the order: each sample is in a single lease, and the weights of the leases of an update sum to 1."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fabricx.data.leasing import LeasedSection


class Dealer:
    """Grants the leases of a section in order to any rank."""

    def __init__(self, leases: int, leases_per_update: int) -> None:
        self.leases_per_update, self.leases, self.next, self.lease = leases_per_update, leases, 0, None
        self.dealt: list[Any] = []

    def ask(self, *, wait: bool) -> Any:
        over = self.next >= self.leases
        self.dealt.append(SimpleNamespace(lease=None if over else self.next, over=over, count=self.leases, share=0.0))
        self.next += not over
        return self.dealt[-1]


@settings(max_examples=100, deadline=None)
@given(
    items=st.integers(1, 60), begin=st.integers(0, 10), batch=st.integers(1, 5), accumulate=st.integers(1, 3),
    together=st.integers(1, 4), ranks=st.integers(1, 3), wanted=st.integers(1, 20), turns=st.randoms(),
)  # fmt: skip
def test_each_sample_is_leased_once_and_each_update_has_weight_1(
    items: int, begin: int, batch: int, accumulate: int, together: int, ranks: int, wanted: int, turns: Any
) -> None:
    begin = begin * batch * accumulate % items // (batch * accumulate) * batch * accumulate  # of a complete lease
    dealer: Any = Dealer(0, together)
    sections = [LeasedSection(dealer, begin, items, batch, accumulate) for _ in range(ranks)]
    [leases] = {section.plan(lambda done, left: wanted) for section in sections}
    dealer.leases = leases
    taken: Counter[int] = Counter()
    weights: dict[int, float] = defaultdict(float)
    waiting = list(sections)
    while waiting:
        section = turns.choice(waiting)
        shares = list(section.shares())
        for share, data in section.taken(iter(range(len(shares)))):
            assert dealer.lease is not None
            assert 0 < share.end - share.begin <= batch
            assert share.window_begin <= share.begin < share.end <= share.window_end
            taken.update(range(share.begin, share.end))
            del data
        if section.over:
            waiting.remove(section)
    end = min(items, begin + leases * batch * accumulate)
    assert taken == Counter(range(begin, end))
    assert {section.end for section in sections} == {end}
    for granted in dealer.dealt:
        if granted.lease is not None:
            weights[granted.lease // together] += granted.share
    complete = [weight for update, weight in weights.items() if (update + 1) * together <= leases or end == items]
    assert all(abs(weight - 1) < 1e-9 for weight in complete)
