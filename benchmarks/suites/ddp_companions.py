"""What goes with DistributedDataParallel: communication hooks, joins, sharded optimizers."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)

from benchmarks.models import TrainingTest, backward, batch, network, train


class CommunicationTest(TrainingTest):
    def check(self, model: Any, *, factor: float = 1.0, compressed: bool = False) -> None:
        """Gradients are a factor times the average; as near as half precision allows."""
        reference = network()
        (reference(batch()).square().mean() * factor).backward()
        backward(model, self.mine(batch()))
        tolerance = {"atol": 1e-4, "rtol": 1e-2} if compressed else {}
        self.assert_same(model, reference, gradients=True, **tolerance)

    def test_all_reduce_hook(self) -> None:
        with self.group():
            model = DDP(network())
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            self.check(model)

    @parametrize(
        "hook",
        [
            subtest(default_hooks.fp16_compress_hook, "alone"),
            subtest(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), "around"),
        ],
    )
    def test_compression(self, hook: Any) -> None:
        with self.group():
            model = DDP(network())
            model.register_comm_hook(None, hook)
            self.check(model, compressed=True)

    def test_own_hook(self) -> None:
        def three_times(state: list[int], bucket: Any) -> Any:
            state.append(len(bucket.gradients()))
            tensor = bucket.buffer().mul_(3 / self.world_size)
            work = dist.all_reduce(tensor, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        with self.group():
            buckets: list[int] = []
            model = DDP(network(), bucket_cap_mb=0.0001)
            # DDP takes no annotation for a bucket that is a string.
            three_times.__annotations__.clear()
            model.register_comm_hook(buckets, three_times)
            self.check(model, factor=3.0)
            self.assertEqual(sum(buckets), 6)

    def test_one_hook_only(self) -> None:
        with self.group():
            model = DDP(network())
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            with self.assertRaisesRegex(RuntimeError, "only be called once"):
                model.register_comm_hook(None, default_hooks.allreduce_hook)

    def test_power_sgd_before_it_starts(self) -> None:
        with self.group():
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
            model = DDP(network())
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            self.check(model)
            self.assertEqual(state.iter, 1)

    def test_power_sgd_keeps_the_error(self) -> None:
        with self.group():
            state = powerSGD_hook.PowerSGDState(
                None, start_powerSGD_iter=2, min_compression_rate=1, matrix_approximation_rank=1
            )
            model = DDP(network())
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for seed in range(4):
                model.zero_grad()
                backward(model, self.mine(batch(seed)))
            everyone = [torch.empty(12, 8) for _ in range(self.world_size)]
            dist.all_gather(everyone, model.module[0].weight.grad)
            self.assertEqual(everyone, [everyone[0]] * self.world_size)
            self.assertEqual(torch.linalg.matrix_rank(everyone[0], rtol=1e-4).item(), 1)
            self.assertGreater(max(error.norm() for error in state.error_dict.values()), 0)


class UnevenTest(TrainingTest):
    def test_join(self) -> None:
        with self.group():
            model, reference = DDP(network()), network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            plain = torch.optim.SGD(reference.parameters(), lr=0.05)
            with model.join():
                for step in range(self.rank + 1):
                    optimizer.zero_grad()
                    backward(model, batch(step).chunk(4)[self.rank])
                    optimizer.step()
            # A rank that has ended counts as one whose gradients are zero.
            for step in range(self.world_size):
                plain.zero_grad()
                for part in batch(step).chunk(4)[step:]:
                    (reference(part).square().mean() / self.world_size).backward()
                plain.step()
            self.assert_same(model, reference)

    def test_join_divides_by_those_that_are_left(self) -> None:
        with self.group():
            model, reference = DDP(network()), network()
            with model.join(divide_by_initial_world_size=False):
                for step in range(1 + (self.rank > 1)):
                    model.zero_grad()
                    backward(model, batch(step).chunk(4)[self.rank])
            backward(reference, batch(1).chunk(2)[1])
            if self.rank > 1:
                self.assert_same(model, reference, gradients=True)

    def test_join_throws_where_the_first_ends(self) -> None:
        with self.group():
            model, done = DDP(network()), 0
            with self.assertRaisesRegex(RuntimeError, "exhausted"):
                with model.join(throw_on_early_termination=True):
                    for step in range(2 + self.rank):
                        backward(model, batch(step))
                        done += 1
            self.assertEqual(done, 2)

    def test_join_with_sharded_optimizer(self) -> None:
        with self.group():
            model = DDP(network(), gradient_as_bucket_view=True)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
            with Join([model, optimizer]):
                for step in range(1 + self.rank):
                    optimizer.zero_grad()
                    backward(model, batch(step))
                    optimizer.step()
            everyone = [torch.empty(12, 8) for _ in range(self.world_size)]
            dist.all_gather(everyone, model.module[0].weight.detach())
            self.assertEqual(everyone, [everyone[0]] * self.world_size)
            self.assertNotEqual(everyone[0], network()[0].weight)


class OptimizersTest(TrainingTest):
    @parametrize("kind", [subtest(getattr(torch.optim, n), n) for n in ("Adam", "SGD")])
    def test_zero_redundancy(self, kind: Any) -> None:
        def sharded(parameters: Any, lr: float) -> Any:
            return ZeroRedundancyOptimizer(parameters, kind, lr=lr)

        with self.group():
            model, reference = DDP(network()), network()
            batches = [batch(seed) for seed in range(3)]
            optimizer = train(model, map(self.mine, batches), sharded)
            expected = train(reference, batches, kind)
            self.assert_same(model, reference)
            self.assertLess(len(optimizer.optim.param_groups[0]["params"]), 6)
            optimizer.consolidate_state_dict(to=0)
            if self.rank == 0:
                self.assertEqual(optimizer.state_dict()["state"], expected.state_dict()["state"])

    def test_averaged_models(self) -> None:
        with self.group():
            model = network()
            train(model, [self.mine(batch())])
            PeriodicModelAverager(period=2).average_parameters(model.parameters())
            everyone = []
            for part in batch().chunk(self.world_size):
                everyone.append(network())
                train(everyone[-1], [part])
            for name, got in model.named_parameters():
                parts = [local.get_parameter(name) for local in everyone]
                self.assertEqual(got, torch.stack(parts).mean(0))


instantiate_parametrized_tests(CommunicationTest)
instantiate_parametrized_tests(OptimizersTest)
