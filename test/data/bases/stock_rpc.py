"""Tests on the base of torch's RPC suites."""

import unittest

import torch
import torch.distributed.rpc as rpc
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.dist_utils import dist_init, worker_name
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)
from torch.testing._internal.distributed.rpc_utils import SpawnHelper


def add(one, other):
    return one + other


def fail():
    raise ValueError("on purpose")


class Counter:
    def __init__(self, start):
        self.number = start

    def up(self):
        self.number += 1
        return self.number


class TestRpc(TensorPipeRpcAgentTestFixture, SpawnHelper):
    @property
    def world_size(self):
        return 2

    @property
    def peer(self):
        return worker_name(1 - self.rank)

    @dist_init
    def test_sync(self):
        self.assertEqual(rpc.rpc_sync(self.peer, add, args=(1, 2)), 3)

    @dist_init
    def test_async(self):
        futures = [rpc.rpc_async(self.peer, add, args=(i, 1)) for i in range(4)]
        self.assertEqual([future.wait() for future in futures], [1, 2, 3, 4])

    @dist_init
    def test_tensor(self):
        found = rpc.rpc_sync(self.peer, torch.add, args=(torch.ones(2), 1))
        self.assertEqual(found, torch.full((2,), 2.0))

    @dist_init
    def test_remote(self):
        reference = rpc.remote(self.peer, add, args=(2, 3))
        self.assertEqual(reference.to_here(), 5)

    @dist_init
    def test_remote_object(self):
        counter = rpc.remote(self.peer, Counter, args=(5,))
        self.assertEqual(counter.rpc_sync().up(), 6)

    @dist_init
    def test_remote_error(self):
        with self.assertRaisesRegex(ValueError, "on purpose"):
            rpc.rpc_sync(self.peer, fail)

    @dist_init
    def test_worker_info(self):
        self.assertEqual(rpc.get_worker_info().id, self.rank)

    @dist_init
    def test_first_reference_again(self):
        # The ids of references start over only in a fresh process.
        reference = rpc.remote(self.peer, add, args=(1, 1))
        self.assertEqual(reference.to_here(), 2)

    @dist_init(setup_rpc=False)
    def test_by_hand(self):
        rpc.init_rpc(
            worker_name(self.rank),
            rank=self.rank,
            world_size=2,
            rpc_backend_options=self.rpc_backend_options,
        )
        rpc.shutdown()

    @dist_init(setup_rpc=False)
    def test_without(self):
        with self.assertRaises(RuntimeError):
            rpc.get_worker_info()

    @dist_init(setup_rpc=False)
    def test_skips(self):
        raise unittest.SkipTest("not here")

    @dist_init(setup_rpc=False)
    def test_fails(self):
        self.assertEqual(self.rank, 5)


if __name__ == "__main__":
    run_tests()
