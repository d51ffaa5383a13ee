"""Tests on torch's ShardedTensorTestBase."""

import unittest

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.testing._internal.common_distributed import requires_gloo, requires_nccl
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._shard.sharded_tensor import (
    ShardedTensorTestBase,
    with_comms,
)

SPEC = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])


class TestShardedTensor(ShardedTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms(init_rpc=False, backend="gloo")
    @requires_gloo()
    def test_ones(self):
        tensor = sharded_tensor.ones(SPEC, 4, 3)
        self.assertEqual(tensor.local_tensor(), torch.ones(2, 3))

    @with_comms(init_rpc=False, backend="gloo")
    def test_full(self):
        tensor = sharded_tensor.full(SPEC, (4, 2), fill_value=7.0)
        self.assertEqual(tensor.local_tensor(), torch.full((2, 2), 7.0))

    @with_comms(init_rpc=False, backend="gloo")
    def test_uneven(self):
        tensor = sharded_tensor.zeros(SPEC, 3, 2)
        self.assertEqual(tensor.local_tensor().size(0), 2 - self.rank)

    @with_comms(init_rpc=False, backend="gloo")
    def test_gather(self):
        tensor = sharded_tensor.ones(SPEC, 4, 2)
        whole = torch.empty(4, 2) if self.rank == 0 else None
        tensor.gather(0, whole)
        if self.rank == 0:
            self.assertEqual(whole, torch.ones(4, 2))

    @with_comms(init_rpc=False, backend="gloo")
    def test_metadata(self):
        tensor = sharded_tensor.empty(SPEC, 4, 2)
        self.assertEqual(len(tensor.metadata().shards_metadata), 2)
        self.assertEqual(tensor.size(), torch.Size([4, 2]))

    @with_comms(init_rpc=False, backend="gloo")
    def test_sharding_spec(self):
        tensor = sharded_tensor.ones(SPEC, 4, 2)
        self.assertEqual(tensor.sharding_spec(), SPEC)

    @with_comms(init_rpc=False, backend="gloo")
    def test_remote_shards(self):
        tensor = sharded_tensor.ones(SPEC, 4, 2)
        with self.assertRaises(RuntimeError):
            tensor.remote_shards()

    @with_comms(init_rpc=False, backend="gloo")
    def test_group(self):
        self.assertEqual(dist.get_world_size(), 2)

    @with_comms
    def test_nccl_by_default(self):
        self.fail("there are no devices")

    @requires_nccl()
    @with_comms(init_rpc=False, backend="nccl")
    def test_requires_nccl(self):
        self.fail("it is not built in")

    @with_comms(init_rpc=False, backend="gloo")
    def test_skips(self):
        raise unittest.SkipTest("not here")

    @with_comms(init_rpc=False, backend="gloo")
    def test_fails(self):
        self.assertEqual(self.rank, 5)


if __name__ == "__main__":
    run_tests()
