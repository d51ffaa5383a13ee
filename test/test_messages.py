"""What crosses the wire is the same at the other end."""

import pickle

from torchcontinuous._messages import Finished, Passed, finished
from torchcontinuous._report import Ending, Failure, GroupState, Leak, RankReport


def arrived(message):
    return pickle.loads(pickle.dumps(message))


def test_a_report_that_says_nothing_is_short():
    for group in (None, GroupState((1, 2, 3), None, True, 4, 5), GroupState((), "spent")):
        report = RankReport(2, Ending.REPORTED, 0, group=group)
        message = arrived(finished(7, 8, report))
        assert isinstance(message, Passed)
        assert message.finished() == Finished(7, 8, report)


def test_any_other_goes_whole():
    for report in (
        RankReport(0, Ending.REPORTED, 1),
        RankReport(0, Ending.DIED, 0),
        RankReport(0, Ending.REPORTED, 0, skip_reason="why"),
        RankReport(0, Ending.REPORTED, 0, failure=Failure("E", "m", "t", False)),
        RankReport(0, Ending.REPORTED, 0, pipe=(b"sent",)),
        RankReport(0, Ending.REPORTED, 0, used_up="why"),
        RankReport(0, Ending.REPORTED, 0, leaks=(Leak("gc", "a", "b", "c", True),)),
    ):
        assert arrived(finished(7, 8, report)) == Finished(7, 8, report)
