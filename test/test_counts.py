"""The totals of a run, and the line that tells them."""

import re

from torchcontinuous._counts import Counts

SUITE = """
class Test(Spawning):
    def make(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}",
                                rank=self.rank, world_size=self.world_size)
    def test_1_makes_two(self):
        self.make()
        dist.new_group([0, 1])
    def test_2_is_handed_one(self):
        self.make()
    def test_3_leaks(self):
        os.environ["LEFT"] = "1"
    def test_4_fails_when_used(self):
        self.assertFalse(hasattr(torch, "tc_left"))
        torch.tc_left = True
        raise RuntimeError("fails")
    def test_5_is_run_by_new_workers(self):
        pass
"""


def test_describe():
    line = Counts(tests=1, workers=4, generations=1, groups_made=1, leaks=2).describe()
    assert line == (
        "1 test run by 4 workers in 1 generation, 0 of them in place of others; "
        "1 process group made, 0 reused; 2 leaks found"
    )
    line = Counts(repeated=2, leaked_into=1).describe()
    assert line.endswith("2 tests repeated in fresh workers, 1 of them because of a leak")


def test_a_run_tells_its_totals(suites):
    suites.write(SUITE)
    run = suites.unittest("test_it", TORCHCONTINUOUS_VERBOSE=1)
    (line,) = re.findall(r"^torchcontinuous: \d+ tests run .*$", run.output, re.MULTILINE)
    # The fourth test fails in the first two workers and in two of its own; the fifth has two new.
    assert line == (
        "torchcontinuous: 6 tests run by 6 workers in 3 generations, 2 of them in place of others; "
        "2 process groups made, 1 reused; 1 leak found; "
        "1 test repeated in fresh workers, 0 of them because of a leak"
    ), run.output
    assert "tests run by" not in suites.unittest("test_it").output
    suites.assert_nothing_left()
