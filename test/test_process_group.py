"""Process groups of a worker: kept from test to test, given up, released; sub-groups and meshes."""

import json
import textwrap

from test.conftest import HEADER

#: Tests note, in a file for each rank, which process and which group object they ran with.
NOTING = """
import functools, json
from datetime import timedelta
from torch.distributed import destroy_process_group, init_process_group, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

class Noting(Spawning):
    def note(self, **more):
        name = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"rank{self.rank}.jsonl")
        entry = {"test": self._testMethodName, "pid": os.getpid(), "group": id(dist.group.WORLD)}
        with open(name, "a") as file:
            file.write(json.dumps({**entry, **more}) + "\\n")

    def reduce(self):
        value = torch.ones(1)
        dist.all_reduce(value)
        self.assertEqual(value.item(), self.world_size)
        self.note()
"""


def notes(suites, rank=0):
    lines = (suites.folder / f"rank{rank}.jsonl").read_text().splitlines()
    return {entry["test"]: entry for entry in map(json.loads, lines)}


def write(suites, source):
    suites.write(NOTING + textwrap.dedent(source), header=HEADER)


def assert_passed(run, count):
    assert run.code == 0, run.output[-5000:]
    assert set(run.outcomes().values()) == {"passed"}, run.output[-5000:]
    assert len(run.cases) == count
    assert "StateLeakWarning" not in run.output


def test_every_way_to_make_a_group_gets_the_kept_one(suites):
    """Init methods, positional and keyword, imported by name, destroyed or left; and between
    tests everything reads as after a real destroy."""
    write(
        suites,
        """
        import socket
        from torch.testing._internal.common_utils import find_free_port

        class Test(Noting):
            def setUp(self):
                MultiProcContinuousTest.setUp(self)
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                os.environ["MASTER_PORT"] = str(find_free_port())
                self._spawn_processes()

            def _run_checked(self):
                self.assertFalse(dist.is_initialized())

            def before(self):
                self.assertFalse(dist.is_initialized())
                self.assertIs(sys.excepthook, sys.__excepthook__)
                with self.assertRaisesRegex(ValueError, "not been initialized"):
                    dist.get_rank()

            def after_init(self):
                self.assertEqual(dist.get_rank(), self.rank)
                self.assertEqual(dist.group.WORLD.group_name, "0")
                self.assertEqual(dist.new_group([0, 1]).group_name, "1")
                self.assertIsNot(sys.excepthook, sys.__excepthook__)
                self.reduce()

            def test_1_store(self):
                self.before()
                self.init()
                self.after_init()
                destroy_process_group()
                self.before_again()

            def before_again(self):
                self.assertFalse(dist.is_initialized())

            def test_2_file(self):
                self.before()
                init_process_group("gloo", f"file://{self.file_name}", rank=self.rank, world_size=2)
                self.after_init()

            def test_3_environment(self):
                self.before()
                os.environ["RANK"], os.environ["WORLD_SIZE"] = str(self.rank), "2"
                dist.init_process_group("gloo")
                self.after_init()
                dist.destroy_process_group()

            def test_4_tcp(self):
                self.before()
                port = os.environ["MASTER_PORT"]
                dist.init_process_group(
                    backend="gloo", init_method=f"tcp://127.0.0.1:{port}",
                    rank=self.rank, world_size=2)
                self.after_init()
                dist.destroy_process_group(dist.group.WORLD)

            def test_5_twice(self):
                self.before()
                self.init()
                with self.assertRaisesRegex(ValueError, "twice"):
                    self.init()
                dist.destroy_process_group()
                file = self.file_name + "2"
                dist.init_process_group(
                    "gloo", init_method=f"file://{file}", rank=self.rank, world_size=2)
                self.after_init()
                dist.destroy_process_group()
                with self.assertRaises(Exception):
                    dist.all_reduce(torch.ones(1))
        """,
    )
    assert_passed(suites.pytest("test_it.py", TORCHCONTINUOUS_VERBOSE=1), 5)
    for rank in (0, 1):
        noted = notes(suites, rank)
        assert len({(entry["pid"], entry["group"]) for entry in noted.values()}) == 1
    suites.assert_nothing_left()


