"""Class style: fixtures that run in workers, as well as in the parent."""

import json
import textwrap

from test.conftest import HEADER

#: Every process notes what it does, with the time, in one file.
NOTING = """
import json

class Noting(MultiProcContinuousTest):
    world_size = 2
    setup_in_workers = True

    @classmethod
    def backend_str(cls):
        return "gloo"

    def note(self, what):
        name = os.path.join(os.path.dirname(os.path.abspath(__file__)), "notes.jsonl")
        entry = [self._testMethodName, self.rank, what, time.monotonic()]
        with open(name, "a") as file:
            file.write(json.dumps(entry) + "\\n")

    def setUp(self):
        super().setUp()
        self.addCleanup(self.note, "cleanup")
        self.note("setUp")
        if self.rank != self.MAIN_PROCESS_RANK:
            dist.barrier()

    def tearDown(self):
        if self.rank != self.MAIN_PROCESS_RANK:
            dist.barrier()
        self.note("tearDown")
        super().tearDown()
"""


def run(suites, source, *options):
    suites.write(NOTING + textwrap.dedent(source), header=HEADER)
    return suites.pytest("test_it.py", *options)


def notes(suites, test):
    """What each rank did, in order; and when."""
    found, moments = {}, {}
    for line in (suites.folder / "notes.jsonl").read_text().splitlines():
        name, rank, what, moment = json.loads(line)
        if name == test:
            found.setdefault(rank, []).append(what)
            moments[rank, what] = moment
    return found, moments


def test_fixtures_run_on_every_rank(suites):
    """tearDown not before every body has ended; a skip in the body is an end, too."""
    ended = run(
        suites,
        """
        class Test(Noting):
            def test_1(self):
                dist.barrier()
                time.sleep(0.5 * self.rank)
                self.note("body")
            def test_2_is_skipped(self):
                raise unittest.SkipTest("no reason")
            def test_3(self):
                self.note("body")

        class TestParentOnly(Noting):
            setup_in_workers = False
            def test_4(self):
                self.note("body")
        """,
    )
    assert ended.outcomes() == {
        "test_1": "passed", "test_2_is_skipped": "skipped", "test_3": "passed", "test_4": "passed",
    }, ended.output  # fmt: skip
    assert ended.code == 0
    found, moments = notes(suites, "test_1")
    whole = ["setUp", "body", "tearDown", "cleanup"]
    assert found == {-1: ["setUp", "tearDown", "cleanup"], 0: whole, 1: whole}
    assert moments[0, "tearDown"] > moments[1, "body"] > moments[0, "body"] + 0.3
    skipped, _ = notes(suites, "test_2_is_skipped")
    assert skipped[0] == skipped[1] == ["setUp", "tearDown", "cleanup"]
    assert notes(suites, "test_4")[0] == {
        -1: ["setUp", "tearDown", "cleanup"],
        0: ["body"],
        1: ["body"],
    }
    suites.assert_nothing_left()


def test_no_rank_waits_for_a_body_that_failed(suites):
    """Its peers leave tearDown out, and are not said to hang; the next test has new workers."""
    ended = run(
        suites,
        """
        class Test(Noting):
            def test_1_fails_on_one(self):
                dist.barrier()
                self.note("body")
                if self.rank == 1:
                    raise ValueError("on purpose")
            def test_2_fails_in_set_up(self):
                self.fail("never comes here on every rank")
            def test_3(self):
                self.note("body")
            def test_4_exits(self):
                dist.barrier()
                self.note("body")
                if self.rank == 0:
                    os._exit(3)
            def test_5_tear_down_fails(self):
                self.note("body")

            def setUp(self):
                if self.rank == 0 and self._testMethodName == "test_2_fails_in_set_up":
                    raise ValueError("in setUp")
                super().setUp()

            def tearDown(self):
                super().tearDown()
                if self.rank == 1 and self._testMethodName == "test_5_tear_down_fails":
                    raise ValueError("in tearDown")
        """.replace('self.fail("never comes here on every rank")', "dist.barrier()"),
        "--durations=0",
    )
    outcomes = ended.outcomes()
    assert outcomes.pop("test_3") == "passed", ended.output
    assert set(outcomes.values()) <= {"failed", "error"}, ended.output
    assert "on purpose" in ended.cases["test_1_fails_on_one"].text
    assert "in setUp" in ended.cases["test_2_fails_in_set_up"].text
    assert "exit code 3" in ended.cases["test_4_exits"].text
    assert "in tearDown" in ended.cases["test_5_tear_down_fails"].text
    found, _ = notes(suites, "test_1_fails_on_one")
    assert "tearDown" not in found[0] + found[1]
    assert "killed" not in ended.cases["test_1_fails_on_one"].text
    assert all(case.seconds < 30 for case in ended.cases.values())
    suites.assert_nothing_left()
