"""What the stacks of ranks that timed out say."""

import sysconfig

from torchcontinuous import _hang
from torchcontinuous._report import Ending, Failure, RankReport, merge

TORCH = "/venv/lib/python3.11/site-packages/torch"
HARNESS = f"""\
  File "{TORCH}/testing/_internal/common_utils.py", line 3553 in wrapper
  File "{TORCH}/testing/_internal/common_distributed.py", line 1058 in run_test
  File "{_hang.__file__.replace("_hang", "_single")}", line 178 in run_stock_style
"""


def stack(*lines, head="Current thread 0x1 (most recent call first):"):
    frames = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in lines)
    return f"{head}\n{frames}{HARNESS}"


WAITING = stack(
    (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"),
    ("/home/me/test_x.py", 41, "test_sum"),
)
ELSEWHERE = stack(
    (f"{sysconfig.get_paths()['stdlib']}/threading.py", 12, "wait"),
    ("/home/me/helper.py", 7, "pause"),
    ("/home/me/test_x.py", 38, "test_sum"),
)


def test_the_collective_and_the_line():
    place = _hang.place_of(WAITING)
    assert str(place) == "waited in all_reduce (test_x.py:41)"
    assert str(_hang.place_of(ELSEWHERE)) == "at helper.py:7 in pause"


def test_the_thread_that_runs_the_test():
    other = 'Thread 0x2 (most recent call first):\n  File "/home/me/other.py", line 3 in loop\n'
    assert str(_hang.place_of(f"{other}\n{WAITING}")) == "waited in all_reduce (test_x.py:41)"


def test_suites_in_torchs_own_folder():
    file = f"{TORCH}/testing/_internal/distributed/distributed_test.py"
    found = _hang.place_of(stack((f"{TORCH}/nn/modules/module.py", 5, "call"), (file, 9, "test")))
    assert str(found) == "at distributed_test.py:9 in test"


def test_no_line_of_the_tests_own():
    assert _hang.place_of("Current thread 0x1 (most recent call first):\n" + HARNESS) is None
    assert _hang.place_of("") is None


def test_harness_is_left_out():
    own = _hang.own_part(WAITING)
    assert "test_sum" in own
    assert "run_test" not in own
    assert _hang.own_part("no frames") == "no frames"


def test_verdict_says_who_is_missing():
    def late(rank, found):
        return RankReport(rank, Ending.TIMED_OUT, None, stack=found)

    reports = [
        late(0, WAITING),
        late(1, WAITING),
        RankReport(2, Ending.REPORTED, 0),
        late(3, ELSEWHERE),
        late(4, ""),
        RankReport(5, Ending.DIED, -9),
        RankReport(6, Ending.REPORTED, 10, Failure("ValueError", "no", "text", False)),
    ]
    text = merge(reports, skips={}).text
    assert (
        "Where the ranks were: ranks 0, 1 waited in all_reduce (test_x.py:41); "
        "rank 2 had finished the test; rank 3 at helper.py:7 in pause; "
        "rank 4 did not answer (stopped, or in native code); "
        "rank 5 died with SIGKILL (exit code -9); rank 6 raised ValueError: no."
    ) in text
    assert "run_stock_style" not in text
