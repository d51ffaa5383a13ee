"""Verdicts held back during an attempt."""

import unittest

import pytest

from torchcontinuous._rerun import Attempt


class Recorder(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if name.startswith("add") or name in ("startTest", "stopTest"):

            def call(*arguments):
                self.calls.append((name, *arguments))
                return value(*arguments)

            return call
        return value


class Case(unittest.TestCase):
    def runTest(self):
        pass


@pytest.fixture
def result():
    return Recorder()


def test_verdicts_come_at_delivery_and_of_the_first_instance(result):
    first, second = Case(), Case()
    attempt = Attempt(result, first)
    attempt.startTest(second)
    attempt.addSkip(second, "why")
    attempt.stopTest(second)
    assert [c[0] for c in result.calls] == ["startTest"]
    attempt.deliver()
    assert [c[0] for c in result.calls] == ["startTest", "addSkip", "stopTest"]
    assert all(call[1] is first for call in result.calls)


def test_second_attempt_starts_no_second_time(result):
    attempt = Attempt(result, Case(), first=False)
    attempt.startTest(Case())
    assert result.calls == []


def test_an_attempt_that_is_dropped_says_nothing(result):
    attempt = Attempt(result, Case())
    attempt.addSuccess(Case())
    attempt.stopTest(Case())
    assert result.calls == []


def test_success_becomes_a_failure(result):
    case = Case()
    attempt = Attempt(result, case)
    attempt.addSuccess(case)
    try:
        raise AssertionError("leak")
    except AssertionError as error:
        attempt.deliver(instead_of_success=(type(error), error, error.__traceback__))
    assert len(result.failures) == 1


def test_it_passes_for_the_result(result):
    attempt = Attempt(result, Case())
    assert isinstance(attempt, unittest.TestResult)
    attempt.shouldStop = True
    assert result.shouldStop is True
    assert attempt.wasSuccessful()
    assert not hasattr(attempt, "addNothing")


def test_a_result_without_a_method_stays_without(result):
    class Bare:
        pass

    assert not hasattr(Attempt(Bare(), Case()), "addSubTest")
    assert hasattr(Attempt(result, Case()), "addSubTest")