def test_what_does_not_fit_gets_a_group_of_its_own(suites):
    """Time-out, a variable that shapes groups, debug level; and the kept one is there after it."""
    write(
        suites,
        """
        class Test(Noting):
            def make(self, **more):
                store = dist.FileStore(self.file_name, 2)
                dist.init_process_group(
                    "gloo", rank=self.rank, world_size=2, store=store, **more)
                self.reduce()
                self.assertTrue(dist.is_initialized())

            def test_1_first(self):
                self.make()
            def test_2_time_out(self):
                self.make(timeout=timedelta(seconds=77))
                backend = dist.group.WORLD._get_backend(torch.device("cpu"))
                self.assertEqual(backend.options._timeout, timedelta(seconds=77))
            def test_3_same(self):
                self.make()
            def test_4_variable(self):
                os.environ["GLOO_TC"] = "1"
                self.make()
            def test_5_debug_level(self):
                dist.set_debug_level(dist.DebugLevel.DETAIL)
                self.make()
            def test_6_same(self):
                self.assertEqual(dist.get_debug_level(), dist.DebugLevel.OFF)
                self.make()
            def test_7_ranks_differ(self):
                self.make(timeout=timedelta(seconds=100 + self.rank))
            def test_8_same(self):
                self.make()
        """,
    )
    assert_passed(suites.pytest("test_it.py"), 8)
    noted = notes(suites)
    assert len({entry["pid"] for entry in noted.values()}) == 1
    first = noted["test_1_first"]["group"]
    same = {name for name, entry in noted.items() if entry["group"] == first}
    assert same == {"test_1_first", "test_3_same", "test_6_same", "test_8_same"}


def test_a_group_that_a_test_spent_is_given_up(suites):
    """Point-to-point, unequal numbers of collectives, a changed time-out, a failed collective: no
    later test meets what they left, and all ranks decide alike."""
    write(
        suites,
        """
        class Test(Noting):
            def test_1(self):
                self.init()
                self.reduce()
            def test_2_unmatched_send(self):
                self.init()
                self.reduce()
                if self.rank == 0:
                    dist.isend(torch.full((1,), 7.0), 1)
            def test_3_a_later_receive_gets_its_own(self):
                self.init()
                self.reduce()
                value = torch.zeros(1)
                if self.rank == 0:
                    dist.send(torch.full((1,), 8.0), 1)
                else:
                    dist.recv(value, 0)
                    self.assertEqual(value.item(), 8.0)
            def test_4_unequal(self):
                self.init()
                self.reduce()
                if self.rank == 0:
                    dist.broadcast(torch.ones(1), 0, async_op=True)
            def test_5(self):
                self.init()
                self.reduce()
            def test_6_time_out(self):
                self.init()
                self.reduce()
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
            def test_7(self):
                self.init()
                self.reduce()
                timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
                self.assertGreater(timeout.seconds, 5)
            def test_8_abort(self):
                self.init()
                self.reduce()
                dist.monitored_barrier(timeout=timedelta(seconds=20))
            def test_9(self):
                self.init()
                self.reduce()
        """,
    )
    assert_passed(suites.pytest("test_it.py"), 9)
    for rank in (0, 1):
        noted = notes(suites, rank)
        pairs = [("test_2_unmatched_send", "test_3_a_later_receive_gets_its_own")]
        pairs += [("test_4_unequal", "test_5"), ("test_6_time_out", "test_7")]
        pairs += [("test_8_abort", "test_9")]
        for spender, follower in pairs:
            assert noted[spender]["group"] != noted[follower]["group"], (spender, rank)
        assert noted["test_1"]["group"] == noted["test_2_unmatched_send"]["group"]
        assert noted["test_5"]["group"] == noted["test_6_time_out"]["group"]
        assert len({entry["pid"] for entry in noted.values()}) == 1


