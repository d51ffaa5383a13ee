"""A project's own copy of stock's class, as such copies are: another module, no keywords in
``_run``, its own way to join."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import types
import unittest
from functools import wraps

SKIPPED, FAILED = 86, 10


class CopiedTestCase(unittest.TestCase):
    world_size = 2
    rank = -1

    def __init__(self, method_name="runTest"):
        super().__init__(method_name)
        setattr(self, method_name, self.join_or_run(getattr(self, method_name)))

    def join_or_run(self, fn):
        @wraps(fn)
        def wrapper(self):
            if self.rank == -1:
                self._join_processes(fn)
            else:
                fn()

        return types.MethodType(wrapper, self)

    def setUp(self):
        super().setUp()
        self.processes = []
        self.pid_to_pipe = {}
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self.file_name = file.name

    def tearDown(self):
        super().tearDown()
        for process in self.processes:
            process.terminate()
        os.remove(self.file_name)

    def _current_test_name(self):
        return self.id().split(".")[-1]

    def _spawn_processes(self):
        self._start_processes(multiprocessing.get_context("spawn").Process)

    def _start_processes(self, proc):
        for rank in range(self.world_size):
            ours, theirs = multiprocessing.Pipe()
            arguments = (rank, self._current_test_name(), self.file_name, theirs)
            process = proc(target=type(self)._run, name=f"process {rank}", args=arguments)
            process.start()
            self.pid_to_pipe[process.pid] = ours
            self.processes.append(process)

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe):
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        self.run_test(test_name, pipe)

    def run_test(self, test_name, pipe):
        try:
            getattr(self, test_name)()
        except unittest.SkipTest:
            sys.exit(SKIPPED)
        except Exception:
            pipe.send(traceback.format_exc())
            sys.exit(FAILED)
        pipe.close()

    def _join_processes(self, fn):
        deadline = time.time() + 60
        while any(p.exitcode is None for p in self.processes):
            if any(p.exitcode == FAILED for p in self.processes):
                break
            if time.time() > deadline:
                raise RuntimeError("timed out")
            time.sleep(0.05)
        self._check_return_codes()

    def _check_return_codes(self):
        texts = [self.pid_to_pipe[p.pid].recv() for p in self.processes if p.exitcode == FAILED]
        if texts:
            raise RuntimeError("\n".join(texts))
        codes = [process.exitcode for process in self.processes]
        if codes[0] == SKIPPED:
            raise unittest.SkipTest("skipped in a worker")
        self.assertEqual(codes, [0] * len(codes))
