"""Sentences about waiting ranks and the ranks for which they wait."""

from __future__ import annotations

import re

import pytest

from fabricx.distributed.activity import heartbeat
from fabricx.distributed.activity.heartbeat import Diagnosis
from fabricx.fault_tolerance.hang_report import explain, from_dump


def waits(operation: str) -> Diagnosis:
    return Diagnosis("torch.py:1 in wait: ...", operation, "", "")


def busy(where: str, done: str = "") -> Diagnosis:
    return Diagnosis(where, "", done, "")


@pytest.mark.parametrize(
    ("diagnoses", "sentence"),
    [
        (
            {0: waits("all_reduce #119"), 1: waits("all_reduce #119"), 2: waits("broadcast #118")},
            "rank 2 waits in broadcast #118, the others in all_reduce #119",
        ),
        (
            {0: waits("all_reduce #7"), 1: busy("a.py:3 in f: g()", "all_reduce #6"), 2: waits("all_reduce #7")},
            "rank 1 is at a.py:3 in f: g(), after all_reduce #6, the others wait in all_reduce #7",
        ),
        (
            {0: waits("all_reduce #7"), 1: None, 2: waits("all_reduce #7"), 3: None},
            "rank 1, 3 doesn't answer, the others wait in all_reduce #7",
        ),
        (
            {0: waits("all_reduce #7"), 1: waits("barrier #7")},
            "rank 0 waits in all_reduce #7, rank 1 waits in barrier #7",
        ),
        ({0: waits("barrier #2"), 1: waits("barrier #2")}, "all ranks are alike: rank 0 waits in barrier #2"),
        ({0: busy("a.py:1 in f: x")}, "rank 0 is at a.py:1 in f: x"),
    ],
)
def test_the_rank_that_differs_is_named_first(diagnoses: dict[int, Diagnosis | None], sentence: str) -> None:
    assert explain(diagnoses) == sentence


DUMP = f"""\
Thread 0x00007f1 (most recent call first):
  File "/home/me/beat.py", line 3 in beat

Current thread 0x00007f2 (most recent call first):
  File "{re.__file__}", line 166 in match
  File "/home/me/train.py", line 15 in training_step
  File "{heartbeat.__file__}", line 9 in where
"""


def test_a_stack_printed_by_a_signal_names_the_user_line_of_the_main_thread() -> None:
    diagnosis = from_dump(DUMP)
    assert diagnosis is not None
    assert diagnosis.where == "/home/me/train.py:15 in training_step"
    assert diagnosis.stacks == DUMP
    assert from_dump("") is None  # a process that was stopped shows nothing