def test_a_bad_rendezvous_is_an_error_though_a_group_is_kept(suites):
    write(
        suites,
        """
        class Test(Noting):
            def test_1(self):
                self.init()
                self.reduce()
            def test_2_no_port(self):
                os.environ.pop("MASTER_PORT", None)
                with self.assertRaisesRegex(ValueError, "MASTER_PORT|RANK"):
                    dist.init_process_group(
                        "gloo", init_method="env://", rank=self.rank, world_size=2)
                self.assertFalse(dist.is_initialized())
            def test_3_no_path(self):
                with self.assertRaisesRegex(ValueError, "path missing"):
                    dist.init_process_group(
                        "gloo", init_method="file://", rank=self.rank, world_size=2)
            def test_4_no_rank(self):
                with self.assertRaises(Exception):
                    dist.init_process_group("gloo", init_method=f"file://{self.file_name}")
            def test_5_unknown_backend(self):
                with self.assertRaises(Exception):
                    dist.init_process_group(
                            "nosuch", store=dist.HashStore(), rank=self.rank, world_size=2)
            def test_6_a_rank_is_missing(self):
                if self.rank == 0:
                    with self.assertRaises(Exception):
                        store = dist.FileStore(self.file_name, 2)
                        dist.init_process_group("gloo", rank=0, world_size=2, store=store,
                                                timeout=timedelta(seconds=1))
            def test_7(self):
                self.init()
                self.reduce()
        """,
    )
    assert_passed(suites.pytest("test_it.py"), 7)


def test_sub_groups_and_meshes_end_with_their_test(suites):
    """The same 2-D mesh again and again: no group, descriptor or thread more after 100 tests; one
    kept in a cache of the test's module or of the code under test does no harm."""
    (suites.folder / "under_test.py").write_text(
        "import functools, torch.distributed as dist\n"
        "@functools.cache\n"
        "def grid(): return dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b'))\n"
    )
    write(
        suites,
        """
        import under_test

        @functools.cache
        def own_grid():
            return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        class Test(Noting):
            world_size = 4

            def use(self, mesh):
                whole = torch.arange(16.0).reshape(4, 4)
                sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
                self.assertEqual((sharded + sharded).full_tensor(), whole * 2)
                value = torch.tensor(float(self.rank))
                dist.all_reduce(value, group=mesh.get_group("b"))
                self.assertEqual(value.item(), [1.0, 1.0, 5.0, 5.0][self.rank])

            def again(self):
                self.init()
                self.use(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
                self.note(
                    descriptors=len(os.listdir("/proc/self/fd")),
                    threads=len(os.listdir("/proc/self/task")),
                    groups=len(dist.distributed_c10d._pg_map))

            def test_x_own_cache(self):
                self.init()
                self.use(own_grid())
            def test_y_own_cache(self):
                self.init()
                dist.new_group([0, 1])
                dist.new_group([2, 3])
                self.use(own_grid())

        for number in range(100):
            setattr(Test, f"test_{number:03}", Test.again)

        class TestUnderTest(Test):
            def test_1(self):
                self.init()
                self.use(under_test.grid())
            def test_2(self):
                self.init()
                dist.new_group([0, 3])
                self.use(under_test.grid())
        """,
    )
    run = suites.pytest("test_it.py::Test")
    assert_passed(run, 102)
    noted = notes(suites)
    for what in ("descriptors", "threads", "groups", "pid"):
        # gloo closes its sockets a little later than asked: one test may see one more.
        early, late = (
            min(noted[f"test_{number:03}"][what] for number in numbers)
            for numbers in (range(10, 20), range(90, 100))
        )
        assert early == late, what
    run = suites.pytest("test_it.py::TestUnderTest", "-k", "test_1 or test_2")
    assert set(run.outcomes().values()) == {"passed"}, run.output[-5000:]
    assert "StateLeakWarning" in run.output
    assert "DeviceMesh" in run.output


def test_level_group_makes_a_new_group_in_the_same_workers(suites):
    write(
        suites,
        """
        class Test(Noting):
            def test_1(self):
                self.init()
                self.reduce()
            def test_2(self):
                self.init()
                self.reduce()
                dist.destroy_process_group()
            @isolated("group")
            def test_3_alone(self):
                self.init()
                self.reduce()
            def test_4(self):
                self.init()
                self.reduce()
        """,
    )
    assert_passed(suites.pytest("test_it.py"), 4)
    noted = notes(suites)
    groups = [entry["group"] for entry in noted.values()]
    assert groups[0] == groups[1] == groups[3] != groups[2]
    assert len({entry["pid"] for entry in noted.values()}) == 1

    (suites.folder / "rank0.jsonl").unlink()
    run = suites.pytest("test_it.py", TORCHCONTINUOUS_ISOLATION="group", TORCHCONTINUOUS_VERBOSE=1)
    assert_passed(run, 4)
    assert len({entry["pid"] for entry in notes(suites).values()}) == 1


