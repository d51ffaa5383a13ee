"""Tests on torch's FSDPTest: on a machine without devices stock skips them all."""

import unittest

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

from torchcontinuous import FSDPTest

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


class TestDevices(FSDPTest):
    """Does not ask for the CPU: it skips where there are no devices, whatever the base."""

    @property
    def world_size(self):
        return 2

    def test_one(self):
        self.fail("there are no devices")

    def test_two(self):
        self.fail("there are no devices")


@instantiate_parametrized_tests
class TestFSDP(FSDPTest):
    device_type = "cpu"
    world_size = 2

    def test_group(self):
        self.assertEqual(self.process_group.size(), 2)
        self.assertEqual(dist.get_backend(), "gloo")

    @parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
    def test_wrapped(self, strategy):
        plain, wrapped = model(), FSDP(model(), sharding_strategy=strategy, device_id=CPU)
        inputs = torch.randn(2, 4)
        self.assertEqual(wrapped(inputs), plain(inputs))

    def test_training(self):
        plain, wrapped = model(), FSDP(model(), device_id=CPU)
        for each in (plain, wrapped):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        self.assertEqual(wrapped(torch.ones(1, 4)), plain(torch.ones(1, 4)))

    def test_state_dict(self):
        wrapped = FSDP(model(), device_id=CPU)
        with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
            self.assertEqual(wrapped.state_dict(), model().state_dict())

    def test_summon(self):
        wrapped = FSDP(model(), device_id=CPU)
        with FSDP.summon_full_params(wrapped):
            self.assertEqual(sum(p.numel() for p in wrapped.parameters()), 76)

    def test_fully_shard(self):
        sharded = fully_shard(model())
        self.assertEqual(sharded(torch.ones(2, 4)), model()(torch.ones(2, 4)))

    def test_fully_shard_training(self):
        plain, sharded = model(), model()
        fully_shard(sharded[0])
        fully_shard(sharded)
        for each in (plain, sharded):
            each(torch.ones(2, 4)).sum().backward()
        gradient = sharded[0].weight.grad.full_tensor()
        self.assertEqual(gradient, plain[0].weight.grad)

    def test_run_subtests(self):
        self.ran = []
        self.run_subtests({"lr": [0.1, 0.2]}, self._check)
        self.assertEqual(self.ran, [0.1, 0.2])

    def _check(self, lr):
        wrapped = FSDP(model(), device_id=CPU)
        wrapped(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(wrapped.parameters(), lr=lr).step()
        self.ran.append(lr)

    @skip_if_lt_x_gpu(2)
    def test_needs_two_devices(self):
        self.fail("there are none")

    def test_skips(self):
        raise unittest.SkipTest("not here")

    def test_fails(self):
        self.assertEqual(self.rank, 5)


if __name__ == "__main__":
    run_tests()
