"""The merge of ranks' reports into one verdict, by stock's rules."""

import dataclasses
import signal

import pytest

from torchcontinuous._report import (
    Ending,
    Failure,
    Outcome,
    RankReport,
    describe_exit,
    describe_running,
    merge,
    name_ranks,
)

SKIPS = {86: "generic", 75: "Need at least 1 CUDA device"}
ASSERTION = Failure("AssertionError", "1 != 2", "Traceback: the lines\n", True)
ERROR = Failure("ValueError", "bad", "Traceback: other lines\nValueError: bad\n", False)


def report(rank, code=0, ending=Ending.REPORTED, **rest):
    return RankReport(rank, ending, code, **rest)


def merged(*reports, **rest):
    return merge(reports, skips=SKIPS, **rest)


def test_no_processes_pass():
    assert merged().outcome is Outcome.PASSED


def test_all_zero_passes_without_notes():
    verdict = merged(report(0), report(1))
    assert verdict.outcome is Outcome.PASSED
    assert verdict.notes == ()


def test_assertions_on_every_failing_rank_are_a_failure():
    verdict = merged(report(0), report(1, 10, failure=ASSERTION), report(2, 10, failure=ASSERTION))
    assert verdict.outcome is Outcome.FAILED
    assert verdict.ranks == (1, 2)
    assert "failed on ranks 1, 2 of 3" in verdict.text
    # Alike, so shown once, with stock's sentence for the first.
    assert verdict.text.count("the lines") == 1
    assert "ranks 1, 2: AssertionError" in verdict.text
    assert "Process 1 exited with error code 10 and exception:" in verdict.text


def test_one_error_among_assertions_is_an_error():
    verdict = merged(report(0, 10, failure=ASSERTION), report(1, 10, failure=ERROR))
    assert verdict.outcome is Outcome.ERROR
    assert "the lines" in verdict.text
    assert "other lines" in verdict.text


def test_code_10_of_any_rank_comes_before_a_skip():
    verdict = merged(report(0, 86, skip_reason="why"), report(1, 10, failure=ERROR))
    assert verdict.outcome is Outcome.ERROR


def test_killed_peer_is_told_apart_and_not_blamed():
    verdict = merged(report(0, None, Ending.KILLED), report(1, 10, failure=ASSERTION))
    assert verdict.outcome is Outcome.FAILED
    assert verdict.ranks == (1,)
    assert "rank 0 was killed only because a peer failed" in verdict.text


STACK = """Current thread 0x00007f (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/home/me/test_x.py", line 41 in test_1
"""


def test_where_a_killed_peer_was_is_told():
    killed = dataclasses.replace(report(0, None, Ending.KILLED), stack=STACK, silent=1.26)
    verdict = merged(killed, report(1, 10, failure=ASSERTION))
    assert verdict.ranks == (1,)
    told = (
        "rank 0 was killed only because a peer failed, when it waited in all_reduce (test_x.py:41)"
    )
    assert told in verdict.text
    assert "rank 0 was at, 1.3 s after it was last heard of:\nCurrent thread" in verdict.text


def test_a_test_that_runs_is_described():
    running = dataclasses.replace(report(0, None, Ending.TIMED_OUT), stack=STACK, silent=3.0)
    reports = [running, report(1, 0), report(2, -9, Ending.DIED), report(3, 77)]
    text = describe_running("test_x.Test.test_1", reports, {77: "why"}, 4.2)
    assert text.startswith("test_x.Test.test_1 has run for 4.2 s.")
    assert "rank 0 waited in all_reduce (test_x.py:41); ranks 1, 3 had finished the test" in text
    assert "rank 2 died with SIGKILL" in text
    assert text.count(" was at, ") == 1


def test_death_beside_an_assertion_is_an_error_that_names_the_signal():
    verdict = merged(report(0, 10, failure=ASSERTION), report(1, -11, Ending.DIED))
    assert verdict.outcome is Outcome.ERROR
    assert "rank 1 died with SIGSEGV (exit code -11)" in verdict.text


def test_time_out_has_stocks_sentence_and_the_stack():
    late = report(1, None, Ending.TIMED_OUT, stack="File x.py, line 3")
    verdict = merged(report(0), late, elapsed=5.0)
    assert verdict.outcome is Outcome.ERROR
    assert "Process 1 terminated or timed out after 5.0 seconds" in verdict.text
    assert "File x.py, line 3" in verdict.text


def test_rank_that_does_not_answer_is_named():
    verdict = merged(report(0, None, Ending.TIMED_OUT))
    assert "did not answer" in verdict.text


def test_rank_0_alone_decides_and_others_are_noted():
    verdict = merged(report(0), report(1, -9, Ending.DIED))
    assert verdict.outcome is Outcome.PASSED
    assert verdict.notes == (
        "rank 1 died with SIGKILL (exit code -9), unseen by stock, which asks rank 0 only",
    )
    assert merged(report(0, 3), report(1)).outcome is Outcome.ERROR


def test_every_rank_counts_in_class_style():
    verdict = merged(report(0), report(1, -9, Ending.DIED), every_rank_counts=True)
    assert verdict.outcome is Outcome.ERROR
    assert verdict.ranks == (1,)
    # Even with exit code 0: the rank left its test.
    verdict = merged(report(0), report(1, 0, Ending.DIED), every_rank_counts=True)
    assert (verdict.outcome, verdict.ranks) == (Outcome.ERROR, (1,))
    assert "rank 1 died with exit code 0" in verdict.text
    assert merged(report(0), report(1, 0, Ending.DIED)).outcome is Outcome.PASSED


def test_skip_keeps_its_reason():
    verdict = merged(report(0, 86, skip_reason="because"), report(1, 86, skip_reason="because"))
    assert (verdict.outcome, verdict.text) == (Outcome.SKIPPED, "because")
    assert merged(report(0, 75), report(1, 75)).text == "Need at least 1 CUDA device"


@pytest.mark.parametrize(("first", "second"), [(86, 0), (0, 86)])
def test_ranks_that_disagree_on_skipping_are_noted(first, second):
    verdict = merged(report(0, first), report(1, second))
    assert verdict.outcome is (Outcome.SKIPPED if first else Outcome.PASSED)
    assert len(verdict.notes) == 1
    assert "skipped" in verdict.notes[0]


def test_declared_codes():
    died = report(0, -6, Ending.DIED)
    assert merged(died, expected=-6).outcome is Outcome.PASSED
    assert merged(died, unchecked=True).outcome is Outcome.PASSED
    verdict = merged(report(0), expected=-6)
    assert verdict.outcome is Outcome.ERROR
    assert "Expected exit code -6 but got 0" in verdict.text
    # A traceback counts even where codes do not, as in stock.
    assert merged(report(0, 10, failure=ERROR), unchecked=True).outcome is Outcome.ERROR


def test_words():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGKILL) == "SIGKILL (exit code -9)"
    assert describe_exit(-63) == "signal 63 (exit code -63)"
    assert name_ranks([0]) == "rank 0"
    assert name_ranks([0, 2]) == "ranks 0, 2"
