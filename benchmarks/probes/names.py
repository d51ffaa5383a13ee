"""Variables by which a sweep tells ``many`` what to be."""

#: Names the process that runs the tests, whose children are counted.
PARENT = "BENCH_PARENT"
#: How many tests.
TESTS = "BENCH_TESTS"
#: "1": each makes a group and reduces.
GROUPS = "BENCH_GROUPS"
#: A file that a last test is to write the memory held to.
MEMORY = "BENCH_MEMORY"
#: Seed, number of tests and of classes of a soak.
SOAK = "BENCH_SOAK"