def test_a_failure_with_a_group_that_was_given_back_is_looked_at_in_fresh_workers(suites):
    """The kept group is not what a real destroy leaves; a test that can tell must not fail."""
    write(
        suites,
        """
        import gc, weakref

        class Test(Noting):
            def test_destroyed_for_good(self):
                self.init()
                gone = weakref.ref(dist.group.WORLD)
                dist.destroy_process_group()
                gc.collect()
                self.assertIsNone(gone())
        """,
    )
    run = suites.pytest("test_it.py")
    assert run.outcomes() == {"test_destroyed_for_good": "passed"}, run.output[-3000:]


def test_class_style(suites):
    """One group for the class, before each test's body; what a test makes of its own ends with it,
    and what it destroyed stands again."""
    write(
        suites,
        """
        class Style(MultiProcContinuousTest):
            world_size = 4
            timeout = timedelta(seconds=66)
            device_type = "cpu"
            note = Noting.note
            reduce = Noting.reduce

            @classmethod
            def backend_str(cls):
                return "gloo"

            def stands(self):
                self.assertEqual(dist.get_rank(), self.rank)
                self.assertEqual(type(self).rank, self.rank)
                self.assertEqual(type(self).world_size, 4)
                self.assertIs(type(self).pg, dist.group.WORLD)
                self.assertTrue(os.path.exists(type(self).rdvz_file))
                options = dist.group.WORLD._get_backend(torch.device("cpu")).options
                self.assertEqual(options._timeout, timedelta(seconds=66))
                self.assertEqual(len(dist.distributed_c10d._pg_map), 1)
                self.reduce()

        class Test(Style):
            def test_1(self):
                self.stands()
                self.assertEqual(dist.new_group([0, 1, 2, 3]).group_name, "1")
            def test_2_mesh(self):
                self.stands()
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
                whole = torch.arange(16.0).reshape(4, 4)
                placed = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
                self.assertEqual(placed.full_tensor(), whole)
            def test_3_sub_groups(self):
                self.stands()
                group = dist.new_group([0, 2])
                value = torch.tensor(float(self.rank))
                if self.rank in (0, 2):
                    dist.all_reduce(value, group=group)
                    self.assertEqual(value.item(), 2.0)
            def test_4_destroys(self):
                self.stands()
                dist.destroy_process_group()
                self.assertFalse(dist.is_initialized())
            def test_5_makes_its_own(self):
                self.stands()
                store = dist.FileStore(self.file_name, 4)
                dist.init_process_group("gloo", rank=self.rank, world_size=4, store=store)
                value = torch.ones(1)
                dist.all_reduce(value)
                self.assertEqual(value.item(), 4)
                dist.destroy_process_group()
            def test_6_makes_its_own_by_name_and_leaves_it(self):
                self.stands()
                store = dist.FileStore(self.file_name, 4)
                init_process_group("gloo", rank=self.rank, world_size=4, store=store,
                                   timeout=timedelta(seconds=66))
                dist.barrier()
            def test_7_rank(self):
                self.stands()
                self.assertEqual(dist.group.WORLD.group_name, "0")

        class TestSkip(Style):
            @classmethod
            def _init_pg(cls, rank, world_size, rdvz_file):
                sys.exit(81)
            def test_1(self):
                pass
            def test_2(self):
                pass
        """,
    )
    run = suites.pytest("test_it.py")
    outcomes = run.outcomes()
    assert run.code == 0, run.output[-5000:]
    assert [outcomes.pop(name) for name in ("test_1", "test_2")] == ["skipped", "skipped"]
    assert set(outcomes.values()) == {"passed"}, run.output[-5000:]
    assert "StateLeakWarning" not in run.output
    for rank in range(4):
        noted = {n: entry for n, entry in notes(suites, rank).items() if n != "test_1"}
        assert len({(entry["pid"], entry["group"]) for entry in noted.values()}) == 1


def test_a_group_of_many_ranks_is_kept(suites):
    """Its connections to so many peers are no leak of descriptors or threads."""
    write(
        suites,
        """
        class Test(Noting):
            world_size = 32
            def look(self):
                self.init()
                self.reduce()
                dist.destroy_process_group()
            test_1 = test_2 = test_3 = look
        """,
    )
    run = suites.pytest("test_it.py", TORCHCONTINUOUS_VERBOSE=1)
    assert_passed(run, 3)
    assert "3 tests run by 32 workers in 1 generation" in run.output
    assert "1 process group made, 2 reused" in run.output
    suites.assert_nothing_left()
